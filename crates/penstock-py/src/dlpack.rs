//! Tensors lent through DLPack.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

// The structs of dlpack.h. The unversioned form is frozen; the versioned form keeps its fields
// within a major version.

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

const MAJOR: u32 = 1;
const FLAG_READ_ONLY: u64 = 1;

const UNVERSIONED: &CStr = c"dltensor";
const UNVERSIONED_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// Device types whose memory the CPU addresses: plain, and pinned for CUDA or ROCm.
const HOST_DEVICES: [i32; 3] = [1, 3, 11];

fn device_name(device_type: i32) -> String {
    match device_type {
        2 => "a CUDA device".to_owned(),
        7 => "a Vulkan device".to_owned(),
        8 => "a Metal device".to_owned(),
        10 => "a ROCm device".to_owned(),
        13 => "CUDA managed memory".to_owned(),
        14 => "a oneAPI device".to_owned(),
        other => format!("DLPack device type {other}"),
    }
}

enum Tensor {
    Plain(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

/// A tensor that its producer keeps alive until this `Exported` is dropped.
pub(crate) struct Exported {
    tensor: Tensor,
    address: *mut u8,
    len: usize,
    readonly: bool,
}

impl Exported {
    /// Takes over an export of a contiguous tensor in host memory.
    pub(crate) fn of(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let (device_type, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        if !HOST_DEVICES.contains(&device_type) {
            return Err(PyBufferError::new_err(format!(
                "its memory is on {}; copy it to host memory first (for torch: .cpu())",
                device_name(device_type)
            )));
        }
        let exported = Self::consume(&capsule(object)?)?;
        if writable && exported.readonly {
            return Err(PyBufferError::new_err("it is read-only"));
        }
        Ok(exported)
    }

    /// Becomes the owner of a capsule's tensor. The capsule is marked as used, so that its
    /// destructor leaves the tensor alone.
    fn consume(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        let raw = capsule.as_ptr();
        // SAFETY: the GIL is held; a valid capsule of this name holds, by the protocol, a
        // pointer to a live managed tensor of this form, and renaming it makes us its only
        // owner. The names are static.
        let tensor = unsafe {
            if ffi::PyCapsule_IsValid(raw, VERSIONED.as_ptr()) == 1 {
                let managed: *mut ManagedVersioned =
                    ffi::PyCapsule_GetPointer(raw, VERSIONED.as_ptr()).cast();
                // Fields behind the version are only known for our major version.
                if (*managed).major != MAJOR {
                    return Err(PyBufferError::new_err(format!(
                        "its DLPack version is {}.{}, and {MAJOR} is supported",
                        (*managed).major,
                        (*managed).minor
                    )));
                }
                ffi::PyCapsule_SetName(raw, VERSIONED_USED.as_ptr());
                Tensor::Versioned(managed)
            } else if ffi::PyCapsule_IsValid(raw, UNVERSIONED.as_ptr()) == 1 {
                let managed = ffi::PyCapsule_GetPointer(raw, UNVERSIONED.as_ptr()).cast();
                ffi::PyCapsule_SetName(raw, UNVERSIONED_USED.as_ptr());
                Tensor::Plain(managed)
            } else {
                return Err(PyBufferError::new_err(
                    "__dlpack__ gave a capsule of another kind",
                ));
            }
        };
        let mut exported = Self {
            tensor,
            address: std::ptr::null_mut(),
            len: 0,
            readonly: false,
        };
        // SAFETY: `exported` owns the managed tensor, which is alive until it is dropped.
        let (dl, readonly) = unsafe {
            match exported.tensor {
                Tensor::Plain(managed) => (&(*managed).tensor, false),
                Tensor::Versioned(managed) => {
                    (&(*managed).tensor, (*managed).flags & FLAG_READ_ONLY != 0)
                }
            }
        };
        // SAFETY: `dl` comes from a live managed tensor.
        let len = unsafe { contiguous_bytes(dl)? };
        exported.readonly = readonly;
        exported.len = len;
        exported.address = dl
            .data
            .cast::<u8>()
            .wrapping_add(usize::try_from(dl.byte_offset)?);
        Ok(exported)
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn readonly(&self) -> bool {
        self.readonly
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        // Producers' deleters release Python objects. At exit there is no interpreter for that.
        let _ = Python::try_attach(|_| {
            // SAFETY: the tensor is ours, alive, and deleted once, by its producer's function.
            unsafe {
                match self.tensor {
                    Tensor::Plain(managed) => {
                        if let Some(deleter) = (*managed).deleter {
                            deleter(managed);
                        }
                    }
                    Tensor::Versioned(managed) => {
                        if let Some(deleter) = (*managed).deleter {
                            deleter(managed);
                        }
                    }
                }
            }
        });
    }
}

/// Asks for the versioned form, which says whether the tensor is read-only. Older producers do not
/// know the parameter.
fn capsule<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyCapsule>> {
    let py = object.py();
    let options = PyDict::new(py);
    options.set_item("max_version", (MAJOR, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            object.call_method0("__dlpack__")?
        }
        answer => answer?,
    };
    Ok(capsule.cast_into()?)
}

/// Bytes of a tensor whose elements lie side by side in row-major order.
///
/// # Safety
/// `dl` must be a valid DLTensor: `shape`, and `strides` unless null, have `ndim` elements.
unsafe fn contiguous_bytes(dl: &DlTensor) -> PyResult<usize> {
    let overflow = || PyBufferError::new_err("its size does not fit 64 bits");
    let ndim = usize::try_from(dl.ndim)?;
    let bits = usize::from(dl.dtype_bits) * usize::from(dl.dtype_lanes);
    if !bits.is_multiple_of(8) {
        return Err(PyBufferError::new_err(format!(
            "its elements have {bits} bits, not whole bytes"
        )));
    }
    let mut expected: usize = 1;
    let mut apart = false;
    for axis in (0..ndim).rev() {
        // SAFETY: by the caller's word, `axis` is within both arrays.
        let (size, stride) = unsafe {
            let stride = if dl.strides.is_null() {
                None
            } else {
                Some(*dl.strides.add(axis))
            };
            (usize::try_from(*dl.shape.add(axis))?, stride)
        };
        // The stride of an axis with one element has no meaning.
        if size != 1 && stride.is_some_and(|stride| usize::try_from(stride) != Ok(expected)) {
            apart = true;
        }
        expected = expected.checked_mul(size).ok_or_else(overflow)?;
    }
    if apart && expected != 0 {
        return Err(PyBufferError::new_err(
            "its elements are not contiguous in row-major order (for torch: .contiguous())",
        ));
    }
    expected.checked_mul(bits / 8).ok_or_else(overflow)
}
