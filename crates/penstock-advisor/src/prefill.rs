//! How long computing prompts takes.

use crate::fit::{Fit, is_measured};

/// Weight of a step's time, relative to the step after it: about the last ten steps decide.
const STEP_DECAY: f64 = 0.9;

/// Tokens of a short step. For a shorter step, the error of the time counts as it is; for a longer
/// step, the error per token.
const SHORT_STEP: f64 = 64.0;

/// The least tokens of a long step. The time of a shorter step depends on much else.
const LONG_STEP: u64 = 256;

/// A long step that is so many times faster than expected shows that what was known no longer
/// holds: an engine's first steps set up what later steps use. While few steps are known, a short
/// step shows it too.
const WARMED_UP: f64 = 2.0;

/// Steps that are still few. Fewer steps than this do not yet outweigh one that set something up.
const FEW_STEPS: u32 = 4;

/// How long the engine takes to compute tokens of prompts, under its current load.
///
/// The time of a step has three parts: a constant, a time for each token, and a time for each pair
/// of a token and one that it attends to. What the step computes for other requests is in the
/// constant.
#[derive(Clone, Debug)]
pub struct Prefill {
    tokens_per_step: u64,
    fit: Fit<3>,
    /// How many steps the fit is made of.
    fitted: u32,
    /// A fit of long steps alone: the time of short steps says little about a whole prompt's. The
    /// first one is left out once there is another, because it sets up what later steps use.
    long: Fit<3>,
    /// How many steps `long` was told of.
    long_steps: u32,
}

impl Prefill {
    /// A model of an engine whose steps compute up to `tokens_per_step` tokens.
    pub fn new(tokens_per_step: u64) -> Self {
        Self {
            tokens_per_step: tokens_per_step.max(1),
            fit: Fit::new(STEP_DECAY),
            fitted: 0,
            long: Fit::new(STEP_DECAY),
            long_steps: 0,
        }
    }

    /// Takes in the time of a step that computed `tokens` tokens of prompts, which attended to
    /// `pairs` tokens in sum.
    pub fn observe(&mut self, tokens: u64, pairs: u64, seconds: f64) {
        if !is_measured(seconds) {
            return;
        }
        let features = features(tokens, pairs, 1);
        let expected = self.fit.predict(features);
        let is_faster = expected.is_some_and(|expected| seconds < expected / WARMED_UP);
        if is_faster && (tokens >= LONG_STEP || self.fitted < FEW_STEPS) {
            self.fit.forget();
            self.long.forget();
            self.fitted = 0;
            self.long_steps = 0;
        }
        let size = features[0] + SHORT_STEP;
        self.fit.observe(features, seconds, size);
        self.fitted = self.fitted.saturating_add(1);
        if tokens >= LONG_STEP {
            if self.long_steps == 1 {
                self.long.forget();
            }
            self.long.observe(features, seconds, size);
            self.long_steps = self.long_steps.saturating_add(1);
        }
    }

    /// The number of tokens in the first step of a computation of `tokens` tokens.
    pub fn step_tokens(&self, tokens: u64) -> u64 {
        tokens.min(self.tokens_per_step)
    }

    /// Time to compute a prompt's tokens from `first` to `end`; none if nothing is known yet.
    pub fn seconds(&self, first: u64, end: u64) -> Option<f64> {
        self.fit.predict(self.features(first, end))
    }

    /// How much less time it takes to compute a prompt of `prompt` tokens from `end` on than from
    /// `first` on. None before a long step was seen.
    pub fn saved_seconds(&self, first: u64, end: u64, prompt: u64) -> Option<f64> {
        let from = |first| self.long.predict(self.features(first, prompt));
        Some((from(first)? - from(end)?).max(0.0))
    }

    fn features(&self, first: u64, end: u64) -> [f64; 3] {
        let tokens = end.saturating_sub(first);
        let steps = tokens.div_ceil(self.tokens_per_step);
        features(tokens, attended(first, end), steps)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts, to estimate times with")]
fn features(tokens: u64, pairs: u64, steps: u64) -> [f64; 3] {
    [tokens as f64, pairs as f64, steps as f64]
}

/// How many tokens the tokens from `first` to `end` attend to in sum. Each attends to itself and to
/// all tokens before it.
///
/// ```
/// assert_eq!(penstock_advisor::attended(0, 3), 6);
/// assert_eq!(penstock_advisor::attended(5, 9), 6 + 7 + 8 + 9);
/// ```
pub fn attended(first: u64, end: u64) -> u64 {
    let up_to = |count: u64| u128::from(count) * (u128::from(count) + 1) / 2;
    let pairs = up_to(end).saturating_sub(up_to(first));
    u64::try_from(pairs).unwrap_or(u64::MAX)
}
