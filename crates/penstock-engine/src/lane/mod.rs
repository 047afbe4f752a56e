//! Lanes: the threads that move bytes.

mod copy;
mod delivery;
mod fetching;
mod get;
mod in_place;
mod node;
mod put;
mod witness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use parking_lot::Mutex;
use penstock_threads::Ran;
use penstock_value::SealedStore;

use crate::config::EngineConfig;
use crate::copy::cuda::Pins;
use crate::fence::Watch;
use crate::gauge::Gauge;
use crate::queue::Queues;
use crate::signal::Signals;
use crate::{Counters, CudaError, EngineError, Fault};

/// What the engine and its lanes share.
pub(crate) struct Inner {
    pub(crate) config: EngineConfig,
    pub(crate) store: SealedStore,
    /// The store for comparisons, where the values of all writers count: a writer that one engine has
    /// marked may be the one that is right.
    pub(crate) evidence: SealedStore,
    /// Declared before the memory, so that it is unpinned before it is unmapped.
    pub(crate) node_pins: Mutex<Option<Pins>>,
    /// The host memory that the engines of this machine share, if they do.
    pub(crate) node: Option<SealedStore>,
    pub(crate) queues: Queues,
    pub(crate) signals: Arc<Signals>,
    pub(crate) watch: Watch,
    /// Faults in the background that nobody has been told about yet.
    pub(crate) faults: Mutex<Vec<Fault>>,
    /// Whether it was told that a device's copies are made one by one.
    pub(crate) told_of_batches: AtomicBool,
    /// The last writer of which it was told that others have found its KV to be wrong.
    pub(crate) told_of_distrust: AtomicU64,
    pub(crate) counters: Arc<Counters>,
    /// Lanes of a kind rest together: they take from one queue.
    pub(crate) lanes: Lanes,
    /// The number of lanes that run.
    pub(crate) running: Gauge,
}

/// The lanes of each kind.
pub(crate) struct Lanes {
    copy: penstock_threads::Lane,
    get: penstock_threads::Lane,
    put: penstock_threads::Lane,
}

impl Default for Lanes {
    fn default() -> Self {
        let lane = penstock_threads::Lane::new;
        Self {
            copy: lane("penstock-copy"),
            get: lane("penstock-get"),
            put: lane("penstock-put"),
        }
    }
}

/// The thread gets a tenth of the processor time that a thread of the model gets beside it.
const NICE: i32 = 10;

/// Lets other threads that want the processor go before this thread.
pub(crate) fn give_way() {
    // On Linux, this concerns this thread alone. If it is refused, the thread is only more in the
    // way.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(NICE);
}

/// Starts every lane. If a lane cannot be started, those that were started end.
pub(crate) fn start(inner: &Arc<Inner>) -> Result<Vec<JoinHandle<()>>, EngineError> {
    let copy =
        (0..inner.config.copy_lanes).map(|i| (format!("penstock-copy-{i}"), copy::run as Lane));
    let get = (0..inner.config.get_lanes).map(|i| (format!("penstock-get-{i}"), get::run as Lane));
    let put = (0..inner.config.put_lanes).map(|i| (format!("penstock-put-{i}"), put::run as Lane));
    let mut threads = Vec::new();
    for (name, lane) in copy.chain(get).chain(put) {
        match spawn(name, Arc::clone(inner), lane) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                inner.queues.close();
                for thread in threads {
                    let _ = thread.join();
                }
                return Err(EngineError::Thread(error));
            }
        }
    }
    Ok(threads)
}

pub(crate) type Lane = fn(&Inner);

/// Starts a thread that is waited for when the engine ends.
pub(crate) fn spawn(
    name: String,
    inner: Arc<Inner>,
    lane: impl FnOnce(&Inner) + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    inner.running.add(1);
    let running = Running(inner);
    // A failed spawn drops the closure, and `running` with it.
    Builder::new().name(name).spawn(move || lane(&running.0))
}

/// Counts a lane while it lives.
struct Running(Arc<Inner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.sub(1);
    }
}

impl Inner {
    /// Notes that memory could not be pinned.
    pub(crate) fn unpinned(&self, ordinal: i32, bytes: u64, error: CudaError) {
        self.faults.lock().push(Fault::Unpinned {
            ordinal,
            bytes,
            error,
        });
    }

    /// Runs one piece of a lane's work. If it panics (a store broke its contract), the objects that
    /// it was working on fail as their tickets are dropped, and the lane lives on. Lanes of a
    /// kind that panic again and again rest for a while: what comes to them then fails at once.
    fn run(&self, lane: &penstock_threads::Lane, work: impl FnOnce()) {
        // Nobody sees what the work leaves half done: it owns its slots and tickets, and no lock of
        // ours is held while foreign code runs.
        if lane.run(Instant::now(), work) == Ran::Panicked {
            self.counters.panics.fetch_add(1, Ordering::Relaxed);
        }
    }
}
