//! The loaded driver, and contexts of its devices.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

#[cfg(any(loom, not(test)))]
use super::symbols::installed;
use super::symbols::{CudaError, DevicePtr, Handle, Symbols};
// Unit tests bring a stand-in for the driver, whether there is a real one or not.
#[cfg(all(test, not(loom)))]
use super::tests::installed;

const CAPTURE_MODE_RELAXED: c_int = 2;
const POINTER_MEMORY_TYPE: c_int = 2;
const POINTER_DEVICE_ADDRESS: c_int = 3;
const MEMORY_TYPE_HOST: u32 = 1;
const MULTIPROCESSOR_COUNT: c_int = 16;

/// Set to `off`, pieces are never copied in batches: for a driver whose batches do harm.
const BATCHES: &str = "PENSTOCK_CUDA_BATCHES";

/// The driver of this process.
pub(super) struct Driver {
    pub(super) calls: Symbols,
}

#[allow(unsafe_code)]
impl Driver {
    /// The driver, loaded and initialised once in a process.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        DRIVER
            .get_or_init(|| {
                let driver = Self {
                    calls: installed()?,
                };
                // SAFETY: no precondition.
                let code = unsafe { (driver.calls.init)(0) };
                driver.check("cuInit", code)?;
                Ok(driver)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the place to write to is valid; the name is a static string of the driver.
        let named = unsafe { (self.calls.error_name)(code, &raw mut name) } == 0 && !name.is_null();
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
}

/// A device's primary context. Other users of the device in this process (PyTorch) work in it too.
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    without_batches: AtomicBool,
    /// The answer that made an end of batches, unless it was that there are none.
    refusal: OnceLock<CudaError>,
    ordinal: i32,
    device: c_int,
    handle: Handle,
}

#[allow(unsafe_code)]
impl Context {
    /// The context of a device by its ordinal.
    pub(super) fn of(ordinal: i32) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::get()?;
        let mut device = 0;
        // SAFETY: the place to write to is valid.
        let code = unsafe { (driver.calls.device_get)(&raw mut device, ordinal) };
        driver.check("cuDeviceGet", code)?;
        let mut handle = Handle::NULL;
        // SAFETY: the place to write to is valid, the device is one.
        let code = unsafe { (driver.calls.primary_retain)(&raw mut handle, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Self {
            driver,
            without_batches: AtomicBool::new(
                std::env::var_os(BATCHES).is_some_and(|said| said == "off"),
            ),
            refusal: OnceLock::new(),
            ordinal,
            device,
            handle,
        }))
    }

    /// How many multiprocessors the device has.
    pub(super) fn multiprocessors(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: the place to write to is valid, the device is one.
        let code = unsafe {
            (self.driver.calls.device_attribute)(&raw mut count, MULTIPROCESSOR_COUNT, self.device)
        };
        self.driver.check("cuDeviceGetAttribute", code)?;
        Ok(count.unsigned_abs())
    }

    /// Whether copies can be started as a batch, as far as is known.
    pub(super) fn has_batches(&self) -> bool {
        self.driver.calls.copy_batch.is_some() && !self.without_batches.load(Ordering::Relaxed)
    }

    /// Notes that copies are no more to be started as a batch, and why. `None`: the device has no
    /// batches, which is no fault.
    pub(super) fn give_up_batches(&self, refusal: Option<CudaError>) {
        self.without_batches.store(true, Ordering::Relaxed);
        if let Some(refusal) = refusal {
            let _ = self.refusal.set(refusal);
        }
    }

    /// The error for which batches were given up.
    pub(super) fn refusal(&self) -> Option<&CudaError> {
        self.refusal.get()
    }

    /// Whether this is the context of the device with this ordinal.
    pub(super) fn is_of(&self, ordinal: i32) -> bool {
        self.ordinal == ordinal
    }

    /// Makes the context this thread's until the guard is dropped. Then the thread has its earlier
    /// context again: on PyTorch's threads, that is PyTorch's choice of a device.
    ///
    /// Meanwhile, the thread's calls do not affect graphs that other threads are capturing. By
    /// default, allocating or pinning memory here would spoil a capture of the model's graphs
    /// there.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        let calls = &self.driver.calls;
        // SAFETY: the context was retained and is not released before `self` is dropped.
        let code = unsafe { (calls.push_current)(self.handle) };
        self.driver.check("cuCtxPushCurrent", code)?;
        let mut entered = Entered {
            context: self,
            capture_mode: None,
        };
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the place to read from and write to is valid.
        let code = unsafe { (calls.capture_mode)(&raw mut mode) };
        self.driver
            .check("cuThreadExchangeStreamCaptureMode", code)?;
        entered.capture_mode = Some(mode);
        Ok(entered)
    }

    /// The address at which kernels reach `len` bytes of pinned host memory. None if not all of
    /// them are pinned, in one piece. The context must be the thread's.
    pub(super) fn device_address(&self, host: *const u8, len: usize) -> Option<DevicePtr> {
        let first = host.addr() as DevicePtr;
        let mut kind = 0_u32;
        // SAFETY: the attribute is a `u32`; any address may be asked about.
        let known = unsafe {
            (self.driver.calls.pointer_attribute)(
                (&raw mut kind).cast(),
                POINTER_MEMORY_TYPE,
                first,
            )
        };
        if known != 0 || kind != MEMORY_TYPE_HOST {
            return None;
        }
        let of = |host: DevicePtr| {
            let mut address = 0;
            // SAFETY: the attribute is a device address; any address may be asked about.
            let code = unsafe {
                (self.driver.calls.pointer_attribute)(
                    (&raw mut address).cast(),
                    POINTER_DEVICE_ADDRESS,
                    host,
                )
            };
            (code == 0).then_some(address)
        };
        let span = (len as DevicePtr).saturating_sub(1);
        let (start, end): (DevicePtr, DevicePtr) = (of(first)?, of(first + span)?);
        (end.checked_sub(start) == Some(span)).then_some(start)
    }
}

impl Drop for Context {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: what `of` retained, once; an error is of no use to anybody.
        unsafe { (self.driver.calls.primary_release)(self.device) };
    }
}

/// A context that is this thread's.
pub(super) struct Entered<'c> {
    context: &'c Context,
    /// The capture mode that the thread had before.
    capture_mode: Option<c_int>,
}

impl Drop for Entered<'_> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        let calls = &self.context.driver.calls;
        if let Some(mut mode) = self.capture_mode {
            // SAFETY: the place to read from and write to is valid.
            unsafe { (calls.capture_mode)(&raw mut mode) };
        }
        let mut popped = Handle::NULL;
        // SAFETY: the place to write to is valid.
        unsafe { (calls.pop_current)(&raw mut popped) };
    }
}
