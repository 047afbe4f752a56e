//! The keeper for Python: a request's blocks from the catalogue, what to do with them.

use std::time::Duration;

use penstock_catalogue::Place;
use penstock_contract::Chunk;
use penstock_engine::{Keeper as Native, KeeperConfig};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{config_error, engine_error};
use crate::groups::PoolGroup;
use crate::store::{Store, seconds};

/// Longer than any call to a store.
const LAST_WAIT: Duration = Duration::from_secs(60);

/// Touches kept blocks of a store, and removes others, on a native thread. Kept blocks take at most
/// `share` of the store, and those of one account `account_share`. A store that does not tell its
/// bound counts as having `assumed_bytes`. Blocks are touched every so many seconds.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Keeper {
    native: Native,
}

impl Keeper {
    pub(crate) fn native(&self) -> &Native {
        &self.native
    }
}

/// Blocks as the keeper names them.
pub(crate) fn blocks(places: Vec<Place>) -> Vec<(usize, Chunk, u64)> {
    let block = |place: Place| (place.group, place.chunk, place.position);
    places.into_iter().map(block).collect()
}

#[pymethods]
impl Keeper {
    /// Starts the thread. Each group's `block_bytes` count towards the shares, and must be known.
    #[new]
    #[pyo3(signature = (store, groups, *, share, account_share, assumed_bytes, every))]
    fn new(
        py: Python<'_>,
        store: &Store,
        groups: Vec<Py<PoolGroup>>,
        share: f64,
        account_share: f64,
        assumed_bytes: u64,
        every: f64,
    ) -> PyResult<Self> {
        let config = KeeperConfig {
            share,
            account_share,
            assumed_bytes,
            every: seconds(py, every)?,
        };
        let groups: Option<_> = groups.iter().map(|group| group.get().kept()).collect();
        let groups = groups.ok_or_else(|| {
            config_error(
                py,
                "a keeper needs the bytes of a block of each group".to_owned(),
            )
        })?;
        let store = store.shared();
        py.detach(|| Native::new(store, groups, config))
            .map(|native| Self { native })
            .map_err(|error| engine_error(py, &error))
    }

    /// What the keeper did since it was made: `touched`, `refused` and `removed` blocks, calls that
    /// `failed`, and the blocks that are `kept` now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.native.stats();
        let dict = PyDict::new(py);
        for (name, count) in [
            ("touched", stats.touched),
            ("refused", stats.refused),
            ("removed", stats.removed),
            ("failed", stats.failed),
            ("kept", stats.kept),
        ] {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    /// Ends the thread. False if it is still inside the store when the time is over.
    #[pyo3(signature = (timeout = 5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(py, timeout)?;
        Ok(py.detach(|| self.native.shutdown(timeout)))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        Python::attach(|py| py.detach(|| self.native.shutdown(LAST_WAIT)));
    }
}
