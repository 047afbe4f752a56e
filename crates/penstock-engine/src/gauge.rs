//! Gauges: how much of something is under way, for those who wait until nothing is.

use std::time::Instant;

use crate::sync::{Condvar, Mutex, wait_until};

/// A number. One can wait until it is zero. Its lock is a leaf.
#[derive(Default)]
pub(crate) struct Gauge {
    count: Mutex<usize>,
    zero: Condvar,
}

impl Gauge {
    pub(crate) fn add(&self, n: usize) {
        *self.count.lock() += n;
    }

    pub(crate) fn sub(&self, n: usize) {
        let mut count = self.count.lock();
        *count -= n;
        if *count == 0 {
            self.zero.notify_all();
        }
    }

    /// Waits until the number is zero (true), or until the time `until`.
    pub(crate) fn wait_zero(&self, until: Instant) -> bool {
        let mut count = self.count.lock();
        while *count > 0 {
            if wait_until(&self.zero, &mut count, until) {
                return *count == 0;
            }
        }
        true
    }
}
