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
    /// Of a store: blocks that the engine may give away while it reads them.
    pub(crate) reads: Vec<u64>,
    /// Of a prefetch: whether nobody waits for it any more.
    pub(crate) is_released: bool,
}
