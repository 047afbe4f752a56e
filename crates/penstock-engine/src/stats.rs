//! Counters of an engine.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::Outcome;

/// Defines the counters once: as atomics to count in, and as plain numbers to read.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            rejected: Mutex<BTreeMap<&'static str, u64>>,
            failed: Mutex<BTreeMap<&'static str, u64>>,
        }

        /// What an engine has done since it was made. Times are sums over lanes.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct EngineStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Objects whose value did not verify, by reason.
            pub rejected: BTreeMap<&'static str, u64>,
            /// Objects that the store failed on, by kind of error.
            pub failed: BTreeMap<&'static str, u64>,
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> EngineStats {
                EngineStats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    rejected: self.rejected.lock().clone(),
                    failed: self.failed.lock().clone(),
                }
            }
        }

        impl EngineStats {
            /// Every plain counter with its name.
            pub fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Load jobs accepted.
    load_jobs,
    /// Store jobs accepted.
    store_jobs,
    /// Objects loaded.
    loaded_objects,
    /// Payload bytes loaded.
    loaded_bytes,
    /// Objects stored.
    stored_objects,
    /// Payload bytes stored.
    stored_bytes,
    /// Bytes of the values stored: with headers, and as compressed.
    stored_value_bytes,
    /// Objects that the store already had when they were put.
    already_present_objects,
    /// Objects dropped instead of stored.
    dropped_objects,
    /// Objects to load that the store did not have.
    missed_objects,
    /// Objects not loaded because an earlier object of the job was not.
    skipped_objects,
    /// Objects not loaded by the deadline.
    timed_out_objects,
    /// Objects cancelled.
    cancelled_objects,
    /// Objects whose value did not verify.
    rejected_objects,
    /// Objects loaded from another tier, because the copy in the nearest tier that had them was
    /// damaged.
    mended_objects,
    /// Objects that the store failed on.
    failed_objects,
    /// Panics caught in lanes.
    panics,
    /// Calls to the store's get.
    get_calls,
    /// Nanoseconds in the store's get, including checksums that it computes as values come.
    get_nanos,
    /// Calls to the store's put.
    put_calls,
    /// Nanoseconds in the store's put.
    put_nanos,
    /// Nanoseconds spent making values of payloads, including compression and encryption.
    seal_nanos,
    /// Nanoseconds spent verifying what the store got, including decryption and decompression.
    verify_nanos,
    /// Nanoseconds spent copying from blocks into slots, including checksums unless the values are
    /// encrypted.
    gather_nanos,
    /// Nanoseconds spent copying from slots into blocks.
    scatter_nanos,
    /// Slots in use now.
    slots_in_use,
    /// The most slots in use at one time.
    slots_peak,
    /// Slots that keep a value and are not in use.
    slots_kept,
    /// Bytes of the arena that are pinned for a CUDA device.
    pinned_bytes,
    /// Bytes of the arena that could not be pinned.
    unpinned_bytes,
    /// Mean bytes of a piece from which on the copy engines of a CUDA device copy from the device,
    /// as measured on it. Zero while this has not been measured, or could not be.
    gather_copy_engine_from,
    /// Mean bytes of a piece from which on the copy engines of a CUDA device copy to the device, as
    /// measured on it. Zero while this has not been measured, or could not be.
    scatter_copy_engine_from,
    /// Objects loaded from the host tier.
    kept_objects,
    /// Payload bytes loaded from the host tier.
    kept_bytes,
    /// Objects that were compared with what the store had.
    witnessed_objects,
    /// Compared objects of which the store had another value, that cannot be of the same KV.
    disagreements,
    /// Nanoseconds spent comparing, including the gets of what was compared.
    witness_nanos,
}

impl Counters {
    pub(crate) fn count(&self, outcome: &Outcome) {
        let one = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        match outcome {
            Outcome::Stored(bytes) => {
                one(&self.stored_objects);
                self.stored_bytes.fetch_add(*bytes, Ordering::Relaxed);
            }
            Outcome::AlreadyPresent => one(&self.already_present_objects),
            Outcome::Dropped => one(&self.dropped_objects),
            Outcome::Loaded(bytes) => {
                one(&self.loaded_objects);
                self.loaded_bytes.fetch_add(*bytes, Ordering::Relaxed);
            }
            Outcome::Kept(bytes) => {
                one(&self.kept_objects);
                self.kept_bytes.fetch_add(*bytes, Ordering::Relaxed);
            }
            Outcome::Miss => one(&self.missed_objects),
            Outcome::Rejected(reason) => {
                one(&self.rejected_objects);
                *self.rejected.lock().entry(reason.name()).or_default() += 1;
            }
            Outcome::TimedOut => one(&self.timed_out_objects),
            Outcome::Cancelled => one(&self.cancelled_objects),
            Outcome::Skipped => one(&self.skipped_objects),
            Outcome::Disagreed => one(&self.disagreements),
            Outcome::Failed(kind) => {
                one(&self.failed_objects);
                *self.failed.lock().entry(kind.name()).or_default() += 1;
            }
        }
    }
}

/// Adds the time since `start` to a counter of nanoseconds.
pub(crate) fn add_time(counter: &AtomicU64, start: Instant) {
    let nanos = Duration::as_nanos(&start.elapsed()) as u64;
    counter.fetch_add(nanos, Ordering::Relaxed);
}
