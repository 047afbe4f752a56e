//! Copies between registered memory and arena slots. One file for each kind of device.

mod host;

pub(crate) use host::HostExecutor;

use penstock_layout::Segment;
use penstock_store::value::Checksum;

use crate::Region;

/// Moves bytes between regions and a slot's payload. Both calls return when the bytes have moved.
pub(crate) trait Executor: Send + Sync {
    /// Concatenates the segments into `payload` and feeds it to `checksum`, in order.
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
        checksum: &mut Checksum,
    );

    /// Cuts `payload` up into the segments, in order.
    ///
    /// # Safety
    ///
    /// As for [`gather`](Self::gather), and nobody reads the segments meanwhile.
    #[allow(unsafe_code)]
    unsafe fn scatter(&self, payload: &[u8], regions: &[Region], segments: &[Segment]);
}
