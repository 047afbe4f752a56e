//! Digests of weights for Python: of files beside other work, and of memory.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use penstock_digest::{DigestError, digest_bytes};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer::Pinned;
use crate::errors::raised;

/// How often a waiting thread lets signals through.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Digests of files, made by native threads beside other work.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct FileDigests {
    job: penstock_digest::FileDigests,
}

#[pymethods]
impl FileDigests {
    /// Begins with so many threads. With a folder as `cache`, files that did not change since are
    /// not read again, and of the processes that want the same files one reads.
    #[new]
    #[pyo3(signature = (paths, *, threads, cache = None))]
    fn new(paths: Vec<PathBuf>, threads: usize, cache: Option<PathBuf>) -> Self {
        Self {
            job: penstock_digest::FileDigests::start(paths, threads, cache.as_deref()),
        }
    }

    /// Waits for the digests of all files, in their order. None if they are not there in `timeout`
    /// seconds.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        let limit = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let pause = left.map_or(LOOK_UP, |left| left.min(LOOK_UP));
            let outcome = py.detach(|| self.job.wait(pause));
            py.check_signals()?;
            match outcome {
                Some(Ok(digests)) => {
                    let bytes = digests.iter().map(|digest| PyBytes::new(py, digest));
                    return Ok(Some(bytes.collect()));
                }
                Some(Err(error)) => return Err(digest_error(&error)),
                None if left.is_some_and(|left| left.is_zero()) => return Ok(None),
                None => {}
            }
        }
    }

    /// Bytes of all files, bytes that are digested or were known, and bytes that were read.
    #[getter]
    fn progress(&self) -> (u64, u64, u64) {
        let progress = self.job.progress();
        (progress.bytes, progress.done, progress.read)
    }
}

/// The digest of a buffer's bytes, which is that of a file with this content.
#[pyfunction]
#[pyo3(signature = (source, *, threads = 1))]
pub(crate) fn digest<'py>(
    py: Python<'py>,
    source: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let pinned = Pinned::of(source, false)?;
    let digest = py.detach(|| digest_bytes(pinned.bytes(), threads));
    Ok(PyBytes::new(py, &digest))
}

fn digest_error(error: &DigestError) -> PyErr {
    let message = (error.to_string(),);
    match error {
        DigestError::Read { .. } | DigestError::NoThread(_) => raised::IoError::new_err(message),
        _ => raised::ConfigError::new_err(message),
    }
}
