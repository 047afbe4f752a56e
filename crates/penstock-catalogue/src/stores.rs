//! Stores: which of the blocks that a step fills are new.

use penstock_contract::Block;

use crate::catalogue::{Catalogue, found_mut};
use crate::error::Result;
use crate::groups::Reads;
use crate::index::{Index, Number};
use crate::job::Kind;

/// A store that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The blocks that it takes, the witnesses at the end.
    pub blocks: Vec<Block>,
    /// Witnesses: blocks that the pool has, to be compared with what it has.
    pub witnesses: usize,
    /// Whether this engine has computed all of the blocks, each on top of its own.
    pub is_own: bool,
}

/// A block that a store takes: its group, its index in the request, the engine's block, its number.
type Taken = (usize, usize, u64, Number);

impl Catalogue {
    /// Begins the store of every block that is full after `tokens` tokens, was not considered
    /// before, and is neither in the pool nor on its way there. None if there is no such block.
    ///
    /// Only blocks whose hash was handed over count. A hash exists only once all tokens of the
    /// block are final, so speculative tokens never get into a stored block. `table` gives the
    /// engine's block for a group's position and a block's index in the request, and `None` beyond
    /// the table's end. In the table, `null` stands for a block that is not needed any more.
    ///
    /// Of a group whose layers keep a state, only blocks count that were seen to hold one: see
    /// [`step`](Self::step) and [`note_state`](Self::note_state).
    ///
    /// Up to `witnesses` blocks that the pool has are taken too, to be compared. Each is computed
    /// by this engine in the request's present run, and all before it is this engine's own: what
    /// was computed on top of a loaded block may be wrong through that block. Those that were not
    /// taken so before come first. They are spread evenly over what was considered.
    ///
    /// # Errors
    /// The request is not known, or the job's number is in use.
    pub fn begin_store(
        &mut self,
        id: &str,
        job: u64,
        tokens: u64,
        null: u64,
        witnesses: usize,
        table: impl Fn(usize, usize) -> Option<u64>,
    ) -> Result<Option<Begun>> {
        let request = found_mut(&mut self.requests, id)?;
        let tokens = tokens.min(request.storable);
        let mut new: Vec<Taken> = Vec::new();
        let mut known: Vec<Taken> = Vec::new();
        let mut is_own = request.own_from.is_some();
        for (position, group) in self.groups.iter().enumerate() {
            let numbers = &mut request.blocks[position];
            let full = (tokens / group.block_tokens) as usize;
            let considered = &mut request.considered[position];
            while *considered < full.min(numbers.len())
                && let Some(block) = table(position, *considered)
            {
                let begin = *considered as u64 * group.block_tokens;
                let end = begin + group.block_tokens;
                let is_whole = block != null
                    && (group.reads != Reads::State || request.states.contains(&(position, end)));
                if is_whole {
                    let is_computed = request.own_from.is_some_and(|from| begin >= from);
                    // What was found to be in the pool, and is not computed now, is passed over
                    // without a search.
                    let mut number = numbers[*considered];
                    if is_computed || !self.index.state(number).is_in_pool() {
                        number = self.index.join(number);
                        numbers[*considered] = number;
                    }
                    if is_computed {
                        self.index.set_computed(number);
                    }
                    let state = self.index.state(number);
                    if state.storing == 0 {
                        let taken = (position, *considered, block, number);
                        if !state.is_in_pool() {
                            is_own &= is_computed || state.is_computed();
                            new.push(taken);
                        } else if is_computed && state.is_loadable() {
                            known.push(taken);
                        }
                    }
                }
                *considered += 1;
            }
            let done = *considered as u64 * group.block_tokens;
            request
                .states
                .retain(|&(other, end)| other != position || end > done);
        }
        let known = chosen(&known, if is_own { witnesses } else { 0 }, &self.index);
        let witnesses = known.len();
        new.extend(known);
        if new.is_empty() {
            return Ok(None);
        }
        let request = self.request(id)?;
        let blocks = new
            .iter()
            .map(|&(group, index, block, _)| self.block(request, group, index, block))
            .collect();
        // The engine takes back blocks that left a window, and old states, while their request runs.
        let reads = new
            .iter()
            .filter(|&&(group, ..)| self.groups.at(group).leaves_blocks())
            .map(|&(_, _, block, _)| block)
            .collect();
        let numbers = new.iter().map(|&(_, _, _, number)| number).collect();
        self.begin(job, Kind::Store, numbers, reads, witnesses)?;
        for &(_, _, _, number) in &new[new.len() - witnesses..] {
            self.index.set_witnessed(number);
        }
        Ok(Some(Begun {
            blocks,
            witnesses,
            is_own,
        }))
    }

    /// Whether this engine has computed all that it has of the request's first `tokens` tokens, each
    /// block on top of its own.
    ///
    /// # Errors
    /// The request is not known.
    pub fn is_own(&self, id: &str, tokens: u64) -> Result<bool> {
        let request = self.request(id)?;
        Ok(request.is_own(&self.groups, &self.index, tokens))
    }

    /// Notes that a block of the request's table holds the state that its first `tokens` tokens have
    /// left, or will once the present step is computed. The group is given by its position. Says
    /// nothing about a request that is not known, or about layers that keep no state.
    pub fn note_state(&mut self, id: &str, group: usize, tokens: u64) {
        if let Some(request) = self.requests.get_mut(id)
            && self.groups.is_end_of_state(group, tokens)
        {
            request.states.push((group, tokens));
        }
    }

    /// Notes that somebody else has loaded the request's tokens from `first` to `end`: its blocks there,
    /// and all after them, are not this engine's own. Says nothing about a request that is not known.
    pub fn note_loaded(&mut self, id: &str, first: u64, end: u64) {
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        request.own_from = None;
        for (position, group) in self.groups.iter().enumerate() {
            let blocks = &request.blocks[position];
            let within = |at: u64| ((at / group.block_tokens) as usize).min(blocks.len());
            let last = within(end.next_multiple_of(group.block_tokens));
            for &number in &blocks[within(first)..last] {
                self.index.set_loaded(number);
            }
        }
    }

    /// Notes that no rank reads a store's blocks any more.
    pub fn on_read(&mut self, job: u64) {
        let Some(store) = self.jobs.get_mut(&job) else {
            return;
        };
        for block in std::mem::take(&mut store.reads) {
            if self.reading.get(&block) == Some(&job) {
                self.reading.remove(&block);
            }
        }
    }

    /// Ends a store on all ranks: its blocks are in the pool, except those at the positions in
    /// `unstored`. Returns how many are in the pool, without the witnesses. The pool's values of
    /// those at the positions in `disagreed` were others than this engine's: the pool has them no
    /// more. A witness that was not compared says nothing about the pool.
    ///
    /// # Errors
    /// No such job is under way.
    pub fn end_store(
        &mut self,
        job: u64,
        unstored: &[usize],
        disagreed: &[usize],
    ) -> Result<usize> {
        self.on_read(job);
        let store = self.take(job)?;
        let witnesses_from = store.numbers.len() - store.witnesses;
        let mut stored = 0;
        for (position, &number) in store.numbers.iter().enumerate() {
            self.index.state_mut(number).storing -= 1;
            if disagreed.contains(&position) {
                self.index.set_lost(number);
            } else if position < witnesses_from && !unstored.contains(&position) {
                self.index.set_stored(number);
                stored += 1;
            }
            self.index.release(number);
        }
        Ok(stored)
    }

    /// Whether some store still reads blocks that the engine may give away.
    pub fn is_reading(&self) -> bool {
        !self.reading.is_empty()
    }

    /// The stores that have yet to read one of these blocks of the engine.
    pub fn readers(&self, blocks: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut jobs: Vec<u64> = blocks
            .filter_map(|block| self.reading.get(&block).copied())
            .collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }
}

/// Up to `most` of these blocks, spread evenly: first those that have borne no witness.
fn chosen(blocks: &[Taken], most: usize, index: &Index) -> Vec<Taken> {
    let (old, new): (Vec<Taken>, Vec<Taken>) = blocks
        .iter()
        .partition(|&&(_, _, _, number)| index.state(number).is_witnessed());
    let mut chosen: Vec<Taken> = spread(&new, most).collect();
    chosen.extend(spread(&old, most - chosen.len()));
    chosen.sort_unstable_by_key(|&(group, block, ..)| (group, block));
    chosen
}

/// Up to `most` of these, spread evenly.
fn spread<T: Copy>(all: &[T], most: usize) -> impl Iterator<Item = T> + '_ {
    let most = most.min(all.len());
    (0..most).map(move |n| all[(2 * n + 1) * all.len() / (2 * most)])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_spread_is_in_order_and_leaves_no_long_gap(len in 0_usize..200, most in 0_usize..20) {
            let all: Vec<usize> = (0..len).collect();
            let some: Vec<usize> = spread(&all, most).collect();
            prop_assert_eq!(some.len(), most.min(len));
            prop_assert!(some.is_sorted_by(|one, next| one < next));
            let ends = some.iter().map(|&n| n + 1).chain([len]);
            let starts = [0].into_iter().chain(some.iter().map(|&n| n + 1));
            let gap = starts.zip(ends).map(|(start, end)| end - start).max();
            prop_assert!(some.is_empty() || gap.unwrap_or(0) <= len.div_ceil(some.len()));
        }
    }
}
