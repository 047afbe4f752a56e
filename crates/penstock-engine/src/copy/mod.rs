//! Copies between registered memory and arena slots, with one module for each kind of device.

pub(crate) mod cuda;
pub(crate) mod host;

pub(crate) use host::HostExecutor;

use std::sync::Arc;

use penstock_layout::Segment;
use penstock_store::value::Checksum;

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

/// Moves bytes between regions and a slot's payload. Both calls return when the bytes have moved,
/// or when none move any more.
pub(crate) trait Executor: Send + Sync {
    /// Whether the regions are memory that this process can read and write itself.
    fn is_host(&self) -> bool {
        false
    }

    /// Concatenates the segments into `payload`, in order. Feeds the payload to `checksum`, if
    /// there is one.
    ///
    /// # Safety
    ///
    /// Every segment lies inside its region, their lengths add up to `payload.len()`, no
    /// region overlaps `payload`, and nobody writes the segments meanwhile.
    #[allow(unsafe_code)]
    unsafe fn gather(
        &self,
        regions: &[Region],
        segments: &[Segment],
        payload: &mut [u8],
        checksum: Option<&mut Checksum>,
    ) -> Result<(), CudaError>;

    /// Cuts `payload` up into the segments, in order.
    ///
    /// # Safety
    ///
    /// As for [`gather`](Self::gather), and nobody reads the segments meanwhile.
    #[allow(unsafe_code)]
    unsafe fn scatter(
        &self,
        payload: &[u8],
        regions: &[Region],
        segments: &[Segment],
    ) -> Result<(), CudaError>;
}
