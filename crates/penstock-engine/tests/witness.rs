//! Witnesses: an engine compares what it has computed with what the store has.

use std::sync::Arc;

use penstock_contract::{Block, Store};
use penstock_engine::{Engine, EngineConfig, Fault, Fence, KvGroup, Outcome, Owner};
use penstock_layout::KvLayout;
use penstock_value::compare::Numbers;
use penstock_value::header::{Rejection, Writer};
use penstock_value::{Accused, MemoryStore};

use crate::support::segment::Pool;
use crate::support::*;

const STORED: Outcome = Outcome::Stored(BLOCK_BYTES as u64);
const LOADED: Outcome = Outcome::Loaded(BLOCK_BYTES as u64);

fn trusting(keep: bool) -> EngineConfig {
    let mut config = config(8);
    config.trusts = true;
    config.keep = keep;
    config
}

/// An engine of this writer, on memory of bf16 numbers.
fn rig<'kv>(
    store: &Arc<impl Store + 'static>,
    config: EngineConfig,
    kv: &'kv Kv,
    writer: u64,
) -> Rig<'kv> {
    named(unregistered(store, config), kv, writer)
}

fn named<'kv>(rig: Rig<'kv>, kv: &'kv Kv, writer: u64) -> Rig<'kv> {
    let group = KvGroup {
        numbers: Some(Numbers::Bf16),
        ..kv.group()
    };
    rig.register(0, group).unwrap();
    rig.set_writer(Writer(writer));
    rig.name(0, NAMESPACE).unwrap();
    rig
}

/// A block's bytes as bf16 numbers of about the same size.
fn numbers(seed: u64) -> Vec<u8> {
    let mut bytes = pattern(seed);
    for element in bytes.as_chunks_mut::<2>().0 {
        element[1] = element[1] & 0x80 | 0x3f;
    }
    bytes
}

/// Numbers of a block, each off by a rounding.
fn rounded(seed: u64) -> Vec<u8> {
    let mut bytes = numbers(seed);
    for element in bytes.as_chunks_mut::<2>().0 {
        element[0] ^= 1;
    }
    bytes
}

fn witness(rig: &Rig, blocks: &[Block]) -> Vec<Outcome> {
    let owner = Owner::default();
    rig.submit_witness(1, blocks, blocks.len(), &owner, Fence::NONE)
        .unwrap();
    outcomes(rig, 1)
}

#[test]
fn what_agrees_stays_and_what_is_missing_is_stored() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let writer = rig(&probe, trusting(false), &kv, 1);
    let reader = rig(&probe, trusting(false), &other, 2);
    (1..4).for_each(|n| kv.write(n, share(), &numbers(n)));
    assert_eq!(
        store(&writer, vec![block_of(1, 1), block_of(2, 2)]),
        [STORED; 2]
    );
    other.write(1, share(), &numbers(1));
    other.write(2, share(), &rounded(2));
    other.write(3, share(), &numbers(3));
    let blocks = [block_of(1, 1), block_of(2, 2), block_of(3, 3)];
    let present = Outcome::AlreadyPresent;
    assert_eq!(witness(&reader, &blocks), [present, present, STORED]);
    let stats = reader.stats();
    assert_eq!((stats.witnessed_objects, stats.disagreements), (2, 0));
    assert_eq!(reader.take_faults(), []);
    // The first engine's own value was not replaced.
    assert_eq!(load(&reader, vec![block_of(2, 9)]), [LOADED]);
    assert_eq!(other.read(9, share()), numbers(2));
}

#[test]
fn without_being_told_to_nothing_is_compared() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let writer = rig(&probe, trusting(false), &kv, 1);
    kv.write(0, share(), &numbers(1));
    kv.write(1, share(), &numbers(2));
    assert_eq!(store(&writer, vec![block_of(1, 0)]), [STORED]);
    assert_eq!(
        store(&writer, vec![block_of(1, 1)]),
        [Outcome::AlreadyPresent]
    );
    assert_eq!(writer.stats().witnessed_objects, 0);
}

#[test]
fn after_a_disagreement_nothing_of_that_writer_is_loaded() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let wrong = rig(&probe, trusting(false), &kv, 1);
    let right = rig(&probe, trusting(false), &other, 2);
    let third = rig(&probe, trusting(false), &other, 3);
    (0..4).for_each(|n| kv.write(n, share(), &numbers(100 + n)));
    (0..4).for_each(|n| other.write(n, share(), &numbers(n)));
    assert_eq!(
        store(&wrong, (0..3).map(|n| block_of(n, n)).collect()),
        [STORED; 3]
    );
    assert_eq!(store(&right, vec![block_of(3, 3)]), [STORED]);
    assert_eq!(witness(&right, &[block_of(0, 0)]), [Outcome::Disagreed]);
    let faults = right.take_faults();
    let [
        Fault::Disagreement {
            writer,
            witness: by,
            accused,
            key: of,
            ..
        },
    ] = &faults[..]
    else {
        panic!("{faults:?}");
    };
    assert_eq!((*writer, *by, *of), (Writer(1), Writer(2), key(0)));
    assert_eq!(*accused, Some(Accused::Writer));
    // The value is gone. What else that writer stored is not loaded, and is removed on the way.
    assert!(!probe.has(&key(0)) && probe.has(&key(1)));
    let distrusted = Outcome::Rejected(Rejection::Distrusted(Writer(1)));
    assert_eq!(load(&right, vec![block_of(1, 9)]), [distrusted]);
    assert!(!probe.has(&key(1)));
    // An engine that knows of nothing yet reads the roll before it loads.
    assert_eq!(
        load(&third, vec![block_of(2, 9), block_of(3, 10)]),
        [distrusted, LOADED]
    );
    assert_eq!(other.read(10, share()), numbers(3));
    // It may be stored anew, by others.
    assert_eq!(store(&right, vec![block_of(0, 0)]), [STORED]);
    assert_eq!(load(&third, vec![block_of(0, 9)]), [LOADED]);
    assert_eq!(other.read(9, share()), numbers(0));
    // The fault is told once for each writer.
    assert_eq!(right.take_faults(), []);
}

#[test]
fn an_engine_that_others_have_marked_stores_nothing_and_says_so_once() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let right = rig(&probe, trusting(false), &other, 2);
    kv.write(0, share(), &numbers(100));
    other.write(0, share(), &numbers(0));
    {
        let wrong = rig(&probe, trusting(false), &kv, 1);
        assert_eq!(store(&wrong, vec![block_of(0, 0)]), [STORED]);
    }
    assert_eq!(witness(&right, &[block_of(0, 0)]), [Outcome::Disagreed]);
    let wrong = rig(&probe, trusting(false), &kv, 1);
    assert_eq!(store(&wrong, vec![block_of(4, 0)]), [Outcome::Dropped]);
    assert_eq!(store(&wrong, vec![block_of(5, 0)]), [Outcome::Dropped]);
    let faults = wrong.take_faults();
    assert!(
        matches!(faults[..], [Fault::Distrusted { writer: Writer(1) }]),
        "{faults:?}"
    );
    // With other weights it is another writer.
    wrong.set_writer(Writer(4));
    assert_eq!(store(&wrong, vec![block_of(4, 0)]), [STORED]);
}

#[test]
fn an_engine_that_one_other_has_marked_still_bears_witness() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let wrong = rig(&probe, trusting(false), &kv, 1);
    let (right, third) = (
        rig(&probe, trusting(false), &other, 2),
        rig(&probe, trusting(false), &other, 3),
    );
    (0..4).for_each(|n| kv.write(n, share(), &numbers(100 + n)));
    (0..4).for_each(|n| other.write(n, share(), &numbers(n)));
    let own = (0..2).map(|n| block_of(n, n)).collect();
    assert_eq!(store(&right, own), [STORED; 2]);
    // The wrong engine is the first to compare, and puts its own in the place of what was right.
    assert_eq!(witness(&wrong, &[block_of(0, 0)]), [Outcome::Disagreed]);
    let own = vec![block_of(0, 0), block_of(2, 2)];
    assert_eq!(store(&wrong, own), [STORED; 2]);
    let marked = rig(&probe, trusting(false), &other, 2);
    let seen = witness(&marked, &[block_of(0, 0), block_of(3, 3)]);
    assert_eq!(seen, [Outcome::Disagreed, Outcome::Dropped]);
    // One word against the other: neither is trusted. A third word decides.
    let distrusted = |n| Outcome::Rejected(Rejection::Distrusted(Writer(n)));
    let reader = rig(&probe, trusting(false), &other, 4);
    assert_eq!(load(&reader, vec![block_of(1, 9)]), [distrusted(2)]);
    assert_eq!(witness(&third, &[block_of(2, 2)]), [Outcome::Disagreed]);
    let again = rig(&probe, trusting(false), &other, 2);
    assert_eq!(store(&again, vec![block_of(3, 3)]), [STORED]);
    // An engine that two others have marked compares nothing more.
    let wrong = rig(&probe, trusting(false), &kv, 1);
    assert_eq!(witness(&wrong, &[block_of(3, 3)]), [Outcome::Dropped]);
    assert!(probe.has(&key(3)));
}

#[test]
fn what_is_kept_in_host_memory_is_not_loaded_either() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let wrong = rig(&probe, trusting(false), &kv, 1);
    let right = rig(&probe, trusting(true), &other, 2);
    (0..2).for_each(|n| kv.write(n, share(), &numbers(100 + n)));
    assert_eq!(
        store(&wrong, vec![block_of(0, 0), block_of(1, 1)]),
        [STORED; 2]
    );
    assert_eq!(load(&right, vec![block_of(1, 9)]), [LOADED]);
    assert_eq!(
        load(&right, vec![block_of(1, 9)]),
        [Outcome::Kept(BLOCK_BYTES as u64)]
    );
    other.write(0, share(), &numbers(0));
    assert_eq!(witness(&right, &[block_of(0, 0)]), [Outcome::Disagreed]);
    let distrusted = Outcome::Rejected(Rejection::Distrusted(Writer(1)));
    assert_eq!(load(&right, vec![block_of(1, 9)]), [distrusted]);
    // It is not there any more, so the pool's is next.
    assert_eq!(load(&right, vec![block_of(1, 9)]), [distrusted]);
    assert_eq!(load(&right, vec![block_of(1, 9)]), [Outcome::Miss]);
}

#[test]
fn what_lies_in_node_memory_is_not_loaded_either() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let node = Pool::new();
    let with_node = |kv, writer| {
        let store = Arc::clone(&probe) as Arc<dyn Store>;
        let engine = Engine::with_node_memory(store, node.open(8 << 20), trusting(true)).unwrap();
        named(Rig::from(engine), kv, writer)
    };
    let (wrong, right) = (with_node(&kv, 1), with_node(&other, 2));
    (0..3).for_each(|n| kv.write(n, share(), &numbers(100 + n)));
    (0..3).for_each(|n| other.write(n, share(), &numbers(n)));
    let blocks = (0..3).map(|n| block_of(n, n)).collect();
    assert_eq!(store(&wrong, blocks), [STORED; 3]);
    assert_eq!(
        load(&right, vec![block_of(1, 9)]),
        [Outcome::Kept(BLOCK_BYTES as u64)]
    );
    assert_eq!(witness(&right, &[block_of(0, 0)]), [Outcome::Disagreed]);
    // Of node memory it is removed, and then the pool's is looked at.
    let distrusted = Outcome::Rejected(Rejection::Distrusted(Writer(1)));
    for n in [1, 2] {
        assert_eq!(load(&right, vec![block_of(n, 9)]), [distrusted]);
        assert_eq!(load(&right, vec![block_of(n, 9)]), [Outcome::Miss]);
    }
    // What was computed right goes both ways, under the name of who computed it.
    assert_eq!(store(&right, vec![block_of(0, 0)]), [STORED]);
    assert_eq!(
        load(&wrong, vec![block_of(0, 9)]),
        [Outcome::Kept(BLOCK_BYTES as u64)]
    );
    assert_eq!(kv.read(9, share()), numbers(0));
}

#[test]
fn what_another_engine_brought_into_node_memory_keeps_its_writer() {
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let node = Pool::new();
    let wrong = rig(&probe, trusting(false), &kv, 1);
    let store_of = || Arc::clone(&probe) as Arc<dyn Store>;
    let with_node = |writer| {
        let engine = Engine::with_node_memory(store_of(), node.open(8 << 20), trusting(true));
        named(Rig::from(engine.unwrap()), &other, writer)
    };
    (0..2).for_each(|n| kv.write(n, share(), &numbers(100 + n)));
    assert_eq!(
        store(&wrong, vec![block_of(0, 0), block_of(1, 1)]),
        [STORED; 2]
    );
    let innocent = with_node(2);
    assert_eq!(load(&innocent, vec![block_of(1, 9)]), [LOADED]);
    other.write(0, share(), &numbers(0));
    assert_eq!(witness(&innocent, &[block_of(0, 0)]), [Outcome::Disagreed]);
    let distrusted = Outcome::Rejected(Rejection::Distrusted(Writer(1)));
    assert_eq!(load(&innocent, vec![block_of(1, 9)]), [distrusted]);
}

#[test]
fn a_single_flipped_bit_is_found_where_kernels_are_exact() {
    const KERNELS: u64 = 5 << 40;
    let (probe, kv, other) = (
        Probe::new(),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let writer = rig(&probe, trusting(false), &kv, KERNELS | 1);
    // The lowest bit of a mantissa.
    let mut flipped = numbers(0);
    flipped[500] ^= 1;
    kv.write(0, share(), &flipped);
    other.write(0, share(), &numbers(0));
    assert_eq!(store(&writer, vec![block_of(0, 0)]), [STORED]);
    for others in [2, 6 << 40 | 2] {
        let near = rig(&probe, trusting(false), &other, others);
        assert_eq!(witness(&near, &[block_of(0, 0)]), [Outcome::AlreadyPresent]);
    }
    let exact = rig(&probe, trusting(false), &other, KERNELS | 2);
    assert_eq!(witness(&exact, &[block_of(0, 0)]), [Outcome::Disagreed]);
}

#[test]
fn values_of_unknown_writers_are_removed_alone() {
    let (store_of, kv, other) = (
        Arc::new(MemoryStore::new(1 << 20)),
        Kv::new(KvLayout::LBHNC),
        Kv::new(KvLayout::BLNHC),
    );
    let unknown = rig(&store_of, trusting(false), &kv, 0);
    let right = rig(&store_of, trusting(false), &other, 2);
    (0..2).for_each(|n| kv.write(n, share(), &numbers(100 + n)));
    assert_eq!(
        store(&unknown, vec![block_of(0, 0), block_of(1, 1)]),
        [STORED; 2]
    );
    other.write(0, share(), &numbers(0));
    assert_eq!(witness(&right, &[block_of(0, 0)]), [Outcome::Disagreed]);
    assert!(matches!(
        right.take_faults()[..],
        [Fault::Disagreement { accused: None, .. }]
    ));
    assert_eq!(
        load(&right, vec![block_of(0, 9), block_of(1, 10)]),
        [Outcome::Miss, LOADED]
    );
}

#[test]
fn a_damaged_value_accuses_nobody_and_is_put_anew() {
    let (probe, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let writer = rig(&probe, trusting(false), &kv, 1);
    kv.write(0, share(), &numbers(0));
    assert_eq!(store(&writer, vec![block_of(0, 0)]), [STORED]);
    let mut value = probe.value(&key(0));
    value[200] ^= 1;
    probe.plant(&key(0), &value);
    assert_eq!(witness(&writer, &[block_of(0, 0)]), [STORED]);
    assert_eq!(writer.stats().witnessed_objects, 0);
    assert_eq!(load(&writer, vec![block_of(0, 9)]), [LOADED]);
}
