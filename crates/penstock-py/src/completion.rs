//! What became of jobs, for Python: numbers, positions of blocks, and enumerations.

use penstock_engine::{self as engine, Tally};
use pyo3::prelude::*;

/// What happened to a job. Every event but `RELEASED` is the job's last.
#[pyclass(
    frozen,
    eq,
    hash,
    module = "penstock._native",
    rename_all = "SCREAMING_SNAKE_CASE"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    /// The source blocks of a store are not read any more. Comes before `STORED`.
    Released,
    Stored,
    Loaded,
    Prefetched,
}

/// What became of a block: the worst outcome of its objects.
#[pyclass(
    frozen,
    eq,
    hash,
    module = "penstock._native",
    rename_all = "SCREAMING_SNAKE_CASE"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// The store took the object.
    Stored,
    /// The store had the object already, or another engine that holds the same stores it.
    AlreadyPresent,
    /// The object came from the store.
    Loaded,
    /// The object came from host memory.
    Kept,
    /// Nothing was done, since there was no room, or no store that answers.
    Dropped,
    /// The store does not have the object.
    Miss,
    /// The store's value did not verify.
    Rejected,
    /// The store's value is encrypted with a key that this engine does not have.
    Foreign,
    /// The deadline passed first.
    TimedOut,
    /// The job was cancelled first.
    Cancelled,
    /// An object before it did not come.
    Skipped,
    /// The store failed.
    Failed,
    /// The store had another value than this engine computed. It was removed.
    Disagreed,
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
            engine::Outcome::Disagreed => Self::Disagreed,
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

    /// Seconds from the submission of the job to this event. They count from when its fence was
    /// passed, if that was later.
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

    /// Positions of blocks that are missing. For a store: those that are not in the pool now. For a
    /// load or prefetch: those that did not come, except the cancelled ones, which nobody misses.
    #[getter]
    fn missing(&self) -> Vec<usize> {
        self.native.event.missing()
    }

    /// Positions of the blocks that the pool does not have, or not whole.
    #[getter]
    fn lost(&self) -> Vec<usize> {
        self.native.event.lost()
    }

    /// Positions of the blocks that are encrypted with a key that this engine does not have.
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

    /// Objects that did not verify, without the foreign ones.
    #[getter]
    fn rejected_objects(&self) -> u64 {
        self.tally.rejected_objects
    }

    /// Objects encrypted with a key that this engine does not have.
    #[getter]
    fn foreign_objects(&self) -> u64 {
        self.tally.foreign_objects
    }

    /// Bytes of the blocks of a load or prefetch that are `missing`.
    #[getter]
    fn missing_bytes(&self) -> u64 {
        self.tally.missing_bytes
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.native)
    }
}
