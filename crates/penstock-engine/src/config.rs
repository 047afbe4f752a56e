//! Settings of an engine, and their checks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::BatchBytes;
use penstock_value::{Keyring, MAX_ENCRYPTED_PAYLOAD};

use crate::EngineError;

/// Steps whose stores may wait to be gathered at a time. One step is gathered while the next is
/// computed and the one after that is already ordered. As many again cover copies that fall behind.
const STEPS: usize = 4;

/// The longest time that means anything here.
pub(crate) const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// The end of a wait that begins now. A wait of more than a day ends after a day, so that a
/// caller's "for ever" does not overflow the clock.
pub(crate) fn end_of(wait: Duration) -> Instant {
    Instant::now() + wait.min(LONGEST)
}

/// The most that one call to the store takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) objects: usize,
    /// Payload bytes; a single object may have more.
    pub(crate) bytes: usize,
}

/// Batches of either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batches {
    pub(crate) put: Batch,
    pub(crate) get: Batch,
}

/// Sizes, bounds and times of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Payload bytes that a slot holds: those of the largest object.
    pub slot_bytes: usize,
    /// Number of slots in the arena.
    pub slots: usize,
    /// Slots that stores may hold at once; the others are kept for loads. At least 1, and less than
    /// `slots`.
    pub store_slots: usize,
    /// Whether values stay in their slots until the room is needed. This is the host tier.
    pub keep: bool,
    /// Whether loads from this machine's memory go straight into the blocks, and stores straight into
    /// node memory. To measure what that gains, false has them go through slots.
    pub in_place: bool,
    /// The most slots whose values wait for the request that they were prefetched for. Less than
    /// `slots`: a lane that waits for a slot is not told when one of these may be given up.
    pub prefetch_slots: usize,
    /// Threads that gather blocks into slots.
    pub copy_lanes: usize,
    /// Threads that get values and scatter what they got.
    pub get_lanes: usize,
    /// Threads that put values, at low priority.
    pub put_lanes: usize,
    /// The most objects in one call to the store, unless the store takes larger batches best.
    pub batch: usize,
    /// The most payload bytes in one call to the store, unless the store takes larger batches best; a
    /// single object may have more.
    pub batch_bytes: usize,
    /// The most objects that wait to be gathered. Further objects are dropped. As many may wait in node
    /// memory for the store; further ones stay there alone.
    pub max_pending_objects: usize,
    /// The most payload bytes that wait to be gathered; see `max_pending_objects`.
    pub max_pending_bytes: usize,
    /// How long an object may wait for a slot before it is dropped. The time counts from when its
    /// blocks could be read, which is when its fence was passed. The engine cannot reuse the blocks
    /// meanwhile.
    pub store_wait: Duration,
    /// How long a job may wait for its fence before it is given up. A device that has not computed
    /// its work by then hangs.
    pub fence_wait: Duration,
    /// Time given to one put.
    pub put_timeout: Duration,
    /// The most time given to one get, however far the deadline of its job is.
    pub get_timeout: Duration,
    /// How long a load waits for a value that another engine is bringing into node memory. Then it
    /// fetches the value itself, as the other engine may have been stopped.
    pub claim_wait: Duration,
    /// How long stores are dropped at once after a whole batch of puts has failed.
    pub store_backoff: Duration,
    /// The most objects of jobs whose last completion has not been polled yet.
    pub max_outstanding_objects: usize,
    /// With keys, values are encrypted, and no other values are loaded.
    pub keys: Option<Arc<Keyring>>,
    /// Whether values are compressed without loss where that makes them shorter. Without this, no
    /// compressed values are loaded: the namespace must say which it is. Each put lane takes memory
    /// for one batch, and each get lane for one object.
    pub compress: bool,
    /// Whether the pool tells whose values are not to be loaded, and this engine tells the others. Then
    /// values of a [writer](crate::Engine::set_writer) that others have found to be wrong are not
    /// loaded, and an engine that others have found to be wrong stores nothing.
    pub trusts: bool,
}

impl EngineConfig {
    /// Settings for an arena of `slots` slots of `slot_bytes` each. Everything else has its
    /// default.
    ///
    /// The defaults for lanes and batches did best in `examples/jobs.rs`, on two cores over a
    /// directory and over Redis. With more lanes, or with more than a MiB in one call, loads got
    /// slower, since values left the cache before they were verified and scattered. A call takes
    /// more small objects, up to the same bytes. As many bytes of small objects wait as of large
    /// ones.
    pub fn new(slot_bytes: usize, slots: usize) -> Self {
        Self {
            slot_bytes,
            slots,
            store_slots: (slots - slots / 4).min(slots.saturating_sub(1)).max(1),
            keep: true,
            in_place: true,
            prefetch_slots: slots / 2,
            copy_lanes: 1,
            get_lanes: 2,
            put_lanes: 1,
            batch: ((1 << 20) / slot_bytes.max(1)).clamp(8, 256),
            batch_bytes: 1 << 20,
            max_pending_objects: ((1 << 30) / slot_bytes.max(1)).clamp(4096, 1 << 17),
            max_pending_bytes: 1 << 30,
            store_wait: Duration::from_millis(100),
            fence_wait: Duration::from_secs(60),
            put_timeout: Duration::from_secs(5),
            get_timeout: Duration::from_secs(10),
            claim_wait: Duration::from_millis(250),
            store_backoff: Duration::from_secs(1),
            max_outstanding_objects: 1 << 18,
            keys: None,
            compress: false,
            trusts: false,
        }
    }

    /// Makes the queues hold what the owner stores in `STEPS` steps of `objects` objects each,
    /// whatever the objects' size. They never become smaller than by default.
    #[must_use]
    pub fn with_steps_of(mut self, objects: usize) -> Self {
        let held = objects.saturating_mul(STEPS);
        self.max_pending_objects = self.max_pending_objects.max(held);
        self.max_pending_bytes = self
            .max_pending_bytes
            .max(held.saturating_mul(self.slot_bytes));
        self.max_outstanding_objects = self.max_outstanding_objects.max(held.saturating_mul(4));
        self
    }

    /// The batches in which lanes call a store that takes batches of size `best` best. They are
    /// never smaller than the settings say. If they are larger, their bytes fit into half of the
    /// slots that there are for them.
    pub(crate) fn batches(&self, best: BatchBytes) -> Batches {
        let batch = |best: u64, slots: usize| {
            let room = (slots / 2).saturating_mul(self.slot_bytes);
            let bytes = usize::try_from(best).unwrap_or(usize::MAX).min(room);
            if bytes <= self.batch_bytes {
                return Batch {
                    objects: self.batch,
                    bytes: self.batch_bytes,
                };
            }
            Batch {
                objects: self.batch.max(slots / 2),
                bytes,
            }
        };
        Batches {
            put: batch(best.put, self.store_slots),
            get: batch(best.get, self.slots - self.store_slots),
        }
    }

    pub(crate) fn check(&self) -> Result<(), EngineError> {
        let refuse = |what: &'static str| Err(EngineError::Config(what));
        if self.slot_bytes == 0 || self.slot_bytes > 1 << 40 {
            return refuse("slot_bytes must be between 1 and 2^40");
        }
        if self.keys.is_some() && self.slot_bytes as u64 > MAX_ENCRYPTED_PAYLOAD {
            return refuse("with encryption slot_bytes must be less than 2^36 - 31");
        }
        if self.slots < 2 || self.slots > 1 << 24 {
            return refuse("slots must be between 2 and 2^24: stores and loads need one each");
        }
        if self.store_slots == 0 || self.store_slots >= self.slots {
            return refuse("store_slots must be at least 1 and less than slots");
        }
        if self.prefetch_slots >= self.slots {
            return refuse("prefetch_slots must be less than slots");
        }
        if self.copy_lanes == 0 || self.copy_lanes > 64 {
            return refuse("copy_lanes must be between 1 and 64");
        }
        if self.get_lanes == 0 || self.get_lanes > 64 {
            return refuse("get_lanes must be between 1 and 64");
        }
        if self.put_lanes == 0 || self.put_lanes > 64 {
            return refuse("put_lanes must be between 1 and 64");
        }
        if self.batch == 0 {
            return refuse("batch must be at least 1");
        }
        let times = [
            self.store_wait,
            self.fence_wait,
            self.put_timeout,
            self.get_timeout,
            self.claim_wait,
            self.store_backoff,
        ];
        if times.iter().any(|&time| time > LONGEST) {
            return refuse("no time may be longer than a day");
        }
        Ok(())
    }
}
