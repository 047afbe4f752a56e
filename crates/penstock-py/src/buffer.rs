//! Memory that Python lends: the bytes of an object, which stay where they are while in use.

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::dlpack::Exported;
use crate::errors::config_error;

/// An export of the buffer protocol. While it exists, the exporter neither frees nor resizes its
/// memory. (PyO3's own asks exporters for strides, which `ctypes` does not give.)
struct View(Box<ffi::Py_buffer>);

#[allow(unsafe_code)]
impl View {
    fn of(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let mut raw = Box::new(ffi::Py_buffer::new());
        let access = if writable { ffi::PyBUF_WRITABLE } else { 0 };
        let flags = ffi::PyBUF_C_CONTIGUOUS | ffi::PyBUF_FORMAT | access;
        // SAFETY: the GIL is held (`object` proves it) and `raw` is a writable Py_buffer that
        // stays at its address until it is released.
        let status = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *raw, flags) };
        if status != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let view = Self(raw);
        if view.format().contains(&b'O') {
            return Err(PyBufferError::new_err(
                "its elements are Python objects, not bytes",
            ));
        }
        Ok(view)
    }

    /// Codes of the types of the elements, as in the `struct` module; `O` stands for references.
    fn format(&self) -> &[u8] {
        if self.0.format.is_null() {
            return b"B";
        }
        // SAFETY: the exporter gave a string that lives as long as the export.
        unsafe { std::ffi::CStr::from_ptr(self.0.format) }.to_bytes()
    }
}

#[allow(unsafe_code)]
impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter there is no exporter either: at exit, the export is left as it is.
        let _ = Python::try_attach(|_| {
            // SAFETY: the view was filled by PyObject_GetBuffer, is released once, and the
            // thread is attached.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

enum Owner {
    View(#[expect(dead_code, reason = "held for its drop")] View),
    Exported(#[expect(dead_code, reason = "held for its drop")] Exported),
}

/// Contiguous bytes of a Python object, which stay valid until this `Pinned` is dropped.
pub(crate) struct Pinned {
    address: *mut u8,
    len: usize,
    readonly: bool,
    _owner: Owner,
}

// SAFETY: the bytes are plain memory that the owner keeps alive from any thread, and the owner
// is released with the GIL held, whichever thread drops it.
#[allow(unsafe_code)]
unsafe impl Send for Pinned {}
// SAFETY: as for Send; writing needs `bytes_mut`, whose caller answers for exclusivity.
#[allow(unsafe_code)]
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins the bytes of an object that has the buffer protocol or `__dlpack__`.
    pub(crate) fn of(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let py = object.py();
        let refused = |error: PyErr| {
            let kind = if writable {
                "a writable contiguous"
            } else {
                "a contiguous"
            };
            let name = object
                .get_type()
                .name()
                .map(|n| n.to_string())
                .unwrap_or_default();
            let refusal = config_error(
                py,
                format!("{name} is not {kind} buffer: {}", error.value(py)),
            );
            refusal.set_cause(py, Some(error));
            refusal
        };
        if has_buffer_protocol(object) {
            let view = View::of(object, writable).map_err(refused)?;
            return Ok(Self {
                address: view.0.buf.cast(),
                len: usize::try_from(view.0.len)?,
                readonly: view.0.readonly != 0,
                _owner: Owner::View(view),
            });
        }
        if object.hasattr("__dlpack__")? {
            let exported = Exported::of(object, writable).map_err(refused)?;
            return Ok(Self {
                address: exported.address(),
                len: exported.len(),
                readonly: exported.readonly(),
                _owner: Owner::Exported(exported),
            });
        }
        Err(config_error(
            py,
            format!(
                "{} offers neither the buffer protocol nor __dlpack__; pass bytes, bytearray, \
                 memoryview, a numpy array or a CPU tensor",
                object.get_type().name()?
            ),
        ))
    }

    /// The bytes.
    #[allow(unsafe_code)]
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the owner keeps `len` initialised bytes at `address` alive as long as `self`.
        // Python code may write to them meanwhile; then what is stored is a mixture of old and
        // new bytes, as with any I/O on a buffer that is being changed. Nothing here trusts two
        // reads to agree.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The bytes, to write to.
    ///
    /// # Safety
    /// No other slice of these bytes may exist while the result does.
    #[allow(unsafe_code, clippy::mut_from_ref)]
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        debug_assert!(!self.readonly);
        // SAFETY: as in `bytes`; the exporter granted write access, and the caller answers for
        // there being no other slice.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

#[allow(unsafe_code)]
fn has_buffer_protocol(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the GIL is held and the object is alive.
    unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// Contiguous memory of a Python object, kept in place as long as this object lives.
///
/// Accepts objects with the buffer protocol (bytes, bytearray, memoryview, numpy arrays) or
/// `__dlpack__` on the CPU (torch tensors). Refuses anything else before touching it.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Buffer {
    pinned: Pinned,
}

#[pymethods]
impl Buffer {
    #[new]
    #[pyo3(signature = (source, *, writable = false))]
    fn new(source: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        Ok(Self {
            pinned: Pinned::of(source, writable)?,
        })
    }

    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.pinned.len
    }

    /// Whether the owner forbids writing.
    #[getter]
    fn readonly(&self) -> bool {
        self.pinned.readonly
    }

    /// Where the bytes begin in the memory of this process.
    #[getter]
    fn address(&self) -> usize {
        self.pinned.address.addr()
    }

    fn __len__(&self) -> usize {
        self.pinned.len
    }
}

/// A piece of a value in Python's memory.
pub(crate) enum Part {
    Own(Pinned),
    Shared(Py<Buffer>),
}

impl Part {
    pub(crate) fn pinned(&self) -> &Pinned {
        match self {
            Part::Own(pinned) => pinned,
            Part::Shared(buffer) => &buffer.get().pinned,
        }
    }
}

/// Pins a buffer, or each buffer of a list or tuple. Their concatenation is one value.
pub(crate) fn parts(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Vec<Part>> {
    if let Ok(list) = object.cast::<PyList>() {
        list.iter().map(|part| one_part(&part, writable)).collect()
    } else if let Ok(tuple) = object.cast::<PyTuple>() {
        tuple.iter().map(|part| one_part(&part, writable)).collect()
    } else {
        Ok(vec![one_part(object, writable)?])
    }
}

fn one_part(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Part> {
    let Ok(buffer) = object.cast::<Buffer>() else {
        return Pinned::of(object, writable).map(Part::Own);
    };
    if writable && buffer.get().pinned.readonly {
        return Err(config_error(object.py(), "the Buffer is read-only"));
    }
    Ok(Part::Shared(buffer.clone().unbind()))
}

/// Refuses destinations if two of them share a byte.
pub(crate) fn check_apart<'a>(
    py: Python<'_>,
    parts: impl Iterator<Item = &'a Part>,
) -> PyResult<()> {
    let mut ranges: Vec<(usize, usize)> = parts
        .map(Part::pinned)
        .filter(|pinned| pinned.len > 0)
        .map(|pinned| (pinned.address.addr(), pinned.address.addr() + pinned.len))
        .collect();
    ranges.sort_unstable();
    if ranges.windows(2).any(|pair| pair[1].0 < pair[0].1) {
        return Err(config_error(py, "destinations overlap"));
    }
    Ok(())
}
