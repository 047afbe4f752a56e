//! Copies on the calling thread, without jobs: for measurements, and for users with their own
//! transport.

use penstock_layout::{Descriptor, Span};

use crate::copy::cuda::CudaExecutor;
use crate::registration::{NotCopied, Object, Registration};
use crate::{Calibration, CudaError, Device, EngineError, Region};

/// Blocks in registered memory, copied to and from one contiguous piece in canonical order.
pub struct DirectCopy {
    registration: Registration,
}

impl DirectCopy {
    /// Copies of what `descriptor` describes in `regions`, with one region for each of the
    /// descriptor's. What was promised about the regions must hold during each copy. The first
    /// `DirectCopy` on a CUDA device measures the device.
    pub fn new(
        device: Device,
        descriptor: Descriptor,
        regions: Vec<Region>,
    ) -> Result<Self, EngineError> {
        let registration = Registration::new(descriptor, regions, device.executor()?)?;
        if let Device::Cuda(ordinal) = device {
            // Without it, copies go by the figures of other devices.
            let _ = Self::calibration(ordinal);
        }
        Ok(Self { registration })
    }

    /// The times of a CUDA device's copies. They are measured, unless an engine or another
    /// `DirectCopy` uses the device and has them.
    pub fn calibration(ordinal: i32) -> Result<Calibration, CudaError> {
        CudaExecutor::of(ordinal)?.calibrate().cloned()
    }

    /// Copies a span of blocks, one after the other, into the beginning of `payload`; returns the
    /// number of bytes. With `sum`, it also computes the checksum that a stored value would have.
    pub fn gather(
        &self,
        blocks: &[u64],
        span: Span,
        payload: &mut [u8],
        sum: bool,
    ) -> Result<usize, EngineError> {
        let bytes = self.bytes(blocks, &span, payload.len())?;
        let object = Object {
            pages: blocks.iter().copied(),
            span: &span,
            payload: &mut payload[..bytes],
        };
        self.registration.gather([object], sum).map_err(refused)?;
        Ok(bytes)
    }

    /// Copies the beginning of `payload` into a span of blocks, one after the other; returns the
    /// number of bytes.
    pub fn scatter(
        &self,
        blocks: &[u64],
        span: Span,
        payload: &[u8],
    ) -> Result<usize, EngineError> {
        let bytes = self.bytes(blocks, &span, payload.len())?;
        let object = Object {
            pages: blocks.iter().copied(),
            span: &span,
            payload: &payload[..bytes],
        };
        self.registration.scatter([object]).map_err(refused)?;
        Ok(bytes)
    }

    fn bytes(&self, blocks: &[u64], span: &Span, room: usize) -> Result<usize, EngineError> {
        if blocks.is_empty() {
            return Err(EngineError::Config("a copy needs at least one block"));
        }
        for &block in blocks {
            self.registration.check_page(block)?;
        }
        self.registration
            .payload_bytes(span, blocks.len() as u64, room)
    }
}

fn refused(why: NotCopied) -> EngineError {
    match why {
        NotCopied::Closed => EngineError::Closed,
        NotCopied::Device(error) => EngineError::Device(error),
    }
}
