//! A fleet: nodes with caches of their own, a pool that they share, or both. And what a replay found.

use crate::cache::PolicyKind;
use crate::error::{Error, Result};
use crate::node::{EngineSettings, Speed};
use crate::route::Routing;
use crate::trace::Trace;

/// What is simulated. Sizes are in bytes, times in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Fleet {
    /// Engines, each with a cache of its own.
    pub nodes: u32,
    /// What each node's own cache holds.
    pub host_bytes: u64,
    /// What the pool holds; 0 for none.
    pub pool_bytes: u64,
    /// KV of one token, all layers and ranks of a node together.
    pub bytes_per_token: u64,
    /// The policy that evicts from the nodes' own caches.
    pub policy: PolicyKind,
    /// The policy that evicts from the pool.
    pub pool_policy: PolicyKind,
    /// How requests are sent to nodes.
    pub routing: Routing,
    /// Tokens that a node computes a second, before the first token of an answer.
    pub prefill_speed: f64,
    /// The settings of each node's engine.
    pub engine: EngineSettings,
    /// The speed of a node's own cache.
    pub host: Speed,
    /// The speed of the pool.
    pub pool: Speed,
    /// Parts of the trace's duration that are reported one by one.
    pub windows: u32,
}

/// Sums over requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Number of requests.
    pub requests: u64,
    /// Tokens of prompts.
    pub input_tokens: u64,
    /// Blocks of prompts.
    pub blocks: u64,
    /// Blocks loaded from the node's own cache, in a row from the first.
    pub host_blocks: u64,
    /// Blocks loaded from the pool, in a row after those.
    pub pool_blocks: u64,
    /// Tokens of prompts that nodes computed.
    pub computed_tokens: u64,
    /// Bytes that nodes read from the pool, to load them or to measure it.
    pub read_bytes: u64,
    /// Bytes that nodes wrote to the pool.
    pub written_bytes: u64,
    /// Requests for which the pool was read.
    pub pool_readers: u64,
    /// Requests for which the pool was written to.
    pub pool_writers: u64,
}

impl Sums {
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.input_tokens += other.input_tokens;
        self.blocks += other.blocks;
        self.host_blocks += other.host_blocks;
        self.pool_blocks += other.pool_blocks;
        self.computed_tokens += other.computed_tokens;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.pool_readers += other.pool_readers;
        self.pool_writers += other.pool_writers;
    }
}

/// What a replay found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Sums over the whole trace.
    pub total: Sums,
    /// Sums over parts of the trace's duration, all of the same length.
    pub windows: Vec<Sums>,
    /// Seconds to the first token of each request, sorted. They include the look-up if it is waited
    /// for, what is loaded or waited for in vain, and what is computed. They do not include any
    /// queue.
    pub ttft: Vec<f32>,
    /// Requests of the node that had the most of them.
    pub busiest_node: u64,
    /// Blocks in the pool at the end.
    pub pool_blocks_held: u64,
    /// Blocks in all nodes' own caches at the end.
    pub host_blocks_held: u64,
}

/// Which tiers a fleet has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Whether nodes have their own caches.
    pub host: bool,
    /// What the pool holds; 0 for none.
    pub pool_bytes: u64,
}

impl Fleet {
    pub(crate) fn check(&self, trace: &Trace, tiers: &[Tiers]) -> Result<()> {
        let speeds = [
            ("prefill speed", self.prefill_speed),
            ("host bandwidth", self.host.bandwidth),
            ("pool bandwidth", self.pool.bandwidth),
            ("load floor", self.engine.load_floor),
        ];
        for (name, speed) in speeds {
            if !(speed.is_finite() && speed > 0.0) {
                return Err(Error::Config(format!("a {name} of {speed} is none")));
            }
        }
        let times = [
            ("latency", self.host.latency),
            ("latency", self.pool.latency),
            ("look-up timeout", self.engine.lookup_timeout),
            ("load timeout", self.engine.load_timeout),
        ];
        for (name, seconds) in times {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return Err(Error::Config(format!("a {name} of {seconds} s is none")));
            }
        }
        let counts = [
            u64::from(self.nodes),
            u64::from(self.windows),
            self.bytes_per_token,
            self.engine.tokens_per_step,
            self.engine.get_lanes,
        ];
        if counts.contains(&0) {
            let what =
                "nodes, windows, bytes per token, tokens per step and lanes must be at least 1";
            return Err(Error::Config(what.into()));
        }
        let block = self.block_bytes(trace);
        let pools = tiers.iter().map(|tiers| ("pool", tiers.pool_bytes));
        for (name, bytes) in pools.chain([("host", self.host_bytes)]) {
            if bytes > 0 && bytes < block {
                let what = format!("the {name} tier of {bytes} bytes holds no block of {block}");
                return Err(Error::Config(what));
            }
        }
        Ok(())
    }

    /// Bytes of a whole block. A block that the end of a prompt cuts short takes as much room.
    pub(crate) fn block_bytes(&self, trace: &Trace) -> u64 {
        self.bytes_per_token
            .saturating_mul(u64::from(trace.block_tokens))
    }
}
