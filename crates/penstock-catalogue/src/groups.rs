//! The KV-cache groups of a model: layers that share one block table.

use std::ops::Range;

use crate::CatalogueError;
use crate::error::Result;

/// What a layer needs of the tokens before the one that it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// The KV of all of them.
    All,
    /// The KV of the last ones: of so many tokens, the current one included.
    Window(u64),
    /// One state that all of them have left: recurrent layers, short convolutions. A block of such a
    /// group is the state after the block's last token.
    State,
}

/// One group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Tokens in a block.
    pub block_tokens: u64,
    /// What its layers need.
    pub reads: Reads,
}

impl Group {
    /// The first block that is needed to continue computing after `tokens` tokens. If layers keep a
    /// state, `tokens` must be whole blocks.
    ///
    /// ```
    /// use penstock_catalogue::{Group, Reads};
    ///
    /// let first = |reads| Group { block_tokens: 16, reads }.first_needed(64);
    /// assert_eq!(first(Reads::All), 0);
    /// assert_eq!(first(Reads::Window(20)), 2);
    /// assert_eq!(first(Reads::State), 3);
    /// ```
    pub fn first_needed(&self, tokens: u64) -> u64 {
        match self.reads {
            Reads::All => 0,
            Reads::Window(window) => (tokens + 1).saturating_sub(window) / self.block_tokens,
            Reads::State => (tokens / self.block_tokens).saturating_sub(1),
        }
    }

    /// Whether the serving engine gives blocks away while their request runs.
    pub(crate) fn leaves_blocks(&self) -> bool {
        self.reads != Reads::All
    }

    /// The blocks that a load of the tokens from `first` to `end` needs.
    pub fn needed(&self, first: u64, end: u64) -> Range<usize> {
        let start = (first / self.block_tokens).max(self.first_needed(end));
        let end = end / self.block_tokens;
        start.min(end) as usize..end as usize
    }
}

/// All groups of a model that are transferred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    groups: Vec<Group>,
    hash_tokens: u64,
    alignment: u64,
    /// Tokens at the end of what is found that are computed all the same.
    dropped: u64,
    keep_states: bool,
}

impl Groups {
    /// `hash_tokens` is the number of tokens that one block hash adds to the chain. A group's block
    /// may span several hashes; the last of them names the block.
    ///
    /// # Errors
    /// There is no group, or a group's blocks are not made of whole hashes.
    pub fn new(groups: Vec<Group>, hash_tokens: u64) -> Result<Self> {
        if groups.is_empty() || groups.len() > usize::from(u16::MAX) {
            return Err(CatalogueError::Config("there must be 1 to 65,535 groups"));
        }
        let divides = |group: &Group| {
            hash_tokens > 0
                && group.block_tokens > 0
                && group.block_tokens.is_multiple_of(hash_tokens)
        };
        if !groups.iter().all(divides) {
            let what = "a group's block must be a multiple of the tokens of a block hash";
            return Err(CatalogueError::Config(what));
        }
        let alignment = groups
            .iter()
            .try_fold(1, |lcm, group| least_common(lcm, group.block_tokens))
            .ok_or(CatalogueError::Config(
                "no number of tokens below 2^64 is whole blocks in every group",
            ))?;
        Ok(Self {
            keep_states: groups.iter().any(|group| group.reads == Reads::State),
            groups,
            hash_tokens,
            alignment,
            dropped: 0,
        })
    }

    /// Makes these the groups of an engine that, if `drops`, loads one unit less than it finds.
    /// vLLM does so with EAGLE and MTP (`use_eagle_block_drop`): what their layers keep of a
    /// block's last token depends on the token after it, which the block's hash does not cover.
    pub fn dropping_last(mut self, drops: bool) -> Self {
        self.dropped = if drops { self.alignment } else { 0 };
        self
    }

    /// The number of groups.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Iterates over the groups.
    pub fn iter(&self) -> std::slice::Iter<'_, Group> {
        self.groups.iter()
    }

    /// The group at a position.
    pub(crate) fn at(&self, position: usize) -> &Group {
        &self.groups[position]
    }

    /// Whether layers of some group keep a state.
    pub(crate) fn keep_states(&self) -> bool {
        self.keep_states
    }

    /// Whether a block of the group holds the state after so many tokens.
    pub(crate) fn is_end_of_state(&self, position: usize, tokens: u64) -> bool {
        self.groups.get(position).is_some_and(|group| {
            group.reads == Reads::State && tokens.is_multiple_of(group.block_tokens)
        })
    }

    /// The number of block hashes that make up a block of a group.
    pub fn hashes_per_block(&self, position: usize) -> usize {
        (self.groups[position].block_tokens / self.hash_tokens) as usize
    }

    /// The number of tokens in the shortest run that is whole blocks in every group.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Where a load of a prompt of so many tokens may end at the latest. Its last token is left to
    /// compute.
    pub fn last_end(&self, tokens: u64) -> u64 {
        let whole = tokens.saturating_sub(1) / self.alignment * self.alignment;
        whole.saturating_sub(self.dropped)
    }

    /// The end of the longest run of tokens from `first` that can be loaded. `missing` tells the
    /// first missing block of a group within a range of blocks.
    ///
    /// The run ends at `limit` at the latest; `first` and `limit` are multiples of the alignment.
    /// Layers that attend to all tokens need every block of the run, and the unit after it, if the
    /// last one is dropped. The other layers need the blocks of the window at its end, or the state
    /// there. The result is `first` if nothing can be loaded.
    pub fn reach(
        &self,
        first: u64,
        limit: u64,
        missing: impl Fn(usize, Range<usize>) -> Option<usize>,
    ) -> u64 {
        if limit <= first {
            return first;
        }
        let mut end = limit + self.dropped;
        for (position, group) in self.groups.iter().enumerate() {
            if group.reads == Reads::All {
                let blocks = group.needed(first, end);
                let whole = missing(position, blocks.clone()).unwrap_or(blocks.end);
                end = self.down(first, whole as u64 * group.block_tokens);
            }
        }
        end = end.saturating_sub(self.dropped).max(first);
        // If a window lacks a block, it lacks it at every end for which the block is in the window.
        while let Some(lower) = self.lower_end(first, end, &missing) {
            end = lower;
        }
        end
    }

    /// A shorter end to try, if a window at the end of the run is not whole, or a state is missing.
    fn lower_end(
        &self,
        first: u64,
        end: u64,
        missing: &impl Fn(usize, Range<usize>) -> Option<usize>,
    ) -> Option<u64> {
        for (position, group) in self.groups.iter().enumerate() {
            if group.reads != Reads::All
                && let Some(block) = missing(position, group.needed(first, end))
            {
                return Some(self.down(first, block as u64 * group.block_tokens));
            }
        }
        None
    }

    /// An aligned end of the run, at `end` or before it.
    fn down(&self, first: u64, end: u64) -> u64 {
        (end / self.alignment * self.alignment).max(first)
    }
}

fn least_common(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Groups, which of their blocks are there, and a run of tokens.
    type Situation = (Groups, Vec<Vec<bool>>, u64, u64);

    fn situations() -> impl Strategy<Value = Situation> {
        let reads = prop_oneof![
            Just(Reads::All),
            (1_u64..20).prop_map(Reads::Window),
            Just(Reads::State),
        ];
        let group = (prop::sample::select(vec![2_u64, 4, 6]), reads);
        let group = group.prop_map(|(block_tokens, reads)| Group {
            block_tokens,
            reads,
        });
        (
            prop::collection::vec(group, 1..4),
            prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.75), 0..40), 3),
            0_u64..7,
            0_u64..7,
            prop::bool::ANY,
        )
            .prop_map(|(groups, has, from, units, drops)| {
                let groups = Groups::new(groups, 2).unwrap().dropping_last(drops);
                let unit = groups.alignment();
                (groups, has, from.min(units) * unit, units * unit)
            })
    }

    /// The tokens whose blocks are needed.
    fn attended(group: &Group, end: u64) -> Range<u64> {
        let first = match group.reads {
            Reads::All => 0,
            Reads::Window(window) => (end + 1).saturating_sub(window),
            // The last token's block holds what all tokens have left.
            Reads::State => end.saturating_sub(1),
        };
        first..end
    }

    proptest! {
        /// Compares with trying every length.
        #[test]
        fn the_longest_run_that_can_be_computed_on_from((groups, there, first, limit) in situations()) {
            let has = |position: usize, block: usize| {
                there[position].get(block).copied().unwrap_or(false)
            };
            let is_loadable = |end: u64| {
                groups.iter().enumerate().all(|(position, group)| {
                    let beyond = if group.reads == Reads::All { groups.dropped } else { 0 };
                    attended(group, end)
                        .chain(end..end + beyond)
                        .filter(|&token| token >= first)
                        .all(|token| has(position, (token / group.block_tokens) as usize))
                })
            };
            let longest = (first..=limit)
                .step_by(groups.alignment() as usize)
                .filter(|&end| is_loadable(end))
                .max();
            let missing = |position: usize, mut blocks: Range<usize>| {
                blocks.find(|&block| !has(position, block))
            };
            prop_assert_eq!(groups.reach(first, limit, missing), longest.unwrap_or(first));
        }

        #[test]
        fn what_is_needed_is_what_is_attended_to((groups, _, first, end) in situations()) {
            for group in groups.iter() {
                let mut expected: Vec<usize> = attended(group, end)
                    .filter(|&token| token >= first)
                    .map(|token| (token / group.block_tokens) as usize)
                    .collect();
                expected.dedup();
                let needed: Vec<usize> = group.needed(first, end).collect();
                prop_assert_eq!(needed, expected);
            }
        }
    }

    #[test]
    fn a_load_leaves_the_last_token_and_what_is_dropped() {
        let group = Group {
            block_tokens: 16,
            reads: Reads::All,
        };
        let groups = Groups::new(vec![group], 16).unwrap();
        let ends = |groups: &Groups| [0, 1, 16, 17, 33].map(|tokens| groups.last_end(tokens));
        assert_eq!(ends(&groups), [0, 0, 0, 16, 32]);
        assert_eq!(ends(&groups.dropping_last(true)), [0, 0, 0, 0, 16]);
    }

    #[test]
    fn blocks_are_made_of_whole_hashes() {
        let group = |block_tokens| Group {
            block_tokens,
            reads: Reads::All,
        };
        assert!(Groups::new(vec![group(16), group(24)], 16).is_err());
        assert!(Groups::new(vec![], 16).is_err());
        // Their least common multiple is beyond 2^64.
        assert!(Groups::new(vec![group(u64::MAX), group(u64::MAX - 1)], 1).is_err());
        let groups = Groups::new(vec![group(16), group(24)], 8).unwrap();
        assert_eq!(groups.alignment(), 48);
        assert_eq!(groups.hashes_per_block(1), 3);
    }
}
