//! The uses that are remembered, one for each prompt. The blocks of a prompt grow old together.

use std::collections::VecDeque;

use super::age::{self, BUCKETS};
use super::worth::CLASSES;
use crate::queue::Queue;

/// One use of a prompt's blocks.
pub(super) struct Chain {
    /// The clock at the time of the use.
    pub(super) used_at: u64,
    /// The age bucket of the use.
    pub(super) bucket: usize,
    /// How much each of its blocks counts.
    pub(super) share: f32,
    /// Blocks of the chain that no later chain has used: how many of each class.
    pub(super) members: [u32; CLASSES],
    /// The candidates among them.
    pub(super) candidates: Queue,
}

impl Chain {
    fn is_empty(&self) -> bool {
        self.members.iter().all(|&count| count == 0)
    }
}

/// Chains by number, from the oldest that has members.
pub(super) struct Chains {
    chains: VecDeque<Chain>,
    first: u64,
    /// For every bucket but the last, the first chain that is not older than the bucket.
    bounds: [u64; BUCKETS - 1],
    /// How many chains have members.
    live: usize,
}

impl Chains {
    pub(super) fn new() -> Self {
        Self {
            chains: VecDeque::new(),
            first: 1,
            bounds: [1; BUCKETS - 1],
            live: 0,
        }
    }

    fn end(&self) -> u64 {
        self.first + self.chains.len() as u64
    }

    /// Starts the next chain; returns its number, which is not 0.
    pub(super) fn begin(&mut self, clock: u64, share: f32) -> u64 {
        while self.chains.front().is_some_and(Chain::is_empty) {
            self.chains.pop_front();
            self.first += 1;
        }
        for bound in &mut self.bounds {
            *bound = self.first.max(*bound);
        }
        self.chains.push_back(Chain {
            used_at: clock,
            bucket: 0,
            share,
            members: [0; CLASSES],
            candidates: Queue::new(),
        });
        self.end() - 1
    }

    pub(super) fn get(&self, number: u64) -> &Chain {
        &self.chains[(number - self.first) as usize]
    }

    pub(super) fn get_mut(&mut self, number: u64) -> &mut Chain {
        &mut self.chains[(number - self.first) as usize]
    }

    /// Makes a block of this class a member of the chain.
    pub(super) fn join(&mut self, number: u64, class: usize) {
        let chain = self.get_mut(number);
        let was_empty = chain.is_empty();
        chain.members[class] += 1;
        self.live += usize::from(was_empty);
    }

    /// Notes that a block of this class is no longer a member of the chain.
    pub(super) fn part(&mut self, number: u64, class: usize) {
        let chain = self.get_mut(number);
        chain.members[class] -= 1;
        let is_empty = chain.members[class] == 0 && chain.is_empty();
        self.live -= usize::from(is_empty);
    }

    /// If the oldest chain in this bucket has left it, moves that chain on to the next bucket and
    /// returns its number.
    pub(super) fn grow_older(&mut self, bucket: usize, clock: u64) -> Option<u64> {
        let number = self.bounds[bucket];
        let end = match bucket {
            0 => self.end(),
            _ => self.bounds[bucket - 1],
        };
        if number == end {
            return None;
        }
        let chain = self.get_mut(number);
        if clock - chain.used_at < age::start(bucket + 1) {
            return None;
        }
        chain.bucket = bucket + 1;
        self.bounds[bucket] += 1;
        Some(number)
    }

    /// Whether most chains that are kept have no members. `known` is the number of blocks that are
    /// known.
    pub(super) fn is_sparse(&self, known: usize) -> bool {
        self.chains.len() > 2 * self.live + known / 8 + 1024
    }

    /// Drops the chains without members. The others are numbered anew, in the same order, starting
    /// with the number that is returned.
    pub(super) fn squeeze(&mut self) -> u64 {
        let mut bounds = self.bounds;
        let chains = std::mem::take(&mut self.chains);
        for (number, chain) in (self.first..).zip(chains) {
            if chain.is_empty() {
                for (bound, before) in bounds.iter_mut().zip(&self.bounds) {
                    *bound -= u64::from(*before > number);
                }
            } else {
                self.chains.push_back(chain);
            }
        }
        self.bounds = bounds;
        self.first
    }
}
