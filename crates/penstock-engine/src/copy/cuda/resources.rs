//! Resources of a context: streams, events, memory and kernels. Each is given back when it is
//! dropped.
//!
//! Methods need their context to be the thread's. Dropping makes it so by itself.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use super::driver::Context;
use super::symbols::{CopyAttributes, CudaError, DevicePtr, Handle};

const STREAM_NON_BLOCKING: c_uint = 1;
/// Threads that wait sleep, so they leave their core to the model.
const EVENT_BLOCKING_SYNC: c_uint = 1;
const EVENT_NO_TIMING: c_uint = 2;
const HOST_PORTABLE_DEVICEMAP: c_uint = 1 | 2;
const SOURCE_IN_STREAM_ORDER: c_int = 1;
/// A hint: the multiprocessors belong to the model.
const PREFER_OVERLAP_WITH_COMPUTE: c_uint = 1;
const NOT_SUPPORTED: c_int = 801;

/// A stream in which work starts in order. It has the lowest priority, which on CUDA is also the
/// default: work of any other priority goes before it.
pub(super) struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

#[allow(unsafe_code)]
impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let driver = context.driver;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the places to write to are valid.
        let code = unsafe { (driver.calls.priorities)(&raw mut least, &raw mut greatest) };
        driver.check("cuCtxGetStreamPriorityRange", code)?;
        let mut handle = Handle::NULL;
        // SAFETY: the place to write to is valid.
        let code =
            unsafe { (driver.calls.stream_create)(&raw mut handle, STREAM_NON_BLOCKING, least) };
        driver.check("cuStreamCreateWithPriority", code)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        self.context.driver.check(call, code)
    }

    /// Returns when all work on the stream is done, by an event of its own.
    ///
    /// It waits on an error too: then for the stream itself. If that fails as well, the context is
    /// lost, and with it the work.
    pub(super) fn finish(&self, event: &Event) -> Result<(), CudaError> {
        let finished = event.record(self).and_then(|()| event.wait());
        if finished.is_err() {
            // SAFETY: the stream is ours.
            unsafe { (self.context.driver.calls.stream_synchronize)(self.handle) };
        }
        finished
    }

    /// Starts a copy to the host.
    ///
    /// # Safety
    ///
    /// Both ranges are valid, and stay so and are left alone until the stream is done.
    pub(super) unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: DevicePtr,
        len: usize,
    ) -> Result<(), CudaError> {
        let calls = &self.context.driver.calls;
        // SAFETY: the caller's promise.
        let code = unsafe { (calls.to_host)(to.cast(), from, len, self.handle) };
        self.check("cuMemcpyDtoHAsync", code)
    }

    /// Starts a copy to the device.
    ///
    /// # Safety
    ///
    /// As for [`copy_to_host`](Self::copy_to_host).
    pub(super) unsafe fn copy_to_device(
        &self,
        to: DevicePtr,
        from: *const u8,
        len: usize,
    ) -> Result<(), CudaError> {
        let calls = &self.context.driver.calls;
        // SAFETY: the caller's promise.
        let code = unsafe { (calls.to_device)(to, from.cast(), len, self.handle) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    /// Starts copies in one call and returns true, or starts none of them and returns false: the
    /// driver has no batches. After an error some of them may have been started.
    ///
    /// # Safety
    ///
    /// As for [`copy_to_host`](Self::copy_to_host), for all copies. No two of them overlap, as they
    /// run in any order.
    pub(super) unsafe fn copy_batch(&self, copies: &mut Batch) -> Result<bool, CudaError> {
        let driver = self.context.driver;
        let Some(copy_batch) = driver.calls.copy_batch else {
            return Ok(false);
        };
        let mut attributes = CopyAttributes {
            source_order: SOURCE_IN_STREAM_ORDER,
            source_hint: [0; 2],
            target_hint: [0; 2],
            flags: PREFER_OVERLAP_WITH_COMPUTE,
        };
        let (mut from_first, mut failed) = (0, 0);
        // SAFETY: the arrays are of the length given, the attributes hold from the first copy on;
        // the rest is the caller's promise.
        let code = unsafe {
            copy_batch(
                copies.to.as_mut_ptr(),
                copies.from.as_mut_ptr(),
                copies.bytes.as_mut_ptr(),
                copies.bytes.len(),
                &raw mut attributes,
                &raw mut from_first,
                1,
                &raw mut failed,
                self.handle,
            )
        };
        if code == NOT_SUPPORTED {
            return Ok(false);
        }
        self.check("cuMemcpyBatchAsync", code).map(|()| true)
    }
}

impl Drop for Stream {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: `new` made it; it is not used again.
            unsafe { (self.context.driver.calls.stream_destroy)(self.handle) };
        }
    }
}

/// Copies that are started together.
#[derive(Default)]
pub(super) struct Batch {
    to: Vec<DevicePtr>,
    from: Vec<DevicePtr>,
    bytes: Vec<usize>,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }

    /// Adds a copy; addresses are those at which the device reaches the memory, be it its own or
    /// pinned.
    pub(super) fn push(&mut self, to: DevicePtr, from: DevicePtr, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }
}

/// An event whose waiters sleep.
pub(super) struct Event {
    context: Arc<Context>,
    handle: Handle,
}

#[allow(unsafe_code)]
impl Event {
    /// An event without timing, since timing costs time.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, EVENT_BLOCKING_SYNC | EVENT_NO_TIMING)
    }

    pub(super) fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with(context, EVENT_BLOCKING_SYNC)
    }

    fn with(context: &Arc<Context>, flags: c_uint) -> Result<Self, CudaError> {
        let driver = context.driver;
        let mut handle = Handle::NULL;
        // SAFETY: the place to write to is valid.
        let code = unsafe { (driver.calls.event_create)(&raw mut handle, flags) };
        driver.check("cuEventCreate", code)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    /// Records the event: it happens when the stream has done all work that it has been given so
    /// far.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.context.driver;
        // SAFETY: both are ours, of one context.
        let code = unsafe { (driver.calls.event_record)(self.handle, stream.handle) };
        driver.check("cuEventRecord", code)
    }

    /// Records the event on a stream of another owner.
    ///
    /// # Safety
    ///
    /// The handle is that of a stream of the event's device, which is alive; zero is its default
    /// stream.
    pub(super) unsafe fn record_on(&self, stream: u64) -> Result<(), CudaError> {
        let driver = self.context.driver;
        let stream = Handle(ptr::with_exposed_provenance_mut(stream as usize));
        // SAFETY: the event is ours, the stream the caller's promise.
        let code = unsafe { (driver.calls.event_record)(self.handle, stream) };
        driver.check("cuEventRecord", code)
    }

    /// Sleeps until the event has happened.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        let driver = self.context.driver;
        // SAFETY: the event is ours.
        let code = unsafe { (driver.calls.event_synchronize)(self.handle) };
        driver.check("cuEventSynchronize", code)
    }

    /// Seconds from another event to this one. Both are timed and have happened.
    pub(super) fn seconds_since(&self, start: &Self) -> Result<f64, CudaError> {
        let driver = self.context.driver;
        let mut milliseconds = 0.0_f32;
        // SAFETY: the place to write to is valid, both events are ours.
        let code = unsafe {
            (driver.calls.event_elapsed)(&raw mut milliseconds, start.handle, self.handle)
        };
        driver.check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: `with` made it; it is not used again.
            unsafe { (self.context.driver.calls.event_destroy)(self.handle) };
        }
    }
}

/// Pinned host memory that the driver allocates and kernels can address.
pub(super) struct PinnedMemory {
    context: Arc<Context>,
    host: *mut u8,
    device: DevicePtr,
}

// SAFETY: plain memory that this owns.
#[allow(unsafe_code)]
unsafe impl Send for PinnedMemory {}

#[allow(unsafe_code)]
impl PinnedMemory {
    /// Pinned memory that is aligned to a page at least.
    pub(super) fn new(context: &Arc<Context>, len: usize) -> Result<Self, CudaError> {
        let driver = context.driver;
        let mut host = ptr::null_mut();
        // SAFETY: the place to write to is valid.
        let code =
            unsafe { (driver.calls.host_alloc)(&raw mut host, len, HOST_PORTABLE_DEVICEMAP) };
        driver.check("cuMemHostAlloc", code)?;
        let mut memory = Self {
            context: Arc::clone(context),
            host: host.cast(),
            device: 0,
        };
        memory.device = context.device_address(memory.host, len).ok_or_else(|| {
            CudaError::NoDriver("kernels cannot address pinned host memory".to_owned())
        })?;
        Ok(memory)
    }

    /// The address at which the host reaches it. It may be dereferenced only while no work on a
    /// stream touches the memory.
    pub(super) fn host(&self) -> *mut u8 {
        self.host
    }

    /// The address at which kernels reach it.
    pub(super) fn device(&self) -> DevicePtr {
        self.device
    }
}

impl Drop for PinnedMemory {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: `new` allocated it; whoever gave it to a stream has waited for its end.
            unsafe { (self.context.driver.calls.host_free)(self.host.cast()) };
        }
    }
}

/// Host memory of another owner that is pinned.
pub(super) struct Pin {
    context: Arc<Context>,
    address: *mut u8,
}

// SAFETY: an address that is only handed back to the driver.
#[allow(unsafe_code)]
unsafe impl Send for Pin {}

#[allow(unsafe_code)]
impl Pin {
    /// Pins memory for every device, so that kernels can address it.
    ///
    /// # Safety
    ///
    /// The memory is mapped until this `Pin` is dropped, and no copy touches it then.
    pub(super) unsafe fn new(
        context: &Arc<Context>,
        address: *mut u8,
        len: usize,
    ) -> Result<Self, CudaError> {
        let driver = context.driver;
        // SAFETY: the caller's promise.
        let code =
            unsafe { (driver.calls.host_register)(address.cast(), len, HOST_PORTABLE_DEVICEMAP) };
        driver.check("cuMemHostRegister", code)?;
        Ok(Self {
            context: Arc::clone(context),
            address,
        })
    }
}

impl Drop for Pin {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: `new` pinned it.
            unsafe { (self.context.driver.calls.host_unregister)(self.address.cast()) };
        }
    }
}

/// Device memory of our own.
pub(super) struct DeviceMemory {
    context: Arc<Context>,
    address: DevicePtr,
}

#[allow(unsafe_code)]
impl DeviceMemory {
    pub(super) fn new(context: &Arc<Context>, len: usize) -> Result<Self, CudaError> {
        let driver = context.driver;
        let mut address = 0;
        // SAFETY: the place to write to is valid.
        let code = unsafe { (driver.calls.device_alloc)(&raw mut address, len) };
        driver.check("cuMemAlloc", code)?;
        Ok(Self {
            context: Arc::clone(context),
            address,
        })
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }
}

impl Drop for DeviceMemory {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: `new` allocated it; whoever gave it to a stream has waited for its end.
            unsafe { (self.context.driver.calls.device_free)(self.address) };
        }
    }
}

/// A function of a module given as PTX.
pub(super) struct Kernel {
    context: Arc<Context>,
    module: Handle,
    function: Handle,
}

#[allow(unsafe_code)]
impl Kernel {
    pub(super) fn new(context: &Arc<Context>, ptx: &CStr, name: &CStr) -> Result<Self, CudaError> {
        let driver = context.driver;
        let mut module = Handle::NULL;
        // SAFETY: the text ends with a zero, as the call wants it.
        let code = unsafe { (driver.calls.module_load)(&raw mut module, ptx.as_ptr().cast()) };
        driver.check("cuModuleLoadData", code)?;
        let mut kernel = Self {
            context: Arc::clone(context),
            module,
            function: Handle::NULL,
        };
        // SAFETY: the place to write to is valid, the module was just loaded.
        let code = unsafe {
            (driver.calls.module_function)(&raw mut kernel.function, module, name.as_ptr())
        };
        driver.check("cuModuleGetFunction", code)?;
        Ok(kernel)
    }

    /// Starts the kernel on one dimension of blocks and threads.
    ///
    /// # Safety
    ///
    /// `arguments` point to values of the kernel's parameters' types, in order; what they address
    /// is valid, and left alone, until the stream is done.
    pub(super) unsafe fn launch(
        &self,
        blocks: u32,
        threads: u32,
        stream: &Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let driver = self.context.driver;
        // SAFETY: the caller's promise; grid and block sizes are plain numbers.
        let code = unsafe {
            (driver.calls.launch)(
                self.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.handle,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        driver.check("cuLaunchKernel", code)
    }
}

impl Drop for Kernel {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: `new` loaded it; whoever launched it has waited for its end.
            unsafe { (self.context.driver.calls.module_unload)(self.module) };
        }
    }
}
