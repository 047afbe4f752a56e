//! Promotions: a thread puts values that came from a far tier into the nearer ones, beside the
//! work.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use penstock_contract::{Key, Store};

/// Most bytes that wait. A value that does not fit is left out: the far tier still has it.
const MOST_BYTES: usize = 128 << 20;
/// Longest time that a put into a nearer tier may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A value that is to be put into the first `tiers` tiers.
struct Promotion {
    key: Key,
    value: Vec<u8>,
    tiers: usize,
}

#[derive(Default)]
struct Waiting {
    promotions: VecDeque<Promotion>,
    bytes: usize,
    is_closed: bool,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

/// A thread that copies values towards the reader.
pub(super) struct Promoter {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Promoter {
    /// Starts the thread. If no thread can be had, nothing is ever promoted.
    pub(super) fn start(tiers: Vec<Arc<dyn Store>>) -> Self {
        let shared = Arc::new(Shared::default());
        let thread = thread::Builder::new().name("penstock-tiers".into()).spawn({
            let shared = Arc::clone(&shared);
            move || {
                penstock_threads::serve(
                    "penstock-tiers",
                    |pause| rest(&shared, pause),
                    || work(&shared, &tiers),
                )
            }
        });
        Self {
            shared,
            thread: thread.ok(),
        }
    }

    /// Copies a value, to be put into the first `tiers` tiers when there is time. Does nothing if
    /// there is no room for the value to wait.
    pub(super) fn offer(&self, key: Key, value: &[IoSlice<'_>], tiers: usize) {
        let bytes: usize = value.iter().map(|slice| slice.len()).sum();
        {
            let waiting = &mut *self.shared.waiting.lock();
            if self.thread.is_none() || waiting.bytes + bytes > MOST_BYTES {
                return;
            }
            waiting.bytes += bytes;
        }
        // Copy without the lock: the bytes are counted already.
        let value = penstock_contract::slices::gather(value);
        self.shared
            .waiting
            .lock()
            .promotions
            .push_back(Promotion { key, value, tiers });
        self.shared.changed.notify_one();
    }
}

impl Drop for Promoter {
    fn drop(&mut self) {
        self.shared.waiting.lock().is_closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // The thread contains panics. If one escaped all the same, the thread is gone.
            let _ = thread.join();
        }
    }
}

/// Waits for so long, unless this is the end. Whether it is not.
fn rest(shared: &Shared, pause: Duration) -> bool {
    let mut waiting = shared.waiting.lock();
    if !waiting.is_closed {
        shared.changed.wait_for(&mut waiting, pause);
    }
    !waiting.is_closed
}

fn work(shared: &Shared, tiers: &[Arc<dyn Store>]) {
    loop {
        let mut waiting = shared.waiting.lock();
        let promotion = loop {
            if waiting.is_closed {
                return;
            }
            match waiting.promotions.pop_front() {
                Some(promotion) => break promotion,
                None => shared.changed.wait(&mut waiting),
            }
        };
        // It is out of the way also if a tier panics.
        waiting.bytes -= promotion.value.len();
        drop(waiting);
        for tier in &tiers[..promotion.tiers] {
            // If a tier refuses, it just has one value less.
            let value = [IoSlice::new(&promotion.value)];
            let _ = tier.put(&promotion.key, &value, Instant::now() + TIMEOUT);
        }
    }
}
