//! What jobs are made of: objects, with their memory, and the time that they have.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_store::Key;

use crate::config::LONGEST;
use crate::outcome::Part;
use crate::registration::Registration;

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

/// An object: a value in the store, and the pages of memory that it is gathered from or scattered to.
pub(crate) struct Transfer {
    /// The memory, of which it has been checked that the pages are there.
    pub(crate) registration: Arc<Registration>,
    pub(crate) key: Key,
    /// The same of the chunk before.
    pub(crate) parent: Option<Key>,
    /// Tokens before it in its prompt, 0 if not known.
    pub(crate) position: u64,
    /// Those of its block; of a prefetch they mean nothing.
    pub(crate) pages: Range<u64>,
    /// The tenant's part of the encryption.
    pub(crate) context: Arc<[u8]>,
    /// Payload bytes.
    pub(crate) bytes: usize,
}

/// A job's objects, and the blocks that they make up.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) objects: Vec<Transfer>,
    pub(crate) parts: Vec<Part>,
}
