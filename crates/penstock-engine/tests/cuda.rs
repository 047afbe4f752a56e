//! CUDA on whatever machine this runs. What needs a device is skipped without one, and says so.

use penstock_engine::{CudaError, Device, DirectCopy, EngineError, KvGroup};
use penstock_layout::KvLayout;

use crate::support::{Kv, Probe, config, unregistered};

/// More than a machine has.
const ABSENT: i32 = 1000;

/// Looked up as any program does, not by what is tested here.
fn has_driver() -> bool {
    // SAFETY: the driver's initialisers have no precondition.
    #[allow(unsafe_code)]
    let library = unsafe { libloading::Library::new("libcuda.so.1") };
    // Whoever has loaded it must not unload it.
    library.map(std::mem::forget).is_ok()
}

fn registered(device: i32) -> Result<u64, CudaError> {
    let kv = Kv::new(KvLayout::LBHNC);
    let engine = unregistered(&Probe::new(), config(4));
    let device = Device::Cuda(device);
    match engine.register(
        0,
        KvGroup::new(device, kv.descriptor.clone(), vec![kv.region()]),
    ) {
        Ok(()) => Ok(engine.stats().gather_copy_engine_from),
        Err(EngineError::Device(error)) => {
            assert_eq!(engine.stats().gather_copy_engine_from, 0);
            Err(error)
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_device_that_is_not_there_is_refused_with_the_reason() {
    let refused = registered(ABSENT).expect_err("no machine has so many");
    assert_eq!(DirectCopy::calibration(ABSENT).unwrap_err(), refused);
    match refused {
        CudaError::NoDriver(reason) => {
            assert!(!has_driver(), "{reason}");
            assert!(reason.contains("libcuda.so.1"), "{reason}");
        }
        // A driver without any device refuses to begin.
        CudaError::Call { call, .. } => {
            assert!(has_driver());
            assert!(["cuInit", "cuDeviceGet"].contains(&call), "{call}");
        }
    }
}

#[test]
fn the_first_device_is_registered_and_measured() {
    if !has_driver() {
        eprintln!("skipped: copies from a CUDA device, as there is no CUDA driver here");
        return;
    }
    match registered(0) {
        // The kernel was loaded for it, and both ways to copy were timed.
        Ok(copy_engine_from) => {
            assert!(copy_engine_from > 0);
            assert!(
                !DirectCopy::calibration(0)
                    .unwrap()
                    .gather
                    .timings
                    .is_empty()
            );
        }
        Err(CudaError::Call {
            call: "cuInit",
            name,
            ..
        }) => {
            eprintln!("skipped: copies from a CUDA device, as its driver says {name}");
        }
        Err(error) => panic!("{error}"),
    }
}
