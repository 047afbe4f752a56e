//! Which of several ways to evict is followed: the one that would find the most.

/// How many standard deviations a way must be ahead of what chance makes of the differences.
const SURE: f64 = 3.0;
/// The lead in blocks that is needed at least. A cache of a few blocks finds so few of each prompt
/// that one prompt more or less would change the way.
const LEAST_LEAD: f64 = 32.0;

/// Compares, prompt by prompt, how many blocks each of `N` ways would have found.
///
/// A way is followed once it is ahead of the one that is followed by more than chance, and by more
/// than one prompt could have made. It must also be ahead by what the last change cost.
pub(crate) struct Choice<const N: usize> {
    followed: usize,
    leads: [Lead; N],
    /// The most blocks that any way would have found of one prompt.
    stake: f64,
    /// Blocks that the followed way would have found since it is followed, but that were not held:
    /// the price of the last change.
    price: f64,
}

/// By how many blocks a way is ahead of the one that is followed, since it was last level. Then the
/// sum of the squares of the differences that made up this lead: it says what chance alone would
/// make of them.
#[derive(Clone, Copy, Default)]
struct Lead {
    ahead: f64,
    squares: f64,
}

impl Lead {
    fn add(&mut self, difference: f64) {
        self.ahead += difference;
        self.squares += difference * difference;
        if self.ahead <= 0.0 {
            *self = Self::default();
        }
    }
}

impl<const N: usize> Choice<N> {
    /// Begins with the way of this number.
    pub(crate) fn new(followed: usize) -> Self {
        Self {
            followed,
            leads: [Lead::default(); N],
            stake: LEAST_LEAD,
            price: 0.0,
        }
    }

    /// The number of the way that is followed.
    pub(crate) fn followed(&self) -> usize {
        self.followed
    }

    /// Notes how many blocks of a prompt were found in a row from its start, and how many each way
    /// would have found. Returns whether from now on another way is followed.
    pub(crate) fn found(&mut self, held: u32, by_way: [u32; N]) -> bool {
        let by_way = by_way.map(f64::from);
        let base = by_way[self.followed];
        self.price = (self.price + base - f64::from(held)).max(0.0);
        self.stake = by_way.iter().copied().fold(self.stake, f64::max);
        let needed = self.stake + self.price;
        let mut best: Option<(usize, f64)> = None;
        for (way, (lead, found)) in self.leads.iter_mut().zip(by_way).enumerate() {
            lead.add(found - base);
            let ahead = lead.ahead;
            let is_sure = ahead > needed && ahead > SURE * lead.squares.sqrt();
            if is_sure && best.is_none_or(|(_, most)| ahead > most) {
                best = Some((way, ahead));
            }
        }
        let Some((way, _)) = best else { return false };
        self.followed = way;
        self.leads = [Lead::default(); N];
        self.price = 0.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lead_that_one_prompt_can_make_is_not_followed() {
        let mut choice = Choice::new(0);
        assert!(!choice.found(0, [0, 5000]), "one prompt");
        for _ in 0..2000 {
            assert!(!choice.found(9, [9, 9]), "no more than one prompt");
        }
        assert_eq!(choice.followed(), 0);
    }

    #[test]
    fn what_is_steadily_ahead_is_followed() {
        let mut choice = Choice::new(0);
        let changes = (0..20).filter(|_| choice.found(10, [10, 15, 14]));
        assert_eq!(changes.count(), 1);
        assert_eq!(choice.followed(), 1);
    }

    #[test]
    fn equal_ways_are_not_changed() {
        let mut choice = Choice::new(2);
        assert!((0..1000).all(|_| !choice.found(50, [50, 50, 50])));
    }

    #[test]
    fn blocks_found_by_turns_are_chance() {
        let mut choice = Choice::new(0);
        let by_turns = |n: u32| {
            if n.is_multiple_of(2) {
                [20, 0]
            } else {
                [0, 20]
            }
        };
        assert!((0..1000).all(|n| !choice.found(0, by_turns(n))));
    }

    #[test]
    fn what_the_last_change_cost_has_to_be_earned_before_the_next() {
        let prompts_until_the_next = |held| {
            let mut choice = Choice::new(0);
            assert!((0..20).any(|_| choice.found(0, [0, 20])));
            for _ in 0..30 {
                assert!(!choice.found(held, [20, 20]));
            }
            1 + (0..).find(|_| choice.found(0, [20, 0])).unwrap()
        };
        assert_eq!(prompts_until_the_next(20), 10, "more than chance");
        assert_eq!(prompts_until_the_next(0), 32, "more than 632 blocks");
    }
}
