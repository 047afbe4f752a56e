//! The CUDA driver's calls, found when a device is first asked for.
//!
//! Building needs nothing of CUDA. Without a driver, [`Symbols::load`] reports that.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// A device address.
pub(super) type DevicePtr = u64;

/// An opaque handle of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Handle(pub(super) *mut c_void);

impl Handle {
    pub(super) const NULL: Self = Self(std::ptr::null_mut());
}

// SAFETY: never dereferenced here, and the driver takes its handles from any thread.
#[allow(unsafe_code)]
unsafe impl Send for Handle {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Handle {}

/// A call of the driver that failed, or a missing driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, or it lacks calls that are needed.
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

/// `CUmemcpyAttributes`; the location hints do not concern pinned and device memory.
#[repr(C)]
pub(super) struct CopyAttributes {
    pub(super) source_order: c_int,
    pub(super) source_hint: [c_int; 2],
    pub(super) target_hint: [c_int; 2],
    pub(super) flags: c_uint,
}

/// Finds the address of a call by its name, or the reason why it is missing.
pub(super) type Find<'f> = &'f dyn Fn(&CStr) -> Result<*mut c_void, String>;

/// The names are those of `cuda.h`, with the version that the ABI names.
macro_rules! symbols {
    (
        required { $($field:ident = $symbol:literal ($($arg:ty),*);)* }
        optional { $($maybe:ident = $maybe_symbol:literal ($($maybe_arg:ty),*);)* }
    ) => {
        /// The driver's functions.
        pub(super) struct Symbols {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_arg),*) -> c_int>,)*
        }

        impl Symbols {
            /// # Safety
            ///
            /// What `find` returns for a name is the function of `cuda.h`, and stays where it is.
            #[allow(unsafe_code)]
            pub(super) unsafe fn load(find: Find<'_>) -> Result<Self, CudaError> {
                Ok(Self {
                    $($field: {
                        let at = find($symbol).map_err(CudaError::NoDriver)?;
                        // SAFETY: the caller's promise; the signature is that of `cuda.h`.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) -> c_int,
                            >(at)
                        }
                    },)*
                    $($maybe: find($maybe_symbol).ok().map(|at| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($maybe_arg),*) -> c_int,
                            >(at)
                        }
                    }),)*
                })
            }
        }
    };
}

symbols! {
    required {
        init = c"cuInit" (c_uint);
        error_name = c"cuGetErrorName" (c_int, *mut *const c_char);
        device_get = c"cuDeviceGet" (*mut c_int, c_int);
        device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        primary_retain = c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
        primary_release = c"cuDevicePrimaryCtxRelease_v2" (c_int);
        push_current = c"cuCtxPushCurrent_v2" (Handle);
        pop_current = c"cuCtxPopCurrent_v2" (*mut Handle);
        capture_mode = c"cuThreadExchangeStreamCaptureMode" (*mut c_int);
        priorities = c"cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
        stream_create = c"cuStreamCreateWithPriority" (*mut Handle, c_uint, c_int);
        stream_destroy = c"cuStreamDestroy_v2" (Handle);
        stream_synchronize = c"cuStreamSynchronize" (Handle);
        event_create = c"cuEventCreate" (*mut Handle, c_uint);
        event_destroy = c"cuEventDestroy_v2" (Handle);
        event_record = c"cuEventRecord" (Handle, Handle);
        event_synchronize = c"cuEventSynchronize" (Handle);
        event_elapsed = c"cuEventElapsedTime" (*mut f32, Handle, Handle);
        to_host = c"cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, Handle);
        to_device = c"cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, Handle);
        host_register = c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        host_unregister = c"cuMemHostUnregister" (*mut c_void);
        host_alloc = c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_free = c"cuMemFreeHost" (*mut c_void);
        device_alloc = c"cuMemAlloc_v2" (*mut DevicePtr, usize);
        device_free = c"cuMemFree_v2" (DevicePtr);
        pointer_attribute = c"cuPointerGetAttribute" (*mut c_void, c_int, DevicePtr);
        module_load = c"cuModuleLoadData" (*mut Handle, *const c_void);
        module_unload = c"cuModuleUnload" (Handle);
        module_function = c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        launch = c"cuLaunchKernel" (
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        // This name is CUDA 12.8's version of the call, also in drivers whose headers name a `_v2`.
        copy_batch = c"cuMemcpyBatchAsync" (
            *mut DevicePtr, *mut DevicePtr, *mut usize, usize,
            *mut CopyAttributes, *mut usize, usize, *mut usize, Handle
        );
    }
}

/// Looks names up in `libcuda.so.1`, which is never unloaded.
#[cfg(any(loom, not(test)))]
#[allow(unsafe_code)]
pub(super) fn installed() -> Result<Symbols, CudaError> {
    let missing = |error: libloading::Error| error.to_string();
    // SAFETY: the driver's initialisers have no precondition.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }
        .map_err(|error| CudaError::NoDriver(missing(error)))?;
    let find = |name: &CStr| {
        // SAFETY: only the address is taken here.
        unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) }
            .map(|symbol| *symbol)
            .map_err(missing)
    };
    // SAFETY: the library is CUDA's driver, and is left open below.
    let symbols = unsafe { Symbols::load(&find) };
    std::mem::forget(library);
    symbols
}
