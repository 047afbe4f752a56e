//! CUDA devices, for Python: which device, and the times of its copies.

use penstock_engine::{CudaError, Device, DirectCopy, Direction};
use pyo3::prelude::*;

use crate::errors::raised;

/// The device where memory lies: a CUDA device by its ordinal, or host memory for none.
pub(crate) fn device(cuda_device: Option<i32>) -> Device {
    cuda_device.map_or(Device::Host, Device::Cuda)
}

/// Times of copies of so many bytes together, in pieces of one size.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub(crate) struct PieceTimes {
    /// Bytes of a piece.
    piece_bytes: usize,
    /// Seconds of a copy by the copy engines.
    copy_engine_seconds: f64,
    /// Seconds of a copy by the kernel.
    kernel_seconds: f64,
}

/// Copies in one direction.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub(crate) struct DirectionTimes {
    /// Mean bytes of a piece from which on the copy engines are used. The kernel copies smaller
    /// pieces.
    copy_engine_from: usize,
    /// The times, by rising size of a piece.
    pieces: Vec<Py<PieceTimes>>,
}

/// Measured copies of a CUDA device.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub(crate) struct CopyTimes {
    /// Bytes of each copy that was timed.
    copy_bytes: usize,
    /// Copies from the device.
    gather: Py<DirectionTimes>,
    /// Copies to the device.
    scatter: Py<DirectionTimes>,
}

fn direction(py: Python<'_>, found: &Direction) -> PyResult<Py<DirectionTimes>> {
    let pieces = found.timings.iter().map(|timing| {
        let times = PieceTimes {
            piece_bytes: timing.piece_bytes,
            copy_engine_seconds: timing.copy_engine,
            kernel_seconds: timing.kernel,
        };
        Py::new(py, times)
    });
    let times = DirectionTimes {
        copy_engine_from: found.copy_engine_from,
        pieces: pieces.collect::<PyResult<_>>()?,
    };
    Py::new(py, times)
}

/// Measures a CUDA device's copies, unless the device is in use and its times are known.
#[pyfunction]
pub(crate) fn cuda_calibration(py: Python<'_>, cuda_device: i32) -> PyResult<CopyTimes> {
    let found = py
        .detach(|| DirectCopy::calibration(cuda_device))
        .map_err(|error: CudaError| raised::Unavailable::new_err((error.to_string(),)))?;
    Ok(CopyTimes {
        copy_bytes: found.copy_bytes,
        gather: direction(py, &found.gather)?,
        scatter: direction(py, &found.scatter)?,
    })
}
