//! Copies for KV that lies in host memory.

use std::io::{IoSlice, IoSliceMut};
use std::ptr;

use penstock_layout::Segment;
use penstock_value::copies::{SummedCopy, past_caches};

use super::cuda::CudaError;
use super::{Executor, Gathering, Scattering};
use crate::Region;

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

/// The segments' own bytes.
///
/// # Safety
///
/// The regions are host memory, every segment lies inside its region, and nobody writes the
/// segments while the slices live.
#[allow(unsafe_code)]
pub(crate) unsafe fn slices<'a>(
    regions: &'a [Region],
    segments: &'a [Segment],
) -> impl Iterator<Item = IoSlice<'a>> {
    segments.iter().map(|segment| {
        // SAFETY: the caller's promise.
        let bytes =
            unsafe { std::slice::from_raw_parts(address(regions, segment), segment.len as usize) };
        IoSlice::new(bytes)
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
            // SAFETY: the caller's promise.
            unsafe {
                if let Some(checksum) = &mut object.checksum {
                    // The payload is read again when it is put.
                    let mut copy = SummedCopy::new(payload.len() as u64, false);
                    gather(regions, segments, payload, |from, into| {
                        copy.copy(from, into);
                    });
                    **checksum = copy.finish();
                } else {
                    gather(regions, segments, payload, |from, into| {
                        into.copy_from_slice(from);
                    });
                }
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
            let mut source = *payload;
            // SAFETY: the caller promises that the segments are mapped, touched by nobody else
            // meanwhile, and do not overlap `payload`.
            for mut target in unsafe { slices_mut(regions, segments) } {
                let (now, later) = source.split_at(target.len());
                // The model reads them when all are there.
                past_caches(now, &mut target);
                source = later;
            }
        }
        Ok(())
    }
}

/// Copies segments into a payload, with `copy`.
///
/// # Safety
///
/// As for [`Executor::gather`].
#[allow(unsafe_code)]
unsafe fn gather(
    regions: &[Region],
    segments: &[Segment],
    payload: &mut [u8],
    mut copy: impl FnMut(&[u8], &mut [u8]),
) {
    let mut target = payload;
    // SAFETY: the caller promises that the segments are mapped, not written meanwhile, and do not
    // overlap `payload`.
    for source in unsafe { slices(regions, segments) } {
        let (now, later) = target.split_at_mut(source.len());
        copy(&source, now);
        target = later;
    }
}
