//! Calls that fail. A copy that reports success is done, whatever else happened.

use std::sync::Arc;

use penstock_layout::KvLayout;

use super::super::{CudaError, CudaExecutor};
use super::{Cache, Payload, Sizes};
use crate::Region;
use crate::copy::{Executor, Gathering};
use penstock_cuda_standin::{ILLEGAL_ADDRESS, Machine, TOLD_TO_FAIL};

/// Each call that can fail before or while bytes move.
const CALLS: [&str; 19] = [
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuEventCreate",
    "cuMemHostAlloc",
    "cuPointerGetAttribute",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyBatchAsync",
    "cuLaunchKernel",
];

/// If one of these calls fails, nothing can be given back: what they were called for stays.
const LEAVES_THINGS: [&str; 2] = ["cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"];

fn sizes(content: u64) -> Sizes {
    Sizes {
        layers: 3,
        blocks: 4,
        heads: 2,
        tokens: 2,
        content,
    }
}

/// Room for two blocks.
fn payload(cache: &Cache, pinned: bool) -> Payload {
    let len = cache.places(&[2, 0], &cache.whole()).len();
    Payload::new(&cache.machine, len, 64, pinned)
}

/// A gather and a scatter. Returns whether both report success.
fn copy_both_ways(cache: &Cache, payload: &mut Payload) -> Result<(), CudaError> {
    let places = cache.places(&[2, 0], &cache.whole());
    let before = cache.memory.read();
    let executor = CudaExecutor::of(cache.machine.ordinal)?;
    let gathered = cache.gather(&executor, &[2, 0], &cache.whole(), payload.bytes());
    if gathered.is_ok() {
        let expected = places.iter().map(|&at| before[at]);
        assert!(expected.eq(payload.bytes().iter().copied()), "gathered");
    }
    // Whatever the answer, nothing still runs; else the next line would race with it.
    payload.bytes().fill(0x5a);
    let scattered = cache.scatter(&executor, &[2, 0], &cache.whole(), payload.bytes());
    let now = cache.memory.read();
    let mut after = before.clone();
    for &at in &places {
        after[at] = 0x5a;
    }
    if scattered.is_ok() {
        assert!(now == after, "scattered");
    }
    // Done or not, other blocks are as they were.
    for (at, (&now, &before)) in now.iter().zip(&before).enumerate() {
        assert!(now == before || after[at] == now, "byte {at}");
    }
    payload.bytes().fill(0);
    assert!(cache.memory.read() == now, "nothing runs on");
    gathered.and(scattered)
}

#[test]
fn whatever_fails_nothing_is_done_that_is_not() {
    let mut told = 0;
    for call in CALLS {
        for nth in 0..4 {
            for (content, pinned, batches) in [
                (16, true, true),
                (32 << 10, true, true),
                (32 << 10, true, false),
                (16, false, true),
            ] {
                let machine = Machine::new();
                machine.state.lock().without_batches = !batches;
                let cache = Cache::new(&machine, KvLayout::LHBNC, sizes(content), nth as u64);
                let mut payload = payload(&cache, pinned);
                machine.fail(call, nth);
                let outcome = copy_both_ways(&cache, &mut payload);
                let failed = machine.stop_failing();
                if let Err(error) = &outcome {
                    assert!(failed, "{error}");
                    told += 1;
                }
                // The next copy finds everything in order.
                copy_both_ways(&cache, &mut payload).unwrap();
                drop((payload, cache));
                if failed && LEAVES_THINGS.contains(&call) {
                    Machine::leave_thread();
                } else {
                    machine.assert_clean();
                }
                Machine::assert_thread_as_before();
            }
        }
    }
    assert!(told > 60, "{told}");
}

#[test]
fn an_error_names_the_call() {
    let machine = Machine::new();
    let cache = Cache::new(&machine, KvLayout::LHBNC, sizes(16), 1);
    let mut payload = payload(&cache, false);
    machine.fail("cuStreamCreateWithPriority", 0);
    let error = copy_both_ways(&cache, &mut payload).unwrap_err();
    assert_eq!(
        error,
        CudaError::Call {
            call: "cuStreamCreateWithPriority",
            code: TOLD_TO_FAIL,
            name: "CUDA_ERROR_UNKNOWN".to_owned(),
        }
    );
}

/// A kernel or a copy that reaches memory that is not there: the context is lost, every copy
/// fails from then on, and none claims to be done.
#[test]
fn an_illegal_access_is_an_error_of_its_copy_and_all_later_ones() {
    for (content, batches) in [(16, true), (65_536, true), (65_536, false)] {
        let machine = Machine::new();
        machine.state.lock().without_batches = !batches;
        let cache = Cache::new(&machine, KvLayout::LBHNC, sizes(content), 1);
        let executor = CudaExecutor::of(machine.ordinal).unwrap();
        let segments = cache.segments(&[0, 2], &cache.whole());
        let bytes: u64 = segments.iter().map(|segment| segment.len).sum();
        let mut payload = Payload::new(&machine, bytes as usize, 0, true);
        // SAFETY: of a stand-in, which knows that there is no such memory.
        #[allow(unsafe_code)]
        let nowhere = unsafe { Region::new(0x5000_0000_0000_1000, 1 << 30) };
        for region in [nowhere, cache.region] {
            let gathering = Gathering {
                segments: &segments,
                payload: payload.bytes(),
                checksum: None,
            };
            // SAFETY: as above; the payload is as long as the segments.
            #[allow(unsafe_code)]
            let outcome = unsafe { executor.gather(&[region], &mut [gathering]) };
            match outcome {
                Err(CudaError::Call { code, .. }) => assert_eq!(code, ILLEGAL_ADDRESS),
                other => panic!("{other:?}"),
            }
        }
        assert!(Arc::strong_count(&executor) == 1);
    }
}
