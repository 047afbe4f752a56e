//! CUDA on whatever machine this runs: most have no driver, and say so.

mod support;

use penstock_engine::{CudaError, Device, DirectCopy, EngineError};
use penstock_layout::KvLayout;

use support::{Kv, Probe, config, unregistered};

#[test]
fn without_a_driver_the_reason_is_told() {
    let kv = Kv::new(KvLayout::LBHNC);
    let engine = unregistered(&Probe::new(), config(4));
    match engine.register(0, Device::Cuda(0), kv.descriptor.clone(), vec![kv.region()]) {
        // Where there is a device, the kernel has to load.
        Ok(()) => {}
        Err(EngineError::Device(CudaError::NoDriver(reason))) => {
            assert!(reason.contains("libcuda"), "{reason}");
            let again = DirectCopy::calibration(0).unwrap_err();
            assert_eq!(again, CudaError::NoDriver(reason));
        }
        Err(EngineError::Device(CudaError::Call { call, .. })) => {
            let first = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"];
            assert!(first.contains(&call), "{call}");
        }
        Err(other) => panic!("{other}"),
    }
    assert_eq!(engine.stats().gather_copy_engine_from, 0);
}
