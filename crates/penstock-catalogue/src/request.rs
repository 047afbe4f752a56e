//! What is known of one request.

use penstock_contract::Tenant;

use crate::groups::Groups;
use crate::index::Number;

/// Blocks and progress of a request.
pub(crate) struct Request {
    pub(crate) prompt_tokens: u64,
    /// The owner of its blocks.
    pub(crate) tenant: Option<Tenant>,
    /// Hashes that were handed over.
    pub(crate) hashes: usize,
    /// For each group: the request's blocks, from the first.
    pub(crate) blocks: Vec<Vec<Number>>,
    /// Blocks beyond these tokens are not stored.
    pub(crate) storable: u64,
    /// For each group: blocks before this one have been stored, or need not be.
    pub(crate) considered: Vec<usize>,
    /// States that the engine's blocks hold and that were not considered yet: the group's position,
    /// and the tokens that left the state.
    pub(crate) states: Vec<(usize, u64)>,
    pub(crate) lookup: Lookup,
    /// Whether it has been computed since it came, or was last paused.
    pub(crate) is_running: bool,
}

/// A request's look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    None,
    /// `left` groups' answers are still to come; `has_failed` tells whether an earlier one failed.
    Asked {
        left: usize,
        has_failed: bool,
    },
    /// Whether the pool gave an answer, for every group.
    Answered {
        is_heard: bool,
    },
}

impl Request {
    pub(crate) fn new(prompt_tokens: u64, tenant: Option<Tenant>, groups: usize) -> Self {
        Self {
            prompt_tokens,
            tenant,
            hashes: 0,
            blocks: vec![Vec::new(); groups],
            storable: u64::MAX,
            considered: vec![0; groups],
            states: Vec::new(),
            lookup: Lookup::None,
            is_running: false,
        }
    }

    /// Whether `tokens` computed tokens fill a block that was not considered yet.
    pub(crate) fn is_filled(&self, groups: &Groups, tokens: u64) -> bool {
        let tokens = tokens.min(self.storable);
        groups
            .iter()
            .zip(&self.considered)
            .any(|(group, &considered)| tokens / group.block_tokens > considered as u64)
    }
}
