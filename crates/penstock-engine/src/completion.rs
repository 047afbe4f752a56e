//! Completions, and the queue in which they wait for the jobs' owner.

use std::time::{Duration, Instant};

use crate::outcome::{Outcome, Outcomes};
use crate::sync::{Condvar, Mutex, wait_until};

/// What happened to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The source blocks of a store job are not read any more, so they may be freed. Precedes
    /// [`Event::Stored`].
    Released,
    /// A load job is over. None of its blocks is written any more.
    Loaded(Outcomes),
    /// A prefetch is over. What it brought is in the host tier, and stays there until it is
    /// released.
    Prefetched(Outcomes),
    /// A store job is over.
    Stored(Outcomes),
}

impl Event {
    /// Whether nothing more will be reported about the job, so that its id may be used again.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Released)
    }

    /// What became of the blocks; nothing yet with [`Event::Released`].
    pub fn outcomes(&self) -> Option<&Outcomes> {
        match self {
            Self::Released => None,
            Self::Loaded(outcomes) | Self::Prefetched(outcomes) | Self::Stored(outcomes) => {
                Some(outcomes)
            }
        }
    }

    /// What became of each block, in the order submitted; none with [`Event::Released`].
    pub fn blocks(&self) -> &[Outcome] {
        self.outcomes().map_or(&[], |outcomes| &outcomes.blocks)
    }

    /// Positions of blocks that are missing. For a store: those that are not in the pool now. For a
    /// load or prefetch: those that did not come and that somebody misses, so not the cancelled
    /// ones.
    pub fn missing(&self) -> Vec<usize> {
        match self {
            Self::Released => Vec::new(),
            Self::Stored(outcomes) => outcomes.failed(),
            Self::Loaded(outcomes) | Self::Prefetched(outcomes) => outcomes.missed(),
        }
    }

    /// Positions of the blocks that are not in the store, or not whole, whatever a look-up found.
    pub fn lost(&self) -> Vec<usize> {
        self.outcomes().map_or_else(Vec::new, Outcomes::lost)
    }

    /// Positions of the blocks that are encrypted with a key that this engine does not have.
    pub fn foreign(&self) -> Vec<usize> {
        self.outcomes().map_or_else(Vec::new, Outcomes::foreign)
    }
}

/// One entry of the completion queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The id that the job was submitted with.
    pub job: u64,
    /// What happened.
    pub event: Event,
    /// The time from the job's submission until the event. If the job's fence was passed after the
    /// submission, the time counts from then; if the fence was not passed, it is zero. It does not
    /// depend on when the completion is polled.
    pub took: Duration,
}

/// Completions that nobody has polled yet, in the order in which things happened.
///
/// It holds at most two entries for each job of the table. Its lock is a leaf.
#[derive(Default)]
pub(crate) struct Completions {
    queue: Mutex<Vec<Completion>>,
    pushed: Condvar,
}

impl Completions {
    /// Adds an event of a job whose time counts from `since`.
    pub(crate) fn push(&self, job: u64, event: Event, since: Instant) {
        let took = since.elapsed();
        self.queue.lock().push(Completion { job, event, took });
        self.pushed.notify_all();
    }

    /// Moves all completions to the end of `out`.
    pub(crate) fn drain(&self, out: &mut Vec<Completion>) {
        out.append(&mut self.queue.lock());
    }

    /// Sleeps until there is something to drain (true), or until the time `until`.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut queue = self.queue.lock();
        while queue.is_empty() {
            if wait_until(&self.pushed, &mut queue, until) {
                return !queue.is_empty();
            }
        }
        true
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn an_owner_that_waits_hears_of_every_job() {
        loom::model(|| {
            let completions = Arc::new(Completions::default());
            let lanes: Vec<_> = (0..2)
                .map(|job| {
                    let completions = Arc::clone(&completions);
                    thread::spawn(move || completions.push(job, Event::Released, Instant::now()))
                })
                .collect();
            let far = Instant::now() + Duration::from_secs(60);
            let mut heard = Vec::new();
            while heard.len() < 2 {
                assert!(completions.wait(far));
                completions.drain(&mut heard);
            }
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            let mut jobs: Vec<_> = heard.iter().map(|completion| completion.job).collect();
            jobs.sort_unstable();
            assert_eq!(jobs, [0, 1]);
        });
    }
}
