//! When to recompute what could be loaded: of an engine that only loads nobody knows what
//! recomputing takes, and a load that was worth it once may not be any more.

/// Loads that are not clearly worth it, in a row, before a prompt is recomputed instead, to know
/// how long that takes; each time doubles it up to [`LAST`].
const FIRST: u32 = 4;

/// See [`FIRST`].
const LAST: u32 = 256;

#[derive(Clone, Debug)]
pub(crate) struct Checks {
    /// Loads not clearly worth it since a step last told what recomputing takes.
    unchecked: u32,
    after: u32,
    /// Tokens of the step that would have told.
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

    /// A step computed so many tokens of prompts.
    pub(crate) fn on_step(&mut self, tokens: u64) {
        if tokens.saturating_mul(2) >= self.step_tokens {
            self.unchecked = 0;
        }
    }

    /// Nothing was to be loaded, so that is being computed.
    pub(crate) fn on_nothing_to_load(&mut self) {
        self.after = FIRST;
    }

    /// A load is not clearly worth it, in place of whose first step so many tokens would be
    /// computed. Whether to recompute instead.
    pub(crate) fn on_doubtful_load(&mut self, step_tokens: u64) -> bool {
        self.step_tokens = step_tokens;
        let is_due = self.is_due();
        if !is_due {
            self.unchecked += 1;
        }
        is_due
    }

    /// Whether it is time to recompute. It is not, any more, once this has said so.
    pub(crate) fn is_due(&mut self) -> bool {
        if self.unchecked < self.after {
            return false;
        }
        self.unchecked = 0;
        self.after = LAST.min(2 * self.after);
        true
    }
}
