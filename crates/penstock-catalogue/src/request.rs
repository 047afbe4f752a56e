//! What is known of one request.

use penstock_contract::Tenant;

use crate::groups::Groups;
use crate::index::{Index, Number};

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
    /// The first token that it has computed since, if all before it is this engine's own.
    pub(crate) own_from: Option<u64>,
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
            own_from: None,
        }
    }

    /// Whether this engine has computed all that it has of the first `tokens` tokens, each block on
    /// top of its own. Of blocks that left a window, and of states before the last, it is enough
    /// that they were never loaded: the request does not have them.
    pub(crate) fn is_own(&self, groups: &Groups, index: &Index, tokens: u64) -> bool {
        groups.iter().zip(&self.blocks).all(|(group, numbers)| {
            let needed = group.first_needed(tokens) as usize;
            let is_own = |(block, &number): (usize, &Number)| {
                let state = index.state(number);
                state.is_computed() || (block < needed && !state.is_loaded())
            };
            let before = numbers.get(..tokens.div_ceil(group.block_tokens) as usize);
            before.is_some_and(|before| before.iter().enumerate().all(is_own))
        })
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
