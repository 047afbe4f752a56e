//! Engines that share their host tier.

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{Block, ErrorKind, Store};
use penstock_engine::{Engine, EngineConfig, EngineError, Fence, Outcome, Owner};
use penstock_layout::KvLayout;
use penstock_store::OpenOptions;
use penstock_value::{Keyring, MemoryStore, SealedStore};

use crate::support::segment::Pool;
use crate::support::*;

const LOADED: Outcome = Outcome::Loaded(BLOCK_BYTES as u64);
const KEPT: Outcome = Outcome::Kept(BLOCK_BYTES as u64);
const SIZE: u64 = 8 << 20;
const ALL: usize = BLOCKS as usize;

/// An engine's settings as users have them: host memory of an engine's own would keep values.
fn settings(slots: usize) -> EngineConfig {
    EngineConfig {
        keep: true,
        claim_wait: LONG,
        ..config(slots)
    }
}

fn sharing<'kv>(store: &Arc<Probe>, node: &Pool, config: EngineConfig, kv: &'kv Kv) -> Rig<'kv> {
    let store = Arc::clone(store) as Arc<dyn Store>;
    let engine = Engine::with_node_memory(store, node.open(SIZE), config).unwrap();
    let rig = Rig::from(engine);
    rig.register_kv(kv);
    rig
}

fn filled() -> Kv {
    let kv = Kv::new(KvLayout::LBHNC);
    (0..BLOCKS).for_each(|block| kv.fill(block, block));
    kv
}

fn numbered() -> Vec<Block> {
    (0..BLOCKS).map(|n| block_of(n, n)).collect()
}

fn store(rig: &Rig) -> Vec<Outcome> {
    rig.submit_store(1, numbered(), Fence::NONE).unwrap();
    outcomes(rig, 1)
}

fn load(rig: &Rig) -> Vec<Outcome> {
    rig.submit_load(2, numbered(), soon(), false, Fence::NONE)
        .unwrap();
    outcomes(rig, 2)
}

fn assert_whole(kv: &Kv) {
    for block in 0..BLOCKS {
        assert_eq!(kv.read(block, share()), pattern(block));
    }
}

/// A store that has all blocks.
fn full() -> Arc<Probe> {
    let probe = Probe::new();
    let source = filled();
    let writer = engine(&probe, config(32), &source);
    assert!(store(&writer).iter().all(Outcome::is_success));
    probe
}

fn keys_got(probe: &Probe) -> usize {
    let got = |call: &Call| match call {
        Call::Get(keys) => keys.len(),
        _ => 0,
    };
    probe.calls().iter().map(got).sum()
}

/// Waits until another engine would find all blocks in node memory.
fn arrived(node: &Pool) {
    let shm = node.open(SIZE);
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    eventually("all is in node memory", || {
        shm.contains(&keys, soon()).unwrap().iter().all(|&has| has)
    });
}

#[test]
fn what_one_engine_stores_another_loads_without_the_store() {
    let (node, source, target) = (Pool::new(), filled(), Kv::new(KvLayout::BLHNC));
    let writer = sharing(&Probe::new(), &node, settings(32), &source);
    assert!(store(&writer).iter().all(Outcome::is_success));
    let nothing = Probe::new();
    let reader = sharing(&nothing, &node, settings(4), &target);
    assert_eq!(load(&reader), [KEPT; ALL]);
    assert_whole(&target);
    assert_eq!(nothing.calls(), []);
    assert_eq!(reader.stats().get_calls, 0, "no value went through a slot");
}

#[test]
fn blocks_are_free_once_node_memory_has_them_and_the_store_gets_them_from_there() {
    let (probe, node, source) = (Probe::new(), Pool::new(), filled());
    probe.hold_contains(true);
    // Few slots, of which stores would get half.
    let writer = sharing(&probe, &node, settings(4), &source);
    writer.submit_store(1, numbered(), Fence::NONE).unwrap();
    released(&writer, 1);
    (0..BLOCKS).for_each(|block| source.fill(block, block + 100));
    let target = Kv::new(KvLayout::BLHNC);
    let reader = sharing(&Probe::new(), &node, settings(4), &target);
    assert_eq!(load(&reader), [KEPT; ALL]);
    assert_whole(&target);
    assert_eq!(writer.stats().slots_peak, 0);

    probe.hold_contains(false);
    let stored = Outcome::Stored(BLOCK_BYTES as u64);
    assert_eq!(outcomes(&writer, 1), [stored; ALL]);
    let other = full();
    for n in 0..BLOCKS {
        assert_eq!(probe.value(&key(n)), other.value(&key(n)), "as from a slot");
    }
}

#[test]
fn what_the_store_has_is_not_copied_out_of_node_memory() {
    let (probe, node, source) = (full(), Pool::new(), filled());
    let memory = node.open(SIZE);
    let shared = Arc::clone(&memory) as Arc<dyn Store>;
    let store_of_all = Arc::clone(&probe) as Arc<dyn Store>;
    let writer = Rig::from(Engine::with_node_memory(store_of_all, shared, settings(4)).unwrap());
    writer.register_kv(&source);
    assert_eq!(store(&writer), [Outcome::AlreadyPresent; ALL]);
    assert_eq!(memory.stats().gets, 0);
    arrived(&node);
}

#[test]
fn what_node_memory_has_given_up_does_not_reach_the_store() {
    let (probe, node, source) = (Probe::new(), Pool::new(), filled());
    probe.hold_contains(true);
    let writer = sharing(&probe, &node, settings(4), &source);
    writer.submit_store(1, numbered(), Fence::NONE).unwrap();
    released(&writer, 1);
    assert_eq!(
        node.open(SIZE).remove(&[key(0), key(5)], soon()).unwrap(),
        2
    );
    probe.hold_contains(false);
    for (n, outcome) in outcomes(&writer, 1).into_iter().enumerate() {
        let is_gone = n == 0 || n == 5;
        assert_eq!(outcome == Outcome::Dropped, is_gone, "{n}: {outcome:?}");
        assert_eq!(probe.has(&key(n as u64)), !is_gone);
    }
}

#[test]
fn what_waits_in_node_memory_for_the_store_is_bounded() {
    let bytes = EngineConfig {
        max_pending_bytes: 4 * BLOCK_BYTES,
        ..settings(4)
    };
    let objects = EngineConfig {
        max_pending_objects: 4,
        ..settings(4)
    };
    for bounded in [bytes, objects] {
        let (probe, node, source) = (Probe::new(), Pool::new(), filled());
        probe.hold_contains(true);
        let writer = sharing(&probe, &node, bounded, &source);
        for block in numbered() {
            let job = block.id + 1;
            writer.submit_store(job, vec![block], Fence::NONE).unwrap();
            released(&writer, job);
        }
        arrived(&node);
        probe.hold_contains(false);
        let dropped = (1..=BLOCKS)
            .filter(|&job| outcomes(&writer, job) == [Outcome::Dropped])
            .count();
        // What a put lane holds does not wait.
        assert!((1..=ALL - 4).contains(&dropped), "{dropped}");
    }
}

#[test]
fn what_node_memory_does_not_take_goes_to_the_store_by_a_slot() {
    let (probe, node, source) = (Probe::new(), Pool::new(), filled());
    let url = format!("shm://{}?size={SIZE}&quota=tenant/red:1KiB", node.name());
    let small = penstock_store::open(&url, &OpenOptions::default()).unwrap();
    let store = Arc::clone(&probe) as Arc<dyn Store>;
    let writer = Rig::from(Engine::with_node_memory(store, small, settings(4)).unwrap());
    writer.register_kv(&source);
    let red = tenant("red");
    writer.store_for(&red, 1, numbered());
    let stored = Outcome::Stored(BLOCK_BYTES as u64);
    assert_eq!(outcomes(&writer, 1), [stored; ALL]);
    let keys: Vec<_> = (0..BLOCKS).map(|n| key_for(&red, n)).collect();
    assert!(keys.iter().all(|key| probe.has(key)));
    assert_eq!(
        node.open(SIZE).contains(&keys, soon()).unwrap(),
        [false; ALL]
    );
    assert!(writer.stats().slots_peak > 0);
}

#[test]
fn what_has_room_in_node_memory_does_not_wait_for_what_has_none() {
    let (probe, node, source) = (Probe::new(), Pool::new(), filled());
    probe.hold_contains(true);
    let url = format!("shm://{}?size={SIZE}&quota=tenant/red:1KiB", node.name());
    let small = penstock_store::open(&url, &OpenOptions::default()).unwrap();
    let patient = EngineConfig {
        store_wait: 10 * LONG,
        ..settings(4)
    };
    let store = Arc::clone(&probe) as Arc<dyn Store>;
    let writer = Rig::from(Engine::with_node_memory(store, small, patient).unwrap());
    writer.register_kv(&source);
    // They need slots, of which there are too few.
    writer.store_for(&tenant("red"), 1, numbered());
    writer.store_for(&tenant("blue"), 2, numbered());
    released(&writer, 2);
    // What waits for a slot is given up as soon as its blocks are needed.
    assert!(writer.wait_released(&[1], LONG));
    probe.hold_contains(false);
    let red = outcomes(&writer, 1);
    assert!(red.contains(&Outcome::Dropped), "{red:?}");
    let stored = Outcome::Stored(BLOCK_BYTES as u64);
    assert_eq!(outcomes(&writer, 2), [stored; ALL]);
}

#[test]
fn what_comes_from_the_store_is_in_node_memory_afterwards() {
    let (probe, node, target) = (full(), Pool::new(), Kv::new(KvLayout::BLHNC));
    let reader = sharing(&probe, &node, settings(4), &target);
    assert_eq!(load(&reader), [LOADED; ALL]);
    assert_whole(&target);
    arrived(&node);

    let other = Kv::new(KvLayout::BHLNC);
    let again = sharing(&Probe::new(), &node, settings(4), &other);
    assert_eq!(load(&again), [KEPT; ALL]);
    assert_whole(&other);
}

#[test]
fn engines_that_want_the_same_fetch_it_once() {
    let (probe, node) = (full(), Pool::new());
    let targets: Vec<Kv> = (0..4).map(|_| Kv::new(KvLayout::BLHNC)).collect();
    let share = |kv| sharing(&probe, &node, settings(8), kv);
    let rigs: Vec<Rig> = targets.iter().map(share).collect();
    probe.hold_gets(true);
    for rig in &rigs {
        rig.submit_load(2, numbered(), soon(), false, Fence::NONE)
            .unwrap();
    }
    probe.until(|call| matches!(call, Call::Get(_)));
    eventually("each of them looks for its first blocks", || {
        rigs.iter().all(|rig| rig.stats().slots_in_use > 0)
    });
    probe.hold_gets(false);
    let mut loaded = 0;
    for (rig, target) in rigs.iter().zip(&targets) {
        let got = outcomes(rig, 2);
        assert!(
            got.iter().all(|outcome| [LOADED, KEPT].contains(outcome)),
            "{got:?}"
        );
        loaded += got.iter().filter(|&&outcome| outcome == LOADED).count();
        assert_whole(target);
    }
    assert_eq!(loaded, ALL);
    assert_eq!(keys_got(&probe), ALL);
}

#[test]
fn an_engine_that_never_brings_what_it_began_is_not_waited_for() {
    let (probe, node, target) = (full(), Pool::new(), Kv::new(KvLayout::BLHNC));
    let stopped = SealedStore::new(node.open(SIZE), None);
    let claims: Vec<_> = (0..BLOCKS).map(|n| stopped.claim(&key(n))).collect();
    assert!(claims.iter().all(Option::is_some));
    let settings = EngineConfig {
        claim_wait: Duration::from_millis(5),
        ..settings(4)
    };
    let reader = sharing(&probe, &node, settings, &target);
    assert_eq!(load(&reader), [LOADED; ALL]);
    assert_whole(&target);
}

#[test]
fn a_damaged_value_is_removed_and_comes_from_the_store() {
    for keys in [None, ring()] {
        let (probe, node, kv) = (Probe::new(), Pool::new(), filled());
        let settings = EngineConfig {
            keys: keys.clone(),
            ..settings(32)
        };
        let rig = sharing(&probe, &node, settings, &kv);
        assert!(store(&rig).iter().all(Outcome::is_success));
        let value = probe.value(&key(3));
        assert_eq!(node.damage(&value[value.len() - 64..]), 1);
        (0..BLOCKS).for_each(|block| kv.fill(block, 99));
        for (block, outcome) in load(&rig).into_iter().enumerate() {
            assert_eq!(outcome, if block == 3 { LOADED } else { KEPT });
        }
        assert_whole(&kv);
        assert_eq!(rig.stats().mended_objects, 1);
        arrived(&node);
        assert_eq!(load(&rig), [KEPT; ALL]);
    }
}

fn ring() -> Option<Arc<Keyring>> {
    let key = "a:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    Some(Arc::new(Keyring::parse(key).unwrap()))
}

#[test]
fn with_keys_node_memory_holds_ciphertext_only() {
    let (probe, node, source) = (Probe::new(), Pool::new(), filled());
    let settings = || EngineConfig {
        keys: ring(),
        ..settings(32)
    };
    let writer = sharing(&probe, &node, settings(), &source);
    assert!(store(&writer).iter().all(Outcome::is_success));
    let target = Kv::new(KvLayout::BLHNC);
    let reader = sharing(&Probe::new(), &node, settings(), &target);
    assert_eq!(load(&reader), [KEPT; ALL]);
    assert_whole(&target);

    let (cold, other) = (Pool::new(), Kv::new(KvLayout::BLHNC));
    let from_store = sharing(&probe, &cold, settings(), &other);
    assert_eq!(load(&from_store), [LOADED; ALL]);
    arrived(&cold);
    assert_eq!(load(&from_store), [KEPT; ALL]);
    for block in 0..BLOCKS {
        let plain = &pattern(block)[..64];
        assert_eq!(node.damage(plain) + cold.damage(plain), 0);
    }
}

#[test]
fn a_prefetch_brings_values_into_node_memory() {
    let (probe, node, target) = (full(), Pool::new(), Kv::new(KvLayout::BLHNC));
    let rig = sharing(&probe, &node, settings(8), &target);
    rig.submit_prefetch(3, numbered(), soon()).unwrap();
    assert_eq!(outcomes(&rig, 3), [LOADED; ALL]);
    rig.submit_prefetch(4, numbered(), soon()).unwrap();
    assert_eq!(outcomes(&rig, 4), [KEPT; ALL]);
    assert_eq!(load(&rig), [KEPT; ALL]);
    assert_whole(&target);
    rig.release(3);
    rig.release(4);
}

#[test]
fn while_the_store_is_down_node_memory_takes_what_comes() {
    let (probe, node, source, target) = (
        Probe::new(),
        Pool::new(),
        filled(),
        Kv::new(KvLayout::BLHNC),
    );
    probe.fail(Some(ErrorKind::Unreachable));
    let mut patient = settings(32);
    patient.store_backoff = LONG;
    let writer = sharing(&probe, &node, patient, &source);
    let (first, rest) = (numbered()[..1].to_vec(), numbered()[1..].to_vec());
    writer.submit_store(1, first, Fence::NONE).unwrap();
    let failed = Outcome::Failed(ErrorKind::Unreachable);
    assert_eq!(outcomes(&writer, 1), [failed]);
    let calls = probe.calls().len();
    writer.submit_store(2, rest, Fence::NONE).unwrap();
    assert_eq!(outcomes(&writer, 2), [Outcome::Dropped; ALL - 1]);
    assert_eq!(probe.calls().len(), calls, "the store is left alone");

    let reader = sharing(&probe, &node, settings(4), &target);
    assert_eq!(load(&reader), [KEPT; ALL]);
    assert_whole(&target);
}

#[test]
fn tenants_have_quotas_in_node_memory() {
    let (node, source, target) = (Pool::new(), filled(), Kv::new(KvLayout::BLHNC));
    let rig = |kv| {
        let url = format!("shm://{}?size={SIZE}&quota=tenant/red:64KiB", node.name());
        let node = penstock_store::open(&url, &OpenOptions::default()).unwrap();
        let engine = Engine::with_node_memory(Probe::new(), node, settings(32)).unwrap();
        let rig = Rig::from(engine);
        rig.register_kv(kv);
        rig
    };
    let (writer, reader) = (rig(&source), rig(&target));
    let kept = |owner: &Owner| {
        writer.store_for(owner, 1, numbered());
        assert!(outcomes(&writer, 1).iter().all(Outcome::is_success));
        reader.load_for(owner, 2, numbered());
        let outcomes = outcomes(&reader, 2);
        outcomes.iter().filter(|&&outcome| outcome == KEPT).count()
    };
    let red = kept(&tenant("red"));
    assert!(red > 0 && red * BLOCK_BYTES <= 64 << 10, "{red} blocks");
    assert_eq!(kept(&tenant("blue")), ALL);
}

#[test]
fn node_memory_is_shared_memory() {
    let store = || Arc::new(MemoryStore::new(SIZE)) as Arc<dyn Store>;
    let refused = Engine::with_node_memory(store(), store(), config(4));
    assert!(matches!(refused.err(), Some(EngineError::Config(_))));
}
