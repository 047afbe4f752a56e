//! CUDA devices, for Python: which device, and the times of its copies.

use penstock_engine::{CudaError, Device, DirectCopy, Direction};
use pyo3::prelude::*;

use crate::errors::raised;

/// The device where memory lies: a CUDA device by its ordinal, or host memory for none.
pub(crate) fn device(cuda_device: Option<i32>) -> Device {
    cuda_device.map_or(Device::Host, Device::Cuda)
}

/// How copies in one direction are made: bytes of a piece from which on the copy engines are used,
/// then a tuple for each size of a piece that was timed. Such a tuple has the bytes of a piece, the
/// seconds of a copy by the copy engines, and the seconds by the kernel.
type DirectionTuple = (usize, Vec<(usize, f64, f64)>);

fn direction(found: &Direction) -> DirectionTuple {
    let timings = found.timings.iter();
    let timings = timings.map(|timing| (timing.piece_bytes, timing.copy_engine, timing.kernel));
    (found.copy_engine_from, timings.collect())
}

/// Measures a CUDA device's copies, unless the device is in use and its times are known. Returns
/// the bytes of each copy that was timed, then two directions: from the device, and to the device.
/// A direction is a tuple of two. The first is the mean bytes of a piece from which on the copy
/// engines are used. The second is a list with a tuple for each size of a piece: its bytes, the
/// seconds of a copy by the copy engines, and the seconds by the kernel.
#[pyfunction]
pub(crate) fn cuda_calibration(
    py: Python<'_>,
    cuda_device: i32,
) -> PyResult<(usize, DirectionTuple, DirectionTuple)> {
    let found = py
        .detach(|| DirectCopy::calibration(cuda_device))
        .map_err(|error: CudaError| raised::Unavailable::new_err((error.to_string(),)))?;
    Ok((
        found.copy_bytes,
        direction(&found.gather),
        direction(&found.scatter),
    ))
}
