//! Copies between registered memory and arena slots, with one module for each kind of device.

pub(crate) mod cuda;
pub(crate) mod host;

pub(crate) use host::HostExecutor;

use std::sync::Arc;

use penstock_layout::Segment;

use self::cuda::{CudaError, CudaExecutor};
use crate::region::Region;

/// Where registered memory lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// In host memory.
    #[default]
    Host,
    /// On a CUDA device, by its ordinal in this process.
    Cuda(i32),
}

impl Device {
    pub(crate) fn executor(self) -> Result<Arc<dyn Executor>, CudaError> {
        Ok(match self {
            Self::Host => Arc::new(HostExecutor),
            Self::Cuda(ordinal) => CudaExecutor::of(ordinal)?,
        })
    }
}

/// The segments of one object, in order, and the payload that they are gathered into.
pub(crate) struct Gathering<'a> {
    pub(crate) segments: &'a [Segment],
    pub(crate) payload: &'a mut [u8],
    /// The payload's checksum goes here, if it is wanted.
    pub(crate) checksum: Option<&'a mut u64>,
}

/// The segments of one object, in order, and the payload that they are cut from.
pub(crate) struct Scattering<'a> {
    pub(crate) segments: &'a [Segment],
    pub(crate) payload: &'a [u8],
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Gather,
    Scatter,
}

/// Segments, in order, and one run of memory that processes share: they are gathered into it, or cut
/// from it.
pub(crate) struct Shared<'a> {
    pub(crate) segments: &'a [Segment],
    pub(crate) memory: *mut u8,
}

/// Moves bytes between regions and the payloads of slots. Both calls return when all bytes have
/// moved, or when none move any more.
pub(crate) trait Executor: Send + Sync {
    /// Whether the regions are memory that this process can read and write itself.
    fn is_host(&self) -> bool {
        false
    }

    /// Payload bytes that are worth a copy of their own. Smaller objects are copied several at a
    /// time, up to these bytes. None are if this is 0.
    fn copy_bytes(&self) -> usize {
        0
    }

    /// The error for which pieces are no more copied in batches, but one by one.
    fn refusal(&self) -> Option<&CudaError> {
        None
    }

    /// Gathers objects.
    ///
    /// # Safety
    ///
    /// Every segment lies inside its region. An object's segments are together as long as its
    /// payload. No region overlaps a payload, and nobody writes the segments meanwhile.
    #[allow(unsafe_code)]
    unsafe fn gather(
        &self,
        regions: &[Region],
        objects: &mut [Gathering<'_>],
    ) -> Result<(), CudaError>;

    /// Scatters objects.
    ///
    /// # Safety
    ///
    /// As for [`gather`](Self::gather), and nobody reads the segments meanwhile.
    #[allow(unsafe_code)]
    unsafe fn scatter(
        &self,
        regions: &[Region],
        objects: &[Scattering<'_>],
    ) -> Result<(), CudaError>;

    /// Gathers into memory that processes share, or scatters what is there. Only for regions that
    /// are not host memory.
    ///
    /// # Safety
    ///
    /// As for [`gather`](Self::gather) and [`scatter`](Self::scatter), with memory as long as its
    /// segments, and pinned in one piece. Others may write to memory that is scattered: what then
    /// arrives has no meaning.
    #[allow(unsafe_code)]
    unsafe fn copy_shared(
        &self,
        _way: Way,
        _regions: &[Region],
        _pieces: &[Shared<'_>],
    ) -> Result<(), CudaError> {
        unreachable!("host memory is copied by the one who sums it")
    }
}
