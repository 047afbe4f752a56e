//! Registrations: layouts laid over regions, and the copies to and from them.

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::mem;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};
use penstock_contract::memory::Run;
use penstock_layout::{Descriptor, Segment, Span};
use penstock_value::header::Checksum;

use crate::EngineError;
use crate::copy::cuda::CudaError;
use crate::copy::{Executor, Gathering, Scattering, Shared, Way, host};
use crate::region::Region;

/// Why blocks were not copied, or not all of them.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NotCopied {
    /// The registration is closed: nothing was touched.
    #[error("the memory is not registered any more")]
    Closed,
    /// The device failed.
    #[error(transparent)]
    Device(#[from] CudaError),
}

/// A span of pages, which have been checked, and a payload that is as long as they are.
pub(crate) struct Object<'a, P, B> {
    pub(crate) pages: P,
    pub(crate) span: &'a Span,
    pub(crate) payload: B,
}

/// A layout laid over regions. Jobs hold the registration that they were submitted under.
pub(crate) struct Registration {
    descriptor: Descriptor,
    regions: Vec<Region>,
    is_host: bool,
    copy_bytes: usize,
    /// Who copies, as long as the regions may be touched. Copies hold this lock for reading while
    /// they run, so closing waits for them.
    open: RwLock<Option<Arc<dyn Executor>>>,
}

impl Registration {
    pub(crate) fn new(
        descriptor: Descriptor,
        regions: Vec<Region>,
        executor: Arc<dyn Executor>,
    ) -> Result<Self, EngineError> {
        let expected = descriptor.region_lens();
        if expected.len() != regions.len() {
            let (expected, given) = (expected.len(), regions.len());
            return Err(EngineError::Regions(format!(
                "the layout has {expected} regions, but {given} were given"
            )));
        }
        for (region, (&expected, given)) in expected.iter().zip(&regions).enumerate() {
            if given.len() < expected {
                return Err(EngineError::Regions(format!(
                    "region {region} has {} bytes, but the layout takes it to have {expected}",
                    given.len()
                )));
            }
        }
        Ok(Self {
            descriptor,
            regions,
            is_host: executor.is_host(),
            copy_bytes: executor.copy_bytes(),
            open: RwLock::new(Some(executor)),
        })
    }

    /// The error for which pieces are copied one by one, if there is one.
    pub(crate) fn refusal(&self) -> Option<CudaError> {
        self.open.read().as_ref()?.refusal().cloned()
    }

    /// Waits for the copies under way (true), or until the time is over (false). After true no copy
    /// starts, and none is under way. Who copied goes to `given_up`: giving back what it has of a
    /// device waits for all that the device computes.
    pub(crate) fn close(&self, end: Instant, given_up: &mut Vec<Arc<dyn Executor>>) -> bool {
        match self.open.try_write_until(end) {
            Some(mut open) => {
                given_up.extend(open.take());
                true
            }
            None => false,
        }
    }

    /// Keeps the registration open: closing waits until this is dropped.
    fn held_open(&self) -> Result<MappedRwLockReadGuard<'_, Arc<dyn Executor>>, NotCopied> {
        let open = self.open.read();
        RwLockReadGuard::try_map(open, Option::as_ref).map_err(|_| NotCopied::Closed)
    }

    /// The payload bytes of so many pages of a span. Checks them against the memory, and against
    /// `room`.
    pub(crate) fn payload_bytes(
        &self,
        span: &Span,
        pages: u64,
        room: usize,
    ) -> Result<usize, EngineError> {
        self.descriptor
            .check_span(span)
            .map_err(EngineError::NotInLayout)?;
        let bytes = self.descriptor.block_bytes(span).saturating_mul(pages);
        if bytes == 0 {
            return Err(EngineError::Refused(format!(
                "no layer of the object's group lies in span {span}"
            )));
        }
        if bytes > room as u64 {
            return Err(EngineError::Refused(format!(
                "an object of {bytes} bytes does not fit a slot of {room}"
            )));
        }
        Ok(bytes as usize)
    }

    /// Checks that the memory has this page.
    pub(crate) fn check_page(&self, page: u64) -> Result<(), EngineError> {
        self.descriptor
            .check_block(page)
            .map_err(EngineError::NotInLayout)
    }

    /// Copies the pages of objects into their payloads, in one copy. Returns each payload's checksum,
    /// or that of nothing without `sum`.
    #[allow(unsafe_code)]
    pub(crate) fn gather<'a, P: IntoIterator<Item = u64>>(
        &self,
        objects: impl IntoIterator<Item = Object<'a, P, &'a mut [u8]>>,
        sum: bool,
    ) -> Result<Vec<u64>, NotCopied> {
        let mut segments = Scratch::take();
        let payloads = self.segments_of(objects, &mut segments);
        let mut checksums = vec![Checksum::of(&[]); payloads.len()];
        let mut gatherings: Vec<Gathering<'_>> = (payloads.into_iter().zip(&mut checksums))
            .map(|((range, payload), checksum)| Gathering {
                segments: &segments[range],
                payload,
                checksum: sum.then_some(checksum),
            })
            .collect();
        let executor = self.held_open()?;
        // SAFETY: `segments` has checked every segment against its region and their sum against
        // the payload. While the registration is open, the regions are mapped and the blocks of
        // a store job are not written: whoever made them has promised it. The payloads are arena
        // memory, or the caller's own, which no region overlaps.
        unsafe { executor.gather(&self.regions, &mut gatherings) }?;
        Ok(checksums)
    }

    /// Copies the verified payloads of objects into their pages, in one copy.
    #[allow(unsafe_code)]
    pub(crate) fn scatter<'a, P: IntoIterator<Item = u64>>(
        &self,
        objects: impl IntoIterator<Item = Object<'a, P, &'a [u8]>>,
    ) -> Result<(), NotCopied> {
        let mut segments = Scratch::take();
        let payloads = self.segments_of(objects, &mut segments);
        let scatterings: Vec<Scattering<'_>> = (payloads.into_iter())
            .map(|(range, payload)| Scattering {
                segments: &segments[range],
                payload,
            })
            .collect();
        let executor = self.held_open()?;
        // SAFETY: as in `gather`; the blocks of a load job are touched by nobody else.
        unsafe { executor.scatter(&self.regions, &scatterings) }?;
        Ok(())
    }

    /// Copies the pages of objects, in one copy, between the device that they are on and runs of
    /// memory that processes share. Each object's runs are together as long as its pages.
    #[allow(unsafe_code)]
    pub(crate) fn copy_shared<P: IntoIterator<Item = u64>>(
        &self,
        way: Way,
        objects: impl IntoIterator<Item = (P, Span, Vec<Run>)>,
    ) -> Result<(), NotCopied> {
        let (mut segments, mut pieces) = (Vec::new(), Vec::new());
        for (pages, span, runs) in objects {
            let mut own = Vec::new();
            let bytes = runs.iter().map(|run| run.len()).sum();
            self.segments(pages, &span, bytes, &mut own);
            cut_at_runs(own, runs, &mut segments, &mut pieces);
        }
        let pieces: Vec<Shared<'_>> = (pieces.into_iter())
            .map(|(range, memory)| Shared {
                segments: &segments[range],
                memory,
            })
            .collect();
        let executor = self.held_open()?;
        // SAFETY: as in `gather` and `scatter`. The runs are mapped as long as the `Lent` or the
        // `Reserved` lives that they are of, as both promise: longer than this call. For a gather
        // they are reserved, so nobody else writes there.
        unsafe { executor.copy_shared(way, &self.regions, &pieces) }?;
        Ok(())
    }

    /// Payload bytes that are worth a copy of their own; 0 if every object is.
    pub(crate) fn copy_bytes(&self) -> usize {
        self.copy_bytes
    }

    /// Whether the pages are host memory, which [`read`](Self::read) and [`fill`](Self::fill)
    /// need.
    pub(crate) fn is_host(&self) -> bool {
        self.is_host
    }

    /// Lends the memory of a span of pages, in order, to whoever only reads it. Otherwise as
    /// [`fill`](Self::fill).
    #[allow(unsafe_code)]
    pub(crate) fn read<T>(
        &self,
        pages: impl IntoIterator<Item = u64>,
        span: &Span,
        bytes: usize,
        read: impl FnOnce(&mut dyn Iterator<Item = IoSlice<'_>>) -> T,
    ) -> Result<T, NotCopied> {
        assert!(self.is_host(), "pages of a device are not lent");
        let mut segments = Scratch::take();
        self.segments(pages, span, bytes, &mut segments);
        let _open = self.held_open()?;
        // SAFETY: as in `gather`.
        let mut slices = unsafe { host::slices(&self.regions, &segments) };
        Ok(read(&mut slices))
    }

    /// Lends the memory of a span of pages, in order, to whoever fills it. The pages have been
    /// checked, and have `bytes` in all.
    #[allow(unsafe_code)]
    pub(crate) fn fill<T>(
        &self,
        pages: impl IntoIterator<Item = u64>,
        span: &Span,
        bytes: usize,
        fill: impl FnOnce(Vec<IoSliceMut<'_>>) -> T,
    ) -> Result<T, NotCopied> {
        assert!(self.is_host(), "pages of a device are not lent");
        let mut segments = Scratch::take();
        self.segments(pages, span, bytes, &mut segments);
        let _open = self.held_open()?;
        // SAFETY: as in `scatter`. A descriptor's segments do not overlap: its coverage has been
        // checked.
        let slices = unsafe { host::slices_mut(&self.regions, &segments) };
        Ok(fill(slices.collect()))
    }

    /// The segments of all objects, one object after the other. Returns which are whose, with the
    /// payloads.
    fn segments_of<'a, P: IntoIterator<Item = u64>, B: AsRef<[u8]>>(
        &self,
        objects: impl IntoIterator<Item = Object<'a, P, B>>,
        out: &mut Vec<Segment>,
    ) -> Vec<(Range<usize>, B)> {
        let ranges = objects.into_iter().map(|object| {
            let bytes = object.payload.as_ref().len();
            let own = self.segments(object.pages, object.span, bytes, out);
            (own, object.payload)
        });
        ranges.collect()
    }

    /// Appends the segments of a span of pages. Returns which of `out` they are.
    ///
    /// Panics unless each segment lies inside its region and they have `bytes` in all. A descriptor
    /// gives no other segments; the check keeps a fault in a descriptor from becoming a stray
    /// write.
    fn segments(
        &self,
        pages: impl IntoIterator<Item = u64>,
        span: &Span,
        bytes: usize,
        out: &mut Vec<Segment>,
    ) -> Range<usize> {
        let own = (self.descriptor.segments(pages, span, out))
            .expect("checked when the job was submitted");
        let mut sum = 0;
        for segment in &out[own.clone()] {
            let region = &self.regions[segment.region as usize];
            let end = segment
                .offset
                .checked_add(segment.len)
                .expect("a segment within 64 bits");
            assert!(end <= region.len(), "a segment inside its region");
            sum += segment.len;
        }
        assert_eq!(sum, bytes as u64, "segments as long as the payload");
        own
    }
}

/// A vector without segments. Its memory is that of the thread's last copy, and goes on to the next.
struct Scratch(Vec<Segment>);

thread_local! {
    static SCRATCH: Cell<Vec<Segment>> = const { Cell::new(Vec::new()) };
}

impl Scratch {
    fn take() -> Self {
        Self(SCRATCH.take())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.0.clear();
        SCRATCH.set(mem::take(&mut self.0));
    }
}

impl Deref for Scratch {
    type Target = Vec<Segment>;

    fn deref(&self) -> &Vec<Segment> {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut Vec<Segment> {
        &mut self.0
    }
}

/// Cuts segments where the runs that they lie in meet. Appends them to `out`, and to `pieces` which
/// of them are in which run. The runs are together as long as the segments.
fn cut_at_runs(
    segments: Vec<Segment>,
    runs: Vec<Run>,
    out: &mut Vec<Segment>,
    pieces: &mut Vec<(Range<usize>, *mut u8)>,
) {
    let mut left = segments.into_iter();
    let mut rest: Option<Segment> = None;
    for run in runs {
        let start = out.len();
        let mut room = run.len() as u64;
        while room > 0 {
            let next = rest.take().or_else(|| left.next());
            let mut next = next.expect("segments as long as the runs");
            if next.len > room {
                rest = Some(Segment {
                    offset: next.offset + room,
                    len: next.len - room,
                    ..next
                });
                next.len = room;
            }
            room -= next.len;
            out.push(next);
        }
        pieces.push((start..out.len(), run.start()));
    }
}
