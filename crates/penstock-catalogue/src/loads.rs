//! Loads and prefetches: how far a request can be loaded, and from where.

use penstock_advisor::Reach;
use penstock_engine::{Block, Parent};

use crate::CatalogueError;
use crate::catalogue::Catalogue;
use crate::error::Result;
use crate::index::{Number, State};
use crate::job::Kind;
use crate::request::{Lookup, Request};

/// What a job moves, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes that host memory has.
    pub host_bytes: u64,
    /// Bytes that come from the pool.
    pub pool_bytes: u64,
    /// Objects on one rank.
    pub objects: u64,
}

impl Catalogue {
    /// Where loads of the tokens from `first` may end, up to `limit`, the nearest first: as far as host
    /// memory has them, and as far as it or the pool does. None of no token.
    ///
    /// What the pool has counts once the request's look-up has been answered.
    ///
    /// # Errors
    /// The request is not known.
    pub fn reaches(&self, id: &str, first: u64, limit: u64) -> Result<Vec<Reach>> {
        let request = self.request(id)?;
        let mut reaches = Vec::with_capacity(2);
        let held = self.end_of(request, first, limit, |state| self.is_held(state));
        if held > first {
            reaches.push(Reach {
                end: held,
                host_bytes: self.bytes(first, held),
                pool_bytes: 0,
            });
        }
        if held < limit && request.lookup == (Lookup::Answered { is_heard: true }) {
            let furthest = self.end_of(request, first, limit, |state| {
                let is_held = self.is_held(state);
                move |group| state.is_loadable() || is_held(group)
            });
            if furthest > held {
                reaches.push(self.reach_to(request, first, furthest));
            }
        }
        Ok(reaches)
    }

    /// Bytes of the blocks of a load.
    fn bytes(&self, first: u64, end: u64) -> u64 {
        let groups = self.groups.iter().zip(&self.holdings);
        groups
            .map(|(group, holding)| group.needed(first, end).len() as u64 * holding.bytes)
            .sum()
    }

    /// What a load of the tokens from `first` to `limit` would move, wherever it comes from.
    ///
    /// # Errors
    /// The request is not known.
    pub fn whole(&self, id: &str, first: u64, limit: u64) -> Result<Reach> {
        Ok(self.reach_to(self.request(id)?, first, limit))
    }

    fn is_held<'a>(&'a self, state: &'a State) -> impl Fn(usize) -> bool + 'a {
        |group| state.is_held_by(self.holdings[group].ranks as i32)
    }

    fn end_of<'a, F: Fn(usize) -> bool>(
        &'a self,
        request: &'a Request,
        first: u64,
        limit: u64,
        has: impl Fn(&'a State) -> F,
    ) -> u64 {
        self.groups.reach(first, limit, |group, block| {
            let number = request.blocks[group].get(block);
            number.is_some_and(|&number| has(self.index.state(number))(group))
        })
    }

    fn reach_to(&self, request: &Request, first: u64, end: u64) -> Reach {
        let moved = self.moved(
            self.needed(request, first, end)
                .map(|(group, _, number)| (group, number)),
        );
        Reach {
            end,
            host_bytes: moved.host_bytes,
            pool_bytes: moved.pool_bytes,
        }
    }

    fn moved(&self, blocks: impl Iterator<Item = (usize, Number)>) -> Moved {
        let mut moved = Moved::default();
        for (group, number) in blocks {
            let holding = &self.holdings[group];
            let is_held = self.index.state(number).is_held_by(holding.ranks as i32);
            *(if is_held {
                &mut moved.host_bytes
            } else {
                &mut moved.pool_bytes
            }) += holding.bytes;
            moved.objects += holding.objects;
        }
        moved
    }

    /// Group, index and number of the blocks of a load, group after group. Of those beyond the request's
    /// hashes nothing is known, and there are none.
    fn needed<'a>(
        &'a self,
        request: &'a Request,
        first: u64,
        end: u64,
    ) -> impl Iterator<Item = (usize, usize, Number)> + 'a {
        let of_group = move |(position, group): (usize, &'a crate::Group)| {
            let numbers = &request.blocks[position];
            let blocks = group.needed(first, end);
            blocks.map_while(move |block| Some((position, block, *numbers.get(block)?)))
        };
        self.groups.iter().enumerate().flat_map(of_group)
    }

    /// Whether a load under way brings the first block that the request needs from the token `first`: once
    /// it has, that is a hit in the engine's own cache.
    ///
    /// # Errors
    /// The request is not known.
    pub fn is_loading(&self, id: &str, first: u64, end: u64) -> Result<bool> {
        let request = self.request(id)?;
        let next = self.needed(request, first, end).next();
        Ok(next.is_some_and(|(_, _, number)| self.index.state(number).loading > 0))
    }

    /// Begins a load of the tokens from `first` to `end`. `table` tells, of a group's position and a
    /// block's index in the request, where the engine wants it.
    ///
    /// # Errors
    /// The request is not known, the job's number is in use, or a block is in no table; nothing has
    /// begun then.
    pub fn begin_load(
        &mut self,
        id: &str,
        job: u64,
        first: u64,
        end: u64,
        table: impl Fn(usize, usize) -> Option<u64>,
    ) -> Result<(Vec<Block>, Moved)> {
        let request = self.request(id)?;
        let needed: Vec<_> = self.needed(request, first, end).collect();
        let blocks = needed.iter().map(|&(group, index, _)| {
            let block = table(group, index).ok_or(CatalogueError::NoBlock { group, index })?;
            Ok(self.block(request, group, index, block))
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let moved = self.moved(needed.iter().map(|&(group, _, number)| (group, number)));
        let numbers = needed.iter().map(|&(_, _, number)| number).collect();
        self.begin(job, Kind::Load, numbers, Vec::new())?;
        Ok((blocks, moved))
    }

    /// The group of the first block of such a load that host memory lacks; none if it lacks nothing.
    ///
    /// # Errors
    /// The request is not known.
    pub fn lacking(&self, id: &str, first: u64, end: u64) -> Result<Option<usize>> {
        let request = self.request(id)?;
        let is_held = |group: usize, number| self.is_held(self.index.state(number))(group);
        let lacks = self
            .needed(request, first, end)
            .find(|&(group, _, number)| !is_held(group, number));
        Ok(lacks.map(|(group, ..)| group))
    }

    /// Begins a prefetch of what a load of the tokens from `first` to `end` needs: of its first `most`
    /// blocks, or of the first `most` that host memory lacks if `lacking`, those which no other prefetch
    /// keeps. None if that is nothing.
    ///
    /// # Errors
    /// The request is not known, or the job's number is in use.
    pub fn begin_prefetch(
        &mut self,
        id: &str,
        job: u64,
        first: u64,
        end: u64,
        most: usize,
        lacking: bool,
    ) -> Result<Option<(Vec<Block>, Moved)>> {
        let request = self.request(id)?;
        let is_held = |group: usize, number| self.is_held(self.index.state(number))(group);
        let needed: Vec<_> = self
            .needed(request, first, end)
            .filter(|&(group, _, number)| !(lacking && is_held(group, number)))
            .take(most)
            .filter(|&(_, _, number)| !self.index.state(number).is_prefetched())
            .collect();
        if needed.is_empty() {
            return Ok(None);
        }
        let block =
            |&(group, index, _): &(usize, usize, Number)| self.block(request, group, index, 0);
        let blocks = needed.iter().map(block).collect();
        let moved = self.moved(needed.iter().map(|&(group, _, number)| (group, number)));
        let numbers = needed.iter().map(|&(_, _, number)| number).collect();
        self.begin(job, Kind::Prefetch, numbers, Vec::new())?;
        Ok(Some((blocks, moved)))
    }

    pub(crate) fn block(&self, request: &Request, group: usize, index: usize, block: u64) -> Block {
        let numbers = &request.blocks[group];
        let chunk = |index: usize| self.index.name(numbers[index]).chunk;
        let tokens = index as u64 * self.groups.at(group).block_tokens;
        Block {
            group: group as u16,
            block,
            chunk: chunk(index),
            parent: index.checked_sub(1).map(|before| Parent {
                chunk: chunk(before),
                tokens,
            }),
        }
    }

    /// Loads under way.
    pub fn loads(&self) -> usize {
        self.loads
    }

    /// Blocks that prefetches keep, or bring.
    pub fn prefetched(&self) -> usize {
        self.prefetched
    }
}
