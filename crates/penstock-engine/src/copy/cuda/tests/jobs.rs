//! The engine over a device: jobs, pinning in the background, and what a job reports when its
//! device fails.

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::testing::{LONG, eventually, soon};
use penstock_contract::{Block, ErrorKind, Namespace, Store};
use penstock_cuda_standin::Machine;
use penstock_layout::KvLayout;
use penstock_value::MemoryStore;

use super::super::CudaExecutor;
use super::{Cache, Sizes, pattern};
use crate::{
    Completion, CudaError, Device, Engine, EngineConfig, EngineError, Event, Fence, KvGroup,
    Outcome, Owner, slot_stride,
};

/// Pieces of 512 bytes, or of 128 KiB.
pub(super) fn cache(machine: &Arc<Machine>, content: u64) -> Cache {
    let sizes = Sizes {
        layers: 2,
        blocks: 6,
        heads: 1,
        tokens: 8,
        content,
    };
    Cache::new(machine, KvLayout::LBHNC, sizes, 1)
}

/// An engine without a host tier, so loads come through the store.
pub(super) fn engine(cache: &Cache) -> Engine {
    let block = cache.descriptor.block_bytes(&cache.whole()) as usize;
    let mut config = EngineConfig::new(block, 8);
    config.keep = false;
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(64 << 20));
    Engine::new(store, config).unwrap()
}

/// Whether all slots are pinned, after the copies were measured.
pub(super) fn is_ready(engine: &Engine) -> bool {
    let (stats, config) = (engine.stats(), engine.config());
    let slots = config.slots * slot_stride(config.slot_bytes);
    stats.pinned_bytes >= slots as u64 && stats.gather_copy_engine_from > 0
}

pub(super) fn register(engine: &Engine, cache: &Cache) -> Result<(), EngineError> {
    let device = Device::Cuda(cache.machine.ordinal);
    let group = KvGroup::new(device, cache.descriptor.clone(), vec![cache.region]);
    engine.register(0, group)?;
    engine.name(0, Namespace([1; 16]))
}

/// Blocks whose content is named by their number.
pub(super) fn numbered(blocks: &[u64]) -> Vec<Block> {
    let block = |&block: &u64| {
        let mut chunk = [0; 32];
        chunk[0] = block as u8;
        Block {
            group: 0,
            id: block,
            chunk,
            parent: None,
        }
    };
    blocks.iter().map(block).collect()
}

/// The last completion of each job. Completions of other jobs that come meanwhile are lost.
pub(super) fn completions<const N: usize>(engine: &Engine, jobs: [u64; N]) -> [Completion; N] {
    let mut polled: Vec<Completion> = Vec::new();
    let mut last = [const { None }; N];
    eventually("all these jobs are over", || {
        engine.wait(Duration::from_secs(1));
        engine.poll(&mut polled);
        last = jobs.map(|job| {
            let is_last = |c: &&Completion| c.job == job && c.event.is_last();
            polled.iter().find(is_last).cloned()
        });
        last.iter().all(Option::is_some)
    });
    last.map(Option::unwrap)
}

pub(super) fn outcomes(engine: &Engine, job: u64) -> Vec<Outcome> {
    let [last] = completions(engine, [job]);
    last.event.blocks().to_vec()
}

#[test]
fn what_was_stored_is_loaded_while_the_arena_is_pinned_and_after() {
    for content in [64, 16 << 10] {
        let machine = Machine::new();
        let cache = cache(&machine, content);
        let engine = engine(&cache);
        register(&engine, &cache).unwrap();
        let blocks = [0, 3, 5];
        let places = cache.places(&blocks, &cache.whole());
        for round in 0..2 {
            let job = 2 * round;
            cache.memory.fill(round);
            let before = cache.memory.read();
            // Not the last round's values.
            let mut wanted = numbered(&blocks);
            for block in &mut wanted {
                block.chunk[1] = round as u8;
            }
            engine
                .submit_store(job, &wanted, &Owner::default(), Fence::NONE)
                .unwrap();
            let stored = outcomes(&engine, job);
            assert!(
                stored.iter().all(|o| matches!(o, Outcome::Stored(_))),
                "{stored:?}"
            );
            let noise = pattern(cache.memory.len(), 77);
            cache.memory.write(0, &noise);
            let deadline = soon();
            engine
                .submit_load(
                    job + 1,
                    &wanted,
                    &Owner::default(),
                    deadline,
                    true,
                    Fence::NONE,
                )
                .unwrap();
            let loaded = outcomes(&engine, job + 1);
            assert!(
                loaded.iter().all(|o| matches!(o, Outcome::Loaded(_))),
                "{loaded:?}"
            );
            let mut expected = noise;
            for &at in &places {
                expected[at] = before[at];
            }
            assert!(cache.memory.read() == expected, "round {round}");
            eventually("all is pinned, and measured", || is_ready(&engine));
        }
        let (launches, batches) = {
            let state = machine.state.lock();
            (state.launches.len(), state.batches.len())
        };
        assert!(launches + batches > 0);
        assert!(engine.shutdown(LONG));
        drop(engine);
        machine.assert_clean();
    }
}

#[test]
fn several_small_blocks_are_one_copy_and_large_ones_are_not() {
    // Blocks of 1 KiB, of 256 KiB, and of 4 MiB.
    for (content, together) in [(64, true), (16 << 10, true), (256 << 10, false)] {
        let machine = Machine::new();
        let cache = cache(&machine, content);
        let engine = engine(&cache);
        register(&engine, &cache).unwrap();
        eventually("all is pinned, and measured", || is_ready(&engine));
        let copies = || {
            let state = machine.state.lock();
            state.launches.len() + state.batches.len()
        };
        let before = copies();
        let blocks = numbered(&[0, 3, 5]);
        let owner = Owner::default();
        engine
            .submit_store(1, &blocks, &owner, Fence::NONE)
            .unwrap();
        let stored = outcomes(&engine, 1);
        assert!(stored.iter().all(|o| matches!(o, Outcome::Stored(_))));
        let after_store = copies();
        assert_eq!(after_store - before, if together { 1 } else { 3 });

        let deadline = soon();
        engine
            .submit_load(2, &blocks, &owner, deadline, true, Fence::NONE)
            .unwrap();
        let loaded = outcomes(&engine, 2);
        assert!(loaded.iter().all(|o| matches!(o, Outcome::Loaded(_))));
        // Two get lanes share the job.
        let loads = copies() - after_store;
        assert!(if together { loads <= 2 } else { loads == 3 }, "{loads}");
        assert!(engine.shutdown(LONG));
        drop(engine);
        machine.assert_clean();
    }
}

#[test]
fn groups_on_one_device_share_what_was_measured() {
    let machine = Machine::new();
    let (one, other) = (cache(&machine, 64), cache(&machine, 64));
    let engine = engine(&one);
    register(&engine, &one).unwrap();
    let device = Device::Cuda(machine.ordinal);
    engine
        .register(
            1,
            KvGroup::new(device, other.descriptor.clone(), vec![other.region]),
        )
        .unwrap();
    eventually("measured", || engine.stats().scatter_copy_engine_from > 0);
    assert!(engine.shutdown(LONG));
    assert_eq!(machine.calls("cuModuleLoadData"), 1);
    assert_eq!(machine.calls("cuMemAlloc"), 1);
    drop(engine);
    machine.assert_clean();
}

#[test]
fn without_pinned_memory_or_a_measurement_jobs_go_on() {
    for call in ["cuMemHostRegister", "cuMemAlloc"] {
        let machine = Machine::new();
        let cache = cache(&machine, 64);
        let engine = engine(&cache);
        machine.fail(call, 0);
        register(&engine, &cache).unwrap();
        eventually("it has failed", || machine.state.lock().failed);
        engine
            .submit_store(1, &numbered(&[1, 2]), &Owner::default(), Fence::NONE)
            .unwrap();
        let stored = outcomes(&engine, 1);
        assert!(
            stored.iter().all(|o| matches!(o, Outcome::Stored(_))),
            "{stored:?}"
        );
        assert!(engine.shutdown(LONG));
        let stats = engine.stats();
        let [fault] = &engine.take_faults()[..] else {
            panic!("one fault")
        };
        let told = fault.to_string();
        match call {
            "cuMemHostRegister" => {
                assert_eq!(stats.pinned_bytes, 0);
                assert!(stats.unpinned_bytes >= 8 * 64);
                assert_eq!(fault.unpinned_bytes(), stats.unpinned_bytes);
                assert!(told.contains("Ask for less host memory"), "{told}");
            }
            _ => {
                assert_eq!(stats.gather_copy_engine_from, 0);
                assert_eq!((fault.unpinned_bytes(), stats.unpinned_bytes), (0, 0));
                assert!(told.contains("could not be measured"), "{told}");
            }
        }
        assert_eq!(engine.take_faults(), [], "told once");
        drop(engine);
        machine.assert_clean();
    }
}

/// A driver may answer a batch with any error. The job's pieces are copied one by one, and so are all
/// later ones.
#[test]
fn a_batch_that_is_refused_costs_no_job() {
    let machine = Machine::new();
    let cache = cache(&machine, 16 << 10);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    executor.calibrate().unwrap();
    let engine = engine(&cache);
    register(&engine, &cache).unwrap();
    eventually("pinned", || is_ready(&engine));
    assert_eq!(engine.take_faults(), []);
    let tried = machine.calls("cuMemcpyBatchAsync");
    machine.fail("cuMemcpyBatchAsync", 0);
    for job in 1..=3 {
        engine
            .submit_store(job, &numbered(&[job]), &Owner::default(), Fence::NONE)
            .unwrap();
        let stored = outcomes(&engine, job);
        assert!(matches!(stored[..], [Outcome::Stored(_)]), "{stored:?}");
    }
    assert!(machine.stop_failing());
    assert_eq!(machine.calls("cuMemcpyBatchAsync"), tried + 1);
    let [fault] = &engine.take_faults()[..] else {
        panic!("one fault")
    };
    let told = fault.to_string();
    assert!(
        told.contains("does not take copies in batches (cuMemcpyBatchAsync"),
        "{told}"
    );
    assert_eq!(fault.unpinned_bytes(), 0);
    assert_eq!(engine.take_faults(), [], "told once");
    assert!(engine.shutdown(LONG));
    drop((engine, executor));
    machine.assert_clean();
}

#[test]
fn a_device_that_cannot_be_used_is_refused() {
    let machine = Machine::new();
    let cache = cache(&machine, 64);
    let engine = engine(&cache);
    for call in [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuModuleLoadData",
    ] {
        machine.fail(call, 0);
        match register(&engine, &cache) {
            Err(EngineError::Device(CudaError::Call { call: told, .. })) => assert_eq!(told, call),
            other => panic!("{other:?}"),
        }
    }
    machine.assert_clean();
}

/// Any call that a copy makes may fail: then its object fails, and no object claims to be stored or
/// loaded. The next job finds the device in order.
#[test]
fn a_copy_that_fails_fails_its_object() {
    for (content, calls) in [
        (64, ["cuEventSynchronize", "cuLaunchKernel"]),
        (16 << 10, ["cuEventRecord", "cuEventSynchronize"]),
    ] {
        let machine = Machine::new();
        let cache = cache(&machine, content);
        // Measured first; else the calls that fail would be those of measuring.
        let executor = CudaExecutor::of(machine.ordinal).unwrap();
        executor.calibrate().unwrap();
        let engine = engine(&cache);
        register(&engine, &cache).unwrap();
        eventually("pinned", || is_ready(&engine));
        let failed = || vec![Outcome::Failed(ErrorKind::Io)];
        let before = cache.memory.read();
        let mut job = 0;
        for call in calls {
            for (block, is_load) in [(1, false), (1, true)] {
                job += 1;
                let wanted = numbered(&[block]);
                if is_load {
                    engine
                        .submit_store(job, &wanted, &Owner::default(), Fence::NONE)
                        .unwrap();
                    outcomes(&engine, job);
                    job += 1;
                    machine.fail(call, 0);
                    let deadline = soon();
                    engine
                        .submit_load(job, &wanted, &Owner::default(), deadline, true, Fence::NONE)
                        .unwrap();
                } else {
                    machine.fail(call, 0);
                    engine
                        .submit_store(job, &wanted, &Owner::default(), Fence::NONE)
                        .unwrap();
                }
                let told = outcomes(&engine, job);
                assert!(machine.stop_failing(), "{call}");
                assert_eq!(told, failed(), "{call}");
            }
        }
        // The blocks still hold what they held: the same key has the same bytes.
        assert!(cache.memory.read() == before);
        job += 1;
        let deadline = soon();
        engine
            .submit_load(
                job,
                &numbered(&[1]),
                &Owner::default(),
                deadline,
                true,
                Fence::NONE,
            )
            .unwrap();
        assert!(matches!(outcomes(&engine, job)[..], [Outcome::Loaded(_)]));
        assert!(engine.shutdown(LONG));
        drop((engine, executor));
        machine.assert_clean();
    }
}

/// When a job is released, its blocks must have been read: the event comes after the copy's end.
#[test]
fn blocks_are_released_only_when_they_have_been_read() {
    let machine = Machine::new();
    let cache = cache(&machine, 16 << 10);
    let engine = engine(&cache);
    register(&engine, &cache).unwrap();
    let before = cache.memory.read();
    let blocks: Vec<u64> = (0..6).collect();
    engine
        .submit_store(1, &numbered(&blocks), &Owner::default(), Fence::NONE)
        .unwrap();
    let mut polled = Vec::new();
    let mut came = |is_it: fn(&Event) -> bool| {
        engine.wait(Duration::from_secs(1));
        engine.poll(&mut polled);
        polled.iter().any(|c: &Completion| is_it(&c.event))
    };
    eventually("it is released", || came(|event| *event == Event::Released));
    cache.memory.fill(9);
    eventually("it is over", || came(Event::is_last));
    let deadline = soon();
    engine
        .submit_load(
            2,
            &numbered(&blocks),
            &Owner::default(),
            deadline,
            true,
            Fence::NONE,
        )
        .unwrap();
    let loaded = outcomes(&engine, 2);
    assert!(
        loaded.iter().all(|o| matches!(o, Outcome::Loaded(_))),
        "{loaded:?}"
    );
    assert!(cache.memory.read() == before);
}
