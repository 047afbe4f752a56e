//! Copies on the calling thread, without jobs: for measurements, and for those who bring their own
//! transport.

use std::sync::Arc;

use penstock_layout::{Descriptor, Span};
use penstock_store::{Key, Namespace};

use crate::copy::cuda::CudaExecutor;
use crate::job::Transfer;
use crate::region::{NotCopied, Registration};
use crate::{Calibration, CudaError, Device, EngineError, Object, Region};

/// Blocks in registered memory, copied to and from one contiguous piece in canonical order.
pub struct DirectCopy {
    registration: Arc<Registration>,
}

impl DirectCopy {
    /// Copies of what `descriptor` describes in `regions`, one for each of its own. What was
    /// promised of the regions must hold during each copy. The first on a CUDA device measures it.
    pub fn new(
        device: Device,
        descriptor: Descriptor,
        regions: Vec<Region>,
    ) -> Result<Self, EngineError> {
        let registration = Registration::new(descriptor, regions, device.executor()?)?;
        if let Device::Cuda(ordinal) = device {
            // Copies go on without it, by the figures of other devices.
            let _ = Self::calibration(ordinal);
        }
        Ok(Self {
            registration: Arc::new(registration),
        })
    }

    /// What copies of a CUDA device take, measured unless an engine or another of these has it in
    /// use and knows.
    pub fn calibration(ordinal: i32) -> Result<Calibration, CudaError> {
        CudaExecutor::of(ordinal)?.calibrate().cloned()
    }

    /// Copies a span of blocks, one after the other, into the beginning of `payload`; returns the
    /// bytes. With `sum`, computes the checksum that a stored value would have on the way.
    pub fn gather(
        &self,
        blocks: &[u64],
        span: Span,
        payload: &mut [u8],
        sum: bool,
    ) -> Result<usize, EngineError> {
        let transfer = self.transfer(blocks, span, payload.len())?;
        let payload = &mut payload[..transfer.bytes];
        match self
            .registration
            .gather(&transfer, payload, sum, &mut Vec::new())
        {
            Ok(_) => Ok(transfer.bytes),
            Err(why) => Err(refused(why)),
        }
    }

    /// Copies the beginning of `payload` into a span of blocks, one after the other; returns the
    /// bytes.
    pub fn scatter(
        &self,
        blocks: &[u64],
        span: Span,
        payload: &[u8],
    ) -> Result<usize, EngineError> {
        let transfer = self.transfer(blocks, span, payload.len())?;
        let payload = &payload[..transfer.bytes];
        match self
            .registration
            .scatter(&transfer, payload, &mut Vec::new())
        {
            Ok(()) => Ok(transfer.bytes),
            Err(why) => Err(refused(why)),
        }
    }

    fn transfer(&self, blocks: &[u64], span: Span, room: usize) -> Result<Transfer, EngineError> {
        // Copies are asked for as jobs ask for them; nothing is stored under this key.
        let key = Key {
            namespace: Namespace([0; 16]),
            chunk: [0; 32],
            span,
        };
        let object = Object {
            group: 0,
            key,
            parent: None,
            blocks: blocks.to_vec(),
            context: Arc::default(),
        };
        self.registration.transfer(object, room)
    }
}

fn refused(why: NotCopied) -> EngineError {
    match why {
        NotCopied::Closed => EngineError::Closed,
        NotCopied::Device(error) => EngineError::Device(error),
    }
}
