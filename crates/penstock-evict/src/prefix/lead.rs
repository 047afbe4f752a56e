//! Which of two ways to evict is followed: by worth, or least recently used.

/// Standard deviations by which going by worth must be ahead of chance to be followed, and least
/// recently used to be gone back to.
const SURE_TO_TRY: f64 = 1.0;
const SURE_TO_RETURN: f64 = 2.0;
/// Blocks asked for, for each that may be lost against least recently used.
const ASKED_A_LOSS: f64 = 16384.0;

/// Compares what both would have found with what was found, one prompt after the other.
pub(super) struct Lead {
    by_worth: bool,
    /// Blocks by which the other one has been ahead since it was last level, and the sum of the
    /// squares of the differences that this was made of: what chance alone would make of them.
    ahead: f64,
    squares: f64,
    /// Blocks found beyond what least recently used would have found.
    gained: f64,
    /// Blocks asked for.
    asked: f64,
}

impl Lead {
    pub(super) fn new() -> Self {
        Self {
            by_worth: false,
            ahead: 0.0,
            squares: 0.0,
            gained: 0.0,
            asked: 0.0,
        }
    }

    /// Whether victims are chosen by worth.
    pub(super) fn is_by_worth(&self) -> bool {
        self.by_worth
    }

    /// Notes how many blocks of a prompt were found in a row from its start, and would have been;
    /// returns whether from now on the other way is followed.
    pub(super) fn found(&mut self, prompt: &Found) -> bool {
        let (asked, held) = (f64::from(prompt.asked), f64::from(prompt.held));
        let (by_worth, by_age) = (f64::from(prompt.by_worth), f64::from(prompt.by_age));
        self.asked += asked;
        self.gained += held - by_age;
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
            let is_spent = self.gained + self.asked / ASKED_A_LOSS < 0.0;
            self.ahead > SURE_TO_RETURN * chance || (is_spent && self.ahead > 0.0)
        } else {
            // What earlier trials lost has to be made good first.
            self.ahead > SURE_TO_TRY * chance && self.ahead + self.gained > 0.0
        };
        if changes {
            self.by_worth = !self.by_worth;
            (self.ahead, self.squares) = (0.0, 0.0);
        }
        changes
    }
}

/// Blocks of a prompt.
pub(super) struct Found {
    pub(super) asked: u32,
    /// In the cache.
    pub(super) held: u32,
    /// In one that always goes by worth.
    pub(super) by_worth: u32,
    /// In one that is always least recently used.
    pub(super) by_age: u32,
}
