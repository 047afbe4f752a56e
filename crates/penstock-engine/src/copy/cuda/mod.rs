//! Copies between a CUDA device and host memory.
//!
//! Each copy has its own stream. The native thread that asked for the copy waits for its end,
//! asleep. The stream has the lowest priority that there is. This is also the default, and so the
//! model's. So copies do not give way by their priority, but by taking little.
//!
//! Few large pieces go to the copy engines, in one call where the driver can. Many small pieces go
//! to a kernel that gathers or scatters through pinned memory, on only a few multiprocessors. What
//! counts as large is measured on the device.

mod calibration;
mod crossover;
mod driver;
mod pins;
mod point;
mod resources;
mod symbols;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use penstock_layout::Segment;
use penstock_value::header::Checksum;

pub use calibration::{Calibration, Direction};
pub use crossover::Timing;
pub(crate) use pins::Pins;
pub(crate) use point::Point;
pub use symbols::CudaError;

use self::driver::Context;
use self::resources::{Batch, Event, Kernel, PinnedMemory, Stream};
use self::symbols::DevicePtr;
use super::{Executor, Gathering, Scattering, Shared, Way};
use crate::Region;

/// Mean bytes of a piece from which on the copy engines are used, until the device has been
/// measured. Published figures for H100 and H200 put it at about 28 KiB.
const COPY_ENGINE_FROM: usize = 28 << 10;

/// The most blocks of threads of a copy's kernel, each on its own multiprocessor: enough for PCIe.
const KERNEL_BLOCKS: u32 = 16;
/// A copy's kernel gets at most one in so many multiprocessors. Then as many copies as there are
/// lanes by default, five, leave some to the model on any device.
const MULTIPROCESSORS_PER_BLOCK: u32 = 8;
const KERNEL_THREADS: u32 = 512;
/// A warp. With fewer threads for each piece, one warp would copy several pieces.
const FEWEST_THREADS: u32 = 32;
/// Bytes that a thread of the kernel copies at a time.
const VECTOR_BYTES: usize = 16;

/// Pieces that one launch of the kernel copies.
const TABLE_PIECES: usize = 4096;
const TABLE_COLUMNS: usize = 3;
/// The most copies of one call. Jobs have fewer by far, but for very large blocks in small pieces.
const BATCH_PIECES: usize = 4096;

const PIECES_PTX: &str = concat!(include_str!("pieces.ptx"), "\0");
const PIECES_NAME: &CStr = c"penstock_pieces";

/// Copies from and to one device.
pub(crate) struct CudaExecutor {
    /// Tracks that no copy uses now. Copies share everything else that they need.
    idle: Mutex<Vec<Track>>,
    kernel: Kernel,
    /// The most blocks of threads that a copy's kernel gets on this device.
    kernel_blocks: u32,
    context: Arc<Context>,
    calibration: OnceLock<Calibration>,
    calibrating: Mutex<()>,
}

/// Resources that one copy at a time uses.
struct Track {
    stream: Stream,
    event: Event,
    /// The kernel's table.
    table: PinnedMemory,
    batch: Batch,
}

impl Track {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(context)?,
            event: Event::new(context)?,
            table: PinnedMemory::new(context, TABLE_PIECES * TABLE_COLUMNS * size_of::<u64>())?,
            batch: Batch::default(),
        })
    }
}

/// How pieces are copied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    CopyEngine,
    Kernel,
}

/// Payload bytes that are worth a copy of their own. At 50 GB/s, this is 80 µs under way for what it
/// costs to start a copy and to wait for it. Not confirmed on a device.
const OBJECTS_BYTES: usize = 4 << 20;

/// An object of a copy.
struct Object<'a> {
    segments: &'a [Segment],
    /// The payload, as long as all segments together.
    host: *mut u8,
    /// The address at which kernels reach the payload, if it is pinned.
    device: Option<DevicePtr>,
}

/// One run of bytes of a copy.
struct Piece {
    host: *mut u8,
    /// The address at which kernels reach `host`, if it is pinned.
    pinned: Option<DevicePtr>,
    device: DevicePtr,
    len: usize,
}

/// The pieces of all objects.
fn pieces<'a>(
    regions: &'a [Region],
    objects: &'a [Object<'a>],
) -> impl Iterator<Item = Piece> + 'a {
    objects.iter().flat_map(move |object| {
        object.segments.iter().scan(0, move |done, segment| {
            let len = segment.len as usize;
            let piece = Piece {
                // This is inside the payload, which is as long as all segments together.
                host: object.host.wrapping_add(*done),
                pinned: object.device.map(|start| start + *done as u64),
                device: address(regions, segment),
                len,
            };
            *done += len;
            Some(piece)
        })
    })
}

impl CudaExecutor {
    /// The executor of a device by its ordinal. There is one for each device, however many use it
    /// at a time.
    pub(crate) fn of(ordinal: i32) -> Result<Arc<Self>, CudaError> {
        static LIVE: Mutex<BTreeMap<i32, Weak<CudaExecutor>>> = Mutex::new(BTreeMap::new());
        let mut live = LIVE.lock();
        if let Some(executor) = live.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(executor);
        }
        let executor = Arc::new(Self::new(ordinal)?);
        live.insert(ordinal, Arc::downgrade(&executor));
        Ok(executor)
    }

    fn new(ordinal: i32) -> Result<Self, CudaError> {
        let context = Context::of(ordinal)?;
        let ptx = CStr::from_bytes_with_nul(PIECES_PTX.as_bytes())
            .expect("the text has one zero, at its end");
        let entered = context.enter()?;
        let kernel = Kernel::new(&context, ptx, PIECES_NAME)?;
        drop(entered);
        let share = context.multiprocessors()? / MULTIPROCESSORS_PER_BLOCK;
        Ok(Self {
            idle: Mutex::default(),
            kernel,
            kernel_blocks: share.clamp(1, KERNEL_BLOCKS),
            context,
            calibration: OnceLock::new(),
            calibrating: Mutex::default(),
        })
    }

    /// Measures from which size of a piece on the copy engines are used. This is done once; later
    /// calls get the result. It takes some tens of milliseconds, and copies go on meanwhile.
    pub(crate) fn calibrate(&self) -> Result<&Calibration, CudaError> {
        let _one_at_a_time = self.calibrating.lock();
        if let Some(known) = self.calibration.get() {
            return Ok(known);
        }
        let measured = calibration::measure(self)?;
        Ok(self.calibration.get_or_init(|| measured))
    }

    /// A point in the device's work, to be recorded.
    pub(crate) fn point(&self) -> Result<Point, CudaError> {
        Point::new(&self.context)
    }

    fn copy_engine_from(&self, way: Way) -> usize {
        self.calibration
            .get()
            .map_or(COPY_ENGINE_FROM, |known| known.of(way).copy_engine_from)
    }

    /// Copies objects in one direction, and returns when that is done.
    ///
    /// # Safety
    ///
    /// As for [`Executor`], with payloads that are readable, and writable if they are gathered into.
    #[allow(unsafe_code)]
    unsafe fn copy<'a>(
        &self,
        way: Way,
        regions: &[Region],
        objects: impl Iterator<Item = (&'a [Segment], *mut u8)>,
    ) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        let idle = self.idle.lock().pop();
        let mut track = match idle {
            Some(track) => track,
            None => Track::new(&self.context)?,
        };
        let objects: Vec<Object<'_>> = objects
            .map(|(segments, host)| Object {
                segments,
                host,
                device: self.context.device_address(host, bytes_of(segments)),
            })
            .collect();
        let small = mean(&objects) < self.copy_engine_from(way);
        let by = if small && are_pinned(&objects) {
            By::Kernel
        } else {
            By::CopyEngine
        };
        // SAFETY: the caller's promise, until `finish` below has returned.
        let started = unsafe { self.start(way, by, regions, &objects, &mut track) };
        // Work that was started before a failure still runs. Nobody may have the payloads before it
        // ends.
        let finished = track.stream.finish(&track.event);
        if finished.is_ok() {
            self.idle.lock().push(track);
        }
        started.and(finished)
    }

    /// Starts a copy of objects.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), until the track's stream is done; for the kernel all payloads
    /// have device addresses.
    #[allow(unsafe_code)]
    unsafe fn start(
        &self,
        way: Way,
        by: By,
        regions: &[Region],
        objects: &[Object<'_>],
        track: &mut Track,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match by {
                By::CopyEngine => by_copy_engine(&self.context, way, regions, objects, track),
                By::Kernel => self.by_kernel(way, regions, objects, track),
            }
        }
    }

    /// Starts the kernel on all pieces, with as many tables as it takes.
    ///
    /// # Safety
    ///
    /// As for [`start`](Self::start).
    #[allow(unsafe_code)]
    unsafe fn by_kernel(
        &self,
        way: Way,
        regions: &[Region],
        objects: &[Object<'_>],
        track: &mut Track,
    ) -> Result<(), CudaError> {
        let threads = threads_for(mean(objects));
        let mut pieces = pieces(regions, objects).peekable();
        let mut is_first = true;
        while pieces.peek().is_some() {
            if !is_first {
                // The kernel launched before still reads the table that is written now.
                track.stream.finish(&track.event)?;
            }
            is_first = false;
            // SAFETY: the table has as many words, is aligned to a page, and the kernel that read
            // it last is done.
            let table = unsafe {
                std::slice::from_raw_parts_mut(
                    track.table.host().cast::<u64>(),
                    TABLE_PIECES * TABLE_COLUMNS,
                )
            };
            let mut count = 0_u32;
            for (row, piece) in table.chunks_exact_mut(TABLE_COLUMNS).zip(&mut pieces) {
                let pinned = piece.pinned.expect("asked for by the caller");
                row.copy_from_slice(&[piece.device, pinned, piece.len as u64]);
                count += 1;
            }
            let mut table = track.table.device();
            let mut scatter = u32::from(way == Way::Scatter);
            let mut share = threads.ilog2();
            let mut arguments: [*mut c_void; 4] = [
                (&raw mut table).cast(),
                (&raw mut count).cast(),
                (&raw mut scatter).cast(),
                (&raw mut share).cast(),
            ];
            // SAFETY: the arguments are those of `pieces.ptx`; the table is pinned and left alone
            // until the stream is done, the rest is the caller's promise.
            unsafe {
                self.kernel.launch(
                    self.kernel_blocks.min(count),
                    KERNEL_THREADS,
                    &track.stream,
                    &mut arguments,
                )
            }?;
        }
        Ok(())
    }
}

/// Starts copies of all pieces in batches, and returns true. False if the driver does not take them:
/// then nothing is under way, and no batch is tried again. The payloads are pinned.
///
/// # Safety
///
/// As for [`CudaExecutor::copy`], until the track's stream is done.
#[allow(unsafe_code)]
unsafe fn in_batches(
    context: &Context,
    way: Way,
    regions: &[Region],
    objects: &[Object<'_>],
    track: &mut Track,
) -> Result<bool, CudaError> {
    let mut pieces = pieces(regions, objects).peekable();
    while pieces.peek().is_some() {
        track.batch.clear();
        for piece in pieces.by_ref().take(BATCH_PIECES) {
            // Not the host's address: not every device can use that one.
            let pinned = piece.pinned.expect("asked for by the caller");
            match way {
                Way::Gather => track.batch.push(pinned, piece.device, piece.len),
                Way::Scatter => track.batch.push(piece.device, pinned, piece.len),
            }
        }
        // SAFETY: the caller's promise; blocks of a job do not overlap.
        let refusal = match unsafe { track.stream.copy_batch(&mut track.batch) } {
            Ok(true) => continue,
            Ok(false) => None,
            Err(error) => Some(error),
        };
        // What was started ends first. If the context is lost, this says so.
        track.stream.finish(&track.event)?;
        context.give_up_batches(refusal);
        return Ok(false);
    }
    Ok(true)
}

/// Starts copies of all pieces by the copy engines. If the payloads are pinned and the driver can,
/// this takes few calls; otherwise, one call for each piece.
///
/// # Safety
///
/// As for [`CudaExecutor::copy`], until the track's stream is done.
#[allow(unsafe_code)]
unsafe fn by_copy_engine(
    context: &Context,
    way: Way,
    regions: &[Region],
    objects: &[Object<'_>],
    track: &mut Track,
) -> Result<(), CudaError> {
    let count: usize = objects.iter().map(|object| object.segments.len()).sum();
    // The driver stages copies from and to unpinned memory, each one separately.
    if are_pinned(objects) && count > 1 && context.has_batches() {
        // SAFETY: the caller's promise.
        if unsafe { in_batches(context, way, regions, objects, track) }? {
            return Ok(());
        }
    }
    for piece in pieces(regions, objects) {
        // SAFETY: the caller's promise.
        unsafe {
            match way {
                Way::Gather => track
                    .stream
                    .copy_to_host(piece.host, piece.device, piece.len),
                Way::Scatter => track
                    .stream
                    .copy_to_device(piece.device, piece.host, piece.len),
            }
        }?;
    }
    Ok(())
}

fn address(regions: &[Region], segment: &Segment) -> DevicePtr {
    regions[segment.region as usize].address() as u64 + segment.offset
}

fn bytes_of(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.len as usize).sum()
}

/// Mean bytes of a piece.
fn mean(objects: &[Object<'_>]) -> usize {
    let bytes: usize = objects.iter().map(|object| bytes_of(object.segments)).sum();
    let pieces: usize = objects.iter().map(|object| object.segments.len()).sum();
    bytes / pieces.max(1)
}

fn are_pinned(objects: &[Object<'_>]) -> bool {
    objects.iter().all(|object| object.device.is_some())
}

/// The number of threads that share a piece: as many as the piece keeps busy, so that all threads
/// have work under way with small pieces too. A power of two.
fn threads_for(piece_bytes: usize) -> u32 {
    let busy = piece_bytes.div_ceil(VECTOR_BYTES).next_power_of_two();
    u32::try_from(busy)
        .unwrap_or(KERNEL_THREADS)
        .clamp(FEWEST_THREADS, KERNEL_THREADS)
}

#[allow(unsafe_code)]
impl Executor for CudaExecutor {
    fn copy_bytes(&self) -> usize {
        OBJECTS_BYTES
    }

    fn refusal(&self) -> Option<&CudaError> {
        self.context.refusal()
    }

    unsafe fn gather(
        &self,
        regions: &[Region],
        objects: &mut [Gathering<'_>],
    ) -> Result<(), CudaError> {
        let ends = objects
            .iter_mut()
            .map(|object| (object.segments, object.payload.as_mut_ptr()));
        // SAFETY: the caller's promise.
        unsafe { self.copy(Way::Gather, regions, ends) }?;
        for object in objects {
            if let Some(checksum) = &mut object.checksum {
                **checksum = Checksum::of(object.payload);
            }
        }
        Ok(())
    }

    unsafe fn scatter(
        &self,
        regions: &[Region],
        objects: &[Scattering<'_>],
    ) -> Result<(), CudaError> {
        let ends = objects
            .iter()
            .map(|object| (object.segments, object.payload.as_ptr().cast_mut()));
        // SAFETY: the caller's promise; a scatter only reads the payloads.
        unsafe { self.copy(Way::Scatter, regions, ends) }
    }

    unsafe fn copy_shared(
        &self,
        way: Way,
        regions: &[Region],
        pieces: &[Shared<'_>],
    ) -> Result<(), CudaError> {
        let ends = pieces.iter().map(|piece| (piece.segments, piece.memory));
        // SAFETY: the caller's promise. The device reads and writes the memory, and no reference to
        // it exists.
        unsafe { self.copy(way, regions, ends) }
    }
}
