//! One cache of a simulated fleet: a policy that real stores use, and a bound.

use std::str::FromStr;

use penstock_evict::{Clock, Lru, Policy, Prefix, S3Fifo};
use rustc_hash::FxBuildHasher;

use crate::error::Error;

/// The policies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// Least recently used. The ends of prompts go before their beginnings, as in a pool in a
    /// directory.
    Lru,
    /// Least recently used, as in a store that knows no prompts: block by block, in a prompt's
    /// order.
    LruByBlock,
    /// Nearly least recently used, in the same way as the pool in shared memory.
    Clock,
    /// S3-FIFO.
    S3Fifo,
    /// Penstock's policy for prefixes.
    Prefix,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Lru,
        Self::LruByBlock,
        Self::Clock,
        Self::S3Fifo,
        Self::Prefix,
    ];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::LruByBlock => "lru-by-block",
            Self::Clock => "clock",
            Self::S3Fifo => "s3fifo",
            Self::Prefix => "prefix",
        }
    }

    /// Whether this stands for a store that knows no prompts.
    const fn is_told_by_block(self) -> bool {
        matches!(self, Self::LruByBlock)
    }

    fn make(self, capacity: u64) -> Box<dyn Policy<u32>> {
        match self {
            Self::Lru | Self::LruByBlock => Box::new(Lru::<u32, FxBuildHasher>::default()),
            Self::Clock => Box::new(Clock::<u32, FxBuildHasher>::new(capacity)),
            Self::S3Fifo => Box::new(S3Fifo::<u32, FxBuildHasher>::default()),
            Self::Prefix => Box::new(Prefix::<u32, FxBuildHasher>::default()),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("the policy {text:?} is none of {known}"))
        })
    }
}

/// A bounded cache of blocks that all have weight one.
pub(crate) struct Cache {
    policy: Box<dyn Policy<u32>>,
    capacity: u64,
    by_block: bool,
    chain: Vec<(u32, u64)>,
}

impl Cache {
    pub(crate) fn new(kind: PolicyKind, capacity: u64) -> Self {
        Self {
            policy: kind.make(capacity),
            capacity,
            by_block: kind.is_told_by_block(),
            chain: Vec::new(),
        }
    }

    /// How many blocks are held in a row, from the first.
    pub(crate) fn find(&self, blocks: &[u32]) -> usize {
        let held = blocks
            .iter()
            .take_while(|block| self.policy.contains(block));
        held.count()
    }

    /// Uses a prompt's blocks. Absent blocks are taken in, as far as the policy lets them stay.
    /// Returns how many came in and stayed. `found` blocks were held in a row from the first.
    pub(crate) fn use_blocks(&mut self, blocks: &[u32], found: usize) -> u64 {
        let absent = |block: &&u32| !self.policy.contains(block);
        let new: Vec<u32> = blocks[found..].iter().filter(absent).copied().collect();
        if self.by_block {
            for &block in blocks {
                self.policy.insert(block, 1);
                self.keep_to_capacity();
            }
        } else {
            self.chain.clear();
            self.chain.extend(blocks.iter().map(|&block| (block, 1)));
            self.policy.use_chain(None, &self.chain);
            self.keep_to_capacity();
        }
        let stayed = new.iter().filter(|block| self.policy.contains(block));
        stayed.count() as u64
    }

    fn keep_to_capacity(&mut self) {
        while self.policy.weight() > self.capacity {
            if self.policy.evict().is_none() {
                break;
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.policy.len()
    }
}
