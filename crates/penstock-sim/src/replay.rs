//! A fleet under a trace: nodes with caches of their own, a pool that they share, or both.

use crate::cache::{Cache, PolicyKind};
use crate::error::{Error, Result};
use crate::node::{EngineSettings, Machine, Node, Prompt, Speed};
use crate::route::{Router, Routing};
use crate::trace::{Request, Trace};

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
    /// Requests.
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
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.input_tokens += other.input_tokens;
        self.blocks += other.blocks;
        self.host_blocks += other.host_blocks;
        self.pool_blocks += other.pool_blocks;
        self.computed_tokens += other.computed_tokens;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
    }
}

/// What a replay found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Over the whole trace.
    pub total: Sums,
    /// Over parts of its duration, all of the same length.
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

/// Requests between two calls of a replay's `progress`.
const PROGRESS_EVERY: usize = 64;

impl Fleet {
    fn check(&self, trace: &Trace) -> Result<()> {
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
        for (name, bytes) in [("host", self.host_bytes), ("pool", self.pool_bytes)] {
            if bytes > 0 && bytes < block {
                let what = format!("the {name} tier of {bytes} bytes holds no block of {block}");
                return Err(Error::Config(what));
            }
        }
        Ok(())
    }

    /// Bytes of a whole block. A block that the end of a prompt cuts short takes as much room.
    fn block_bytes(&self, trace: &Trace) -> u64 {
        self.bytes_per_token
            .saturating_mul(u64::from(trace.block_tokens))
    }

    /// Replays a trace. Tells `progress` how many requests are done. If `progress` returns false,
    /// the replay stops, and there is no outcome.
    ///
    /// # Errors
    /// The fleet makes no sense.
    pub fn replay(
        &self,
        trace: &Trace,
        mut progress: impl FnMut(usize) -> bool,
    ) -> Result<Option<Outcome>> {
        self.check(trace)?;
        let mut replay = Replay::new(self, trace);
        for (number, request) in trace.requests().iter().enumerate() {
            if number % PROGRESS_EVERY == 0 && !progress(number) {
                return Ok(None);
            }
            replay.step(number, request);
        }
        progress(trace.requests().len());
        Ok(Some(replay.outcome()))
    }
}

struct Replay<'a> {
    fleet: &'a Fleet,
    trace: &'a Trace,
    block_bytes: u64,
    router: Router,
    nodes: Vec<Node>,
    hosts: Vec<Cache>,
    pool: Option<Cache>,
    by_node: Vec<u64>,
    windows: Vec<Sums>,
    ttft: Vec<f32>,
}

impl<'a> Replay<'a> {
    fn new(fleet: &'a Fleet, trace: &'a Trace) -> Self {
        let block_bytes = fleet.block_bytes(trace);
        let machine = Machine {
            block_bytes,
            block_tokens: u64::from(trace.block_tokens),
            prefill_speed: fleet.prefill_speed,
            host: fleet.host,
            pool: (fleet.pool_bytes > 0).then_some(fleet.pool),
        };
        let hosts = if fleet.host_bytes > 0 { fleet.nodes } else { 0 };
        let host = || Cache::new(fleet.policy, fleet.host_bytes / block_bytes);
        let pool = || Cache::new(fleet.pool_policy, fleet.pool_bytes / block_bytes);
        Self {
            fleet,
            trace,
            block_bytes,
            router: Router::new(fleet.routing, fleet.nodes, trace.unique_blocks()),
            nodes: (0..fleet.nodes)
                .map(|_| Node::new(machine, fleet.engine))
                .collect(),
            hosts: (0..hosts).map(|_| host()).collect(),
            pool: (fleet.pool_bytes > 0).then(pool),
            by_node: vec![0; fleet.nodes as usize],
            windows: vec![Sums::default(); fleet.windows as usize],
            ttft: Vec::with_capacity(trace.requests().len()),
        }
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "estimates of time"
    )]
    fn step(&mut self, number: usize, request: &Request) {
        let fleet = self.fleet;
        let blocks = self.trace.blocks(request);
        let node = self.router.route(number as u64, request, blocks) as usize;
        self.by_node[node] += 1;

        let host = self.hosts.get(node).map_or(0, |cache| cache.find(blocks));
        let pool = self.pool.as_ref().map(|cache| cache.find(blocks));
        let prompt = Prompt {
            tokens: u64::from(request.input_tokens),
            blocks: blocks.len() as u64,
            in_host: host as u64,
            in_pool: pool.unwrap_or(0) as u64,
        };
        let served = self.nodes[node].serve(request.at as f64 / 1e6, &prompt);
        self.ttft.push(served.seconds as f32);

        let mut written = 0;
        if let Some(cache) = self.hosts.get_mut(node) {
            cache.use_blocks(blocks, host);
        }
        if let Some(cache) = &mut self.pool {
            written = cache.use_blocks(blocks, pool.unwrap_or(0));
        }
        let duration = u128::from(self.trace.duration()) + 1;
        let window = u128::from(request.at) * u128::from(fleet.windows) / duration;
        self.windows[window as usize].add(&Sums {
            requests: 1,
            input_tokens: prompt.tokens,
            blocks: prompt.blocks,
            host_blocks: served.host_blocks,
            pool_blocks: served.pool_blocks,
            computed_tokens: served.computed_tokens,
            read_bytes: served.read_blocks * self.block_bytes,
            written_bytes: written * self.block_bytes,
        });
    }

    fn outcome(mut self) -> Outcome {
        let mut total = Sums::default();
        for window in &self.windows {
            total.add(window);
        }
        self.ttft.sort_by(f32::total_cmp);
        Outcome {
            total,
            windows: self.windows,
            ttft: self.ttft,
            busiest_node: self.by_node.iter().copied().max().unwrap_or(0),
            pool_blocks_held: self.pool.map_or(0, |cache| cache.len() as u64),
            host_blocks_held: self.hosts.iter().map(|cache| cache.len() as u64).sum(),
        }
    }
}

/// Hits of one cache of `capacity` blocks under a whole trace: blocks found in a row from the
/// first.
///
/// ```
/// use std::path::Path;
///
/// use penstock_sim::{PolicyKind, ReadOptions, hits, parse};
///
/// let lines = r#"{"timestamp": 0, "hash_ids": [1, 2], "input_length": 1024, "output_length": 9}
/// {"timestamp": 5, "hash_ids": [1, 2, 3], "input_length": 1536, "output_length": 9}"#;
/// let read = parse(lines.as_bytes(), Path::new("two turns"), &ReadOptions::default())?;
/// assert_eq!(hits(&read.trace, PolicyKind::Lru, 10), 2);
/// assert_eq!(hits(&read.trace, PolicyKind::Lru, 1), 1);
/// # Ok::<(), penstock_sim::Error>(())
/// ```
pub fn hits(trace: &Trace, policy: PolicyKind, capacity: u64) -> u64 {
    let mut cache = Cache::new(policy, capacity);
    let mut hits = 0;
    for request in trace.requests() {
        let blocks = trace.blocks(request);
        let found = cache.find(blocks);
        cache.use_blocks(blocks, found);
        hits += found as u64;
    }
    hits
}
