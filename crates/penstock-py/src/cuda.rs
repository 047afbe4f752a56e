//! CUDA devices, for Python: which one, and what its copies take.

use penstock_engine::{CudaError, Device, DirectCopy, Direction};
use pyo3::prelude::*;

use crate::errors::raised;

/// Where memory lies, from the ordinal of a CUDA device or none.
pub(crate) fn device(cuda_device: Option<i32>) -> Device {
    cuda_device.map_or(Device::Host, Device::Cuda)
}

/// Bytes of a piece from which the copy engines are used; by size of a piece, seconds of both ways.
type DirectionTuple = (usize, Vec<(usize, f64, f64)>);

fn direction(found: &Direction) -> DirectionTuple {
    let timings = found.timings.iter();
    let timings = timings.map(|timing| (timing.piece_bytes, timing.copy_engine, timing.kernel));
    (found.copy_engine_from, timings.collect())
}

/// Measures a CUDA device's copies, unless it is in use and known: bytes of each copy that was
/// timed, then from the device and to it the mean bytes of a piece from which its copy engines are
/// used and, for each size of a piece, its bytes, and the seconds of a copy by the copy engines and
/// by the kernel.
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
