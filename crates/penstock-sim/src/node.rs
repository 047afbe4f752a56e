//! A node of a fleet: an engine with a given speed. It computes and loads as its advisor says.
//!
//! The node asks and tells its advisor what the scheduler half asks and tells its own, in the same
//! order.

use penstock_advisor::{Advisor, Choice, LoadPolicy, Reach, Transfer, attended};

/// How fast a tier gives what it holds.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// Bytes a second, to one node.
    pub bandwidth: f64,
    /// Seconds before the first byte.
    pub latency: f64,
}

/// An engine's settings, as far as loads depend on them. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// Whether to load what can be loaded.
    pub load_policy: LoadPolicy,
    /// Tokens that a step computes at most.
    pub tokens_per_step: u64,
    /// Objects of a load that are fetched at a time.
    pub get_lanes: u64,
    /// Time after which a look-up has found nothing.
    pub lookup_timeout: f64,
    /// Time that a load may take at least. `load_floor` adds time by size.
    pub load_timeout: f64,
    /// Bytes a second below which a load is given up.
    pub load_floor: f64,
}

/// How fast a node is, and where it holds its blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) block_bytes: u64,
    pub(crate) block_tokens: u64,
    pub(crate) prefill_speed: f64,
    pub(crate) host: Speed,
    /// The pool's speed; `None` if there is no pool.
    pub(crate) pool: Option<Speed>,
}

/// A request's prompt, and how many of its blocks each tier holds, in a row from the first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: u64,
    pub(crate) blocks: u64,
    pub(crate) in_host: u64,
    pub(crate) in_pool: u64,
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    /// Seconds from when the node turned to the request until its first token.
    pub(crate) seconds: f64,
    pub(crate) host_blocks: u64,
    pub(crate) pool_blocks: u64,
    pub(crate) computed_tokens: u64,
    /// Blocks that came from the pool, probes included.
    pub(crate) read_blocks: u64,
}

/// Blocks on their way. The host's come before the pool's.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    host: u64,
    pool: u64,
}

impl Blocks {
    fn count(self) -> u64 {
        self.host + self.pool
    }
}

/// How long blocks took, and how many of them came.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    seconds: f64,
    blocks: u64,
}

/// What became of a load.
#[derive(Clone, Copy, Debug, Default)]
struct Loaded {
    blocks: u64,
    /// Whether less was loaded than could have been.
    is_declined: bool,
}

/// A measurement of the pool that is under way.
#[derive(Clone, Copy, Debug)]
struct Probe {
    number: u64,
    ends: f64,
    seconds: f64,
    missing_bytes: u64,
}

pub(crate) struct Node {
    machine: Machine,
    settings: EngineSettings,
    advisor: Advisor,
    /// Seconds from the trace's beginning. One request is served after the other.
    now: f64,
    /// When the pool has sent all that it was asked for.
    pool_free: f64,
    /// What the last look-up took. Infinite if it failed.
    lookup: Option<f64>,
    probe: Option<Probe>,
    /// The number of the last step, load or probe.
    number: u64,
}

impl Node {
    pub(crate) fn new(machine: Machine, settings: EngineSettings) -> Self {
        Self {
            machine,
            settings,
            advisor: Advisor::new(settings.tokens_per_step, settings.get_lanes),
            now: 0.0,
            pool_free: 0.0,
            lookup: None,
            probe: None,
            number: 0,
        }
    }

    /// Serves a request that comes at `at`. The request waits until the node is done with the one
    /// before. This wait is not counted.
    pub(crate) fn serve(&mut self, at: f64, prompt: &Prompt) -> Served {
        self.pass(self.now.max(at));
        let begun = self.now;
        let mut served = Served::default();

        let (found, late_answer) = self.look_up(prompt);
        let loaded = self.load(prompt, found, &mut served);
        let mut unawaited = late_answer.filter(|_| !loaded.is_declined);
        let mut first = self.end(prompt, loaded.blocks);
        served.computed_tokens = prompt.tokens - first;
        while first < prompt.tokens {
            if unawaited
                .take_if(|answered| *answered <= self.now)
                .is_some()
            {
                self.decline(self.now, prompt, 0, prompt.in_pool, &mut served);
            }
            first = self.compute(prompt, first);
        }
        served.seconds = self.now - begun;
        if let Some(answered) = unawaited {
            self.decline(answered, prompt, 0, prompt.in_pool, &mut served);
        }
        served
    }

    /// The token up to which so many blocks reach. Whatever is found, the engine computes a
    /// prompt's last token itself.
    fn end(&self, prompt: &Prompt, blocks: u64) -> u64 {
        let most = prompt.tokens.saturating_sub(1);
        blocks.saturating_mul(self.machine.block_tokens).min(most)
    }

    /// A load of the blocks from number `from` to number `to`, in the form that the advisor takes.
    fn reach(&self, prompt: &Prompt, from: u64, to: u64) -> Reach {
        let host = prompt.in_host.clamp(from, to);
        // A prompt may be larger than any tier.
        let bytes = |blocks: u64| blocks.saturating_mul(self.machine.block_bytes);
        Reach {
            end: self.end(prompt, to),
            host_bytes: bytes(host - from),
            pool_bytes: bytes(to - host),
        }
    }

    /// Moves time on to `now`, and tells the advisor what ended until then.
    fn pass(&mut self, now: f64) {
        self.now = now;
        if let Some(probe) = self.probe.take_if(|probe| probe.ends <= now) {
            self.advisor
                .on_end(probe.number, probe.seconds, probe.missing_bytes);
        }
    }

    fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    /// How many blocks are known to be there for loading. Also says when the pool's answer comes,
    /// if nobody waits for it.
    fn look_up(&mut self, prompt: &Prompt) -> (u64, Option<f64>) {
        let Some(pool) = self.machine.pool else {
            return (prompt.in_host, None);
        };
        let all = self.reach(prompt, 0, prompt.blocks);
        if self.end(prompt, prompt.in_host) == all.end {
            return (prompt.in_host, None);
        }
        let (tokens, policy) = (prompt.tokens, self.settings.load_policy);
        let is_awaited = self
            .advisor
            .awaits_lookup(0, &all, tokens, self.lookup, policy);
        let is_answered = pool.latency <= self.settings.lookup_timeout;
        let answered = self.now + pool.latency.min(self.settings.lookup_timeout);
        self.lookup = Some(if is_answered {
            pool.latency
        } else {
            f64::INFINITY
        });
        match (is_awaited, is_answered) {
            (false, _) => (prompt.in_host, is_answered.then_some(answered)),
            (true, is_answered) => {
                self.pass(answered);
                let found = if is_answered { prompt.in_pool } else { 0 };
                (found.max(prompt.in_host), None)
            }
        }
    }

    /// Loads as many of the `found` blocks as the advisor says.
    fn load(&mut self, prompt: &Prompt, found: u64, served: &mut Served) -> Loaded {
        let (mut reaches, mut counts, mut tiers) = ([Reach::default(); 2], [0; 2], 0);
        for blocks in [prompt.in_host, found] {
            let reach = self.reach(prompt, 0, blocks);
            if reach.end > reaches[..tiers].last().map_or(0, |last| last.end) {
                (reaches[tiers], counts[tiers]) = (reach, blocks);
                tiers += 1;
            }
        }
        let reaches = &reaches[..tiers];
        let Some(furthest) = reaches.last() else {
            return Loaded::default();
        };
        let policy = self.settings.load_policy;
        let choice = self.advisor.advise(0, reaches, prompt.tokens, policy, true);
        let chosen = reaches.iter().position(|reach| reach.end == choice.end);
        let blocks = chosen.map_or(0, |tier| counts[tier]);
        let is_declined = choice.end < furthest.end;
        if is_declined {
            self.decline(self.now, prompt, blocks, found, served);
        }
        let host = prompt.in_host.min(blocks);
        let wanted = Blocks {
            host,
            pool: blocks - host,
        };
        let there = if blocks > 0 {
            self.fetch(&choice, wanted)
        } else {
            0
        };
        served.host_blocks = there.min(host);
        served.pool_blocks = there - served.host_blocks;
        served.read_blocks += served.pool_blocks;
        Loaded {
            blocks: there,
            is_declined,
        }
    }

    /// Fetches the blocks of a load, and returns how many come. The load is given up if they come
    /// too late.
    fn fetch(&mut self, choice: &Choice, blocks: Blocks) -> u64 {
        let size = self.machine.block_bytes;
        let (host_bytes, pool_bytes) = (blocks.host * size, blocks.pool * size);
        let count = blocks.count();
        let patience = self.advisor.patience(choice, host_bytes, pool_bytes, count);
        let number = self.next_number();
        let load = Transfer {
            host_bytes,
            pool_bytes,
            patience,
            is_probe: false,
        };
        self.advisor.on_begin(self.now, number, load);
        let pace = patience.and(choice.recompute).unwrap_or_default();
        let arrival = self.arrival(self.now, blocks, patience, pace);
        let missing = (count - arrival.blocks) * size;
        self.pass(self.now + arrival.seconds);
        self.advisor.on_end(number, arrival.seconds, missing);
        arrival.blocks
    }

    /// When the blocks come, one after the other, if they are asked for at `now`. Blocks count
    /// until a deadline, which moves by `pace` with what has come.
    #[expect(clippy::cast_precision_loss, reason = "estimates of time")]
    fn arrival(&mut self, now: f64, blocks: Blocks, patience: Option<f64>, pace: f64) -> Arrival {
        let size = self.machine.block_bytes as f64;
        let (count, settings) = (blocks.count(), self.settings);
        let longest = settings.load_timeout + count as f64 * size / settings.load_floor;
        let first = patience.map_or(longest, |patience| patience.min(longest));
        let deadline = |there: u64| first + pace * (there as f64 / count as f64);

        let host = self.machine.host;
        let from_host = |block| host.latency + block as f64 * size / host.bandwidth;
        let all_of_host = if blocks.host > 0 {
            from_host(blocks.host)
        } else {
            0.0
        };
        let pool = self.machine.pool.unwrap_or(host);
        // The pool first sends what it was asked for before.
        let pool_begins = (all_of_host + pool.latency).max(self.pool_free - now);
        let from_pool = |block| pool_begins + block as f64 * size / pool.bandwidth;

        let mut arrival = Arrival {
            seconds: 0.0,
            blocks: 0,
        };
        for there in 0..count {
            let seconds = match there.checked_sub(blocks.host) {
                None => from_host(there + 1),
                Some(of_pool) => from_pool(of_pool + 1),
            };
            if seconds > deadline(there) {
                arrival.seconds = deadline(there);
                break;
            }
            arrival = Arrival {
                seconds,
                blocks: there + 1,
            };
        }
        if blocks.pool > 0 {
            self.pool_free = self.pool_free.max(now + arrival.seconds);
        }
        arrival
    }

    /// Computes the next step of a prompt, from token `first` on. Returns where the step ends.
    #[expect(clippy::cast_precision_loss, reason = "estimates of time")]
    fn compute(&mut self, prompt: &Prompt, first: u64) -> u64 {
        let tokens = (prompt.tokens - first).min(self.settings.tokens_per_step);
        let (number, end) = (self.next_number(), first + tokens);
        self.advisor
            .on_step(Some(self.now), number, tokens, attended(first, end));
        self.pass(self.now + tokens as f64 / self.machine.prefill_speed);
        self.advisor.on_output(self.now, &[number]);
        end
    }

    /// Only the first `loaded` of `found` blocks are loaded, so the pool may be measured.
    fn decline(&mut self, now: f64, prompt: &Prompt, loaded: u64, found: u64, served: &mut Served) {
        let missing = found.saturating_sub(prompt.in_host.max(loaded));
        if missing == 0 || self.settings.load_policy != LoadPolicy::Auto {
            return;
        }
        let (first, reach) = (self.end(prompt, loaded), self.reach(prompt, loaded, found));
        let block = (self.machine.block_bytes, 1);
        let wanted = self
            .advisor
            .wants_probe(now, first, &reach, prompt.tokens, block);
        if wanted > 0 {
            let blocks = Blocks {
                host: 0,
                pool: wanted.min(missing),
            };
            served.read_blocks += self.measure(now, blocks);
        }
    }

    /// Fetches blocks that nobody needs, to measure the pool. Returns how many will have come.
    fn measure(&mut self, now: f64, blocks: Blocks) -> u64 {
        let number = self.next_number();
        let pool_bytes = blocks.pool * self.machine.block_bytes;
        let probe = Transfer {
            pool_bytes,
            is_probe: true,
            ..Transfer::default()
        };
        self.advisor.on_begin(now, number, probe);
        let Arrival {
            seconds,
            blocks: there,
        } = self.arrival(now, blocks, None, 0.0);
        self.probe = Some(Probe {
            number,
            ends: now + seconds,
            seconds,
            missing_bytes: (blocks.pool - there) * self.machine.block_bytes,
        });
        there
    }
}
