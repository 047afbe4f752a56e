//! The one way out of Rust: releases the GIL, waits, and turns errors into
//! `penstock.errors`.

use penstock_engine::EngineError;
use penstock_store::ErrorKind;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

/// Runs blocking work without the GIL and maps its error.
///
/// Signals that arrived meanwhile are handled before the result is given, so Ctrl-C takes
/// effect at the latest when the work's deadline passes.
pub(crate) fn without_gil<T, F>(py: Python<'_>, work: F) -> PyResult<T>
where
    F: FnOnce() -> penstock_store::Result<T> + Send,
    T: Send,
{
    let result = py.detach(work);
    py.check_signals()?;
    result.map_err(|error| store_error(py, &error))
}

/// The exception for a store's error.
pub(crate) fn store_error(py: Python<'_>, error: &penstock_store::Error) -> PyErr {
    let class = match error.kind() {
        ErrorKind::Config => "ConfigError",
        ErrorKind::Unreachable => "Unreachable",
        ErrorKind::TimedOut => "TimedOut",
        ErrorKind::Denied => "Denied",
        ErrorKind::Full => "Full",
        ErrorKind::Unavailable => "Unavailable",
        ErrorKind::Protocol => "ProtocolError",
        ErrorKind::Io => "IoError",
        _ => "StoreError",
    };
    exception(py, class, (error.to_string(),))
}

/// The exception for what an engine refuses.
pub(crate) fn engine_error(py: Python<'_>, error: &EngineError) -> PyErr {
    let class = match error {
        EngineError::NotInLayout(_)
        | EngineError::RegionCount { .. }
        | EngineError::RegionTooSmall { .. } => "LayoutError",
        EngineError::Busy { .. } => "Full",
        EngineError::Closed => "Closed",
        EngineError::Device(_) => "Unavailable",
        _ => "ConfigError",
    };
    exception(py, class, (error.to_string(),))
}

/// A wrong argument.
pub(crate) fn config_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, "ConfigError", (message.into(),))
}

/// Sizes or strides that are no layout.
pub(crate) fn layout_error(py: Python<'_>, error: impl std::fmt::Display) -> PyErr {
    exception(py, "LayoutError", (error.to_string(),))
}

/// An instance of `penstock.errors.<class>`.
pub(crate) fn exception<'py, A>(py: Python<'py>, class: &str, args: A) -> PyErr
where
    A: pyo3::call::PyCallArgs<'py>,
{
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let made = ERRORS
        .get_or_try_init(py, || py.import("penstock.errors").map(Bound::unbind))
        .and_then(|module| module.bind(py).getattr(class))
        .and_then(|class| class.call1(args));
    match made {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    }
}
