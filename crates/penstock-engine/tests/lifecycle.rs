//! Registration, shutdown, and what is left behind: nothing.

mod support;

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, Store};
use penstock_engine::{Engine, EngineConfig, EngineError, Fence, Lookup, LookupConfig, Outcome};
use penstock_layout::KvLayout;
use support::*;

// The one test here that counts this process's threads runs them all, one after the other.
#[test]
fn no_thread_is_left_and_every_job_is_answered() {
    shutdown_answers_all_jobs_and_ends_all_threads();
    shutdown_is_bounded_by_the_caller_and_then_by_the_operation();
    dropping_an_engine_ends_its_threads();
    an_engine_that_cannot_be_made_leaves_nothing();
    unregistered_memory_is_left_alone();
}

/// A joined thread may be listed a moment longer.
fn no_thread_is_left() {
    eventually("all threads are gone", || threads("penstock-").is_empty());
}

fn shutdown_answers_all_jobs_and_ends_all_threads() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(8);
    config.put_timeout = Duration::from_millis(200);
    let engine = engine(&store, config, &kv);
    eventually("all lanes run", || {
        threads("penstock-get").len() == 2
            && threads("penstock-put").len() == 1
            && threads("penstock-copy").len() == 1
    });
    store.hold_puts(true);
    store.hold_gets(true);
    engine
        .submit_store(1, (0..10).map(|n| block_of(n, n)).collect(), Fence::NONE)
        .unwrap();
    engine
        .submit_load(
            2,
            (10..20).map(|n| block_of(n, n)).collect(),
            soon(),
            true,
            Fence::NONE,
        )
        .unwrap();
    engine
        .submit_load(3, vec![block_of(20, 20)], soon(), true, Fence::NONE)
        .unwrap();
    store.until(|call| matches!(call, Call::Get(_)));
    store.hold_gets(false);
    assert!(engine.shutdown(Duration::MAX));
    assert!(engine.shutdown(Duration::ZERO));
    no_thread_is_left();
    for job in [1, 2, 3] {
        for outcome in outcomes(&engine, job) {
            use Outcome::{Cancelled, Dropped, Failed, Miss, Skipped};
            assert!(
                matches!(
                    outcome,
                    Dropped | Cancelled | Failed(ErrorKind::TimedOut) | Miss | Skipped
                ),
                "job {job}: {outcome:?}"
            );
        }
    }
    let refused = engine.submit_load(4, vec![block_of(1, 1)], soon(), true, Fence::NONE);
    assert!(matches!(refused, Err(EngineError::Closed)));
    let refused = engine.submit_store(4, vec![block_of(1, 1)], Fence::NONE);
    assert!(matches!(refused, Err(EngineError::Closed)));
    assert_eq!(engine.stats().slots_in_use, 0);
}

fn shutdown_is_bounded_by_the_caller_and_then_by_the_operation() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(8);
    config.get_timeout = LONG / 2;
    let engine = engine(&store, config, &kv);
    store.hold_gets(true);
    engine
        .submit_load(2, vec![block_of(1, 1)], soon(), true, Fence::NONE)
        .unwrap();
    store.until(|call| matches!(call, Call::Get(_)));
    let bound = within(LONG / 2);
    assert!(store.deadline().unwrap() <= bound, "the operation's bound");
    assert!(!engine.shutdown(Duration::from_millis(10)));
    assert_eq!(outcomes(&engine, 2), [Outcome::Cancelled]);
    store.time_is_over();
    assert!(engine.shutdown(LONG));
    no_thread_is_left();
}

fn dropping_an_engine_ends_its_threads() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    for round in 0..20 {
        let engine = engine(&store, config(4), &kv);
        engine
            .submit_store(1, vec![block_of(round, 1)], Fence::NONE)
            .unwrap();
        engine
            .submit_load(2, vec![block_of(round, 2)], soon(), false, Fence::NONE)
            .unwrap();
        let lookup = Lookup::new(store.clone() as Arc<dyn Store>, LookupConfig::default()).unwrap();
        lookup
            .submit(1, key(1).namespace, vec![key(1).chunk], &[share()], LONG)
            .unwrap();
    }
    no_thread_is_left();
    assert_eq!(Arc::strong_count(&store), 1);
}

fn an_engine_that_cannot_be_made_leaves_nothing() {
    let store = Probe::new();
    for config in [
        EngineConfig::new(0, 4),
        EngineConfig::new(64, 1),
        EngineConfig {
            get_lanes: 0,
            ..EngineConfig::new(64, 4)
        },
        EngineConfig {
            copy_lanes: 65,
            ..EngineConfig::new(64, 4)
        },
        EngineConfig {
            put_timeout: Duration::MAX,
            ..EngineConfig::new(64, 4)
        },
        EngineConfig {
            batch: 0,
            ..EngineConfig::new(64, 4)
        },
        EngineConfig {
            store_slots: 4,
            ..EngineConfig::new(64, 4)
        },
        EngineConfig {
            prefetch_slots: 4,
            ..EngineConfig::new(64, 4)
        },
    ] {
        let made = Engine::new(store.clone() as Arc<dyn Store>, config.clone());
        assert!(matches!(made, Err(EngineError::Config(_))), "{config:?}");
    }
    let huge = EngineConfig::new(1 << 40, 1 << 10);
    let made = Engine::new(store.clone() as Arc<dyn Store>, huge);
    assert!(matches!(made, Err(EngineError::Memory { .. })));
    assert_eq!(Arc::strong_count(&store), 1);
    no_thread_is_left();
}

fn unregistered_memory_is_left_alone() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let mut config = config(8);
    config.store_wait = LONG;
    config.store_slots = 1;
    let engine = engine(&store, config, &kv);
    engine
        .submit_store(1, vec![block_of(1, 1)], Fence::NONE)
        .unwrap();
    outcomes(&engine, 1);
    let before = kv.all();
    store.hold_gets(true);
    store.hold_puts(true);
    engine
        .submit_load(2, vec![block_of(1, 2)], soon(), true, Fence::NONE)
        .unwrap();
    store.until(|call| matches!(call, Call::Get(_)));
    engine
        .submit_store(3, vec![block_of(3, 3), block_of(4, 4)], Fence::NONE)
        .unwrap();
    store.until(|call| *call == Call::Put(vec![key(3)]));
    assert!(engine.unregister(LONG));
    assert!(engine.unregister(LONG));
    assert_eq!(outcomes(&engine, 2), [Outcome::Cancelled]);
    assert_refused(
        engine.submit_load(9, vec![block_of(1, 2)], soon(), true, Fence::NONE),
        "no KV memory is registered with this engine for group 0",
    );
    // What was gathered before is put; nothing else of the old memory is.
    let other = Kv::new(KvLayout::BLHNC);
    engine.register_kv(&other);
    store.hold_gets(false);
    store.hold_puts(false);
    assert_eq!(
        outcomes(&engine, 3),
        [Outcome::Stored(BLOCK_BYTES as u64), Outcome::Dropped]
    );
    assert!(kv.all() == before);
    engine
        .submit_load(9, vec![block_of(1, 2)], soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&engine, 9), [Outcome::Loaded(BLOCK_BYTES as u64)]);
}
