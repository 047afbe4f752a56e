//! Load jobs: what is written, what never is, and when a job is over.

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, Key, Store};
use penstock_engine::{Fence, KvGroup, Outcome};
use penstock_layout::{KvLayout, Span};
use penstock_store::layers::Tiered;
use penstock_value::header::{Checksum, Rejection, Writer, seal};

use crate::support::*;

const LOADED: Outcome = Outcome::Loaded(BLOCK_BYTES as u64);

/// A store that holds `pattern(n)` under `key(n)` for each n.
fn stocked(objects: std::ops::Range<u64>) -> Arc<Probe> {
    let store = Probe::new();
    for n in objects {
        store.plant(&key(n), &value(&key(n), &pattern(n)));
    }
    store
}

fn value(key: &Key, payload: &[u8]) -> Vec<u8> {
    let header = seal(
        key,
        Writer::UNKNOWN,
        payload.len() as u64,
        Checksum::of(payload),
    );
    [header.as_slice(), payload].concat()
}

#[test]
fn every_layout_reads_what_every_layout_wrote() {
    for from in KvLayout::ALL {
        let store = Probe::new();
        let source = Kv::new(from);
        for block in 0..BLOCKS {
            source.fill(block, block);
        }
        // Blocks of two pages.
        let engine = |slots, kv: &Kv| {
            let engine = unregistered(&store, config(slots));
            let in_pairs = KvGroup {
                pages_per_block: 2,
                ..kv.group()
            };
            engine.register(0, in_pairs).unwrap();
            engine.name(0, NAMESPACE).unwrap();
            engine
        };
        let writer = engine(32, &source);
        let chunks: Vec<_> = (0..BLOCKS / 2).map(|c| block_of(c, c)).collect();
        writer.submit_store(1, chunks.clone(), Fence::NONE).unwrap();
        assert!(
            outcomes(&writer, 1)
                .iter()
                .all(|o| *o == Outcome::Stored(2 * BLOCK_BYTES as u64))
        );
        for to in KvLayout::ALL {
            let target = Kv::new(to);
            let reader = engine(5, &target);
            reader
                .submit_load(7, chunks.clone(), soon(), true, Fence::NONE)
                .unwrap();
            let loaded = outcomes(&reader, 7);
            assert_eq!(
                loaded,
                vec![Outcome::Loaded(2 * BLOCK_BYTES as u64); chunks.len()]
            );
            for block in 0..BLOCKS {
                assert_eq!(
                    target.read(block, share()),
                    pattern(block),
                    "{from} to {to}, {block}"
                );
            }
        }
    }
}

#[test]
fn parts_written_by_several_ranks_are_read_by_one() {
    let store = Probe::new();
    let source = Kv::new(KvLayout::LBNHC);
    source.fill(3, 3);
    let parts: Vec<Span> = [(0..2, 0..1), (0..2, 1..2), (2..3, 0..1), (2..3, 1..2)]
        .map(|(layers, heads)| Span::new(layers, heads).unwrap())
        .to_vec();
    let of = |kv: &Kv, spans: &[Span]| {
        let engine = unregistered(&store, config(8));
        let group = KvGroup {
            spans: spans.to_vec(),
            ..kv.group()
        };
        engine.register(0, group).unwrap();
        engine.name(0, NAMESPACE).unwrap();
        engine
    };
    for part in &parts {
        let writer = of(&source, &[*part]);
        writer
            .submit_store(1, vec![block_of(3, 3)], Fence::NONE)
            .unwrap();
        outcomes(&writer, 1);
    }
    let target = Kv::new(KvLayout::BHLNC);
    target.fill(5, 50);
    let reader = of(&target, &[parts[0], parts[2], parts[3]]);
    reader
        .submit_load(1, vec![block_of(3, 5)], soon(), false, Fence::NONE)
        .unwrap();
    let bytes = BLOCK_BYTES as u64 * 2 / 3;
    assert_eq!(outcomes(&reader, 1), [Outcome::Loaded(bytes)]);
    assert_eq!(reader.stats().loaded_objects, 3);
    for (i, span) in parts.iter().enumerate() {
        let expected = if i == 1 {
            Kv::new(KvLayout::LBHNC)
        } else {
            Kv::new(KvLayout::BLHNC)
        };
        expected.fill(0, if i == 1 { 50 } else { 3 });
        assert_eq!(target.read(5, *span), expected.read(0, *span), "{span}");
    }
}

#[test]
fn what_does_not_verify_is_rejected_removed_and_written_nowhere() {
    let key = key(1);
    let good = value(&key, &pattern(1));
    let with = |at: usize, bit: u8| {
        let mut bad = good.clone();
        bad[at] ^= bit;
        bad
    };
    let foreign = {
        let mut other = key;
        other.namespace.0[0] ^= 1;
        value(&other, &pattern(1))
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("bad_magic", with(0, 1)),
        ("version", with(4, 2)),
        ("header_checksum", with(9, 1)),
        ("header_checksum", with(63, 128)),
        ("payload_checksum", with(64, 1)),
        ("payload_checksum", with(good.len() - 1, 128)),
        ("payload_checksum", with(64 + BLOCK_BYTES / 2, 16)),
        ("truncated", good[..good.len() - 1].to_vec()),
        ("truncated", good[..64].to_vec()),
        ("truncated", good[..17].to_vec()),
        ("truncated", vec![]),
        ("length", [good.as_slice(), &[0]].concat()),
        ("length", value(&key, &pattern(1)[1..])),
        ("key", value(&crate::support::key(2), &pattern(1))),
        ("namespace", foreign),
    ];
    for (reason, bad) in cases {
        let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
        kv.fill(0, 40);
        kv.fill(1, 41);
        let before = kv.all();
        let engine = engine(&store, config(2), &kv);
        // The slot has held the good value: what a short one leaves of it must not count.
        store.plant(&key, &good);
        engine
            .submit_load(0, vec![block_of(1, 9)], soon(), false, Fence::NONE)
            .unwrap();
        assert_eq!(outcomes(&engine, 0), [LOADED]);
        kv.write(9, share(), &vec![0; BLOCK_BYTES]);
        store.plant(&key, &bad);
        engine
            .submit_load(1, vec![block_of(1, 1)], soon(), false, Fence::NONE)
            .unwrap();
        let outcomes = outcomes(&engine, 1);
        let [Outcome::Rejected(why)] = outcomes[..] else {
            panic!("{reason}: {outcomes:?}")
        };
        assert_eq!(why.name(), reason);
        assert!(kv.all() == before, "{reason}: memory was written");
        assert_eq!(engine.stats().rejected[reason], 1);
        eventually("the value is removed", || !store.has(&key));
    }
}

#[test]
fn a_damaged_copy_in_a_near_tier_does_not_cost_the_far_one() {
    let (near, far) = (Probe::new(), Probe::new());
    let shared = |probe: &Arc<Probe>| -> Arc<dyn Store> { probe.clone() };
    let tiers = Arc::new(Tiered::new(vec![shared(&near), shared(&far)]));
    let kv = Kv::new(KvLayout::LBHNC);
    let engine = engine(&tiers, config(4), &kv);
    let damaged = |n: u64, at: usize| {
        let mut bad = value(&key(n), &pattern(n));
        bad[at] ^= 1;
        bad
    };
    for n in 1..=4 {
        far.plant(&key(n), &value(&key(n), &pattern(n)));
        near.plant(&key(n), &value(&key(n), &pattern(n)));
    }
    near.plant(&key(1), &damaged(1, 100));
    near.plant(&key(2), &value(&key(2), &pattern(2))[..100]);
    near.plant(&key(4), &damaged(4, 100));
    far.plant(&key(4), &damaged(4, 64));
    let objects = (1..=4).map(|n| block_of(n, n)).collect();
    engine
        .submit_load(1, objects, soon(), false, Fence::NONE)
        .unwrap();
    let outcomes = outcomes(&engine, 1);
    assert_eq!(outcomes[..3], [LOADED; 3]);
    assert!(matches!(outcomes[3], Outcome::Rejected(_)), "{outcomes:?}");
    for n in 1..=3 {
        assert_eq!(kv.read(n, share()), pattern(n));
    }
    let stats = engine.stats();
    assert_eq!((stats.mended_objects, stats.rejected_objects), (2, 1));
    let has = |store: &Probe| [1, 2, 3, 4].map(|n| store.has(&key(n)));
    eventually("damaged copies are gone, and no others", || {
        has(&near) == [false, false, true, false] && has(&far) == [true, true, true, false]
    });
}

#[test]
fn a_length_rejection_tells_both_lengths() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store.plant(&key(1), &[0; 4 * BLOCK_BYTES]);
    let engine = engine(&store, config(2), &kv);
    engine
        .submit_load(1, vec![block_of(1, 1)], soon(), false, Fence::NONE)
        .unwrap();
    let expected = BLOCK_BYTES as u64;
    let found = 4 * expected - 64;
    let rejection = Rejection::Length { expected, found };
    assert_eq!(outcomes(&engine, 1), [Outcome::Rejected(rejection)]);
}

#[test]
fn a_miss_ends_a_prefix_job_but_not_another() {
    let (store, kv) = (stocked(0..8), Kv::new(KvLayout::LBHNC));
    let mut config = config(4);
    config.get_lanes = 1;
    config.batch = 1;
    let engine = engine(&store, config, &kv);
    let wanted = || [0, 1, 99, 3, 4].map(|n| block_of(n, n % 10)).to_vec();
    engine
        .submit_load(1, wanted(), soon(), true, Fence::NONE)
        .unwrap();
    use Outcome::{Miss, Skipped};
    assert_eq!(
        outcomes(&engine, 1),
        [LOADED, LOADED, Miss, Skipped, Skipped]
    );
    let gets = store.calls().len();
    assert_eq!(gets, 3, "nothing is fetched after the miss");
    engine
        .submit_load(1, wanted(), soon(), false, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [LOADED, LOADED, Miss, LOADED, LOADED]);
}

#[test]
fn a_deadline_ends_a_job_while_the_store_still_holds_it_up() {
    let (store, kv) = (stocked(0..4), Kv::new(KvLayout::LBHNC));
    let engine = engine(&store, config(4), &kv);
    let before = kv.all();
    store.hold_gets(true);
    let deadline = within(Duration::from_millis(50));
    engine
        .submit_load(
            1,
            (0..4).map(|n| block_of(n, n)).collect(),
            deadline,
            false,
            Fence::NONE,
        )
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::TimedOut; 4]);
    assert!(past() >= deadline);
    store.hold_gets(false);
    eventually("slots return", || engine.stats().slots_in_use == 0);
    assert!(kv.all() == before);
    assert_eq!(engine.stats().timed_out_objects, 4);
}

#[test]
fn a_deadline_that_is_past_loads_nothing() {
    let (store, kv) = (stocked(0..1), Kv::new(KvLayout::LBHNC));
    let engine = engine(&store, config(2), &kv);
    engine
        .submit_load(1, vec![block_of(0, 0)], past(), false, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::TimedOut]);
}

#[test]
fn a_job_that_waits_behind_a_stuck_one_still_ends_by_its_deadline() {
    let (store, kv) = (stocked(0..8), Kv::new(KvLayout::LBHNC));
    let mut config = config(8);
    config.get_lanes = 1;
    let engine = engine(&store, config, &kv);
    store.hold_gets(true);
    engine
        .submit_load(1, vec![block_of(0, 0)], soon(), true, Fence::NONE)
        .unwrap();
    store.until(|call| matches!(call, Call::Get(_)));
    let deadline = within(Duration::from_millis(30));
    engine
        .submit_load(2, vec![block_of(1, 1)], deadline, true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 2), [Outcome::TimedOut]);
    store.hold_gets(false);
    assert_eq!(outcomes(&engine, 1), [LOADED]);
}

#[test]
fn a_cancelled_load_is_over_at_once_and_writes_nothing_later() {
    let (store, kv) = (stocked(0..4), Kv::new(KvLayout::BLNHC));
    let engine = engine(&store, config(4), &kv);
    let before = kv.all();
    store.hold_gets(true);
    engine
        .submit_load(
            1,
            (0..4).map(|n| block_of(n, n)).collect(),
            soon(),
            true,
            Fence::NONE,
        )
        .unwrap();
    store.until(|call| matches!(call, Call::Get(_)));
    engine.cancel(1);
    let mut seen = Vec::new();
    engine.poll(&mut seen);
    assert_eq!(seen[0].event.blocks(), [Outcome::Cancelled; 4]);
    // The id is free again, though lanes still work for the old job.
    store.hold_gets(false);
    engine
        .submit_load(1, vec![block_of(2, 7)], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [LOADED]);
    eventually("slots return", || engine.stats().slots_in_use == 0);
    assert_eq!(kv.read(7, share()), pattern(2));
    kv.write(7, share(), &vec![0; BLOCK_BYTES]);
    assert!(kv.all() == before);
}

#[test]
fn stuck_puts_do_not_hold_up_loads() {
    let (store, kv) = (stocked(0..4), Kv::new(KvLayout::LBHNC));
    let mut config = config(16);
    config.put_lanes = 2;
    config.batch = 1;
    let engine = engine(&store, config, &kv);
    store.hold_puts(true);
    let puts = || {
        let calls = store.calls();
        calls
            .iter()
            .filter(|call| matches!(call, Call::Put(_)))
            .count()
    };
    engine
        .submit_store(1, (10..20).map(|n| block_of(n, n)).collect(), Fence::NONE)
        .unwrap();
    eventually("two lanes put", || puts() == 2);
    engine
        .submit_load(
            2,
            (0..4).map(|n| block_of(n, n)).collect(),
            soon(),
            true,
            Fence::NONE,
        )
        .unwrap();
    assert_eq!(outcomes(&engine, 2), [LOADED; 4]);
    assert_eq!(puts(), 2);
    store.hold_puts(false);
    outcomes(&engine, 1);
}

#[test]
fn a_load_spreads_over_the_lanes_front_first() {
    let (store, kv) = (stocked(0..12), Kv::new(KvLayout::LBHNC));
    let mut config = config(16);
    config.get_lanes = 4;
    config.batch = 8;
    let engine = engine(&store, config, &kv);
    store.hold_gets(true);
    engine
        .submit_load(
            1,
            (0..12).map(|n| block_of(n, n)).collect(),
            soon(),
            true,
            Fence::NONE,
        )
        .unwrap();
    eventually("every lane has a part", || store.calls().len() == 4);
    let mut parts: Vec<Vec<Key>> = store
        .calls()
        .into_iter()
        .map(|call| match call {
            Call::Get(keys) => keys,
            other => panic!("{other:?}"),
        })
        .collect();
    parts.sort();
    let sizes: Vec<usize> = parts.iter().map(Vec::len).collect();
    assert!(sizes.iter().all(|&size| size <= 3), "{sizes:?}");
    let asked: Vec<Key> = parts.concat();
    assert!(
        asked.iter().enumerate().all(|(n, k)| *k == key(n as u64)),
        "not the job's front"
    );
    store.hold_gets(false);
    assert_eq!(outcomes(&engine, 1), [LOADED; 12]);
}

#[test]
fn batches_are_bounded_in_bytes() {
    let (store, kv) = (stocked(0..6), Kv::new(KvLayout::LBHNC));
    let mut config = config(16);
    config.get_lanes = 1;
    config.batch = 100;
    config.batch_bytes = 2 * BLOCK_BYTES + 1;
    let engine = engine(&store, config, &kv);
    engine
        .submit_load(
            1,
            (0..6).map(|n| block_of(n, n)).collect(),
            soon(),
            true,
            Fence::NONE,
        )
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [LOADED; 6]);
    assert!(
        store
            .calls()
            .iter()
            .all(|call| matches!(call, Call::Get(keys) if keys.len() == 2))
    );
}

#[test]
fn a_failing_store_fails_loads_by_kind() {
    let (store, kv) = (stocked(0..2), Kv::new(KvLayout::LBHNC));
    let engine = engine(&store, config(4), &kv);
    for (kind, expected) in [
        (
            ErrorKind::Unreachable,
            Outcome::Failed(ErrorKind::Unreachable),
        ),
        (ErrorKind::TimedOut, Outcome::TimedOut),
    ] {
        store.fail(Some(kind));
        engine
            .submit_load(1, vec![block_of(0, 0)], soon(), true, Fence::NONE)
            .unwrap();
        assert_eq!(outcomes(&engine, 1), [expected]);
    }
    store.fail(None);
    store.panic_on(key(1));
    engine
        .submit_load(1, vec![block_of(1, 0)], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::Failed(ErrorKind::Internal)]);
    store.deaf(true);
    engine
        .submit_load(1, vec![block_of(0, 0)], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::Failed(ErrorKind::Protocol)]);
    store.deaf(false);
    engine
        .submit_load(1, vec![block_of(0, 0)], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [LOADED]);
    eventually("slots return", || engine.stats().slots_in_use == 0);
}
