//! Traces and their replay.

use std::path::PathBuf;

use penstock_sim::{
    EngineSettings, Fleet, Outcome, PolicyKind, ReadOptions, Routing, Scale, Speed, Sums, Tiers,
    bounds,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::advisor::policy_named;
use crate::errors::config_error;

/// A trace of requests.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Trace {
    trace: penstock_sim::Trace,
    format: &'static str,
}

fn sim_error(py: Python<'_>, error: &penstock_sim::Error) -> PyErr {
    config_error(py, error)
}

/// Shares of requests. For each, a replay reports the time to first token below which this share of
/// the requests stays.
const PERCENTILES: [f64; 5] = [0.1, 0.5, 0.9, 0.99, 1.0];

impl Trace {
    /// Replays without the GIL, and takes it only to report the progress. An exception from that
    /// ends the replay.
    fn run(
        &self,
        py: Python<'_>,
        fleet: &Fleet,
        tiers: &[Tiers],
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Outcome>> {
        let mut raised = None;
        let outcomes = py.detach(|| {
            fleet.compare(&self.trace, tiers, |done| {
                let told = Python::attach(|py| {
                    py.check_signals()?;
                    let tell = progress.as_ref().map(|tell| tell.call1(py, (done,)));
                    tell.transpose().map(drop)
                });
                raised = told.err();
                raised.is_none()
            })
        });
        if let Some(error) = raised {
            return Err(error);
        }
        let outcomes = outcomes.map_err(|error| sim_error(py, &error))?;
        Ok(outcomes.expect("a replay that nobody stopped"))
    }
}

#[pymethods]
impl Trace {
    #[staticmethod]
    #[pyo3(signature = (path, *, block_tokens=None, text_bytes_per_token=4.0, session_interval=60.0))]
    fn read(
        py: Python<'_>,
        path: PathBuf,
        block_tokens: Option<u32>,
        text_bytes_per_token: f64,
        session_interval: f64,
    ) -> PyResult<Self> {
        let options = ReadOptions {
            block_tokens,
            bytes_per_token: text_bytes_per_token,
            session_interval,
        };
        let read = py.detach(|| penstock_sim::read(&path, &options));
        let read = read.map_err(|error| sim_error(py, &error))?;
        Ok(Self {
            trace: read.trace,
            format: read.format,
        })
    }

    #[getter]
    fn format(&self) -> &'static str {
        self.format
    }

    #[pyo3(signature = (populations, *, common_share=0.05, stagger=60.0, seed=0))]
    fn scaled(
        &self,
        py: Python<'_>,
        populations: u32,
        common_share: f64,
        stagger: f64,
        seed: u64,
    ) -> PyResult<Self> {
        let scale = Scale {
            populations,
            common_share,
            stagger,
            seed,
        };
        let trace = py.detach(|| self.trace.scaled(&scale));
        Ok(Self {
            trace: trace.map_err(|error| sim_error(py, &error))?,
            format: self.format,
        })
    }

    #[getter]
    fn populations(&self) -> u32 {
        self.trace.populations()
    }

    #[getter]
    fn requests(&self) -> u64 {
        self.trace.request_count()
    }

    #[getter]
    fn sessions(&self) -> u64 {
        self.trace.session_count()
    }

    #[getter]
    fn blocks(&self) -> u64 {
        self.trace.block_count()
    }

    #[getter]
    fn unique_blocks(&self) -> u32 {
        self.trace.unique_blocks()
    }

    #[getter]
    fn common_blocks(&self) -> u32 {
        self.trace.common_blocks()
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.trace.block_tokens
    }

    #[getter]
    fn input_tokens(&self) -> u64 {
        self.trace.input_tokens()
    }

    /// The duration in seconds.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "seconds in a double")]
    fn duration(&self) -> f64 {
        self.trace.duration() as f64 / 1e6
    }

    fn infinite_hits(&self, py: Python<'_>) -> u64 {
        py.detach(|| bounds::infinite(&self.trace))
    }

    fn belady_hits(&self, py: Python<'_>, capacity: u64) -> PyResult<u64> {
        let hits = py.detach(|| bounds::belady(&self.trace, capacity));
        hits.map_err(|error| sim_error(py, &error))
    }

    fn hits(&self, py: Python<'_>, policy: &str, capacity: u64) -> PyResult<u64> {
        let policy: PolicyKind = policy.parse().map_err(|error| sim_error(py, &error))?;
        Ok(py.detach(|| penstock_sim::hits(&self.trace, policy, capacity)))
    }

    #[pyo3(signature = (*, nodes, host_bytes, tiers, bytes_per_token, policy, pool_policy,
        routing, prefill_speed, host_speed, pool_speed, load_policy, tokens_per_step, get_lanes,
        lookup_timeout, load_timeout, load_floor, windows=1, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    fn replay<'py>(
        &self,
        py: Python<'py>,
        nodes: u32,
        host_bytes: u64,
        tiers: Vec<(bool, u64)>,
        bytes_per_token: u64,
        policy: &str,
        pool_policy: &str,
        routing: &str,
        prefill_speed: f64,
        host_speed: (f64, f64),
        pool_speed: (f64, f64),
        load_policy: &str,
        tokens_per_step: u64,
        get_lanes: u64,
        lookup_timeout: f64,
        load_timeout: f64,
        load_floor: f64,
        windows: u32,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let wrong = |error| sim_error(py, &error);
        let speed = |(bandwidth, latency)| Speed { bandwidth, latency };
        let fleet = Fleet {
            nodes,
            host_bytes,
            pool_bytes: 0,
            bytes_per_token,
            policy: policy.parse::<PolicyKind>().map_err(wrong)?,
            pool_policy: pool_policy.parse::<PolicyKind>().map_err(wrong)?,
            routing: routing.parse::<Routing>().map_err(wrong)?,
            prefill_speed,
            engine: EngineSettings {
                load_policy: policy_named(py, load_policy)?,
                tokens_per_step,
                get_lanes,
                lookup_timeout,
                load_timeout,
                load_floor,
            },
            host: speed(host_speed),
            pool: speed(pool_speed),
            windows,
        };
        let tiers = tiers.into_iter();
        let tiers: Vec<_> = tiers
            .map(|(host, pool_bytes)| Tiers { host, pool_bytes })
            .collect();
        let outcomes = self.run(py, &fleet, &tiers, progress)?;
        outcomes
            .iter()
            .map(|outcome| document(py, outcome))
            .collect()
    }
}

fn sums<'py>(py: Python<'py>, sums: &Sums) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("requests", sums.requests)?;
    found.set_item("input_tokens", sums.input_tokens)?;
    found.set_item("blocks", sums.blocks)?;
    found.set_item("host_blocks", sums.host_blocks)?;
    found.set_item("pool_blocks", sums.pool_blocks)?;
    found.set_item("computed_tokens", sums.computed_tokens)?;
    found.set_item("read_bytes", sums.read_bytes)?;
    found.set_item("written_bytes", sums.written_bytes)?;
    found.set_item("pool_readers", sums.pool_readers)?;
    found.set_item("pool_writers", sums.pool_writers)?;
    Ok(found)
}

fn document<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("total", sums(py, &outcome.total)?)?;
    let windows: PyResult<Vec<_>> = outcome.windows.iter().map(|w| sums(py, w)).collect();
    found.set_item("windows", windows?)?;
    let ttft = PyDict::new(py);
    for share in PERCENTILES {
        ttft.set_item(share, percentile(&outcome.ttft, share))?;
    }
    found.set_item("ttft", ttft)?;
    found.set_item("busiest_node", outcome.busiest_node)?;
    found.set_item("host_blocks_held", outcome.host_blocks_held)?;
    found.set_item("pool_blocks_held", outcome.pool_blocks_held)?;
    Ok(found)
}

/// The names of all eviction policies.
#[pyfunction]
pub(crate) fn policies() -> Vec<&'static str> {
    PolicyKind::ALL.map(PolicyKind::name).to_vec()
}

/// The names of all ways to route requests.
#[pyfunction]
pub(crate) fn routings() -> Vec<&'static str> {
    Routing::ALL.map(Routing::name).to_vec()
}

/// The smallest of the sorted values that at least this share of the values does not exceed.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the share is between 0 and 1"
)]
fn percentile(sorted: &[f32], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    let value = sorted.get(rank.saturating_sub(1));
    value.copied().map_or(0.0, f64::from)
}
