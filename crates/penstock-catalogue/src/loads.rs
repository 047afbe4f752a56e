//! Loads and prefetches: how far a request can be loaded, and from where.

use std::ops::Range;

use penstock_advisor::Reach;
use penstock_contract::{Block, Parent};

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
    /// Where loads of the tokens from `first` may end, up to `limit`, the nearest end first. There
    /// are up to two ends: how far host memory alone reaches, and how far host memory and the pool
    /// reach together. An end that loads no token is left out.
    ///
    /// What the pool has counts only after the request's look-up was answered.
    ///
    /// # Errors
    /// The request is not known.
    pub fn reaches(&self, id: &str, first: u64, limit: u64) -> Result<Vec<Reach>> {
        let request = self.request(id)?;
        let mut reaches = Vec::with_capacity(2);
        let held = self.end_of(request, first, limit, |_| false);
        if held > first {
            reaches.push(Reach {
                end: held,
                host_bytes: self.bytes(first, held),
                pool_bytes: 0,
            });
        }
        if held < limit && request.lookup == (Lookup::Answered { is_heard: true }) {
            let furthest = self.end_of(request, first, limit, State::is_loadable);
            if furthest > held {
                reaches.push(self.reach_to(request, first, furthest));
            }
        }
        Ok(reaches)
    }

    /// The bytes of all blocks of a load.
    fn bytes(&self, first: u64, end: u64) -> u64 {
        let groups = self.groups.iter().zip(&self.holdings);
        groups
            .map(|(group, holding)| group.needed(first, end).len() as u64 * holding.bytes)
            .sum()
    }

    /// What a load of all tokens from `first` to `limit` would move. Blocks that host memory does
    /// not have count as the pool's.
    ///
    /// # Errors
    /// The request is not known.
    pub fn whole(&self, id: &str, first: u64, limit: u64) -> Result<Reach> {
        Ok(self.reach_to(self.request(id)?, first, limit))
    }

    /// Whether host memory has a group's block, on all ranks that hold a part of it.
    fn is_held(&self, group: usize, number: Number) -> bool {
        let ranks = self.holdings[group].ranks as i32;
        self.index.state(number).is_held_by(ranks)
    }

    /// The end of the longest run of blocks that host memory has, or for which `is_had` is true.
    fn end_of(
        &self,
        request: &Request,
        first: u64,
        limit: u64,
        is_had: impl Fn(&State) -> bool,
    ) -> u64 {
        self.groups.reach(first, limit, |group, blocks| {
            let numbers = self.numbers(request, group, &blocks);
            let ranks = self.holdings[group].ranks as i32;
            let is_missing = |&number: &Number| {
                let state = self.index.state(number);
                !state.is_held_by(ranks) && !is_had(state)
            };
            let had = numbers.iter().position(is_missing);
            let next = blocks.start + had.unwrap_or(numbers.len());
            (next < blocks.end).then_some(next)
        })
    }

    /// The numbers of a group's blocks in a range, as far as the request's hashes go.
    fn numbers<'a>(
        &self,
        request: &'a Request,
        group: usize,
        blocks: &Range<usize>,
    ) -> &'a [Number] {
        let numbers = &request.blocks[group];
        let end = blocks.end.min(numbers.len());
        numbers.get(blocks.start..end).unwrap_or(&[])
    }

    fn reach_to(&self, request: &Request, first: u64, end: u64) -> Reach {
        let (mut host_bytes, mut pool_bytes) = (0, 0);
        for (position, group) in self.groups.iter().enumerate() {
            let numbers = self.numbers(request, position, &group.needed(first, end));
            let is_held = |&&number: &&Number| self.is_held(position, number);
            let held = numbers.iter().filter(is_held).count() as u64;
            let bytes = self.holdings[position].bytes;
            host_bytes += held * bytes;
            pool_bytes += (numbers.len() as u64 - held) * bytes;
        }
        Reach {
            end,
            host_bytes,
            pool_bytes,
        }
    }

    fn moved(&self, blocks: impl Iterator<Item = (usize, Number)>) -> Moved {
        let mut moved = Moved::default();
        for (group, number) in blocks {
            let holding = &self.holdings[group];
            *(if self.is_held(group, number) {
                &mut moved.host_bytes
            } else {
                &mut moved.pool_bytes
            }) += holding.bytes;
            moved.objects += holding.objects;
        }
        moved
    }

    /// The group, index and number of each block of a load, one group after the other. Nothing is
    /// known about blocks beyond the request's hashes, so these are left out.
    pub(crate) fn needed<'a>(
        &'a self,
        request: &'a Request,
        first: u64,
        end: u64,
    ) -> impl Iterator<Item = (usize, usize, Number)> + 'a {
        let of_group = move |(position, group): (usize, &'a crate::Group)| {
            let blocks = group.needed(first, end);
            let numbers = self.numbers(request, position, &blocks);
            let counted = numbers.iter().zip(blocks.start..);
            counted.map(move |(&number, block)| (position, block, number))
        };
        self.groups.iter().enumerate().flat_map(of_group)
    }

    /// Whether a load under way brings the first block that the request needs from the token
    /// `first`. When that load is over, the block is a hit in the engine's own cache.
    ///
    /// # Errors
    /// The request is not known.
    pub fn is_loading(&self, id: &str, first: u64, end: u64) -> Result<bool> {
        let request = self.request(id)?;
        let next = self.needed(request, first, end).next();
        Ok(next.is_some_and(|(_, _, number)| {
            let number = self.index.listed_as(number);
            self.index.state(number).loading > 0
        }))
    }

    /// Begins a load of the tokens from `first` to `end`. `table` gives the engine's block for a
    /// group's position and a block's index in the request.
    ///
    /// # Errors
    /// The request is not known, the job's number is in use, or a block is in no table. Nothing has
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
        let mut needed: Vec<_> = self.needed(request, first, end).collect();
        let blocks = needed.iter().map(|&(group, index, _)| {
            let block = table(group, index).ok_or(CatalogueError::NoBlock { group, index })?;
            Ok(self.block(request, group, index, block))
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        self.join(id, &mut needed)?;
        let moved = self.moved(needed.iter().map(|&(group, _, number)| (group, number)));
        let numbers = needed.iter().map(|&(_, _, number)| number).collect();
        self.begin(job, Kind::Load, numbers, Vec::new(), 0)?;
        Ok((blocks, moved))
    }

    /// The group of the first block of such a load that host memory does not have. None if host
    /// memory has all of them.
    ///
    /// # Errors
    /// The request is not known.
    pub fn lacking(&self, id: &str, first: u64, end: u64) -> Result<Option<usize>> {
        let request = self.request(id)?;
        let lacks = self
            .needed(request, first, end)
            .find(|&(group, _, number)| !self.is_held(group, number));
        Ok(lacks.map(|(group, ..)| group))
    }

    /// Begins a prefetch of blocks that a load of the tokens from `first` to `end` needs. It
    /// considers the first `most` of these blocks; if `lacking`, the first `most` that host memory
    /// does not have. Blocks that another prefetch keeps are left out. None if no block is left.
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
        let mut needed: Vec<_> = self
            .needed(request, first, end)
            .filter(|&(group, _, number)| !(lacking && self.is_held(group, number)))
            .take(most)
            .collect();
        self.join(id, &mut needed)?;
        needed.retain(|&(_, _, number)| !self.index.state(number).is_prefetched());
        if needed.is_empty() {
            return Ok(None);
        }
        let request = self.request(id)?;
        let block =
            |&(group, index, _): &(usize, usize, Number)| self.block(request, group, index, 0);
        let blocks = needed.iter().map(block).collect();
        let moved = self.moved(needed.iter().map(|&(group, _, number)| (group, number)));
        let numbers = needed.iter().map(|&(_, _, number)| number).collect();
        self.begin(job, Kind::Prefetch, numbers, Vec::new(), 0)?;
        Ok(Some((blocks, moved)))
    }

    pub(crate) fn block(&self, request: &Request, group: usize, index: usize, id: u64) -> Block {
        let numbers = &request.blocks[group];
        let chunk = |index: usize| self.index.name(numbers[index]).chunk;
        let tokens = index as u64 * self.groups.at(group).block_tokens;
        Block {
            group: group as u16,
            id,
            chunk: chunk(index),
            parent: index.checked_sub(1).map(|before| Parent {
                chunk: chunk(before),
                tokens,
            }),
        }
    }

    /// The number of loads under way.
    pub fn loads(&self) -> usize {
        self.loads
    }

    /// The number of blocks that prefetches keep or bring.
    pub fn prefetched(&self) -> usize {
        self.prefetched
    }
}
