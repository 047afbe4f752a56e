//! Panics that native threads of this process have contained.

use pyo3::prelude::*;

/// The panics of native threads since this process began: for each place its name, how many there
/// were, and what the last one said.
#[pyfunction]
pub(crate) fn panics() -> Vec<(&'static str, u64, String)> {
    let seen = penstock_threads::panics().into_iter();
    seen.map(|seen| (seen.place, seen.count, seen.last))
        .collect()
}
