//! Stores that other distributions bring: Python finds them, and proves that they work.

use std::sync::{Arc, OnceLock};

use penstock_store::{OpenOptions, Place, Registered, open};
use penstock_store_testing::{CHECKS, Outcome, try_check};
use pyo3::prelude::*;

use crate::errors::{config_error, without_gil};

/// A store as Python says it: scheme, origin, kind and place.
type Found = (String, String, String, Vec<String>);

static FINDER: OnceLock<Py<PyAny>> = OnceLock::new();

/// Sets the function that finds registered stores. Only the first call counts.
#[pyfunction]
pub(crate) fn find_stores_with(finder: Py<PyAny>) {
    // A second one is the same: the module that sets it was loaded anew.
    let _ = FINDER.set(finder);
}

/// The registered stores, if the URL has a scheme that is not built in. Only those of its schemes
/// have a place.
pub(crate) fn stores_for(py: Python<'_>, url: &str) -> PyResult<Vec<Registered>> {
    let Some(finder) = FINDER.get() else {
        return Ok(Vec::new());
    };
    let schemes = penstock_store::unknown_schemes(url);
    if schemes.is_empty() {
        return Ok(Vec::new());
    }
    let found: Vec<Found> = finder.call1(py, (schemes,))?.extract(py)?;
    found
        .into_iter()
        .map(|(scheme, origin, kind, place)| {
            let place = match kind.as_str() {
                "library" => Place::Library(place.concat().into()),
                "program" => Place::Program(place.into_iter().map(Into::into).collect()),
                _ => Place::Nowhere(place.concat()),
            };
            Ok(Registered {
                scheme,
                origin,
                place,
            })
        })
        .collect()
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
        let open = || -> Arc<dyn penstock_store::Store> {
            open(url, &options).unwrap_or_else(|error| panic!("{error}"))
        };
        Ok(try_check(*check, &open))
    })?;
    Ok(match outcome {
        Outcome::Passed => None,
        Outcome::Failed(why) => Some(why),
    })
}
