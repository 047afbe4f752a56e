//! Jobs of an engine that compresses values: what lies in the store, what is loaded, what stays.

use std::io::IoSlice;
use std::sync::Arc;

use penstock_contract::Store;
use penstock_engine::{Engine, EngineConfig, KvGroup, Outcome};
use penstock_layout::KvLayout;
use penstock_store::layers::Tiered;
use penstock_value::compress::Element;
use penstock_value::header::{ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Rejection};
use penstock_value::{Keyring, MemoryStore, SealedStore};

use crate::support::segment::Pool;
use crate::support::*;

const LOADED: Outcome = Outcome::Loaded(BLOCK_BYTES as u64);
const KEPT: Outcome = Outcome::Kept(BLOCK_BYTES as u64);
const STORED: Outcome = Outcome::Stored(BLOCK_BYTES as u64);

fn ring() -> Option<Arc<Keyring>> {
    let line = "a:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    Some(Arc::new(Keyring::parse(line).unwrap()))
}

fn compressing(keys: Option<Arc<Keyring>>, slots: usize) -> EngineConfig {
    let mut config = config(slots);
    config.keys = keys;
    config.compress = true;
    config
}

/// An engine that knows what the memory holds.
fn rig<'kv>(store: &Arc<impl Store + 'static>, config: EngineConfig, kv: &'kv Kv) -> Rig<'kv> {
    knowing(unregistered(store, config), kv)
}

fn knowing<'kv>(rig: Rig<'kv>, kv: &'kv Kv) -> Rig<'kv> {
    let group = KvGroup {
        element: Some(Element::Bf16),
        ..kv.group()
    };
    rig.register(0, group).unwrap();
    rig.name(0, NAMESPACE).unwrap();
    rig
}

/// A block's bytes as bf16 numbers with nearly the same exponent.
fn numbers(seed: u64) -> Vec<u8> {
    let mut bytes = pattern(seed);
    for (at, element) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        if at % 300 != 0 {
            element[1] = element[1] & 0x80 | 0x3f;
        }
    }
    bytes
}

fn fill(kv: &Kv, block: u64, seed: u64) {
    kv.write(block, share(), &numbers(seed));
}

#[test]
fn what_one_engine_stores_coded_another_loads() {
    for (keys, header) in [(None, HEADER_BYTES), (ring(), ENCRYPTED_HEADER_BYTES)] {
        let (probe, source, target) = (
            Probe::new(),
            Kv::new(KvLayout::LBHNC),
            Kv::new(KvLayout::BLNHC),
        );
        let writer = rig(&probe, compressing(keys.clone(), 40), &source);
        let blocks = || (0..BLOCKS).map(|n| block_of(n, n)).collect::<Vec<_>>();
        (0..BLOCKS).for_each(|n| fill(&source, n, n));
        assert_eq!(store(&writer, blocks()), [STORED; BLOCKS as usize]);
        let mut lie = 0;
        for n in 0..BLOCKS {
            let value = probe.value(&key(n));
            assert!(value.len() < header + BLOCK_BYTES * 8 / 10);
            lie += value.len() as u64;
        }
        let stats = writer.stats();
        assert_eq!(stats.stored_bytes, BLOCKS * BLOCK_BYTES as u64);
        assert_eq!(stats.stored_value_bytes, lie);

        let reader = rig(&probe, compressing(keys, 4), &target);
        assert_eq!(load(&reader, blocks()), [LOADED; BLOCKS as usize]);
        for n in 0..BLOCKS {
            assert_eq!(target.read(n, share()), numbers(n));
        }
        assert_eq!(stats.panics + reader.stats().panics, 0);
    }
}

#[test]
fn what_does_not_shrink_or_has_no_coder_lies_as_it_is() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(0, 1);
    fill(&kv, 1, 2);
    let coding = rig(&probe, compressing(None, 8), &kv);
    // Noise and numbers in one batch.
    let mixed = vec![block_of(1, 0), block_of(2, 1)];
    assert_eq!(store(&coding, mixed), [STORED; 2]);
    assert_eq!(probe.value(&key(1)).len(), HEADER_BYTES + BLOCK_BYTES);
    assert!(probe.value(&key(2)).len() < BLOCK_BYTES);
    // As `KvGroup::new` makes them, groups have no coder.
    let without = engine(&probe, compressing(None, 8), &kv);
    assert_eq!(store(&without, vec![block_of(3, 1)]), [STORED]);
    assert_eq!(probe.value(&key(3)).len(), HEADER_BYTES + BLOCK_BYTES);
    // Both read both.
    for reader in [&coding, &without] {
        for (n, payload) in [(1, pattern(1)), (2, numbers(2)), (3, numbers(2))] {
            assert_eq!(load(reader, vec![block_of(n, 9)]), [LOADED]);
            assert_eq!(kv.read(9, share()), payload);
        }
    }
}

#[test]
fn an_engine_that_does_not_compress_neither_loads_nor_removes_coded_values() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    fill(&kv, 0, 1);
    let coding = rig(&probe, compressing(None, 4), &kv);
    assert_eq!(store(&coding, vec![block_of(1, 0)]), [STORED]);
    let plain = rig(&probe, config(4), &kv);
    let rejected = [Outcome::Rejected(Rejection::Coded)];
    assert_eq!(load(&plain, vec![block_of(1, 2)]), rejected);
    assert_eq!(load(&coding, vec![block_of(1, 2)]), [LOADED]);
    // It codes nothing itself.
    assert_eq!(store(&plain, vec![block_of(2, 0)]), [STORED]);
    assert_eq!(probe.value(&key(2)).len(), HEADER_BYTES + BLOCK_BYTES);
}

#[test]
fn damaged_codes_are_rejected_removed_and_written_nowhere() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    fill(&kv, 0, 1);
    let engine = rig(&probe, compressing(None, 4), &kv);
    assert_eq!(store(&engine, vec![block_of(1, 0)]), [STORED]);
    let good = probe.value(&key(1));
    let last = good.len() - 1;
    let flipped = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 1;
        bad
    };
    for (reason, bad) in [
        ("header_checksum", flipped(6)),
        ("bad_code", flipped(64)),
        ("payload_checksum", flipped(100)),
        ("bad_code", good[..last].to_vec()),
        ("bad_code", [&good[..], &[0; 10]].concat()),
        ("length", [&good[..], &[0; 4000]].concat()),
        ("truncated", good[..40].to_vec()),
    ] {
        assert_rejected(&engine, &probe, &kv, (&good, &bad), reason);
    }
}

#[test]
fn the_payload_stays_in_host_memory_also_if_its_code_is_encrypted() {
    for keys in [None, ring()] {
        let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
        fill(&kv, 0, 1);
        let keeping = |keys| {
            let mut config = compressing(keys, 8);
            config.keep = true;
            config
        };
        let engine = rig(&probe, keeping(keys.clone()), &kv);
        assert_eq!(store(&engine, vec![block_of(1, 0)]), [STORED]);
        eventually("the value is kept", || {
            load(&engine, vec![block_of(1, 5)]) == [KEPT]
        });
        assert_eq!(kv.read(5, share()), numbers(1));
        // What is loaded is kept too.
        let reader = rig(&probe, keeping(keys), &kv);
        assert_eq!(load(&reader, vec![block_of(1, 6)]), [LOADED]);
        assert_eq!(load(&reader, vec![block_of(1, 7)]), [KEPT]);
        assert_eq!(kv.read(7, share()), numbers(1));
    }
}

#[test]
fn coded_values_in_shared_memory_come_straight_into_blocks_and_are_mended() {
    let pool = Pool::new();
    let near: Arc<dyn Store> = pool.open(8 << 20);
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new(8 << 20));
    let tiers = Arc::new(Tiered::new(vec![Arc::clone(&near), Arc::clone(&far)]));
    let kv = Kv::new(KvLayout::LBNHC);
    fill(&kv, 0, 1);
    let engine = rig(&tiers, compressing(None, 4), &kv);
    assert_eq!(store(&engine, vec![block_of(1, 0)]), [STORED]);
    assert_eq!(load(&engine, vec![block_of(1, 1)]), [LOADED]);
    assert_eq!(kv.read(1, share()), numbers(1));
    assert_eq!(engine.stats().get_calls, 0, "no value went through a slot");

    let whole = SealedStore::new(Arc::clone(&near), None).get_whole(&[(key(1), 0)], soon());
    let mut value = whole.into_iter().next().unwrap().unwrap().expect("there");
    value[500] ^= 1;
    near.remove(&[key(1)], soon()).unwrap();
    let damaged = [IoSlice::new(&value)];
    near.put(&key(1), &damaged, soon()).unwrap();
    assert_eq!(load(&engine, vec![block_of(1, 2)]), [LOADED]);
    assert_eq!(kv.read(2, share()), numbers(1));
    assert_eq!(engine.stats().get_calls, 1);
    assert_eq!(engine.stats().mended_objects, 1);
    assert!(!near.contains(&[key(1)], soon()).unwrap()[0]);
}

#[test]
fn node_memory_has_values_as_they_are_and_the_store_has_codes() {
    for keys in [None, ring()] {
        let (probe, node, kv) = (Probe::new(), Pool::new(), Kv::new(KvLayout::LBHNC));
        fill(&kv, 0, 1);
        let sharing = |store: &Arc<Probe>, node: &Pool| {
            let (store, near) = (Arc::clone(store), node.open(8 << 20));
            let config = compressing(keys.clone(), 8);
            let engine = Engine::with_node_memory(store, near, config).unwrap();
            knowing(Rig::from(engine), &kv)
        };
        let writer = sharing(&probe, &node);
        assert_eq!(store(&writer, vec![block_of(1, 0)]), [STORED]);
        assert!(probe.value(&key(1)).len() < BLOCK_BYTES);
        let near = SealedStore::new(node.open(8 << 20), None);
        let there = |near: &SealedStore| {
            let whole = near.get_whole(&[(key(1), 0)], soon()).remove(0);
            whole.unwrap().map(|value| value.len())
        };
        let header = keys
            .as_ref()
            .map_or(HEADER_BYTES, |_| ENCRYPTED_HEADER_BYTES);
        assert_eq!(there(&near), Some(header + BLOCK_BYTES));

        // From node memory, without the store; and from the store, into other node memory.
        let (nothing, empty) = (Probe::new(), Pool::new());
        let from_node = sharing(&nothing, &node);
        assert_eq!(load(&from_node, vec![block_of(1, 2)]), [KEPT]);
        assert_eq!(kv.read(2, share()), numbers(1));
        let from_store = sharing(&probe, &empty);
        assert_eq!(load(&from_store, vec![block_of(1, 3)]), [LOADED]);
        assert_eq!(kv.read(3, share()), numbers(1));
        let near = SealedStore::new(empty.open(8 << 20), None);
        eventually("it is in node memory", || {
            there(&near) == Some(header + BLOCK_BYTES)
        });
    }
}
