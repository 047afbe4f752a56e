//! Stores that other distributions bring: Python finds them, and proves that they work.

use std::sync::{Arc, OnceLock};

use penstock_contract::testing::{CHECKS, Outcome, try_check};
use penstock_store::{OpenOptions, Place, Registered, open};
use pyo3::prelude::*;

use crate::errors::{config_error, without_gil};

/// A store as Python says it: scheme, origin, the command of its program, and why there is none.
type Found = (String, String, Vec<String>, String);

static FINDER: OnceLock<Py<PyAny>> = OnceLock::new();

/// Sets the function that finds registered stores. Only the first call counts.
#[pyfunction]
pub(crate) fn find_stores_with(finder: Py<PyAny>) {
    // A second one is the same: the module that sets it was loaded anew.
    let _ = FINDER.set(finder);
}

/// The registered stores, if the URL has a scheme that is not built in.
pub(crate) fn stores_for(py: Python<'_>, url: &str) -> PyResult<Vec<Registered>> {
    let Some(finder) = FINDER.get() else {
        return Ok(Vec::new());
    };
    if penstock_store::unknown_schemes(url).is_empty() {
        return Ok(Vec::new());
    }
    let found: Vec<Found> = finder.call0(py)?.extract(py)?;
    let registered = |(scheme, origin, command, problem): Found| Registered {
        scheme,
        origin,
        place: match command.as_slice() {
            [] => Place::Nowhere(problem),
            _ => Place::Program(command.into_iter().map(Into::into).collect()),
        },
    };
    Ok(found.into_iter().map(registered).collect())
}

/// The schemes of the stores that are built in.
#[pyfunction]
pub(crate) fn built_in_schemes() -> Vec<&'static str> {
    penstock_store::schemes().collect()
}

/// The names of the checks that every store passes.
#[pyfunction]
pub(crate) fn store_checks() -> Vec<&'static str> {
    CHECKS.iter().map(|(name, _)| *name).collect()
}

/// Makes one of the checks on the store of a URL, which it opens anew. Returns None if the store
/// passes, or what is wrong.
#[pyfunction]
pub(crate) fn check_store(py: Python<'_>, url: &str, check: &str) -> PyResult<Option<String>> {
    let named = CHECKS.iter().find(|(name, _)| *name == check);
    let Some((_, check)) = named else {
        return Err(config_error(py, format!("there is no check {check:?}")));
    };
    let options = OpenOptions {
        client_name: "penstock-test".to_owned(),
        registered: stores_for(py, url)?,
        ..OpenOptions::default()
    };
    let outcome = without_gil(py, || {
        let open = || -> Arc<dyn penstock_contract::Store> {
            open(url, &options).unwrap_or_else(|error| panic!("{error}"))
        };
        Ok(try_check(*check, &open))
    })?;
    Ok(match outcome {
        Outcome::Passed => None,
        Outcome::Failed(why) => Some(why),
    })
}
