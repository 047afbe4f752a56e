//! Store jobs: what reaches the store, what is dropped, and when blocks are released.

use std::time::Duration;

use penstock_contract::{BatchBytes, Block, ErrorKind, Namespace};
use penstock_engine::{
    EngineConfig, EngineError, Event, Fence, KvGroup, Outcome, Outcomes, Owner, Replica, Tally,
};
use penstock_layout::{KvLayout, Span};
use penstock_value::header::verify_value;

use crate::support::*;

#[test]
fn a_stored_value_is_the_blocks_in_order_behind_a_header() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBNHC));
    kv.fill(4, 1);
    kv.fill(5, 2);
    let engine = unregistered(&store, config(4));
    let in_pairs = KvGroup {
        pages_per_block: 2,
        ..kv.group()
    };
    engine.register(0, in_pairs).unwrap();
    engine.name(0, NAMESPACE).unwrap();
    engine
        .submit_store(1, vec![block_of(9, 2)], Fence::NONE)
        .unwrap();
    let stored_bytes = 2 * BLOCK_BYTES as u64;
    let stored = Outcomes {
        blocks: vec![Outcome::Stored(stored_bytes)],
        tally: Tally {
            stored_bytes,
            ..Tally::default()
        },
    };
    assert_eq!(events(&engine, 1), [Event::Released, Event::Stored(stored)]);

    let value = store.value(&key(9));
    verify_value(&value, &key(9), 2 * BLOCK_BYTES as u64).unwrap();
    assert_eq!(value[64..][..BLOCK_BYTES], pattern(1));
    assert_eq!(value[64 + BLOCK_BYTES..], pattern(2));
}

#[test]
fn a_value_that_is_there_is_kept() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::BLHNC));
    let engine = engine(&store, config(4), &kv);
    engine
        .submit_store(1, vec![block_of(1, 0)], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::Stored(BLOCK_BYTES as u64)]);
    engine
        .submit_store(1, vec![block_of(1, 0), block_of(2, 1)], Fence::NONE)
        .unwrap();
    assert_eq!(
        outcomes(&engine, 1),
        [Outcome::AlreadyPresent, Outcome::Stored(BLOCK_BYTES as u64)]
    );
}

#[test]
fn what_is_put_is_what_the_blocks_held_when_the_job_was_released() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    kv.fill(0, 5);
    let engine = engine(&store, config(4), &kv);
    store.hold_puts(true);
    engine
        .submit_store(1, vec![block_of(1, 0)], Fence::NONE)
        .unwrap();
    released(&engine, 1);
    kv.fill(0, 6);
    store.hold_puts(false);
    assert_eq!(outcomes(&engine, 1), [Outcome::Stored(BLOCK_BYTES as u64)]);
    assert_eq!(store.value(&key(1))[64..], pattern(5));
}

#[test]
fn what_another_engine_waits_for_is_put_before_all_else() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBNHC));
    let one_by_one = EngineConfig {
        batch: 1,
        put_lanes: 1,
        ..config(8)
    };
    let engine = engine(&store, one_by_one, &kv);
    store.hold_puts(true);
    let owner = Owner::default();
    for (job, awaited) in [(1, false), (2, false), (3, false), (4, true), (5, true)] {
        let blocks = [block_of(job, job % 4)];
        let submitted = if awaited {
            engine.submit_awaited_store(job, &blocks, &owner, Fence::NONE)
        } else {
            engine.submit_store(job, blocks.to_vec(), Fence::NONE)
        };
        submitted.unwrap();
        released(&engine, job);
        // The first is under way before the others come.
        store.until(|call| *call == Call::Put(vec![key(1)]));
    }
    store.hold_puts(false);
    for job in 1..=5 {
        assert_eq!(
            outcomes(&engine, job),
            [Outcome::Stored(BLOCK_BYTES as u64)]
        );
    }
    let puts = store.calls().into_iter().filter_map(|call| match call {
        Call::Put(keys) => Some(keys),
        _ => None,
    });
    let order: Vec<_> = puts.flatten().collect();
    assert_eq!(order, [1, 4, 5, 2, 3].map(key));
}

#[test]
fn a_store_gets_batches_as_large_as_it_takes_best() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let bytes = BLOCK_BYTES as u64;
    let small = EngineConfig {
        batch: 2,
        batch_bytes: 2 * BLOCK_BYTES,
        put_lanes: 1,
        get_lanes: 1,
        ..config(32)
    };
    for (best, put, get) in [
        (BatchBytes::default(), 2, 2),
        (
            BatchBytes {
                put: 5 * bytes,
                get: 3 * bytes,
            },
            5,
            3,
        ),
        // Half of the slots that either of them has.
        (
            BatchBytes {
                put: u64::MAX,
                get: u64::MAX,
            },
            12,
            4,
        ),
    ] {
        store.wants_batches(best);
        let engine = engine(&store, small.clone(), &kv);
        let chunk = 100 * put as u64;
        let before = store.calls().len();
        store.hold_puts(true);
        engine
            .submit_store(1, vec![block_of(chunk, 0)], Fence::NONE)
            .unwrap();
        store.until(|call| *call == Call::Put(vec![key(chunk)]));
        let blocks: Vec<_> = (1..=put as u64 + 1)
            .map(|n| block_of(chunk + n, 1))
            .collect();
        engine.submit_store(2, blocks.clone(), Fence::NONE).unwrap();
        released(&engine, 2);
        store.hold_puts(false);
        outcomes(&engine, 2);
        engine
            .submit_load(3, blocks, soon(), false, Fence::NONE)
            .unwrap();
        outcomes(&engine, 3);
        let calls = store.calls().split_off(before);
        let most = |len: fn(&Call) -> Option<usize>| calls.iter().filter_map(len).max();
        let puts = most(|call| match call {
            Call::Put(keys) => Some(keys.len()),
            _ => None,
        });
        let gets = most(|call| match call {
            Call::Get(keys) => Some(keys.len()),
            _ => None,
        });
        assert_eq!((puts, gets), (Some(put), Some(get)), "{best:?}");
    }
}

#[test]
fn under_pressure_stores_are_dropped_and_the_arena_keeps_room_for_loads() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(4);
    config.store_wait = Duration::from_millis(100);
    let engine = engine(&store, config, &kv);
    engine
        .submit_store(0, vec![block_of(0, 0)], Fence::NONE)
        .unwrap();
    outcomes(&engine, 0);

    store.hold_puts(true);
    let blocks = 1..BLOCKS;
    engine
        .submit_store(
            1,
            blocks.clone().map(|b| block_of(b, b)).collect(),
            Fence::NONE,
        )
        .unwrap();
    // Three slots are for stores; the rest waits for them no longer than `store_wait`.
    released(&engine, 1);
    assert_eq!(engine.stats().slots_in_use, 3);
    engine
        .submit_load(2, vec![block_of(0, 23)], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 2), [Outcome::Loaded(BLOCK_BYTES as u64)]);
    store.hold_puts(false);
    let outcomes = outcomes(&engine, 1);
    let dropped = outcomes.iter().filter(|o| **o == Outcome::Dropped).count();
    assert_eq!(dropped, outcomes.len() - 3, "{outcomes:?}");
    assert_eq!(engine.stats().dropped_objects as usize, dropped);
}

#[test]
fn the_queue_is_bounded_in_objects_and_in_bytes() {
    for by_bytes in [false, true] {
        let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
        let mut config = config(2);
        config.store_wait = LONG;
        if by_bytes {
            config.max_pending_bytes = 5 * BLOCK_BYTES + BLOCK_BYTES / 2;
        } else {
            config.max_pending_objects = 5;
        }
        let engine = engine(&store, config, &kv);
        store.hold_puts(true);
        // One is on its way into the store and holds the slot.
        engine
            .submit_store(0, vec![block_of(0, 0)], Fence::NONE)
            .unwrap();
        released(&engine, 0);
        engine
            .submit_store(1, (1..9).map(|b| block_of(b, b)).collect(), Fence::NONE)
            .unwrap();
        store.hold_puts(false);
        let stored = Outcome::Stored(BLOCK_BYTES as u64);
        let expected = [vec![stored; 5], vec![Outcome::Dropped; 3]].concat();
        assert_eq!(outcomes(&engine, 1), expected, "by bytes: {by_bytes}");
    }
}

#[test]
fn the_queues_hold_several_steps_of_the_owners_however_large() {
    let small = EngineConfig::new(1 << 10, 8);
    let same = small.clone().with_steps_of(1);
    assert_eq!(same, small);
    // 16,384 tokens of a large model: 2 GiB in 1024 objects.
    let large = EngineConfig::new(2 << 20, 2048).with_steps_of(1024);
    assert!(large.max_pending_bytes >= 2 * 1024 * (2 << 20));
    assert!(large.max_pending_objects >= 2 * 1024);
    // Many small ones, as pools for any topology have them.
    let pieces = EngineConfig::new(32 << 10, 1 << 20).with_steps_of(1 << 18);
    assert!(pieces.max_pending_objects >= 1 << 19);
    assert!(pieces.max_outstanding_objects >= pieces.max_pending_objects);
}

/// Job 1, of a store that cannot be reached from now on.
fn store_in_vain(engine: &Rig, store: &Probe) {
    store.fail(Some(ErrorKind::Unreachable));
    engine
        .submit_store(1, vec![block_of(1, 1)], Fence::NONE)
        .unwrap();
    assert_eq!(
        outcomes(engine, 1),
        [Outcome::Failed(ErrorKind::Unreachable)]
    );
}

#[test]
fn a_failing_store_costs_its_jobs_and_then_nothing_for_a_while() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(4);
    config.store_backoff = 60 * LONG;
    let engine = engine(&store, config, &kv);
    store_in_vain(&engine, &store);
    assert_eq!(engine.stats().failed["unreachable"], 1);
    engine
        .submit_store(2, vec![block_of(2, 2)], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 2), [Outcome::Dropped]);
    assert_eq!(store.calls().len(), 1);
}

#[test]
fn a_store_that_failed_is_tried_again() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(4);
    config.store_backoff = Duration::from_millis(20);
    let engine = engine(&store, config, &kv);
    store_in_vain(&engine, &store);
    store.fail(None);
    let mut job = 3;
    eventually("stores are tried again", || {
        job += 1;
        engine
            .submit_store(job, vec![block_of(3, 3)], Fence::NONE)
            .unwrap();
        outcomes(&engine, job) == [Outcome::Stored(BLOCK_BYTES as u64)]
    });
}

#[test]
fn a_value_that_is_refused_for_itself_does_not_stop_others() {
    for kind in [ErrorKind::Config, ErrorKind::OverQuota] {
        let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
        let engine = engine(&store, config(4), &kv);
        store.fail_puts(Some(kind));
        engine
            .submit_store(1, vec![block_of(1, 1)], Fence::NONE)
            .unwrap();
        assert_eq!(outcomes(&engine, 1), [Outcome::Failed(kind)]);
        store.fail_puts(None);
        engine
            .submit_store(2, vec![block_of(1, 1)], Fence::NONE)
            .unwrap();
        assert_eq!(outcomes(&engine, 2), [Outcome::Stored(BLOCK_BYTES as u64)]);
    }
}

#[test]
fn waiting_for_release_drops_what_is_queued_and_nothing_is_read_afterwards() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LHBNC));
    let mut config = config(2);
    config.store_wait = LONG;
    let engine = engine(&store, config, &kv);
    store.hold_puts(true);
    engine
        .submit_store(1, vec![block_of(0, 0)], Fence::NONE)
        .unwrap();
    released(&engine, 1);
    engine
        .submit_store(2, vec![block_of(1, 1)], Fence::NONE)
        .unwrap();
    engine
        .submit_store(3, vec![block_of(2, 2), block_of(3, 3)], Fence::NONE)
        .unwrap();
    assert!(engine.wait_released(&[3, 77], Duration::ZERO));
    assert_eq!(outcomes(&engine, 3), [Outcome::Dropped; 2]);
    kv.fill(2, 99);
    store.hold_puts(false);
    assert_eq!(outcomes(&engine, 2), [Outcome::Stored(BLOCK_BYTES as u64)]);
    assert_eq!(outcomes(&engine, 1), [Outcome::Stored(BLOCK_BYTES as u64)]);
    assert!(!store.has(&key(2)) && !store.has(&key(3)));
}

#[test]
fn cancelling_a_store_ends_what_is_not_being_put() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::BHLNC));
    let mut config = config(8);
    config.batch = 1;
    config.put_lanes = 1;
    let engine = engine(&store, config, &kv);
    store.hold_puts(true);
    engine
        .submit_store(1, (0..3).map(|b| block_of(b, b)).collect(), Fence::NONE)
        .unwrap();
    released(&engine, 1);
    store.until(|call| matches!(call, Call::Put(_)));
    engine.cancel(1);
    engine.cancel(1);
    engine.cancel(12);
    store.hold_puts(false);
    let stored = Outcome::Stored(BLOCK_BYTES as u64);
    assert_eq!(
        outcomes(&engine, 1),
        [stored, Outcome::Cancelled, Outcome::Cancelled]
    );
    eventually("slots return", || engine.stats().slots_in_use == 0);
}

#[test]
fn draining_lets_stores_finish_and_refuses_new_ones() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let engine = engine(&store, config(16), &kv);
    engine
        .submit_store(
            1,
            (0..BLOCKS).map(|b| block_of(b, b)).collect(),
            Fence::NONE,
        )
        .unwrap();
    assert!(engine.drain(LONG));
    assert!(
        outcomes(&engine, 1)
            .iter()
            .all(|o| matches!(o, Outcome::Stored(_) | Outcome::Dropped))
    );

    store.hold_puts(true);
    engine
        .submit_store(2, vec![block_of(100, 0)], Fence::NONE)
        .unwrap();
    std::thread::scope(|scope| {
        let draining = scope.spawn(|| engine.drain(LONG));
        let mut job = 10;
        let before = engine.stats().dropped_objects;
        eventually("a store is refused", || {
            job += 1;
            engine
                .submit_store(job, vec![block_of(1, 1)], Fence::NONE)
                .unwrap();
            engine.stats().dropped_objects > before
        });
        store.hold_puts(false);
        assert!(draining.join().unwrap());
    });
}

#[test]
fn draining_against_a_stuck_store_gives_up_in_time() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(8);
    config.batch = 1;
    config.put_lanes = 1;
    let engine = engine(&store, config, &kv);
    store.hold_puts(true);
    engine
        .submit_store(1, (0..3).map(|b| block_of(b, b)).collect(), Fence::NONE)
        .unwrap();
    released(&engine, 1);
    store.until(|call| matches!(call, Call::Put(_)));
    assert!(!engine.drain(Duration::from_millis(50)));
    store.time_is_over();
    assert_eq!(
        outcomes(&engine, 1),
        [
            Outcome::Failed(ErrorKind::TimedOut),
            Outcome::Dropped,
            Outcome::Dropped
        ]
    );
}

#[test]
fn a_store_that_breaks_its_contract_fails_its_objects_only() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(4);
    config.store_backoff = Duration::ZERO;
    let engine = engine(&store, config, &kv);
    store.panic_on(key(1));
    engine
        .submit_store(1, vec![block_of(1, 1)], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::Failed(ErrorKind::Internal)]);
    eventually("the panic is counted", || engine.stats().panics == 1);
    store.deaf(true);
    engine
        .submit_store(2, vec![block_of(2, 1)], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 2), [Outcome::Failed(ErrorKind::Protocol)]);
    store.deaf(false);
    for job in 3..40 {
        engine
            .submit_store(job, vec![block_of(job, 1)], Fence::NONE)
            .unwrap();
        assert_eq!(
            outcomes(&engine, job),
            [Outcome::Stored(BLOCK_BYTES as u64)]
        );
    }
}

/// The lane rests like a tripped breaker, and so costs no more than what it is given.
#[test]
fn a_lane_that_panics_again_and_again_fails_its_objects_and_the_engine_serves_on() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(4);
    (config.put_lanes, config.store_backoff) = (1, Duration::ZERO);
    let engine = engine(&store, config, &kv);
    store.panic_on(key(1));
    for job in 0..20 {
        engine
            .submit_store(job, vec![block_of(1, 1)], Fence::NONE)
            .unwrap();
        let outcomes = outcomes(&engine, job);
        assert_eq!(outcomes, [Outcome::Failed(ErrorKind::Internal)]);
    }
    let panics = penstock_threads::panics();
    let of_puts = panics.iter().find(|seen| seen.place == "penstock-put");
    assert!(of_puts.unwrap().last.contains("on purpose"), "{panics:?}");
    let mut job = 20;
    eventually("it tries again, and goes on", || {
        job += 1;
        engine
            .submit_store(job, vec![block_of(2, 1)], Fence::NONE)
            .unwrap();
        outcomes(&engine, job) == [Outcome::Stored(BLOCK_BYTES as u64)]
    });
}

#[test]
fn what_cannot_be_is_refused_at_once() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let engine = unregistered(&store, config(2));
    assert_refused(
        engine.submit_store(1, vec![block_of(1, 0)], Fence::NONE),
        "no KV memory is registered with this engine for group 0",
    );
    assert_refused(
        engine.name(0, NAMESPACE),
        "no KV memory is registered with this engine for group 0",
    );
    let with = |change: fn(&mut KvGroup)| {
        let mut group = kv.group();
        change(&mut group);
        engine.register(0, group)
    };
    assert!(matches!(
        with(|group| group.regions.clear()),
        Err(EngineError::Regions(told)) if told == "the layout has 1 regions, but 0 were given"
    ));
    assert!(matches!(
        with(|group| group.spans = vec![Span::new(0..LAYERS + 1, 0..HEADS).unwrap()]),
        Err(EngineError::NotInLayout(_))
    ));
    assert_refused(
        with(|group| group.pages_per_block = 3),
        &format!(
            "an object of {} bytes does not fit a slot of {}",
            3 * BLOCK_BYTES,
            2 * BLOCK_BYTES
        ),
    );
    for change in [
        |group: &mut KvGroup| group.pages_per_block = 0,
        |group: &mut KvGroup| group.spans.clear(),
        |group: &mut KvGroup| group.replica = Replica { index: 2, count: 2 },
    ] {
        assert!(matches!(with(change), Err(EngineError::Config(_))));
    }
    engine.register(0, kv.group()).unwrap();
    assert_refused(
        engine.submit_store(1, vec![block_of(1, 0)], Fence::NONE),
        "group 0 has no namespace: name it before its first job",
    );
    engine.name(0, NAMESPACE).unwrap();
    engine.name(0, NAMESPACE).unwrap();
    assert_refused(
        engine.name(7, Namespace([9; 16])),
        "no KV memory is registered with this engine for group 7",
    );
    engine.register(1, kv.group()).unwrap();
    assert_refused(
        engine.name(1, NAMESPACE),
        "the namespace of group 1 is that of group 0 already",
    );
    // A tenant's namespaces could not be told apart.
    let mut similar = NAMESPACE;
    similar.0[15] ^= 1;
    assert_refused(
        engine.name(1, similar),
        "the namespace of group 1 is that of group 0 already",
    );
    assert_refused(
        engine.register(0, kv.group()),
        "KV memory of group 0 is registered with this engine already",
    );
    assert!(matches!(
        engine.submit_store(1, vec![block_of(1, BLOCKS)], Fence::NONE),
        Err(EngineError::NotInLayout(_))
    ));
    assert!(matches!(
        engine.submit_store(1, vec![block_of(1, u64::MAX)], Fence::NONE),
        Err(EngineError::NotInLayout(_))
    ));
    engine.submit_store(1, vec![], Fence::NONE).unwrap();
    assert_refused(
        engine.submit_store(1, vec![], Fence::NONE),
        "job 1 is still outstanding",
    );
    assert_eq!(outcomes(&engine, 1), []);
    engine
        .submit_load(1, vec![], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), []);
}

#[test]
fn more_than_may_be_outstanding_is_dropped_and_said() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(2);
    config.max_outstanding_objects = 3;
    let engine = engine(&store, config, &kv);
    engine
        .submit_store(1, vec![block_of(1, 0), block_of(2, 1)], Fence::NONE)
        .unwrap();
    engine
        .submit_load(2, vec![], soon(), false, Fence::NONE)
        .unwrap();
    engine
        .submit_store(3, vec![block_of(3, 2)], Fence::NONE)
        .unwrap();
    engine
        .submit_load(4, vec![block_of(3, 2)], soon(), true, Fence::NONE)
        .unwrap();
    engine
        .submit_prefetch(5, vec![block_of(3, 2); 2], soon())
        .unwrap();
    assert_refused(
        engine.submit_store(3, vec![block_of(3, 2)], Fence::NONE),
        "job 3 is still outstanding",
    );
    let [Event::Released, Event::Stored(stored)] = &events(&engine, 3)[..] else {
        panic!("not stored")
    };
    assert_eq!(stored.blocks, [Outcome::Dropped]);
    assert_eq!(stored.tally.dropped_objects, 1);
    let [Event::Loaded(loaded)] = &events(&engine, 4)[..] else {
        panic!("not loaded")
    };
    assert_eq!(loaded.blocks, [Outcome::Dropped]);
    assert_eq!(loaded.tally.missing_bytes, BLOCK_BYTES as u64);
    assert_eq!(outcomes(&engine, 5), [Outcome::Dropped; 2]);
    outcomes(&engine, 1);
    engine
        .submit_store(3, vec![block_of(3, 2)], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 3), [Outcome::Stored(BLOCK_BYTES as u64)]);
}

#[test]
fn a_job_that_must_not_be_done_is_over_at_once() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let engine = engine(&store, config(2), &kv);
    let blocks = [block_of(1, 0), block_of(2, 1)];
    engine.decline_store(1, &blocks).unwrap();
    engine.decline_load(2, &blocks).unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::Dropped; 2]);
    let [Event::Loaded(loaded)] = &events(&engine, 2)[..] else {
        panic!("not loaded")
    };
    assert_eq!(loaded.blocks, [Outcome::Dropped; 2]);
    assert_eq!(loaded.tally.missing_bytes, 2 * BLOCK_BYTES as u64);
    assert_eq!(store.calls(), []);
}

#[test]
fn of_blocks_that_several_hold_each_is_stored_by_one() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let engines = [0, 1, 2].map(|index| {
        let engine = unregistered(&store, config(8));
        let group = KvGroup {
            replica: Replica { index, count: 3 },
            ..kv.group()
        };
        engine.register(0, group).unwrap();
        engine.name(0, NAMESPACE).unwrap();
        engine
    });
    for n in 0..6 {
        kv.fill(n, n);
    }
    let blocks: Vec<_> = (0..6).map(|n| block_of(n, n)).collect();
    let mut stored = [0; 6];
    for engine in &engines {
        engine.submit_store(1, blocks.clone(), Fence::NONE).unwrap();
        let outcomes = outcomes(engine, 1);
        for (count, outcome) in stored.iter_mut().zip(&outcomes) {
            match outcome {
                Outcome::Stored(_) => *count += 1,
                other => assert_eq!(*other, Outcome::AlreadyPresent),
            }
        }
        assert_eq!(engine.stats().stored_objects, 2);
    }
    assert_eq!(stored, [1; 6]);
    let target: Vec<_> = (0..6).map(|n| block_of(n, n + 10)).collect();
    engines[1]
        .submit_load(2, target, soon(), true, Fence::NONE)
        .unwrap();
    let loaded = Outcome::Loaded(BLOCK_BYTES as u64);
    assert_eq!(outcomes(&engines[1], 2), [loaded; 6]);
    assert!((0..6).all(|n| kv.read(n + 10, share()) == pattern(n)));
}

#[test]
fn blocks_of_a_group_that_lies_elsewhere_are_there_already() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let engine = engine(&store, config(4), &kv);
    engine.register_elsewhere(1).unwrap();
    engine.name(1, Namespace([4; 16])).unwrap();
    let elsewhere = Block {
        group: 1,
        ..block_of(1, 1 << 40)
    };
    let stored = Outcome::Stored(BLOCK_BYTES as u64);
    engine
        .submit_store(1, vec![elsewhere, block_of(1, 0)], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::AlreadyPresent, stored]);
    engine
        .submit_store(1, vec![elsewhere], Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::AlreadyPresent]);
    engine
        .submit_load(1, vec![elsewhere], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 1), [Outcome::Kept(0)]);
}
