//! Signals: how a lane sleeps until there may be something for it to do.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// An event count. A lane reads the generation, looks everywhere for work, and sleeps only if
/// the generation has not moved since: whoever makes work available moves it, so no wake-up
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

    /// Something that one sleeper can take became available.
    pub(crate) fn notify_one(&self) {
        *self.generation.lock() += 1;
        self.moved.notify_one();
    }

    /// Something became available for several sleepers, or all of them must look again.
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
