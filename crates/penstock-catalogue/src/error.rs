//! The errors of a caller.

/// A call that contradicts what the catalogue was told before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogueError {
    /// The request was never added, or was removed.
    #[error("the request {0:?} is not known: add it first")]
    UnknownRequest(String),
    /// A request of this name exists already.
    #[error("the request {0:?} is known already: remove it first")]
    DuplicateRequest(String),
    /// No such job is under way.
    #[error("no job {0} is under way")]
    UnknownJob(u64),
    /// The job's number is in use.
    #[error("job {0} is under way already")]
    DuplicateJob(u64),
    /// The engine has no block there.
    #[error("block {index} of group {group} is in no block table")]
    NoBlock {
        /// The group's position.
        group: usize,
        /// The block's index in the request.
        index: usize,
    },
    /// A job has no block at this position.
    #[error("job {job} has no block {position}")]
    NoPosition {
        /// The job.
        job: u64,
        /// The position in its list of blocks.
        position: usize,
    },
    /// The groups, or what a caller says about each of them, make no sense.
    #[error("{0}")]
    Config(&'static str),
}

pub(crate) type Result<T> = std::result::Result<T, CatalogueError>;
