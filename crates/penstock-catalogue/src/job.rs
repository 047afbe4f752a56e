//! A load, a prefetch or a store under way.

use crate::index::Number;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Load,
    Prefetch,
    Store,
}

/// Blocks that are on their way.
pub(crate) struct Job {
    pub(crate) kind: Kind,
    pub(crate) numbers: Vec<Number>,
    /// For a store: blocks that the engine may give away while the store reads them.
    pub(crate) reads: Vec<u64>,
    /// For a store: so many blocks at its end are only compared, as the pool has them.
    pub(crate) witnesses: usize,
    /// For a prefetch: whether nobody waits for it any more.
    pub(crate) is_released: bool,
}
