//! Jobs as their owner sees them: objects in, completions out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_store::value::Rejection;
use penstock_store::{CHUNK_BYTES, ErrorKind, Key};

use crate::config::LONGEST;
use crate::region::Registration;

/// One object of a job: a value in the store and the blocks that it holds, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The group of layers whose memory the blocks lie in.
    pub group: u16,
    /// The object's name.
    pub key: Key,
    /// The chunk before its own in the prompt, none for a prompt's first, or if it is not known: the
    /// host tier, and stores that can, keep beginnings longer than what follows them.
    pub parent: Option<Parent>,
    /// The blocks of registered memory that the object's payload consists of.
    pub blocks: Vec<u64>,
    /// What goes into the object's encryption beside the keys, the same whenever it is stored or
    /// loaded; empty for nothing. Without keys it has no effect.
    pub context: Arc<[u8]>,
}

/// What comes before an object in its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The chunk that ends where the object's own begins.
    pub chunk: [u8; CHUNK_BYTES],
    /// Tokens of the prompt until there.
    pub tokens: u64,
}

/// When a load is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    pub(crate) at: Instant,
    pub(crate) pace: Duration,
}

impl Deadline {
    /// At `at`, and later by that part of `pace` which is the part of the bytes that is there.
    ///
    /// With the time to recompute as its pace, a load that is given up has cost the time until `at`
    /// beyond what it brought would have taken to compute, and no more.
    pub fn paced(at: Instant, pace: Duration) -> Self {
        let pace = pace.min(LONGEST);
        Self { at, pace }
    }

    /// The latest that it may be.
    pub(crate) fn limit(&self) -> Instant {
        self.at + self.pace
    }

    /// What it is for a load of which `there` bytes of `total` are there.
    pub(crate) fn now(&self, there: u64, total: u64) -> Instant {
        let part = there as f64 / total.max(1) as f64;
        self.at + self.pace.mul_f64(part.min(1.0))
    }
}

impl From<Instant> for Deadline {
    fn from(at: Instant) -> Self {
        Self {
            at,
            pace: Duration::ZERO,
        }
    }
}

/// What became of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The store took the value; payload bytes.
    Stored(u64),
    /// The store had the value already.
    AlreadyPresent,
    /// Not stored: no room in the arena or in the queue, the store is failing, or the engine is
    /// draining.
    Dropped,
    /// Verified and written into its blocks; payload bytes.
    Loaded(u64),
    /// Written into its blocks from the host tier; payload bytes.
    Kept(u64),
    /// The store does not have it.
    Miss,
    /// The store's value did not verify. Its blocks were not touched.
    Rejected(Rejection),
    /// The job's deadline passed first. Its blocks were not touched.
    TimedOut,
    /// The job was cancelled, or the engine shut down, first.
    Cancelled,
    /// Not fetched, because an earlier object of a prefix job was not loaded.
    Skipped,
    /// The store failed.
    Failed(ErrorKind),
}

impl Outcome {
    /// Stable lower-case name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stored(_) => "stored",
            Self::AlreadyPresent => "already_present",
            Self::Dropped => "dropped",
            Self::Loaded(_) => "loaded",
            Self::Kept(_) => "kept",
            Self::Miss => "miss",
            Self::Rejected(_) => "rejected",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Skipped => "skipped",
            Self::Failed(_) => "failed",
        }
    }

    /// Payload bytes moved.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Stored(bytes) | Self::Loaded(bytes) | Self::Kept(bytes) => *bytes,
            _ => 0,
        }
    }

    /// Whether what was asked for is so.
    pub(crate) fn is_success(&self) -> bool {
        self.is_there() || matches!(self, Self::Stored(_) | Self::AlreadyPresent)
    }

    /// Whether the object of a load is where it was wanted.
    pub(crate) fn is_there(&self) -> bool {
        matches!(self, Self::Loaded(_) | Self::Kept(_))
    }
}

/// What happened to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The source blocks of a store job are not read any more: they may be freed. Precedes
    /// [`Event::Stored`].
    Released,
    /// A load job is over. None of its blocks is written any more.
    Loaded {
        /// One outcome for each object, in the order submitted.
        objects: Vec<Outcome>,
    },
    /// A prefetch is over: what it brought is in the host tier, and stays until it is released.
    Prefetched {
        /// One outcome for each object, in the order submitted.
        objects: Vec<Outcome>,
    },
    /// A store job is over.
    Stored {
        /// One outcome for each object, in the order submitted.
        objects: Vec<Outcome>,
    },
}

impl Event {
    /// Stable lower-case name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Loaded { .. } => "loaded",
            Self::Prefetched { .. } => "prefetched",
            Self::Stored { .. } => "stored",
        }
    }

    /// Whether nothing further will be reported of the job, and its id may be used again.
    pub fn is_last(&self) -> bool {
        !matches!(self, Self::Released)
    }

    /// The outcomes reported, none for [`Event::Released`].
    pub fn outcomes(&self) -> &[Outcome] {
        match self {
            Self::Released => &[],
            Self::Loaded { objects } | Self::Prefetched { objects } | Self::Stored { objects } => {
                objects
            }
        }
    }
}

/// One entry of the completion queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The id that the job was submitted with.
    pub job: u64,
    /// What happened.
    pub event: Event,
    /// Time until then from the job's submission, or from when its fence was passed, if that was
    /// later; none if it was not. Whenever it is polled.
    pub took: Duration,
}

/// An object whose size has been checked against the layout and the slots.
pub(crate) struct Transfer {
    /// The memory that it was checked against.
    pub(crate) registration: Arc<Registration>,
    pub(crate) key: Key,
    /// The same of the chunk before.
    pub(crate) parent: Option<Key>,
    /// Tokens before it in its prompt, 0 if not known.
    pub(crate) position: u64,
    pub(crate) blocks: Vec<u64>,
    /// See [`Object::context`].
    pub(crate) context: Arc<[u8]>,
    /// Payload bytes.
    pub(crate) bytes: usize,
}
