//! When to recompute what could be loaded. An engine that only loads never learns what recomputing
//! takes, and a load that was worth it once may not be any more.

/// After so many loads in a row that are not clearly worth it, a prompt is recomputed instead, to
/// learn how long that takes. Each time doubles the number, up to [`LAST`].
const FIRST: u32 = 4;

/// See [`FIRST`].
const LAST: u32 = 256;

#[derive(Clone, Debug)]
pub(crate) struct Checks {
    /// Loads that were not clearly worth it since a step last told what recomputing takes.
    unchecked: u32,
    after: u32,
    /// Tokens in the step that would have told what recomputing takes.
    step_tokens: u64,
}

impl Checks {
    pub(crate) fn new() -> Self {
        Self {
            unchecked: 0,
            after: FIRST,
            step_tokens: 0,
        }
    }

    /// Notes that a step computed so many tokens of prompts.
    pub(crate) fn on_step(&mut self, tokens: u64) {
        if tokens.saturating_mul(2) >= self.step_tokens {
            self.unchecked = 0;
        }
    }

    /// Notes that nothing could be loaded, so the prompt is computed anyway.
    pub(crate) fn on_nothing_to_load(&mut self) {
        self.after = FIRST;
    }

    /// Notes a load that is not clearly worth it. `step_tokens` is the tokens in the first step
    /// that would be computed in its place. Returns whether to recompute instead.
    pub(crate) fn on_doubtful_load(&mut self, step_tokens: u64) -> bool {
        self.step_tokens = step_tokens;
        let is_due = self.is_due();
        if !is_due {
            self.unchecked += 1;
        }
        is_due
    }

    /// Whether it is time to recompute. After an answer of true, the count starts anew.
    pub(crate) fn is_due(&mut self) -> bool {
        if self.unchecked < self.after {
            return false;
        }
        self.unchecked = 0;
        self.after = LAST.min(2 * self.after);
        true
    }
}
