//! A lane's work: what panics again and again rests for a while.

use std::time::{Duration, Instant};

use crate::contain;

/// Panics in a row after which a lane rests.
const MOST: u32 = 3;
const FIRST_REST: Duration = Duration::from_millis(500);
const LONGEST_REST: Duration = Duration::from_secs(30);

/// The work of one thread, piece by piece. After three panics in a row it rests: pieces that come
/// meanwhile are dropped. Then one is tried. If that panics too, the next rest is twice as long.
#[derive(Debug)]
pub struct Lane {
    place: &'static str,
    in_a_row: u32,
    rest: Duration,
    rests_until: Option<Instant>,
}

/// What became of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// It was done.
    Done,
    /// It panicked.
    Panicked,
    /// It was dropped: the lane rests.
    Rested,
}

impl Lane {
    /// A lane that has not panicked yet; `place` is its name.
    pub fn new(place: &'static str) -> Self {
        Self {
            place,
            in_a_row: 0,
            rest: FIRST_REST,
            rests_until: None,
        }
    }

    /// Runs a piece of work, or drops it. It owns what it works on, so that nobody sees what is left
    /// half done.
    pub fn run(&mut self, now: Instant, work: impl FnOnce()) -> Ran {
        if self.rests_until.is_some_and(|until| now < until) {
            return Ran::Rested;
        }
        if contain(self.place, work).is_some() {
            *self = Self::new(self.place);
            return Ran::Done;
        }
        self.in_a_row += 1;
        if self.in_a_row >= MOST {
            self.rests_until = Some(now + self.rest);
            self.rest = (self.rest * 2).min(LONGEST_REST);
        }
        Ran::Panicked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ON_PURPOSE;

    #[test]
    fn a_lane_rests_after_panics_in_a_row_and_then_tries_one() {
        let mut lane = Lane::new("test-lane");
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut run =
            |seconds: f64, fails: bool| lane.run(at(seconds), || assert!(!fails, "{ON_PURPOSE}"));
        // Two, and one that goes well: they were not in a row.
        assert_eq!([run(0.0, true), run(0.0, true)], [Ran::Panicked; 2]);
        assert_eq!(run(0.0, false), Ran::Done);
        for _ in 0..3 {
            assert_eq!(run(1.0, true), Ran::Panicked);
        }
        assert_eq!(run(1.4, false), Ran::Rested);
        assert_eq!(run(1.6, true), Ran::Panicked);
        assert_eq!(run(2.5, false), Ran::Rested, "twice as long");
        assert_eq!(run(2.7, false), Ran::Done);
        assert_eq!([run(2.7, true), run(2.7, true)], [Ran::Panicked; 2]);
        assert_eq!(run(2.7, false), Ran::Done, "all is forgotten");
    }

    #[test]
    fn what_is_dropped_while_a_lane_rests_is_dropped_at_once() {
        let mut lane = Lane::new("test-dropped");
        let now = Instant::now();
        for _ in 0..3 {
            lane.run(now, || panic!("{ON_PURPOSE}"));
        }
        let owned = std::sync::Arc::new(());
        let held = std::sync::Arc::clone(&owned);
        assert_eq!(lane.run(now, move || drop(held)), Ran::Rested);
        assert_eq!(std::sync::Arc::strong_count(&owned), 1);
    }
}
