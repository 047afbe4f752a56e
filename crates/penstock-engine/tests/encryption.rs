//! Jobs of an engine with encryption keys: what lies in the store, what is loaded, what stays.

use std::sync::Arc;

use penstock_contract::Block;
use penstock_engine::{Engine, EngineConfig, Fence, Outcome};
use penstock_layout::KvLayout;
use penstock_value::Keyring;
use penstock_value::header::{Checksum, ENCRYPTED_HEADER_BYTES, Rejection, Writer, seal};

use crate::support::*;

const LOADED: Outcome = Outcome::Loaded(BLOCK_BYTES as u64);
const STORED: Outcome = Outcome::Stored(BLOCK_BYTES as u64);
const A: &str = "a:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const B: &str = "b://79/Pv6+fj39vX08/Lx8O/u7ezr6uno5+bl5OPi4eA=";

fn ring(lines: &[&str]) -> Option<Arc<Keyring>> {
    Some(Arc::new(Keyring::parse(&lines.join("\n")).unwrap()))
}

fn with(keys: Option<Arc<Keyring>>, slots: usize) -> EngineConfig {
    let mut config = config(slots);
    config.keys = keys;
    config
}

fn store(rig: &Rig, objects: Vec<Block>) -> Vec<Outcome> {
    rig.submit_store(1, objects, Fence::NONE).unwrap();
    outcomes(rig, 1)
}

fn load(rig: &Rig, objects: Vec<Block>) -> Vec<Outcome> {
    rig.submit_load(2, objects, soon(), false, Fence::NONE)
        .unwrap();
    outcomes(rig, 2)
}

fn plain_value(n: u64) -> Vec<u8> {
    let payload = pattern(n);
    let header = seal(
        &key(n),
        Writer::UNKNOWN,
        payload.len() as u64,
        Checksum::of(&payload),
    );
    [&header[..], &payload].concat()
}

#[test]
fn what_one_engine_stores_encrypted_another_loads() {
    let (probe, source, target) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    // As large as an object: a value fills its slot to the end, header and all.
    let exact = |keys| {
        let mut config = EngineConfig::new(BLOCK_BYTES, 6);
        config.keys = keys;
        config
    };
    let writer = engine(&probe, exact(ring(&[A])), &source);
    let objects = || (0..BLOCKS).map(|n| block_of(n, n)).collect::<Vec<_>>();
    for n in 0..BLOCKS {
        source.fill(n, n);
    }
    for object in objects() {
        assert_eq!(store(&writer, vec![object]), [STORED]);
    }
    assert_eq!(writer.stats().stored_bytes, BLOCKS * BLOCK_BYTES as u64);
    for n in 0..BLOCKS {
        let (value, plain) = (probe.value(&key(n)), pattern(n));
        assert_eq!(value.len(), ENCRYPTED_HEADER_BYTES + BLOCK_BYTES);
        let shown = plain
            .chunks_exact(16)
            .any(|piece| value.windows(16).any(|bytes| bytes == piece));
        assert!(!shown, "plaintext in the store");
    }
    let reader = engine(&probe, exact(ring(&[B, A])), &target);
    assert_eq!(load(&reader, objects()), vec![LOADED; BLOCKS as usize]);
    for n in 0..BLOCKS {
        assert_eq!(target.read(n, share()), pattern(n));
    }
    assert_eq!(writer.stats().panics + reader.stats().panics, 0);
}

#[test]
fn values_of_others_are_misses_that_stay() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(1, 1);
    let writer = engine(&probe, with(ring(&[A]), 4), &kv);
    assert_eq!(store(&writer, vec![block_of(1, 1)]), [STORED]);
    let (value, before) = (probe.value(&key(1)), kv.all());
    for (keys, reason) in [
        (None, Rejection::Encrypted),
        (ring(&[B]), Rejection::UnknownKey),
    ] {
        let reader = engine(&probe, with(keys, 4), &kv);
        let rejected = [Outcome::Rejected(reason)];
        assert_eq!(load(&reader, vec![block_of(1, 2)]), rejected);
        assert_eq!(reader.stats().rejected[reason.name()], 1);
        // It cannot replace the value either: of another length or not, it is there.
        assert_eq!(
            store(&reader, vec![block_of(1, 2)]),
            [Outcome::AlreadyPresent]
        );
        assert!(kv.all() == before, "memory was written");
        assert!(reader.shutdown(LONG));
    }
    assert_eq!(probe.value(&key(1)), value);
    let removals = |call: &Call| matches!(call, Call::Remove(_));
    assert!(!probe.calls().iter().any(removals));
    assert_eq!(load(&writer, vec![block_of(1, 3)]), [LOADED]);
    assert_eq!(kv.read(3, share()), pattern(1));
}

#[test]
fn values_that_are_not_encrypted_are_never_loaded_and_make_room() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(0, 5);
    probe.plant(&key(5), &plain_value(5));
    let engine = engine(&probe, with(ring(&[A]), 4), &kv);
    let before = kv.all();
    assert_eq!(
        load(&engine, vec![block_of(5, 1)]),
        [Outcome::Rejected(Rejection::Unencrypted)]
    );
    assert!(kv.all() == before, "memory was written");
    eventually("the value is removed", || !probe.has(&key(5)));
    assert_eq!(store(&engine, vec![block_of(5, 0)]), [STORED]);
    assert_eq!(load(&engine, vec![block_of(5, 1)]), [LOADED]);
    assert_eq!(kv.read(1, share()), pattern(5));
}

#[test]
fn tampered_values_are_rejected_removed_and_written_nowhere() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(0, 1);
    let engine = engine(&probe, with(ring(&[A]), 4), &kv);
    let objects = vec![block_of(1, 0), block_of(2, 0)];
    assert_eq!(store(&engine, objects), [STORED; 2]);
    let (good, other) = (probe.value(&key(1)), probe.value(&key(2)));
    let flipped = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 1;
        bad
    };
    let spliced = [&good[..1000], &other[1000..]].concat();
    let last = good.len() - 1;
    for (reason, bad) in [
        ("bad_magic", flipped(0)),
        ("header_checksum", flipped(6)),
        ("header_checksum", flipped(50)),
        ("header_checksum", flipped(64)),
        ("header_checksum", flipped(127)),
        ("authentication", flipped(128)),
        ("authentication", flipped(last)),
        ("authentication", spliced),
        ("truncated", good[..last].to_vec()),
        ("truncated", good[..100].to_vec()),
        ("truncated", vec![]),
        ("length", [&good[..], &[0; 4000]].concat()),
        ("key", other.clone()),
    ] {
        assert_rejected(&engine, &probe, &kv, (&good, &bad), reason);
    }
}

#[test]
fn objects_of_a_salt_open_with_that_salt_alone() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(0, 1);
    let engine = engine(&probe, with(ring(&[A]), 4), &kv);
    let load = |salt, n| {
        engine.load_for(&salted(salt), 2, vec![block_of(n, 1)]);
        outcomes(&engine, 2)
    };
    engine.store_for(&salted("one"), 1, vec![block_of(1, 0)]);
    assert_eq!(outcomes(&engine, 1), [STORED]);
    assert_eq!(store(&engine, vec![block_of(2, 0)]), [STORED]);
    let (one, none) = (probe.value(&key(1)), probe.value(&key(2)));
    assert_eq!(load("one", 1), [LOADED]);
    for (n, salt, value) in [(1, "", &one), (1, "two", &one), (2, "one", &none)] {
        assert_eq!(
            load(salt, n),
            [Outcome::Rejected(Rejection::Authentication)],
            "{n} {salt:?}"
        );
        eventually("the value is removed", || !probe.has(&key(n)));
        probe.plant(&key(n), value);
    }
}

#[test]
fn what_is_there_already_is_not_encrypted_for_nothing() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(0, 1);
    let engine = engine(&probe, with(ring(&[A]), 8), &kv);
    assert_eq!(store(&engine, vec![block_of(1, 0)]), [STORED]);
    let value = probe.value(&key(1));
    let mixed = vec![block_of(1, 0), block_of(3, 0), block_of(1, 0)];
    assert_eq!(
        store(&engine, mixed),
        [Outcome::AlreadyPresent, STORED, Outcome::AlreadyPresent]
    );
    assert_eq!(probe.value(&key(1)), value);
    eventually("slots return", || engine.stats().slots_in_use == 0);
}

#[test]
fn objects_beyond_what_can_be_encrypted_are_refused_at_the_start() {
    let mut config = EngineConfig::new(1 << 36, 2);
    config.keys = ring(&[A]);
    let refused = Engine::new(Probe::new(), config).err().unwrap();
    assert!(refused.to_string().contains("with encryption"), "{refused}");
}
