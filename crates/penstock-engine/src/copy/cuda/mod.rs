//! Copies between a CUDA device and host memory.
//!
//! Each copy has a stream of low priority to itself, so that it gives way to the model, and ends
//! with a wait that sleeps, on the native thread that asked for it. Few large pieces go to the copy
//! engines, a descriptor a piece; many small ones to a kernel that gathers or scatters through
//! pinned memory, on a few multiprocessors only.

mod driver;

use std::ffi::{CStr, c_int, c_void};

use parking_lot::Mutex;
use penstock_layout::Segment;
use penstock_store::value::Checksum;

pub use driver::CudaError;

use self::driver::{DevicePtr, Driver, Handle};
use super::Executor;
use crate::Region;

/// Mean bytes of a piece from which the copy engines are used. Published figures for H100 and H200
/// put it at about 28 KiB; `benches/gpu_copy.py` measures both ways.
const COPY_ENGINE_FROM: usize = 28 << 10;

/// Blocks of threads of the kernel, each on a multiprocessor of its own: enough for PCIe, few of a
/// device's hundred or more.
const KERNEL_BLOCKS: u32 = 16;
const KERNEL_THREADS: u32 = 512;

/// Pieces that one start of the kernel copies.
const TABLE_PIECES: usize = 4096;
const TABLE_COLUMNS: usize = 3;

const PIECES_PTX: &str = concat!(include_str!("pieces.ptx"), "\0");
const PIECES_NAME: &CStr = c"penstock_pieces";

/// Copies from and to one device.
pub(crate) struct CudaExecutor {
    driver: &'static Driver,
    device: c_int,
    context: Handle,
    module: Handle,
    kernel: Handle,
    idle: Mutex<Vec<Track>>,
}

// SAFETY: handles of the driver may be used from any thread that has made the context its own,
// which every method does first; the rest is behind a lock.
#[allow(unsafe_code)]
unsafe impl Send for CudaExecutor {}
// SAFETY: as for Send.
#[allow(unsafe_code)]
unsafe impl Sync for CudaExecutor {}

/// What one copy at a time uses.
struct Track {
    stream: Handle,
    event: Handle,
    /// The kernel's table, pinned.
    table: Box<[u64]>,
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Gather,
    Scatter,
}

impl CudaExecutor {
    /// An executor for a device by its ordinal.
    pub(crate) fn new(device: i32) -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        let context = driver.retain_primary(device)?;
        let loaded = driver.set_current(context).and_then(|()| {
            let ptx = CStr::from_bytes_with_nul(PIECES_PTX.as_bytes())
                .expect("the text has one zero, at its end");
            driver.function(ptx, PIECES_NAME)
        });
        match loaded {
            Ok((module, kernel)) => Ok(Self {
                driver,
                device,
                context,
                module,
                kernel,
                idle: Mutex::default(),
            }),
            Err(error) => {
                driver.release_primary(device);
                Err(error)
            }
        }
    }

    #[allow(unsafe_code)]
    fn track(&self) -> Result<Track, CudaError> {
        if let Some(track) = self.idle.lock().pop() {
            return Ok(track);
        }
        let mut table = vec![0; TABLE_PIECES * TABLE_COLUMNS].into_boxed_slice();
        let stream = self.driver.low_priority_stream()?;
        let event = self.driver.sleeping_event()?;
        // SAFETY: the table lives until `drop`, which unpins it first.
        let pinned = unsafe {
            self.driver
                .pin(table.as_mut_ptr().cast(), size_of_val(&*table))
        };
        if let Err(error) = pinned {
            self.driver.destroy(stream, event);
            return Err(error);
        }
        Ok(Track {
            stream,
            event,
            table,
        })
    }

    /// Copies all segments one way and returns when that is done.
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
        after: u64,
    ) -> Result<(), CudaError> {
        self.driver.set_current(self.context)?;
        let mut track = self.track()?;
        let bytes: u64 = segments.iter().map(|segment| segment.len).sum();
        let mean = bytes as usize / segments.len().max(1);
        let pinned = self.driver.device_address(payload);
        let started = if after == 0 {
            Ok(())
        } else {
            self.driver.wait_for(track.stream, after as Handle)
        }
        .and_then(|()| match pinned {
            // SAFETY: the caller's promise, until `finish` below has returned.
            Some(pinned) if mean < COPY_ENGINE_FROM => unsafe {
                self.by_kernel(way, regions, segments, pinned, &mut track)
            },
            // SAFETY: as above.
            _ => unsafe { self.by_copy_engine(way, regions, segments, payload, &track) },
        });
        // What was started before a failure still runs: nobody may have the payload before its end.
        let finished = self.driver.finish(track.stream, track.event);
        self.idle.lock().push(track);
        started.and(finished)
    }

    #[allow(unsafe_code)]
    unsafe fn by_copy_engine(
        &self,
        way: Way,
        regions: &[Region],
        segments: &[Segment],
        payload: *mut u8,
        track: &Track,
    ) -> Result<(), CudaError> {
        let mut done = 0;
        for segment in segments {
            let len = segment.len as usize;
            let device = address(regions, segment);
            // SAFETY: the payload is as long as all segments together, so this part lies in it;
            // the rest is the caller's promise.
            unsafe {
                let host = payload.add(done);
                match way {
                    Way::Gather => self.driver.copy_to_host(host, device, len, track.stream),
                    Way::Scatter => self.driver.copy_to_device(device, host, len, track.stream),
                }
            }?;
            done += len;
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    unsafe fn by_kernel(
        &self,
        way: Way,
        regions: &[Region],
        segments: &[Segment],
        payload: DevicePtr,
        track: &mut Track,
    ) -> Result<(), CudaError> {
        let host = track.table.as_ptr().cast();
        let Some(mut table) = self.driver.device_address(host) else {
            return Err(CudaError::NoDriver(
                "pinned memory has no device address".to_owned(),
            ));
        };
        let mut done = 0;
        for (start, pieces) in segments.chunks(TABLE_PIECES).enumerate() {
            if start > 0 {
                // The kernel before reads the table that is written now.
                self.driver.finish(track.stream, track.event)?;
            }
            for (row, segment) in track.table.chunks_exact_mut(TABLE_COLUMNS).zip(pieces) {
                row.copy_from_slice(&[address(regions, segment), done, segment.len]);
                done += segment.len;
            }
            let mut count = pieces.len() as u32;
            let (mut payload, mut scatter) = (payload, u32::from(way == Way::Scatter));
            let mut arguments: [*mut c_void; 4] = [
                (&raw mut table).cast(),
                (&raw mut count).cast(),
                (&raw mut payload).cast(),
                (&raw mut scatter).cast(),
            ];
            // SAFETY: the arguments are those of `pieces.ptx`; the table is pinned and left alone
            // until the stream is done, the rest is the caller's promise.
            unsafe {
                self.driver.launch(
                    self.kernel,
                    KERNEL_BLOCKS.min(count),
                    KERNEL_THREADS,
                    track.stream,
                    &mut arguments,
                )
            }?;
        }
        Ok(())
    }
}

fn address(regions: &[Region], segment: &Segment) -> DevicePtr {
    regions[segment.region as usize].address() as u64 + segment.offset
}

#[allow(unsafe_code)]
impl Executor for CudaExecutor {
    unsafe fn gather(
        &self,
        regions: &[Region],
        segments: &[Segment],
        payload: &mut [u8],
        checksum: Option<&mut Checksum>,
        after: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy(Way::Gather, regions, segments, payload.as_mut_ptr(), after) }?;
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
        after: u64,
    ) -> Result<(), CudaError> {
        let source = payload.as_ptr().cast_mut();
        // SAFETY: the caller's promise; a scatter only reads the payload.
        unsafe { self.copy(Way::Scatter, regions, segments, source, after) }
    }
}

impl Drop for CudaExecutor {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.driver.set_current(self.context).is_ok() {
            for track in self.idle.lock().drain(..) {
                // SAFETY: `track` pinned it, and every copy has waited for its end.
                unsafe { self.driver.unpin(track.table.as_ptr().cast_mut().cast()) };
                self.driver.destroy(track.stream, track.event);
            }
            self.driver.unload(self.module);
        }
        self.driver.release_primary(self.device);
    }
}

/// Host memory that is being pinned, piece by piece, so that neither start nor end waits for all.
pub(crate) struct Pins {
    driver: &'static Driver,
    context: Handle,
    device: c_int,
    pieces: Vec<*mut u8>,
}

// SAFETY: as for `CudaExecutor`.
#[allow(unsafe_code)]
unsafe impl Send for Pins {}

impl Pins {
    /// Nothing pinned yet.
    pub(crate) fn new(device: i32) -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        Ok(Self {
            driver,
            context: driver.retain_primary(device)?,
            device,
            pieces: Vec::new(),
        })
    }

    /// Pins a piece.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until this is dropped.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn add(&mut self, address: *mut u8, len: usize) -> Result<(), CudaError> {
        self.driver.set_current(self.context)?;
        // SAFETY: the caller's promise; `drop` unpins it.
        unsafe { self.driver.pin(address, len) }?;
        self.pieces.push(address);
        Ok(())
    }
}

impl Drop for Pins {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.driver.set_current(self.context).is_ok() {
            for piece in self.pieces.drain(..) {
                // SAFETY: `add` pinned it; the arena drops its pins when no slot is in use.
                unsafe { self.driver.unpin(piece) };
            }
        }
        self.driver.release_primary(self.device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_the_reason_is_told() {
        match CudaExecutor::new(0) {
            // Where there is a device, the kernel has to load.
            Ok(_) => {}
            Err(CudaError::NoDriver(reason)) => assert!(reason.contains("libcuda"), "{reason}"),
            Err(CudaError::Call { call, .. }) => {
                assert!(
                    ["cuInit", "cuDevicePrimaryCtxRetain"].contains(&call),
                    "{call}"
                );
            }
        }
    }

    #[test]
    fn the_kernels_text_is_one_string() {
        assert!(CStr::from_bytes_with_nul(PIECES_PTX.as_bytes()).is_ok());
        assert!(PIECES_PTX.contains(PIECES_NAME.to_str().expect("ASCII")));
    }
}
