//! The CUDA driver, loaded when a device is first asked for: the few calls that copies need.
//!
//! Nothing of CUDA is needed to build; without a driver, [`Driver::get`] says so.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

/// A device address.
pub(super) type DevicePtr = u64;

/// An opaque handle of the driver.
pub(super) type Handle = *mut c_void;

/// A call of the driver that failed, or a driver that is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, or one without the calls that are needed.
    #[error("no usable CUDA driver: {0}")]
    NoDriver(String),
    /// A call failed.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// The call's name.
        call: &'static str,
        /// CUDA's number of the error.
        code: i32,
        /// CUDA's name of the error.
        name: String,
    },
}

/// Loads and calls; the names are those of `cuda.h`, with the version that the ABI names.
macro_rules! driver {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The loaded driver's functions.
        pub(super) struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            /// Keeps the functions where they are.
            _library: Library,
        }

        impl Driver {
            #[allow(unsafe_code)]
            fn load() -> Result<Self, CudaError> {
                let missing = |error: libloading::Error| CudaError::NoDriver(error.to_string());
                // SAFETY: the driver's initialisers have no precondition.
                let library = unsafe { Library::new("libcuda.so.1") }.map_err(missing)?;
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is that of `cuda.h` for this symbol.
                        let symbol = unsafe { library.get($symbol) }.map_err(missing)?;
                        *symbol
                    },)*
                    _library: library,
                })
            }
        }
    };
}

driver! {
    init = b"cuInit\0" (c_uint);
    error_name = b"cuGetErrorName\0" (c_int, *mut *const c_char);
    primary_retain = b"cuDevicePrimaryCtxRetain\0" (*mut Handle, c_int);
    primary_release = b"cuDevicePrimaryCtxRelease_v2\0" (c_int);
    set_current = b"cuCtxSetCurrent\0" (Handle);
    priorities = b"cuCtxGetStreamPriorityRange\0" (*mut c_int, *mut c_int);
    stream_create = b"cuStreamCreateWithPriority\0" (*mut Handle, c_uint, c_int);
    stream_destroy = b"cuStreamDestroy_v2\0" (Handle);
    stream_wait = b"cuStreamWaitEvent\0" (Handle, Handle, c_uint);
    event_create = b"cuEventCreate\0" (*mut Handle, c_uint);
    event_destroy = b"cuEventDestroy_v2\0" (Handle);
    event_record = b"cuEventRecord\0" (Handle, Handle);
    event_synchronize = b"cuEventSynchronize\0" (Handle);
    to_host = b"cuMemcpyDtoHAsync_v2\0" (*mut c_void, DevicePtr, usize, Handle);
    to_device = b"cuMemcpyHtoDAsync_v2\0" (DevicePtr, *const c_void, usize, Handle);
    host_register = b"cuMemHostRegister_v2\0" (*mut c_void, usize, c_uint);
    host_unregister = b"cuMemHostUnregister\0" (*mut c_void);
    host_pointer = b"cuMemHostGetDevicePointer_v2\0" (*mut DevicePtr, *mut c_void, c_uint);
    module_load = b"cuModuleLoadData\0" (*mut Handle, *const c_void);
    module_unload = b"cuModuleUnload\0" (Handle);
    module_function = b"cuModuleGetFunction\0" (*mut Handle, Handle, *const c_char);
    launch = b"cuLaunchKernel\0" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
        *mut *mut c_void, *mut *mut c_void
    );
}

const STREAM_NON_BLOCKING: c_uint = 1;
/// Threads that wait sleep, and leave their core to the model; no timing, which costs.
const EVENT_BLOCKING_SYNC_NO_TIMING: c_uint = 1 | 2;
const REGISTER_PORTABLE_DEVICEMAP: c_uint = 1 | 2;

#[allow(unsafe_code)]
impl Driver {
    /// The driver, loaded and initialised once in a process.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        DRIVER
            .get_or_init(|| {
                let driver = Self::load()?;
                // SAFETY: no precondition.
                let code = unsafe { (driver.init)(0) };
                driver.check("cuInit", code)?;
                Ok(driver)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the place to write to is valid; the name is a static string of the driver.
        let named = unsafe { (self.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        let name = if named {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        } else {
            "unknown".to_owned()
        };
        Err(CudaError::Call { call, code, name })
    }

    /// The context that the device's other users in this process (PyTorch) work in.
    pub(super) fn retain_primary(&self, device: c_int) -> Result<Handle, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: the place to write to is valid.
        let code = unsafe { (self.primary_retain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(context)
    }

    /// Gives back what `retain_primary` took; errors are of no use to anybody.
    pub(super) fn release_primary(&self, device: c_int) {
        // SAFETY: no precondition; the driver counts.
        unsafe { (self.primary_release)(device) };
    }

    /// Makes a context this thread's.
    pub(super) fn set_current(&self, context: Handle) -> Result<(), CudaError> {
        // SAFETY: the context was retained and is not released while this is used.
        self.check("cuCtxSetCurrent", unsafe { (self.set_current)(context) })
    }

    /// A stream of the lowest priority in the current context.
    pub(super) fn low_priority_stream(&self) -> Result<Handle, CudaError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the places to write to are valid.
        let code = unsafe { (self.priorities)(&raw mut least, &raw mut greatest) };
        self.check("cuCtxGetStreamPriorityRange", code)?;
        let mut stream = ptr::null_mut();
        // SAFETY: the place to write to is valid.
        let code = unsafe { (self.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, least) };
        self.check("cuStreamCreateWithPriority", code)?;
        Ok(stream)
    }

    /// An event whose waiters sleep.
    pub(super) fn sleeping_event(&self) -> Result<Handle, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: the place to write to is valid.
        let code = unsafe { (self.event_create)(&raw mut event, EVENT_BLOCKING_SYNC_NO_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// Ends a stream and an event that nothing waits for.
    pub(super) fn destroy(&self, stream: Handle, event: Handle) {
        // SAFETY: both were made by this driver and are not used again.
        unsafe {
            (self.event_destroy)(event);
            (self.stream_destroy)(stream);
        }
    }

    /// Has a stream wait for an event of somebody else's, as long as that one is alive.
    pub(super) fn wait_for(&self, stream: Handle, event: Handle) -> Result<(), CudaError> {
        // SAFETY: the stream is ours; that the event is one, and alive, was promised by whoever
        // submitted the job.
        let code = unsafe { (self.stream_wait)(stream, event, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    /// Returns when all that was put on the stream is done.
    pub(super) fn finish(&self, stream: Handle, event: Handle) -> Result<(), CudaError> {
        // SAFETY: both are ours, of one context.
        let code = unsafe { (self.event_record)(event, stream) };
        self.check("cuEventRecord", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.event_synchronize)(event) };
        self.check("cuEventSynchronize", code)
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
        stream: Handle,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.to_host)(to.cast(), from, len, stream) };
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
        stream: Handle,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.to_device)(to, from.cast(), len, stream) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    /// Pins memory for every device, so that kernels can address it.
    ///
    /// # Safety
    ///
    /// The memory is mapped, and is unpinned before it is unmapped.
    pub(super) unsafe fn pin(&self, address: *mut u8, len: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let code =
            unsafe { (self.host_register)(address.cast(), len, REGISTER_PORTABLE_DEVICEMAP) };
        self.check("cuMemHostRegister", code)
    }

    /// Undoes [`pin`](Self::pin).
    ///
    /// # Safety
    ///
    /// The memory was pinned at this address, and no copy touches it.
    pub(super) unsafe fn unpin(&self, address: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { (self.host_unregister)(address.cast()) };
    }

    /// The address at which kernels reach host memory; none if it is not pinned.
    pub(super) fn device_address(&self, host: *const u8) -> Option<DevicePtr> {
        let mut address = 0;
        // SAFETY: the place to write to is valid; any host address may be asked about.
        let code = unsafe { (self.host_pointer)(&raw mut address, host.cast_mut().cast(), 0) };
        (code == 0).then_some(address)
    }

    /// A function of a module given as PTX, and the module.
    pub(super) fn function(&self, ptx: &CStr, name: &CStr) -> Result<(Handle, Handle), CudaError> {
        let mut module = ptr::null_mut();
        // SAFETY: the text ends with a zero, as the call wants it.
        let code = unsafe { (self.module_load)(&raw mut module, ptx.as_ptr().cast()) };
        self.check("cuModuleLoadData", code)?;
        let mut function = ptr::null_mut();
        // SAFETY: the module was just loaded.
        let code = unsafe { (self.module_function)(&raw mut function, module, name.as_ptr()) };
        if let Err(error) = self.check("cuModuleGetFunction", code) {
            self.unload(module);
            return Err(error);
        }
        Ok((module, function))
    }

    /// Unloads a module that no kernel runs of.
    pub(super) fn unload(&self, module: Handle) {
        // SAFETY: it was loaded by `function`, and is not used again.
        unsafe { (self.module_unload)(module) };
    }

    /// Starts a kernel on one dimension of blocks and threads.
    ///
    /// # Safety
    ///
    /// `arguments` point to values of the kernel's parameters' types, in order; what they address
    /// is valid, and left alone, until the stream is done.
    pub(super) unsafe fn launch(
        &self,
        function: Handle,
        blocks: u32,
        threads: u32,
        stream: Handle,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise; grid and block sizes are plain numbers.
        let code = unsafe {
            (self.launch)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", code)
    }
}
