//! Copies for KV that lies in host memory.

use std::io::IoSliceMut;
use std::ptr;

use penstock_layout::Segment;
use penstock_store::value::Checksum;

use super::cuda::CudaError;
use super::{Executor, Gathering, Scattering};
use crate::Region;

/// Bytes that are copied before they are summed. Source and copy both fit a core's own cache, so
/// the checksum reads from there what the copy has just written.
const PIECE: usize = 64 << 10;

/// Plain copies by the calling thread.
pub(crate) struct HostExecutor;

fn address(regions: &[Region], segment: &Segment) -> *mut u8 {
    let base = regions[segment.region as usize].address();
    ptr::with_exposed_provenance_mut::<u8>(base).wrapping_add(segment.offset as usize)
}

/// The segments' own bytes, to be written.
///
/// # Safety
///
/// The regions are host memory, every segment lies inside its region, no two segments overlap, and
/// nobody else reads or writes them while the slices live.
#[allow(unsafe_code)]
pub(crate) unsafe fn slices_mut<'a>(
    regions: &'a [Region],
    segments: &'a [Segment],
) -> impl Iterator<Item = IoSliceMut<'a>> {
    segments.iter().map(|segment| {
        // SAFETY: the caller's promise.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(address(regions, segment), segment.len as usize)
        };
        IoSliceMut::new(bytes)
    })
}

#[allow(unsafe_code)]
impl Executor for HostExecutor {
    fn is_host(&self) -> bool {
        true
    }

    unsafe fn gather(
        &self,
        regions: &[Region],
        objects: &mut [Gathering<'_>],
    ) -> Result<(), CudaError> {
        for object in objects {
            let Gathering {
                segments, payload, ..
            } = object;
            match &mut object.checksum {
                // SAFETY: the caller's promise.
                Some(checksum) => unsafe { gather_summed(regions, segments, payload, checksum) },
                // SAFETY: the caller's promise.
                None => unsafe { gather(regions, segments, payload) },
            }
        }
        Ok(())
    }

    unsafe fn scatter(
        &self,
        regions: &[Region],
        objects: &[Scattering<'_>],
    ) -> Result<(), CudaError> {
        for Scattering { segments, payload } in objects {
            let mut done = 0;
            for segment in *segments {
                let len = segment.len as usize;
                let source = &payload[done..done + len];
                // SAFETY: the caller promises that the segment is mapped, touched by nobody else
                // meanwhile, and does not overlap `payload`.
                unsafe {
                    ptr::copy_nonoverlapping(source.as_ptr(), address(regions, segment), len);
                }
                done += len;
            }
        }
        Ok(())
    }
}

/// # Safety
///
/// As for [`Executor::gather`].
#[allow(unsafe_code)]
unsafe fn gather(regions: &[Region], segments: &[Segment], payload: &mut [u8]) {
    let mut filled = 0;
    for segment in segments {
        let len = segment.len as usize;
        let target = &mut payload[filled..filled + len];
        // SAFETY: the caller promises that the segment is mapped, not written meanwhile, and does
        // not overlap `payload`.
        unsafe { ptr::copy_nonoverlapping(address(regions, segment), target.as_mut_ptr(), len) };
        filled += len;
    }
}

/// # Safety
///
/// As for [`Executor::gather`].
#[allow(unsafe_code)]
unsafe fn gather_summed(
    regions: &[Region],
    segments: &[Segment],
    payload: &mut [u8],
    checksum: &mut Checksum,
) {
    // The bytes in `summed..filled` are copied but not summed yet.
    let (mut summed, mut filled) = (0, 0);
    for segment in segments {
        let source = address(regions, segment);
        let len = segment.len as usize;
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(PIECE - (filled - summed));
            // SAFETY: the caller promises that the segment is mapped and not written meanwhile,
            // that it does not overlap `payload`, and that all segments together are as long as
            // `payload`, so `filled + piece` stays within it.
            unsafe {
                ptr::copy_nonoverlapping(source.add(done), payload.as_mut_ptr().add(filled), piece);
            }
            done += piece;
            filled += piece;
            if filled - summed == PIECE {
                checksum.update(&payload[summed..filled]);
                summed = filled;
            }
        }
    }
    checksum.update(&payload[summed..filled]);
}
