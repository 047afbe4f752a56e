//! How long the steps and transfers of one engine take, and what that means for the next request.

use rustc_hash::FxHashMap;

use crate::checks::Checks;
use crate::choice::{Choice, choose, patience};
use crate::fit::is_measured;
use crate::policy::LoadPolicy;
use crate::prefill::Prefill;
use crate::probes::{Declined, Probes};
use crate::tier::Tier;

/// Share of the recomputation time. A load is clearly worth it if the load and the computation
/// after it take no longer than this share: a new measurement would not change that.
const CLEARLY: f64 = 0.5;

/// Multiple of the recomputation time. A load that is expected to take longer is not measured
/// whole.
const HOPELESS: f64 = 8.0;

/// Where a load of a run of tokens may end, and what is to be moved up to there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reach {
    /// The token before which the load ends.
    pub end: u64,
    /// Bytes that host memory has.
    pub host_bytes: u64,
    /// Bytes that only the pool has.
    pub pool_bytes: u64,
}

/// A load, a prefetch or a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Transfer {
    /// Bytes from host memory.
    pub host_bytes: u64,
    /// Bytes from the pool.
    pub pool_bytes: u64,
    /// Seconds after which it is given up if nothing comes; none if it is never given up.
    pub patience: Option<f64>,
    /// Whether no request waits for it: it only measures the pool.
    pub is_probe: bool,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    began: Option<f64>,
    tokens: u64,
    pairs: u64,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    transfer: Transfer,
    /// Bytes that were under way from the pool when this transfer began, its own included.
    pool_ahead: u64,
}

/// How long the steps and transfers of one engine take, and what that means for the next request.
///
/// The caller numbers steps and transfers, each kind separately.
///
/// ```
/// use penstock_advisor::{Advisor, LoadPolicy, Reach, Transfer};
///
/// let mut advisor = Advisor::new(2048, 2);
/// advisor.on_step(Some(0.0), 1, 1000, 500_500);
/// advisor.on_output(1.0, &[1]);
///
/// let reach = Reach { end: 960, host_bytes: 0, pool_bytes: 60 << 20 };
/// let mut advise = |advisor: &mut Advisor| advisor.advise(0, &[reach], 1000, LoadPolicy::Auto, true);
/// // Of a pool that is not known a load is tried.
/// let choice = advise(&mut advisor);
/// assert_eq!(choice.end, 960);
/// let patience = advisor.patience(&choice, 0, 60 << 20, 60);
/// let transfer = Transfer { pool_bytes: 60 << 20, patience, ..Transfer::default() };
/// advisor.on_begin(2.0, 1, transfer);
/// advisor.on_end(1, 1.5, 0);
/// // It takes longer than computing.
/// assert_eq!(advise(&mut advisor).end, 0);
/// ```
#[derive(Clone, Debug)]
pub struct Advisor {
    lanes: u64,
    prefill: Prefill,
    host: Tier,
    pool: Tier,
    steps: FxHashMap<u64, Step>,
    last_output: Option<f64>,
    transfers: FxHashMap<u64, UnderWay>,
    probes: Probes,
    checks: Checks,
}

impl Advisor {
    /// An advisor for an engine whose steps compute up to `tokens_per_step` tokens, and which
    /// fetches `lanes` objects of a load at a time.
    pub fn new(tokens_per_step: u64, lanes: u64) -> Self {
        Self {
            lanes,
            prefill: Prefill::new(tokens_per_step),
            host: Tier::default(),
            pool: Tier::default(),
            steps: FxHashMap::default(),
            last_output: None,
            transfers: FxHashMap::default(),
            probes: Probes::new(lanes),
            checks: Checks::new(),
        }
    }

    // --- what is watched ------------------------------------------------------------------

    /// Notes that a step goes to the workers. It computes so many tokens of prompts, which attend
    /// to `pairs` tokens in sum. If `began` is None, it counts from the end of the step before.
    pub fn on_step(&mut self, began: Option<f64>, step: u64, tokens: u64, pairs: u64) {
        self.steps.insert(
            step,
            Step {
                began,
                tokens,
                pairs,
            },
        );
    }

    /// Notes that a step is done. `steps` names it if it computed prompts. A number that is not
    /// under way is ignored.
    pub fn on_output(&mut self, now: f64, steps: &[u64]) {
        for number in steps {
            let Some(step) = self.steps.remove(number) else {
                continue;
            };
            // A step that was ordered ahead waits for the step before it. Nobody may have seen the
            // end of that one.
            let began = step.began.into_iter().chain(self.last_output);
            if let Some(began) = began.reduce(f64::max) {
                self.prefill.observe(step.tokens, step.pairs, now - began);
            }
            self.checks.on_step(step.tokens);
        }
        self.last_output = Some(now);
    }

    /// Notes that a load, prefetch or probe begins.
    pub fn on_begin(&mut self, now: f64, number: u64, transfer: Transfer) {
        let pool_ahead = self.pool.begin(transfer.pool_bytes);
        let under_way = UnderWay {
            transfer,
            pool_ahead,
        };
        self.transfers.insert(number, under_way);
        if transfer.pool_bytes > 0 {
            self.probes.on_pool_used(now);
        }
    }

    /// Notes that a transfer is over: it took so many seconds, and `missing_bytes` of it did not
    /// come. For a probe, returns how many bytes came; for others, none.
    pub fn on_end(&mut self, number: u64, seconds: f64, missing_bytes: u64) -> Option<u64> {
        let UnderWay {
            transfer,
            pool_ahead,
        } = self.transfers.remove(&number)?;
        if transfer.pool_bytes == 0 {
            if missing_bytes == 0 {
                self.host.observe(transfer.host_bytes, seconds);
            }
            return None;
        }
        self.pool.end(transfer.pool_bytes);
        // If any of its own bytes have come, all bytes ahead of them have come too.
        let arrived = if missing_bytes >= transfer.pool_bytes {
            0
        } else {
            pool_ahead - missing_bytes
        };
        if transfer.is_probe {
            self.probes.on_end(seconds, arrived == 0);
        }
        if missing_bytes > 0 && transfer.patience.is_some_and(|most| seconds >= most) {
            self.pool.doubt();
        }
        // The bytes that came took so long. Nobody knows when the missing bytes would have come.
        if arrived > 0 && is_measured(seconds) {
            let host = self.host.seconds(transfer.host_bytes).unwrap_or_default();
            self.pool.observe(arrived, (seconds - host).max(0.0));
        }
        transfer.is_probe.then_some(arrived)
    }

    // --- what follows ---------------------------------------------------------------------

    /// How far to load a prompt of `prompt` tokens, of which `first` are computed. `reaches` are
    /// the possible ends of a load, the nearest first. With `may_check`, the answer is now and then
    /// to load nothing, to see whether loading pays.
    pub fn advise(
        &mut self,
        first: u64,
        reaches: &[Reach],
        prompt: u64,
        policy: LoadPolicy,
        may_check: bool,
    ) -> Choice {
        let unweighed = |end| Choice {
            end,
            load: None,
            recompute: None,
        };
        let furthest = match reaches.last() {
            Some(reach) if policy != LoadPolicy::Never => reach.end,
            _ => return unweighed(first),
        };
        if policy == LoadPolicy::Always {
            return unweighed(furthest);
        }
        let ends = reaches
            .iter()
            .map(|reach| (reach.end, self.load_seconds(reach)));
        let mut choice = choose(first, ends, prompt, &self.prefill);
        if choice.end == furthest {
            self.probes.on_whole_load();
        }
        if may_check && self.checks_instead(first, &choice, prompt) {
            (choice.end, choice.load) = (first, None);
        }
        choice
    }

    /// Whether a request waits for its look-up. If not, it is computed, and the answer serves the
    /// next request.
    ///
    /// `reach` is what it would load if the pool had everything that is asked for. `latency` is
    /// what the last look-up took, infinite if it failed. The request waits only if load and
    /// look-up together are expected to pay. It does not wait either if it is time to measure what
    /// computing takes.
    pub fn awaits_lookup(
        &mut self,
        first: u64,
        reach: &Reach,
        prompt: u64,
        latency: Option<f64>,
        policy: LoadPolicy,
    ) -> bool {
        let recompute = match (policy, self.prefill.seconds(first, prompt)) {
            (LoadPolicy::Never, _) => return false,
            (LoadPolicy::Always, _) | (_, None) => return true,
            (LoadPolicy::Auto, Some(recompute)) => recompute,
        };
        let total = self.load_seconds(reach).unwrap_or_default() + self.rest(reach.end, prompt);
        if total + latency.unwrap_or_default() > recompute {
            return false;
        }
        total <= CLEARLY * recompute || !self.checks.is_due()
    }

    /// Seconds after which to give up a load of so many objects if nothing of it comes. The load
    /// begins now, as advised. None if there is no reason to give it up.
    pub fn patience(
        &self,
        choice: &Choice,
        host_bytes: u64,
        pool_bytes: u64,
        objects: u64,
    ) -> Option<f64> {
        let end = choice.end;
        let load = self.load_seconds(&Reach {
            end,
            host_bytes,
            pool_bytes,
        });
        // Infinite if the pool has been doubted since.
        let first = load.filter(|load| load.is_finite()).map(|load| {
            let least = if pool_bytes > 0 {
                self.pool.seconds(0).unwrap_or_default()
            } else {
                0.0
            };
            // At first, each lane fetches one object.
            least + self.first_share(objects) * (load - least).max(0.0)
        });
        patience(choice, first, self.pool.deviation())
    }

    /// How many blocks to get from the pool now only to measure it; 0 in most cases.
    ///
    /// A prompt of `prompt` tokens is computed from the token `first` on, though `reach` could have
    /// been loaded. The last argument is the bytes and the objects of a block.
    pub fn wants_probe(
        &mut self,
        now: f64,
        first: u64,
        reach: &Reach,
        prompt: u64,
        (block_bytes, block_objects): (u64, u64),
    ) -> u64 {
        let load = Declined {
            pool_bytes: reach.pool_bytes,
            block_bytes,
            block_objects,
            is_hopeless: self.is_hopeless(first, reach, prompt),
        };
        let mut under_way = self.transfers.values();
        let is_one_under_way = under_way.any(|each| each.transfer.is_probe);
        self.probes
            .on_declined(now, load, self.pool.observed(), is_one_under_way)
    }

    /// Expected time of a load that begins now. None if the load needs the pool and nothing is
    /// known about the pool; infinite if the pool is in doubt.
    pub fn load_seconds(&self, reach: &Reach) -> Option<f64> {
        let seconds = |tier: &Tier, bytes: u64| match bytes {
            0 => Some(0.0),
            bytes => tier.seconds(bytes),
        };
        // Host memory is no slower than anything else that is loaded.
        let host = seconds(&self.host, reach.host_bytes).unwrap_or_default();
        Some(host + seconds(&self.pool, reach.pool_bytes)?)
    }

    /// Computation time that a load of a prompt's tokens from `first` to `end` saves. The time of
    /// the load itself is not subtracted. None before a step of hundreds of tokens was seen.
    pub fn saved_seconds(&self, first: u64, end: u64, prompt: u64) -> Option<f64> {
        self.prefill.saved_seconds(first, end, prompt)
    }

    fn rest(&self, end: u64, prompt: u64) -> f64 {
        self.prefill.seconds(end, prompt).unwrap_or_default()
    }

    fn checks_instead(&mut self, first: u64, choice: &Choice, prompt: u64) -> bool {
        if choice.end == first {
            self.checks.on_nothing_to_load();
            return false;
        }
        let (Some(load), Some(recompute)) = (choice.load, choice.recompute) else {
            return false;
        };
        if load + self.rest(choice.end, prompt) <= CLEARLY * recompute {
            return false;
        }
        let tokens = prompt.saturating_sub(first);
        self.checks
            .on_doubtful_load(self.prefill.step_tokens(tokens))
    }

    #[expect(clippy::cast_precision_loss, reason = "few of both")]
    fn first_share(&self, objects: u64) -> f64 {
        (self.lanes as f64 / objects.max(1) as f64).min(1.0)
    }

    fn is_hopeless(&self, first: u64, reach: &Reach, prompt: u64) -> bool {
        let both = self
            .prefill
            .seconds(first, prompt)
            .zip(self.load_seconds(reach));
        both.is_none_or(|(recompute, load)| load > HOPELESS * recompute)
    }
}
