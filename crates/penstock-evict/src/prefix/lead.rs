//! Which of two ways to evict the policy follows: by worth, or least recently used.

/// How many standard deviations a way must be ahead of chance: going by worth to be followed, and
/// least recently used to be gone back to.
const SURE_TO_TRY: f64 = 1.0;
const SURE_TO_RETURN: f64 = 2.0;

/// Compares, prompt by prompt, how many blocks both ways would have found with how many were found.
///
/// A lead that one prompt could have made says nothing about the next prompts. So going by worth is
/// followed only when it is ahead by more than the most that was ever found of one prompt. It is
/// left again when it has lost that much.
pub(super) struct Lead {
    by_worth: bool,
    /// By how many blocks the way that is not followed is ahead, since it was last level. Then the
    /// sum of the squares of the differences that made up this lead: it says what chance alone
    /// would make of them.
    ahead: f64,
    squares: f64,
    /// Blocks found beyond what least recently used would have found.
    gained: f64,
    /// `gained` when the way that is followed last changed.
    gained_before: f64,
    /// The most blocks that either way would have found of one prompt: never more than the cache
    /// holds.
    stake: f64,
}

impl Lead {
    pub(super) fn new() -> Self {
        Self {
            by_worth: false,
            ahead: 0.0,
            squares: 0.0,
            gained: 0.0,
            gained_before: 0.0,
            stake: 0.0,
        }
    }

    /// Whether victims are chosen by worth.
    pub(super) fn is_by_worth(&self) -> bool {
        self.by_worth
    }

    /// Notes how many blocks of a prompt were found in a row from its start, and how many each way
    /// would have found. Returns whether from now on the other way is followed.
    pub(super) fn found(&mut self, prompt: &Found) -> bool {
        let (by_worth, by_age) = (f64::from(prompt.by_worth), f64::from(prompt.by_age));
        self.stake = self.stake.max(by_worth).max(by_age);
        self.gained += f64::from(prompt.held) - by_age;
        let ahead = if self.by_worth {
            by_age - by_worth
        } else {
            by_worth - by_age
        };
        self.ahead += ahead;
        self.squares += ahead * ahead;
        if self.ahead <= 0.0 {
            (self.ahead, self.squares) = (0.0, 0.0);
        }
        let chance = self.squares.sqrt();
        let changes = if self.by_worth {
            let is_lost = self.gained_before - self.gained > self.stake;
            self.ahead > SURE_TO_RETURN * chance || (is_lost && self.ahead > 0.0)
        } else {
            // Losses of earlier trials must be made good first. Their gains may be staked.
            self.ahead > SURE_TO_TRY * chance && self.ahead + self.gained > self.stake
        };
        if changes {
            self.by_worth = !self.by_worth;
            self.gained_before = self.gained;
            (self.ahead, self.squares) = (0.0, 0.0);
        }
        changes
    }
}

/// How many blocks of a prompt are in each cache, in a row from its start.
#[derive(Default)]
pub(super) struct Found {
    /// Blocks in the cache.
    pub(super) held: u32,
    /// Blocks in a cache that always goes by worth.
    pub(super) by_worth: u32,
    /// Blocks in a cache that is always least recently used.
    pub(super) by_age: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn found(held: u32, by_worth: u32, by_age: u32) -> Found {
        Found {
            held,
            by_worth,
            by_age,
        }
    }

    /// A lead that has seen a prompt of which a hundred blocks were found, and that follows worth.
    fn in_a_trial() -> Lead {
        let mut lead = Lead::new();
        assert!(!lead.found(&found(100, 100, 100)));
        for _ in 0..3 {
            assert!(!lead.found(&found(0, 30, 0)), "less than one prompt");
        }
        assert!(lead.found(&found(0, 30, 0)));
        assert!(lead.is_by_worth());
        lead
    }

    #[test]
    fn a_lead_that_one_prompt_can_make_is_not_followed() {
        let mut lead = Lead::new();
        assert!(!lead.found(&found(0, 100, 0)));
        in_a_trial();
    }

    #[test]
    fn a_trial_that_lost_as_much_as_one_prompt_ends() {
        let mut lead = in_a_trial();
        assert!(!lead.found(&found(0, 30, 60)));
        assert!(lead.found(&found(0, 30, 60)), "120 are lost");
        assert!(!lead.is_by_worth());
    }

    #[test]
    fn what_a_trial_lost_has_to_be_made_good_before_the_next() {
        let mut lead = in_a_trial();
        lead.found(&found(0, 30, 60));
        lead.found(&found(0, 30, 60));
        for _ in 0..7 {
            assert!(!lead.found(&found(0, 30, 0)), "no more than 220");
        }
        assert!(lead.found(&found(0, 30, 0)));
    }
}
