//! A lane's work: what panics again and again rests for a while.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::contain;

/// Panics in a row after which a lane rests.
const MOST: u32 = 3;
const FIRST_REST: Duration = Duration::from_millis(500);
const LONGEST_REST: Duration = Duration::from_secs(30);

/// The work of threads that take from one queue, piece by piece. After three panics in a row, of
/// whichever thread, they rest: pieces that come meanwhile are dropped. Then one is tried. If that
/// panics too, the next rest is twice as long.
#[derive(Debug)]
pub struct Lane {
    place: &'static str,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    in_a_row: u32,
    rest: Option<Duration>,
    rests_until: Option<Instant>,
}

/// What became of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// The work was done.
    Done,
    /// The work panicked.
    Panicked,
    /// The work was dropped: the lane rests.
    Rested,
}

impl Lane {
    /// A lane that has not panicked yet; `place` is its name.
    pub fn new(place: &'static str) -> Self {
        Self {
            place,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a piece of work, or drops it. It owns what it works on, so that nobody sees what is left
    /// half done.
    pub fn run(&self, now: Instant, work: impl FnOnce()) -> Ran {
        if self.state().rests_until.is_some_and(|until| now < until) {
            contain(self.place, || drop(work));
            return Ran::Rested;
        }
        let done = contain(self.place, work);
        let state = &mut *self.state();
        if done.is_some() {
            if state.in_a_row > 0 {
                *state = State::default();
            }
            return Ran::Done;
        }
        state.in_a_row += 1;
        if state.in_a_row >= MOST {
            let rest = state.rest.unwrap_or(FIRST_REST);
            state.rests_until = Some(now + rest);
            state.rest = Some((rest * 2).min(LONGEST_REST));
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
        let lane = Lane::new("test-lane");
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let run =
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
        let lane = Lane::new("test-dropped");
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
