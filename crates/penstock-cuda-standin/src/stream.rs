//! Streams and events: work in order, that takes its time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// An event: how often it was recorded, and how many of these records have happened.
#[derive(Default)]
pub struct Event {
    pub(crate) timed: bool,
    /// How often the event was recorded, how often it happened, and when, by the machine's clock.
    pub(crate) state: Mutex<(u64, u64, f64)>,
    pub(crate) changed: Condvar,
}

impl Event {
    pub(crate) fn wait(&self, for_record: u64) {
        let mut state = self.state.lock();
        while state.1 < for_record {
            self.changed.wait(&mut state);
        }
    }
}

type Work = Box<dyn FnOnce(&mut f64) + Send>;

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    running: bool,
    closed: bool,
}

/// A stream: a thread that does its work in order, when it gets round to it.
pub struct Stream {
    queue: Mutex<Queue>,
    /// Copies and kernels that have not ended.
    copies: Arc<AtomicUsize>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// How long each piece of work waits before it is done, by its number.
    late: fn(u64) -> Duration,
}

/// Now and then a little late.
fn a_little_late(turn: u64) -> Duration {
    Duration::from_micros(if turn % 3 == 1 { 150 } else { 0 })
}

/// Up to four milliseconds late, always otherwise: as a model that computes.
fn late_as_a_model(turn: u64) -> Duration {
    let drawn = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52;
    Duration::from_micros(drawn)
}

impl Stream {
    /// A stream that is a little late now and then.
    pub fn new() -> Arc<Self> {
        Self::start(a_little_late)
    }

    /// A stream whose work takes a model's time.
    pub(crate) fn of_a_model() -> Arc<Self> {
        Self::start(late_as_a_model)
    }

    fn start(late: fn(u64) -> Duration) -> Arc<Self> {
        let stream = Arc::new(Self {
            queue: Mutex::default(),
            copies: Arc::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
            late,
        });
        let own = Arc::clone(&stream);
        *stream.thread.lock() = Some(std::thread::spawn(move || own.serve()));
        stream
    }

    fn serve(&self) {
        let mut clock = 0.0;
        let mut turn = 0_u64;
        loop {
            let mut queue = self.queue.lock();
            queue.running = false;
            self.changed.notify_all();
            while queue.work.is_empty() {
                if queue.closed {
                    return;
                }
                self.changed.wait(&mut queue);
            }
            let work = queue.work.pop_front().expect("not empty");
            queue.running = true;
            drop(queue);
            // Late by design: what is not waited for, or not ordered, shows.
            turn += 1;
            std::thread::sleep((self.late)(turn));
            work(&mut clock);
        }
    }

    /// Gives the stream work. It is handed the stream's clock, in seconds.
    pub fn push(&self, work: impl FnOnce(&mut f64) + Send + 'static) {
        self.queue.lock().work.push_back(Box::new(work));
        self.changed.notify_all();
    }

    pub(crate) fn synchronize(&self) {
        let mut queue = self.queue.lock();
        while queue.running || !queue.work.is_empty() {
            self.changed.wait(&mut queue);
        }
    }

    /// Closes the stream. A destroyed stream still does the work that it was given.
    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    /// Work that touches memory.
    pub(crate) fn push_copy(&self, work: impl FnOnce(&mut f64) + Send + 'static) {
        let copies = Arc::clone(&self.copies);
        copies.fetch_add(1, Ordering::Relaxed);
        self.push(move |clock| {
            work(clock);
            copies.fetch_sub(1, Ordering::Release);
        });
    }

    /// Whether the stream touches no memory any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.copies.load(Ordering::Acquire) == 0
    }
}
