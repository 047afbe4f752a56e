//! One cache of a simulated fleet: a policy that real stores use, and a bound.

use std::str::FromStr;

use penstock_evict::{Chooser, Clock, Lru, Policy, Prefix, S3Fifo};
use rustc_hash::FxBuildHasher;

use crate::error::Error;
use crate::trace::Run;

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
    /// Whichever of LRU, S3-FIFO and the policy for prefixes would have found the most.
    Chooser,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 6] = [
        Self::Lru,
        Self::LruByBlock,
        Self::Clock,
        Self::S3Fifo,
        Self::Prefix,
        Self::Chooser,
    ];

    /// The policy's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::LruByBlock => "lru-by-block",
            Self::Clock => "clock",
            Self::S3Fifo => "s3fifo",
            Self::Prefix => "prefix",
            Self::Chooser => "chooser",
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
    held: Held,
    capacity: u64,
}

/// What is held, and how the policy is told of it.
enum Held {
    /// By run, the weight being the number of its first blocks that are held. A run's blocks are
    /// used together, so they lie side by side in the order of use, and the last of them goes
    /// first: this gives what noting every block gives.
    Runs(Lru<u32, FxBuildHasher>),
    /// By block, a prompt at a time.
    Prompts(Box<dyn Policy<u32>>),
    /// By block, one after the other.
    Blocks(Box<dyn Policy<u32>>),
}

impl Cache {
    pub(crate) fn new(kind: PolicyKind, capacity: u64) -> Self {
        let held = match kind {
            PolicyKind::Lru => Held::Runs(Lru::default()),
            PolicyKind::LruByBlock => Held::Blocks(Box::new(Lru::<u32, FxBuildHasher>::default())),
            PolicyKind::Clock => {
                Held::Prompts(Box::new(Clock::<u32, FxBuildHasher>::new(capacity)))
            }
            PolicyKind::S3Fifo => Held::Prompts(Box::new(S3Fifo::<u32, FxBuildHasher>::default())),
            PolicyKind::Prefix => Held::Prompts(Box::new(Prefix::<u32, FxBuildHasher>::default())),
            PolicyKind::Chooser => {
                Held::Prompts(Box::new(Chooser::<u32, FxBuildHasher>::default()))
            }
        };
        Self { held, capacity }
    }

    /// Uses a prompt. Absent blocks are taken in, as far as the policy lets them stay. `scratch` is
    /// room to work in.
    pub(crate) fn use_prompt(&mut self, prompt: &[Run], scratch: &mut Scratch) -> Found {
        match &mut self.held {
            Held::Runs(lru) => use_runs(lru, self.capacity, prompt, scratch),
            Held::Prompts(policy) => scratch.around(policy.as_mut(), prompt, |policy, chain| {
                policy.use_chain(None, chain);
                keep_to(self.capacity, policy);
            }),
            Held::Blocks(policy) => scratch.around(policy.as_mut(), prompt, |policy, chain| {
                for &(block, weight) in chain {
                    policy.insert(block, weight);
                    keep_to(self.capacity, policy);
                }
            }),
        }
    }

    /// Blocks held.
    pub(crate) fn len(&self) -> u64 {
        match &self.held {
            Held::Runs(lru) => lru.weight(),
            Held::Prompts(policy) | Held::Blocks(policy) => policy.len() as u64,
        }
    }
}

/// What a cache had of a prompt before the prompt was used, and what it took in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    /// Blocks held in a row, from the first.
    pub(crate) blocks: u32,
    /// Blocks that came in and stayed.
    pub(crate) written: u32,
}

/// Room for one prompt's blocks.
#[derive(Default)]
pub(crate) struct Scratch {
    chain: Vec<(u32, u64)>,
    absent: Vec<u32>,
    before: Vec<u32>,
}

impl Scratch {
    /// What a policy that is told of every block had before, and took in by, `using` the prompt.
    fn around(
        &mut self,
        policy: &mut dyn Policy<u32>,
        prompt: &[Run],
        using: impl FnOnce(&mut dyn Policy<u32>, &[(u32, u64)]),
    ) -> Found {
        self.chain.clear();
        let blocks = prompt.iter().flat_map(|run| run.blocks());
        self.chain.extend(blocks.map(|block| (block, 1)));
        let held = |(block, _): &&(u32, u64)| policy.contains(block);
        let blocks = self.chain.iter().take_while(held).count();
        self.absent.clear();
        let absent = self.chain[blocks..].iter().filter(|each| !held(each));
        self.absent.extend(absent.map(|&(block, _)| block));
        using(policy, &self.chain);
        let stayed = self.absent.iter().filter(|block| policy.contains(block));
        Found {
            blocks: blocks as u32,
            written: stayed.count() as u32,
        }
    }
}

fn keep_to(capacity: u64, policy: &mut dyn Policy<u32>) {
    while policy.weight() > capacity {
        if policy.evict().is_none() {
            break;
        }
    }
}

fn use_runs(
    lru: &mut Lru<u32, FxBuildHasher>,
    capacity: u64,
    prompt: &[Run],
    scratch: &mut Scratch,
) -> Found {
    let mut found = Found::default();
    let mut is_in_row = true;
    scratch.before.clear();
    for run in prompt.iter().rev() {
        let before = lru.insert(run.name, u64::from(run.len)).unwrap_or(0) as u32;
        scratch.before.push(before);
    }
    for (run, &before) in prompt.iter().zip(scratch.before.iter().rev()) {
        if is_in_row {
            found.blocks += before;
        }
        is_in_row &= before == run.len;
        found.written += run.len - before;
    }
    if lru.weight() > capacity {
        lru.shrink_to(capacity);
        // A prompt that is larger than the cache pushes out its own end.
        for (run, &before) in prompt.iter().zip(scratch.before.iter().rev()) {
            let after = lru.weight_of(&run.name).unwrap_or(0) as u32;
            found.written -= run.len - after.max(before);
        }
    }
    found
}
