//! The crossover, as it follows from the machine's clock.

use penstock_layout::KvLayout;

use super::super::calibration::Calibration;
use super::super::{COPY_ENGINE_FROM, CudaExecutor, Way};
use super::{Cache, Payload, Sizes};
use penstock_cuda_standin::{Costs, Machine};

fn calibrate(machine: &Machine, gather: Costs, scatter: Costs) -> Calibration {
    machine.state.lock().costs = Some((gather, scatter));
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    executor.calibrate().unwrap().clone()
}

#[test]
fn each_direction_has_its_own_crossover() {
    let machine = Machine::new();
    let found = calibrate(&machine, Costs::turning(50_000.0), Costs::turning(12_000.0));
    let near = |found: usize, wanted: f64| (found as f64 / wanted - 1.0).abs() < 0.1;
    assert!(near(found.gather.copy_engine_from, 50_000.0), "{found:?}");
    assert!(near(found.scatter.copy_engine_from, 12_000.0), "{found:?}");
    for direction in [&found.gather, &found.scatter] {
        assert_eq!(direction.timings.len(), 7);
        let sizes: Vec<usize> = direction.timings.iter().map(|t| t.piece_bytes).collect();
        assert_eq!((sizes[0], sizes[6]), (4 << 10, 256 << 10));
    }
    machine.assert_clean();
    Machine::assert_thread_as_before();
}

#[test]
fn copies_go_by_what_was_found() {
    // Pieces of 32 KiB: by what is published for the copy engines, by this machine for the kernel
    // when they are gathered.
    let machine = Machine::new();
    let sizes = Sizes {
        layers: 3,
        blocks: 2,
        heads: 1,
        tokens: 1,
        content: 32 << 10,
    };
    let cache = Cache::new(&machine, KvLayout::LBHNC, sizes, 1);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    assert_eq!(executor.copy_engine_from(Way::Gather), COPY_ENGINE_FROM);
    let mut payload = Payload::new(&machine, 3 << 15, 0, true);
    let mut copy = || {
        let (launches, batches) = {
            let state = machine.state.lock();
            (state.launches.len(), state.batches.len())
        };
        cache
            .gather(&executor, &[1], &cache.whole(), payload.bytes())
            .unwrap();
        cache
            .scatter(&executor, &[1], &cache.whole(), payload.bytes())
            .unwrap();
        let state = machine.state.lock();
        (
            state.launches.len() - launches,
            state.batches.len() - batches,
        )
    };
    assert_eq!(copy(), (0, 2));
    let before = cache.memory.read();
    calibrate(
        &machine,
        Costs::turning(100_000.0),
        Costs::turning(10_000.0),
    );
    assert!(cache.memory.read() == before, "measured elsewhere");
    assert_eq!(copy(), (1, 1));
}

#[test]
fn it_is_measured_once_and_within_bounds() {
    let machine = Machine::new();
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let first = executor.calibrate().unwrap().clone();
    let calls = machine.state.lock().calls.len();
    assert_eq!(*executor.calibrate().unwrap(), first);
    assert_eq!(machine.state.lock().calls.len(), calls);
    // Seven sizes, two directions, five rounds at most.
    assert!((14..=70).contains(&machine.calls("cuLaunchKernel")));
    drop(executor);
    machine.assert_clean();
}

#[test]
fn a_clock_that_stands_still_leaves_the_published_figure() {
    let machine = Machine::new();
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let found = executor.calibrate().unwrap();
    assert_eq!(found.gather.copy_engine_from, COPY_ENGINE_FROM);
    assert_eq!(found.scatter.copy_engine_from, COPY_ENGINE_FROM);
}

#[test]
fn a_batch_that_is_refused_is_measured_one_by_one() {
    let machine = Machine::new();
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    machine.fail("cuMemcpyBatchAsync", 0);
    assert!(executor.calibrate().is_ok());
    assert!(machine.stop_failing());
    assert_eq!(machine.calls("cuMemcpyBatchAsync"), 1);
    assert!(machine.calls("cuMemcpyDtoHAsync") > 0);
}

#[test]
fn whatever_fails_the_published_figure_stays() {
    for (call, nths) in [
        ("cuCtxPushCurrent", 1),
        ("cuMemAlloc", 1),
        ("cuMemHostAlloc", 2),
        ("cuStreamCreateWithPriority", 1),
        ("cuEventCreate", 3),
        ("cuEventRecord", 5),
        ("cuEventSynchronize", 2),
        ("cuEventElapsedTime", 2),
        ("cuLaunchKernel", 2),
    ] {
        for nth in 0..nths {
            let machine = Machine::new();
            let executor = CudaExecutor::of(machine.ordinal).unwrap();
            machine.fail(call, nth);
            assert!(executor.calibrate().is_err(), "{call} {nth}");
            assert!(machine.stop_failing());
            assert_eq!(executor.copy_engine_from(Way::Scatter), COPY_ENGINE_FROM);
            drop(executor);
            machine.assert_clean();
        }
    }
}
