//! The one way out of Rust: it releases the GIL, waits, lets Ctrl-C through, and turns errors into
//! `penstock.errors`.

use std::cell::RefCell;
use std::fmt::Display;

use penstock_contract::ErrorKind;
use penstock_engine::EngineError;
use penstock_value::interrupt;
use pyo3::prelude::*;

/// The exceptions of `penstock.errors`.
pub(crate) mod raised {
    use pyo3::import_exception;

    import_exception!(penstock.errors, Closed);
    import_exception!(penstock.errors, ConfigError);
    import_exception!(penstock.errors, Denied);
    import_exception!(penstock.errors, Full);
    import_exception!(penstock.errors, OverQuota);
    import_exception!(penstock.errors, InternalError);
    import_exception!(penstock.errors, IoError);
    import_exception!(penstock.errors, LayoutError);
    import_exception!(penstock.errors, ProtocolError);
    import_exception!(penstock.errors, Rejected);
    import_exception!(penstock.errors, StoreError);
    import_exception!(penstock.errors, TimedOut);
    import_exception!(penstock.errors, TooSmall);
    import_exception!(penstock.errors, Unavailable);
    import_exception!(penstock.errors, Unreachable);
    import_exception!(penstock.errors, Unsupported);
}

thread_local! {
    /// The exception that a signal's handler raised while this thread was waiting.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs blocking work without the GIL. Signals are handled while it waits. If a handler raises, as
/// Ctrl-C's does, the work ends as if its deadline had come, and the exception is the result.
///
/// Interrupted work has returned: nothing goes on in the background with what it borrowed.
pub(crate) fn interruptibly<T, F>(py: Python<'_>, work: F) -> PyResult<T>
where
    F: FnOnce() -> T + Send,
    T: Send,
{
    let result = py.detach(|| interrupt::interruptible(has_raised, work));
    match RAISED.take() {
        Some(error) => Err(error),
        None => py.check_signals().map(|()| result),
    }
}

/// Handles signals that have arrived, on Python's main thread only, as Python itself does.
fn has_raised() -> bool {
    let handled = Python::try_attach(|py| py.check_signals());
    // Without an interpreter, nobody would handle a signal.
    let Some(Err(error)) = handled else {
        return false;
    };
    RAISED.set(Some(error));
    true
}

/// Runs a store's blocking work as [`interruptibly`] does, and maps its error.
pub(crate) fn without_gil<T, F>(py: Python<'_>, work: F) -> PyResult<T>
where
    F: FnOnce() -> penstock_contract::Result<T> + Send,
    T: Send,
{
    interruptibly(py, work)?.map_err(|error| store_error(py, &error))
}

/// The exception for a store's error.
pub(crate) fn store_error(_: Python<'_>, error: &penstock_contract::Error) -> PyErr {
    let message = (error.to_string(),);
    match error.kind() {
        ErrorKind::Config => raised::ConfigError::new_err(message),
        ErrorKind::Unreachable => raised::Unreachable::new_err(message),
        ErrorKind::TimedOut => raised::TimedOut::new_err(message),
        ErrorKind::Denied => raised::Denied::new_err(message),
        ErrorKind::OverQuota => raised::OverQuota::new_err(message),
        ErrorKind::Full => raised::Full::new_err(message),
        ErrorKind::Unavailable => raised::Unavailable::new_err(message),
        ErrorKind::Protocol => raised::ProtocolError::new_err(message),
        ErrorKind::Io => raised::IoError::new_err(message),
        ErrorKind::Unsupported => raised::Unsupported::new_err(message),
        ErrorKind::Internal => raised::InternalError::new_err(message),
        _ => raised::StoreError::new_err(message),
    }
}

/// The exception for an engine's refusal.
pub(crate) fn engine_error(_: Python<'_>, error: &EngineError) -> PyErr {
    let message = (error.to_string(),);
    match error {
        EngineError::NotInLayout(_) | EngineError::Regions(_) => {
            raised::LayoutError::new_err(message)
        }
        EngineError::Busy { .. } => raised::Full::new_err(message),
        EngineError::Closed => raised::Closed::new_err(message),
        EngineError::Device(_) => raised::Unavailable::new_err(message),
        _ => raised::ConfigError::new_err(message),
    }
}

/// The exception for a wrong argument.
pub(crate) fn config_error(_: Python<'_>, message: impl Display) -> PyErr {
    raised::ConfigError::new_err((message.to_string(),))
}

/// The exception for sizes or strides that are no layout.
pub(crate) fn layout_error(_: Python<'_>, error: impl Display) -> PyErr {
    raised::LayoutError::new_err((error.to_string(),))
}
