//! Points in a device's work.

use std::sync::Arc;

use super::driver::Context;
use super::resources::Event;
use super::symbols::CudaError;

/// A point on a stream of another owner. It may be recorded again once it has been waited for.
pub(crate) struct Point {
    context: Arc<Context>,
    event: Event,
}

impl Point {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        Ok(Self {
            context: Arc::clone(context),
            event: Event::new(context)?,
        })
    }

    /// Whether the point belongs to the device with this ordinal.
    pub(crate) fn is_of(&self, ordinal: i32) -> bool {
        self.context.is_of(ordinal)
    }

    /// Records the point behind all work that the stream has been given so far.
    ///
    /// # Safety
    ///
    /// The handle is that of a stream of this device, which is alive; zero is its default stream.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn record(&self, stream: u64) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.event.record_on(stream) }
    }

    /// Sleeps until the device has reached the point.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        self.event.wait()
    }
}
