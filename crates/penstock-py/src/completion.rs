//! What became of jobs, for Python: numbers, places of blocks, and enumerations.

use penstock_engine::{self as engine, Tally};
use pyo3::prelude::*;

/// What happened to a job. Each is its last but `RELEASED`.
#[pyclass(
    frozen,
    eq,
    hash,
    module = "penstock._native",
    rename_all = "SCREAMING_SNAKE_CASE"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    /// The source blocks of a store are not read any more. Precedes `STORED`.
    Released,
    Stored,
    Loaded,
    Prefetched,
}

/// What became of a block: the worst of what became of its objects.
#[pyclass(
    frozen,
    eq,
    hash,
    module = "penstock._native",
    rename_all = "SCREAMING_SNAKE_CASE"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// The store took it.
    Stored,
    /// The store had it, or who holds the same stores it.
    AlreadyPresent,
    /// It came from the store.
    Loaded,
    /// It came from host memory.
    Kept,
    /// Nothing was done for want of room, or of a store that answers.
    Dropped,
    /// The store does not have it.
    Miss,
    /// What the store has did not verify.
    Rejected,
    /// What the store has is encrypted with a key that this engine does not have.
    Foreign,
    /// The deadline passed first.
    TimedOut,
    /// The job was cancelled first.
    Cancelled,
    /// Something before it did not come.
    Skipped,
    /// The store failed.
    Failed,
}

impl From<&engine::Outcome> for Outcome {
    fn from(outcome: &engine::Outcome) -> Self {
        match outcome {
            engine::Outcome::Stored(_) => Self::Stored,
            engine::Outcome::AlreadyPresent => Self::AlreadyPresent,
            engine::Outcome::Loaded(_) => Self::Loaded,
            engine::Outcome::Kept(_) => Self::Kept,
            engine::Outcome::Dropped => Self::Dropped,
            engine::Outcome::Miss => Self::Miss,
            engine::Outcome::Rejected(rejection) if rejection.is_foreign() => Self::Foreign,
            engine::Outcome::Rejected(_) => Self::Rejected,
            engine::Outcome::TimedOut => Self::TimedOut,
            engine::Outcome::Cancelled => Self::Cancelled,
            engine::Outcome::Skipped => Self::Skipped,
            engine::Outcome::Failed(_) => Self::Failed,
        }
    }
}

/// Something that happened to a job.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Completion {
    native: engine::Completion,
    tally: Tally,
}

impl From<engine::Completion> for Completion {
    fn from(native: engine::Completion) -> Self {
        let outcomes = native.event.outcomes();
        let tally = outcomes.map_or_else(Tally::default, |outcomes| outcomes.tally);
        Self { native, tally }
    }
}

#[pymethods]
impl Completion {
    /// The number that the job was submitted with.
    #[getter]
    fn job(&self) -> u64 {
        self.native.job
    }

    #[getter]
    fn event(&self) -> Event {
        match self.native.event {
            engine::Event::Released => Event::Released,
            engine::Event::Stored(_) => Event::Stored,
            engine::Event::Loaded(_) => Event::Loaded,
            engine::Event::Prefetched(_) => Event::Prefetched,
        }
    }

    /// Seconds since the job was submitted, or since its fence was passed, if that was later.
    #[getter]
    fn seconds(&self) -> f64 {
        self.native.took.as_secs_f64()
    }

    /// What became of each block, in the order submitted; empty with `RELEASED`.
    #[getter]
    fn outcomes(&self) -> Vec<Outcome> {
        self.native
            .event
            .blocks()
            .iter()
            .map(Outcome::from)
            .collect()
    }

    /// Places of a store's blocks that are not in the pool now, or of a load's or prefetch's that did
    /// not come, those excepted that were cancelled: nobody misses them.
    #[getter]
    fn missing(&self) -> Vec<usize> {
        self.native.event.missing()
    }

    /// Places of the blocks that the pool does not have, or not whole.
    #[getter]
    fn lost(&self) -> Vec<usize> {
        self.native.event.lost()
    }

    /// Places of the blocks that are encrypted with a key that this engine does not have.
    #[getter]
    fn foreign(&self) -> Vec<usize> {
        self.native.event.foreign()
    }

    /// Bytes that came from the store.
    #[getter]
    fn loaded_bytes(&self) -> u64 {
        self.tally.loaded_bytes
    }

    /// Bytes that came from host memory.
    #[getter]
    fn kept_bytes(&self) -> u64 {
        self.tally.kept_bytes
    }

    /// Bytes that the store took.
    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.tally.stored_bytes
    }

    #[getter]
    fn dropped_objects(&self) -> u64 {
        self.tally.dropped_objects
    }

    /// Objects that the store failed on.
    #[getter]
    fn failed_objects(&self) -> u64 {
        self.tally.failed_objects
    }

    /// Objects that did not verify, foreign ones excepted.
    #[getter]
    fn rejected_objects(&self) -> u64 {
        self.tally.rejected_objects
    }

    /// Objects encrypted with a key that this engine does not have.
    #[getter]
    fn foreign_objects(&self) -> u64 {
        self.tally.foreign_objects
    }

    /// Bytes of the blocks that are `missing` of a load or prefetch.
    #[getter]
    fn missing_bytes(&self) -> u64 {
        self.tally.missing_bytes
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.native)
    }
}
