//! Host memory that is being pinned.

use std::sync::Arc;

use super::driver::Context;
use super::resources::Pin;
use super::symbols::CudaError;

/// Memory that is pinned piece by piece, so that neither start nor end waits for all of it.
pub(crate) struct Pins {
    context: Arc<Context>,
    pieces: Vec<Pin>,
}

impl Pins {
    /// Nothing pinned yet.
    pub(crate) fn new(device: i32) -> Result<Self, CudaError> {
        Ok(Self {
            context: Context::of(device)?,
            pieces: Vec::new(),
        })
    }

    /// Unpins all pieces.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Pins a piece.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until this `Pins` is dropped, and no copy touches it any more then.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn add(&mut self, address: *mut u8, len: usize) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's promise.
        self.pieces
            .push(unsafe { Pin::new(&self.context, address, len) }?);
        Ok(())
    }
}
