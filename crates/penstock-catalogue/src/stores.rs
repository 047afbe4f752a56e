//! Stores: which of the blocks that a step fills are new.

use penstock_contract::Block;

use crate::catalogue::{Catalogue, found_mut};
use crate::error::Result;
use crate::groups::Reads;
use crate::index::Number;
use crate::job::Kind;

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
    /// # Errors
    /// The request is not known, or the job's number is in use.
    pub fn begin_store(
        &mut self,
        id: &str,
        job: u64,
        tokens: u64,
        null: u64,
        table: impl Fn(usize, usize) -> Option<u64>,
    ) -> Result<Option<Vec<Block>>> {
        let request = found_mut(&mut self.requests, id)?;
        let tokens = tokens.min(request.storable);
        let mut new: Vec<(usize, usize, u64, Number)> = Vec::new();
        for (position, group) in self.groups.iter().enumerate() {
            let numbers = &mut request.blocks[position];
            let full = (tokens / group.block_tokens) as usize;
            let considered = &mut request.considered[position];
            while *considered < full.min(numbers.len())
                && let Some(block) = table(position, *considered)
            {
                let end = (*considered as u64 + 1) * group.block_tokens;
                let is_whole = block != null
                    && (group.reads != Reads::State || request.states.contains(&(position, end)));
                if is_whole {
                    // What was found to be in the pool is passed over without a search.
                    let mut number = numbers[*considered];
                    if !self.index.state(number).is_in_pool() {
                        number = self.index.join(number);
                        numbers[*considered] = number;
                    }
                    let state = self.index.state(number);
                    if !state.is_in_pool() && state.storing == 0 {
                        new.push((position, *considered, block, number));
                    }
                }
                *considered += 1;
            }
            let done = *considered as u64 * group.block_tokens;
            request
                .states
                .retain(|&(other, end)| other != position || end > done);
        }
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
        self.begin(job, Kind::Store, numbers, reads)?;
        Ok(Some(blocks))
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
    /// `unstored`. Returns how many are in the pool.
    ///
    /// # Errors
    /// No such job is under way.
    pub fn end_store(&mut self, job: u64, unstored: &[usize]) -> Result<usize> {
        self.on_read(job);
        let store = self.take(job)?;
        let mut stored = 0;
        for (position, &number) in store.numbers.iter().enumerate() {
            self.index.state_mut(number).storing -= 1;
            if !unstored.contains(&position) {
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
