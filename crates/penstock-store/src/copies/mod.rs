//! Copies of values that the standard library has no way for: between memory of this process and
//! memory that others use too, and with a checksum on the way.

#[cfg(target_arch = "x86_64")]
mod fused;
pub(crate) mod racing;
mod summed;

pub use summed::SummedCopy;

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

    /// Cuts these bytes at every address `begin + k * every`. `begin` must not be behind them.
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

/// Copies bytes that this processor does not read soon. Large copies go past its caches: then it
/// need not read what it overwrites.
///
/// # Panics
///
/// If the lengths differ.
pub fn past_caches(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "a copy is as long as what it is of");
    // SAFETY: both are references, so nobody else writes there, and they do not overlap.
    #[allow(unsafe_code)]
    unsafe {
        racing::copy_in(from.as_ptr(), into.as_mut_ptr(), from.len());
    }
}
