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
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use penstock_layout::Segment;
use penstock_store::value::Checksum;

pub use calibration::{Calibration, Direction};
pub use crossover::Timing;
pub(crate) use pins::Pins;
pub(crate) use point::Point;
pub use symbols::CudaError;

use self::driver::Context;
use self::resources::{Batch, Event, Kernel, PinnedMemory, Stream};
use self::symbols::DevicePtr;
use super::Executor;
use crate::Region;

/// Mean bytes of a piece from which on the copy engines are used, until the device has been
/// measured. Published figures for H100 and H200 put it at about 28 KiB.
const COPY_ENGINE_FROM: usize = 28 << 10;

/// The most blocks of threads of a copy's kernel, each on its own multiprocessor: enough for PCIe.
const KERNEL_BLOCKS: u32 = 16;
/// A copy's kernel gets at most one in so many multiprocessors. Then as many copies as there are
/// lanes by default leave most multiprocessors to the model.
const MULTIPROCESSORS_PER_BLOCK: u32 = 8;
const KERNEL_THREADS: u32 = 512;
/// A warp. With fewer threads for each piece, one warp would copy several pieces.
const FEWEST_THREADS: u32 = 32;
/// Bytes that a thread of the kernel copies at a time.
const VECTOR_BYTES: usize = 16;

/// Pieces that one launch of the kernel copies.
const TABLE_PIECES: usize = 4096;
const TABLE_COLUMNS: usize = 3;

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

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Gather,
    Scatter,
}

/// How pieces are copied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    CopyEngine,
    Kernel,
}

/// The host's end of a copy.
#[derive(Clone, Copy)]
struct Payload {
    host: *mut u8,
    /// The address at which kernels reach it, if it is pinned.
    device: Option<DevicePtr>,
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

    /// Copies all segments in one direction, and returns when that is done.
    ///
    /// # Safety
    ///
    /// As for [`Executor`], with `payload` readable, and writable if it is gathered into.
    #[allow(unsafe_code)]
    unsafe fn copy(
        &self,
        way: Way,
        regions: &[Region],
        segments: &[Segment],
        payload: *mut u8,
    ) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        let idle = self.idle.lock().pop();
        let mut track = match idle {
            Some(track) => track,
            None => Track::new(&self.context)?,
        };
        let bytes = bytes_of(segments);
        let payload = Payload {
            host: payload,
            device: self.context.device_address(payload, bytes),
        };
        let small = mean(bytes, segments) < self.copy_engine_from(way);
        let by = if small && payload.device.is_some() {
            By::Kernel
        } else {
            By::CopyEngine
        };
        // SAFETY: the caller's promise, until `finish` below has returned.
        let started = unsafe { self.start(way, by, regions, segments, payload, &mut track) };
        // Work that was started before a failure still runs. Nobody may have the payload before it
        // ends.
        let finished = track.stream.finish(&track.event);
        if finished.is_ok() {
            self.idle.lock().push(track);
        }
        started.and(finished)
    }

    /// Starts a copy of all segments.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), until the track's stream is done; for the kernel the payload
    /// has a device address.
    #[allow(unsafe_code)]
    unsafe fn start(
        &self,
        way: Way,
        by: By,
        regions: &[Region],
        segments: &[Segment],
        payload: Payload,
        track: &mut Track,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match by {
                By::CopyEngine => by_copy_engine(way, regions, segments, payload, track),
                By::Kernel => self.by_kernel(way, regions, segments, payload, track),
            }
        }
    }

    /// Starts the kernel on all segments, with as many tables as it takes.
    ///
    /// # Safety
    ///
    /// As for [`start`](Self::start).
    #[allow(unsafe_code)]
    unsafe fn by_kernel(
        &self,
        way: Way,
        regions: &[Region],
        segments: &[Segment],
        payload: Payload,
        track: &mut Track,
    ) -> Result<(), CudaError> {
        let threads = threads_for(mean(bytes_of(segments), segments));
        let mut done = 0;
        for (start, pieces) in segments.chunks(TABLE_PIECES).enumerate() {
            if start > 0 {
                // The kernel launched before still reads the table that is written now.
                track.stream.finish(&track.event)?;
            }
            // SAFETY: the table has as many words, is aligned to a page, and the kernel that read
            // it last is done.
            let table = unsafe {
                std::slice::from_raw_parts_mut(
                    track.table.host().cast::<u64>(),
                    TABLE_PIECES * TABLE_COLUMNS,
                )
            };
            for (row, segment) in table.chunks_exact_mut(TABLE_COLUMNS).zip(pieces) {
                row.copy_from_slice(&[address(regions, segment), done, segment.len]);
                done += segment.len;
            }
            let mut table = track.table.device();
            let mut count = pieces.len() as u32;
            let mut payload = payload.device.expect("asked for by the caller");
            let mut scatter = u32::from(way == Way::Scatter);
            let mut share = threads.ilog2();
            let mut arguments: [*mut c_void; 5] = [
                (&raw mut table).cast(),
                (&raw mut count).cast(),
                (&raw mut payload).cast(),
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

/// Starts copies of all segments by the copy engines. If the payload is pinned and the driver can,
/// this is one call; otherwise, one call for each segment.
///
/// # Safety
///
/// As for [`CudaExecutor::copy`], until the track's stream is done.
#[allow(unsafe_code)]
unsafe fn by_copy_engine(
    way: Way,
    regions: &[Region],
    segments: &[Segment],
    payload: Payload,
    track: &mut Track,
) -> Result<(), CudaError> {
    let pieces = || {
        segments.iter().scan(0, |done, segment| {
            let len = segment.len as usize;
            // This is inside the payload, which is as long as all segments together.
            let host = payload.host.wrapping_add(*done);
            *done += len;
            Some((host, address(regions, segment), len))
        })
    };
    // The driver stages copies from and to unpinned memory, each one separately.
    if payload.device.is_some() && segments.len() > 1 && track.stream.has_batches() {
        track.batch.clear();
        for (host, device, len) in pieces() {
            let host = host.expose_provenance() as DevicePtr;
            match way {
                Way::Gather => track.batch.push(host, device, len),
                Way::Scatter => track.batch.push(device, host, len),
            }
        }
        // SAFETY: the caller's promise; blocks of a job do not overlap.
        if unsafe { track.stream.copy_batch(&mut track.batch) }? {
            return Ok(());
        }
    }
    for (host, device, len) in pieces() {
        // SAFETY: the caller's promise.
        unsafe {
            match way {
                Way::Gather => track.stream.copy_to_host(host, device, len),
                Way::Scatter => track.stream.copy_to_device(device, host, len),
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
fn mean(bytes: usize, segments: &[Segment]) -> usize {
    bytes / segments.len().max(1)
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
    unsafe fn gather(
        &self,
        regions: &[Region],
        segments: &[Segment],
        payload: &mut [u8],
        checksum: Option<&mut Checksum>,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy(Way::Gather, regions, segments, payload.as_mut_ptr()) }?;
        if let Some(checksum) = checksum {
            checksum.update(payload);
        }
        Ok(())
    }

    unsafe fn scatter(
        &self,
        payload: &[u8],
        regions: &[Region],
        segments: &[Segment],
    ) -> Result<(), CudaError> {
        let source = payload.as_ptr().cast_mut();
        // SAFETY: the caller's promise; a scatter only reads the payload.
        unsafe { self.copy(Way::Scatter, regions, segments, source) }
    }
}
