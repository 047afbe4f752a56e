//! What a store can do besides the contract if its values lie in this machine's memory: values are
//! read and written where they lie, and processes agree on which of them brings a value there.

use std::io::IoSlice;
use std::time::Instant;

use crate::{Key, PutOutcome, Result};

/// Bytes in front of a value's payload. Such a store keeps them apart where it sums payloads.
pub const HEADER_BYTES: usize = 64;

/// The right to bring a value into a store. It ends when this is dropped, or with the process.
pub type Claim<'a> = Box<dyn Send + 'a>;

/// Bytes of memory that processes share: a place, not a right to touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    start: *mut u8,
    len: usize,
}

impl Run {
    /// The bytes from `start` on.
    pub fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Cuts the run at every address `begin + k * every`. The run does not begin before `begin`.
    pub fn cut(self, begin: usize, every: usize) -> impl Iterator<Item = Self> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let start = self.start.wrapping_add(done);
            let room = every - (start.addr() - begin) % every;
            let len = room.min(self.len - done);
            done += len;
            (len > 0).then_some(Self { start, len })
        })
    }

    /// The first byte.
    pub fn start(self) -> *mut u8 {
        self.start
    }

    /// How many bytes there are.
    #[expect(clippy::len_without_is_empty, reason = "nobody makes an empty one")]
    pub fn len(self) -> usize {
        self.len
    }
}

/// A store whose values lie in memory of this machine, which other processes may share. A get is a
/// copy within that memory, done when the call returns.
///
/// # Safety
/// The [region](Self::region) is mapped, readable and writable, as long as the store lives.
#[allow(unsafe_code, reason = "others copy from and to what it names")]
pub unsafe trait SharedMemory {
    /// The memory that values lie in, for whoever can make it reachable for a device.
    fn region(&self) -> Run;

    /// Does now what this process would otherwise do when it first touches a value's memory, until
    /// `stop` says so. To be called from a thread that nobody waits for.
    fn warm_up(&self, stop: &dyn Fn() -> bool);

    /// A value where it lies. None if it is not there.
    fn lend(&self, key: &Key, position: u64, deadline: Instant) -> Option<Box<dyn Lent + '_>>;

    /// Room for a value, to be filled by the caller. None if it is there already. `position` is as
    /// in [`PutRequest::position`](crate::PutRequest::position).
    ///
    /// Fails as a put does, and with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if
    /// this value must be put the usual way.
    fn reserve(
        &self,
        key: &Key,
        payload_bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> Result<Option<Box<dyn Reserved + '_>>>;

    /// Asks to be the one process that brings a value here from elsewhere. None while another
    /// process is bringing it.
    fn claim(&self, key: &Key) -> Option<Claim<'_>>;
}

/// A value in this machine's memory, which others may give up at any time.
///
/// # Safety
/// The [runs](Self::runs) are mapped and readable as long as this lives. Others may write there.
#[allow(unsafe_code, reason = "others copy from what it names")]
pub unsafe trait Lent {
    /// The value's header, as it was found.
    fn header(&self) -> &[u8; HEADER_BYTES];
    /// Bytes of the value, header included.
    fn bytes(&self) -> u64;
    /// Where the payload lies, in order.
    fn runs(&self) -> Vec<Run>;
    /// The checksum of the payload that lies there.
    fn sum(&self) -> u64;
    /// Whether the value is, and always was, what was found.
    fn is_still(&self) -> bool;
}

/// Room in this machine's memory for a value that nobody sees yet. If it is dropped, it is free
/// again.
///
/// # Safety
/// The [runs](Self::runs) are mapped and writable as long as this lives, do not overlap, and nobody
/// else writes there.
#[allow(unsafe_code, reason = "others copy to what it names")]
pub unsafe trait Reserved {
    /// Where the payload goes, in order.
    fn runs(&self) -> Vec<Run>;
    /// Copies the payload there, and returns its checksum. There must be room for it.
    fn fill(&mut self, payload: &mut dyn Iterator<Item = IoSlice<'_>>) -> u64;
    /// The checksum of the payload that lies there.
    fn sum(&self) -> u64;
    /// Shows the value.
    fn publish(self: Box<Self>, header: &[u8; HEADER_BYTES]) -> Result<PutOutcome>;
}
