//! Signals: how a lane sleeps until there may be something for it to do.

use std::time::Instant;

use crate::sync::{Condvar, Mutex};

/// An event count. A lane reads the generation, looks everywhere for work, and sleeps only if the
/// generation has not moved since. Whoever makes work available moves the generation. So no wake-up
/// between the look and the sleep is lost, and the places where work lies need no common lock.
///
/// Its lock is a leaf: a signal may be given while any other lock is held.
#[derive(Default)]
pub(crate) struct Signal {
    generation: Mutex<u64>,
    moved: Condvar,
}

impl Signal {
    pub(crate) fn generation(&self) -> u64 {
        *self.generation.lock()
    }

    /// Notes that something became available that one sleeper can take.
    pub(crate) fn notify_one(&self) {
        *self.generation.lock() += 1;
        self.moved.notify_one();
    }

    /// Notes that something became available for several sleepers, or that all of them must look
    /// again.
    pub(crate) fn notify_all(&self) {
        *self.generation.lock() += 1;
        self.moved.notify_all();
    }

    /// Sleeps until the generation differs from `seen`, or `until` has come.
    pub(crate) fn wait(&self, seen: u64, until: Option<Instant>) {
        let mut generation = self.generation.lock();
        while *generation == seen {
            match until {
                None => self.moved.wait(&mut generation),
                Some(until) => {
                    if self.moved.wait_until(&mut generation, until).timed_out() {
                        return;
                    }
                }
            }
        }
    }
}

/// One signal for each kind of lane.
#[derive(Default)]
pub(crate) struct Signals {
    pub(crate) copy: Signal,
    pub(crate) get: Signal,
    pub(crate) put: Signal,
}

impl Signals {
    pub(crate) fn notify_all(&self) {
        self.copy.notify_all();
        self.get.notify_all();
        self.put.notify_all();
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Takes items until it has found so many, as lanes do: looks, and sleeps if there is nothing.
    fn take(signal: &Signal, items: &Mutex<Vec<u32>>, wanted: usize) {
        let mut taken = 0;
        while taken < wanted {
            let seen = signal.generation();
            if items.lock().pop().is_some() {
                taken += 1;
            } else {
                signal.wait(seen, None);
            }
        }
    }

    #[test]
    fn no_wake_up_is_lost_between_the_look_and_the_sleep() {
        loom::model(|| {
            let shared = Arc::new((Signal::default(), Mutex::<Vec<u32>>::default()));
            let lane = thread::spawn({
                let shared = Arc::clone(&shared);
                move || take(&shared.0, &shared.1, 2)
            });
            for item in 0..2 {
                shared.1.lock().push(item);
                shared.0.notify_one();
            }
            lane.join().unwrap();
        });
    }

    #[test]
    fn two_lanes_share_what_is_brought() {
        let mut model = loom::model::Builder::new();
        // All interleavings of three threads take minutes; lost wake-ups need few switches.
        model.preemption_bound = Some(2);
        model.check(|| {
            let shared = Arc::new((Signal::default(), Mutex::<Vec<u32>>::default()));
            let lanes: Vec<_> = (0..2)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || take(&shared.0, &shared.1, 1))
                })
                .collect();
            for item in 0..2 {
                shared.1.lock().push(item);
                shared.0.notify_one();
            }
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
        });
    }
}
