//! Weighs loading against recomputing, for Python.

use penstock_advisor::{LoadPolicy, Transfer};
use pyo3::prelude::*;

use crate::errors::config_error;

/// What to do about a run of tokens that could be loaded.
#[pyclass(frozen, eq, from_py_object, module = "penstock._native")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Choice(penstock_advisor::Choice);

#[pymethods]
impl Choice {
    #[new]
    fn new(end: u64, load: Option<f64>, recompute: Option<f64>) -> Self {
        Self(penstock_advisor::Choice {
            end,
            load,
            recompute,
        })
    }

    #[getter]
    fn end(&self) -> u64 {
        self.0.end
    }

    #[getter]
    fn load(&self) -> Option<f64> {
        self.0.load
    }

    #[getter]
    fn recompute(&self) -> Option<f64> {
        self.0.recompute
    }

    fn __repr__(&self) -> String {
        let time = |seconds: Option<f64>| seconds.map_or("None".into(), |s| format!("{s:?}"));
        let penstock_advisor::Choice {
            end,
            load,
            recompute,
        } = self.0;
        let (load, recompute) = (time(load), time(recompute));
        format!("Choice(end={end}, load={load}, recompute={recompute})")
    }
}

/// Where a load of a run may end, and what is to be moved up to there.
#[pyclass(frozen, eq, hash, from_py_object, module = "penstock._native")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Reach(pub(crate) penstock_advisor::Reach);

#[pymethods]
impl Reach {
    #[new]
    fn new(end: u64, host_bytes: u64, pool_bytes: u64) -> Self {
        Self(penstock_advisor::Reach {
            end,
            host_bytes,
            pool_bytes,
        })
    }

    #[getter]
    fn end(&self) -> u64 {
        self.0.end
    }

    #[getter]
    fn host_bytes(&self) -> u64 {
        self.0.host_bytes
    }

    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.0.pool_bytes
    }

    fn __repr__(&self) -> String {
        let penstock_advisor::Reach {
            end,
            host_bytes,
            pool_bytes,
        } = self.0;
        format!("Reach(end={end}, host_bytes={host_bytes}, pool_bytes={pool_bytes})")
    }
}

/// How long steps and loads take, and what that means for the next request.
#[pyclass(subclass, module = "penstock._native")]
pub(crate) struct Advisor(penstock_advisor::Advisor);

#[pymethods]
impl Advisor {
    #[new]
    #[pyo3(signature = (tokens_per_step, lanes=1))]
    fn new(tokens_per_step: u64, lanes: u64) -> Self {
        Self(penstock_advisor::Advisor::new(tokens_per_step, lanes))
    }

    fn on_step(&mut self, began: Option<f64>, step: u64, tokens: u64, pairs: u64) {
        self.0.on_step(began, step, tokens, pairs);
    }

    fn on_output(&mut self, now: f64, steps: &Bound<'_, PyAny>) -> PyResult<()> {
        let steps: PyResult<Vec<u64>> = steps.try_iter()?.map(|step| step?.extract()).collect();
        self.0.on_output(now, &steps?);
        Ok(())
    }

    #[pyo3(signature = (now, number, host_bytes, pool_bytes, *, patience=None, is_probe=false))]
    fn on_begin(
        &mut self,
        now: f64,
        number: u64,
        host_bytes: u64,
        pool_bytes: u64,
        patience: Option<f64>,
        is_probe: bool,
    ) {
        let transfer = Transfer {
            host_bytes,
            pool_bytes,
            patience,
            is_probe,
        };
        self.0.on_begin(now, number, transfer);
    }

    fn on_end(&mut self, number: u64, seconds: f64, missing_bytes: u64) -> Option<u64> {
        self.0.on_end(number, seconds, missing_bytes)
    }

    #[pyo3(signature = (first, reaches, prompt, policy="auto", *, may_check=false))]
    fn advise(
        &mut self,
        py: Python<'_>,
        first: u64,
        reaches: Vec<Reach>,
        prompt: u64,
        policy: &str,
        may_check: bool,
    ) -> PyResult<Choice> {
        let policy = policy_named(py, policy)?;
        let reaches: Vec<_> = reaches.into_iter().map(|reach| reach.0).collect();
        let choice = self.0.advise(first, &reaches, prompt, policy, may_check);
        Ok(Choice(choice))
    }

    #[pyo3(signature = (first, reach, prompt, latency, policy="auto"))]
    fn awaits_lookup(
        &mut self,
        py: Python<'_>,
        first: u64,
        reach: Reach,
        prompt: u64,
        latency: Option<f64>,
        policy: &str,
    ) -> PyResult<bool> {
        let policy = policy_named(py, policy)?;
        Ok(self
            .0
            .awaits_lookup(first, &reach.0, prompt, latency, policy))
    }

    fn patience(
        &self,
        choice: Choice,
        host_bytes: u64,
        pool_bytes: u64,
        objects: u64,
    ) -> Option<f64> {
        self.0.patience(&choice.0, host_bytes, pool_bytes, objects)
    }

    fn wants_probe(
        &mut self,
        now: f64,
        first: u64,
        reach: Reach,
        prompt: u64,
        block: (u64, u64),
    ) -> u64 {
        self.0.wants_probe(now, first, &reach.0, prompt, block)
    }

    fn saved_seconds(&self, first: u64, end: u64, prompt: u64) -> Option<f64> {
        self.0.saved_seconds(first, end, prompt)
    }

    fn load_seconds(&self, reach: Reach) -> Option<f64> {
        self.0.load_seconds(&reach.0)
    }
}

/// The load policy of this name.
pub(crate) fn policy_named(py: Python<'_>, name: &str) -> PyResult<LoadPolicy> {
    LoadPolicy::named(name).ok_or_else(|| {
        let known = LoadPolicy::ALL.map(LoadPolicy::name).join(", ");
        config_error(py, format!("the load policy '{name}' is none of {known}"))
    })
}

#[pyfunction]
pub(crate) fn attended(first: u64, end: u64) -> u64 {
    penstock_advisor::attended(first, end)
}
