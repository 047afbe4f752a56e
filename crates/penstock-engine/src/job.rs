//! The parts of jobs: objects, with their memory, and the time that they have.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::Key;
use penstock_value::compare::Content;
use penstock_value::compress::Element;
use penstock_value::header::Label;
use penstock_value::header::Writer;

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
    /// A deadline at `at` that moves as bytes arrive: it is later by the same share of `pace` as
    /// the share of the bytes that is there.
    ///
    /// Take the time to recompute as the pace. Then a load that is given up has cost no more than
    /// the time until `at`, beyond the time that computing what it brought would have taken.
    pub fn paced(at: Instant, pace: Duration) -> Self {
        let pace = pace.min(LONGEST);
        Self { at, pace }
    }

    /// The latest time that the deadline may be.
    pub(crate) fn limit(&self) -> Instant {
        self.at + self.pace
    }

    /// The deadline of a load when `there` bytes of `total` are there.
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

/// An object: a value in the store, and the pages of memory that it is gathered from or scattered
/// to.
pub(crate) struct Transfer {
    /// The memory. The pages have been checked to be in it.
    pub(crate) registration: Arc<Registration>,
    pub(crate) key: Key,
    /// The key of the same part of the chunk before.
    pub(crate) parent: Option<Key>,
    /// Tokens before it in its prompt; 0 if that is not known.
    pub(crate) position: u64,
    /// The pages of its block. They mean nothing for a prefetch.
    pub(crate) pages: Range<u64>,
    /// The owner's part of the encryption.
    pub(crate) context: Arc<[u8]>,
    /// Payload bytes.
    pub(crate) bytes: usize,
    /// The type of the payload's elements, if its value is to be coded.
    pub(crate) element: Option<Element>,
    /// What the payload consists of, for comparisons.
    pub(crate) content: Content,
    /// Who computes what the job stores.
    pub(crate) writer: Writer,
}

impl Transfer {
    /// What a payload that was gathered for it is sealed under.
    pub(crate) fn label(&self, writer: Writer) -> Label<'_> {
        Label {
            key: &self.key,
            writer,
            context: &self.context,
        }
    }
}

/// A job's objects, and the blocks that they make up.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) objects: Vec<Transfer>,
    pub(crate) parts: Vec<Part>,
}
