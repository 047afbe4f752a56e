//! Layout descriptors and geometry for Python.

use std::sync::{Arc, Mutex, PoisonError};

use penstock_engine::{DirectCopy, Region};
use penstock_layout::{
    Coverage, Descriptor as Layout, Geometry, Interior, KvLayout, RegionAddr, Segment, Span,
    TensorView as NativeView, detect,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::buffer::Pinned;
use crate::cuda::device;
use crate::errors::{config_error, engine_error, layout_error};

type TurnTuple = (u32, u32);

/// A span. In Python it is a tuple: first layer, end of the layers, first head, end of the heads.
pub(crate) struct PySpan(pub(crate) Span);

impl PySpan {
    pub(crate) fn all(spans: Vec<Self>) -> Vec<Span> {
        spans.into_iter().map(|span| span.0).collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for PySpan {
    type Error = PyErr;

    fn extract(tuple: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (first_layer, layers_end, first_head, heads_end): (u16, u16, u16, u16) =
            tuple.extract()?;
        Span::new(first_layer..layers_end, first_head..heads_end)
            .map(Self)
            .map_err(|e| layout_error(tuple.py(), e))
    }
}

impl<'py> IntoPyObject<'py> for PySpan {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let (layers, heads) = (self.0.layers(), self.0.heads());
        (layers.start, layers.end, heads.start, heads.end).into_pyobject(py)
    }
}

/// The KV of one layer, as a tensor: a view of memory that others may share. Shape and strides run
/// along blocks, heads, tokens and content.
#[pyclass(frozen, get_all, from_py_object, eq, hash, module = "penstock._native")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TensorView {
    /// The layer's index in the whole model.
    layer: u16,
    /// The address of the first element.
    address: u64,
    /// Elements along each axis.
    shape: [u64; 4],
    /// Elements from one place to the next along each axis.
    strides: [i64; 4],
    /// Bytes of an element.
    itemsize: u64,
    /// The address of the memory that it is a view of.
    storage_address: u64,
    /// Bytes of that memory.
    storage_bytes: u64,
}

#[pymethods]
impl TensorView {
    #[new]
    #[pyo3(signature = (
        layer, *, address, shape, strides, itemsize, storage_address, storage_bytes
    ))]
    fn new(
        layer: u16,
        address: u64,
        shape: [u64; 4],
        strides: [i64; 4],
        itemsize: u64,
        storage_address: u64,
        storage_bytes: u64,
    ) -> Self {
        Self {
            layer,
            address,
            shape,
            strides,
            itemsize,
            storage_address,
            storage_bytes,
        }
    }

    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

impl TensorView {
    fn native(self) -> NativeView {
        NativeView {
            layer: self.layer,
            address: self.address,
            shape: self.shape,
            strides: self.strides,
            itemsize: self.itemsize,
            storage_address: self.storage_address,
            storage_bytes: self.storage_bytes,
        }
    }
}

fn geometry(
    py: Python<'_>,
    layers_per_object: Option<u16>,
    heads_per_object: Option<u16>,
) -> PyResult<Geometry> {
    Geometry::new(layers_per_object, heads_per_object, 1).map_err(|e| layout_error(py, e))
}

/// Where every byte of a rank's KV cache lies.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Descriptor {
    layout: Layout,
    name: Option<KvLayout>,
    regions: Vec<RegionAddr>,
    /// The copies of the CUDA device that was asked for last: setting them up costs time, so they
    /// are kept.
    copies: Mutex<Option<(i32, Arc<DirectCopy>)>>,
}

impl Descriptor {
    /// The descriptor itself.
    pub(crate) fn inner(&self) -> &Layout {
        &self.layout
    }

    /// The regions as the engine takes them.
    pub(crate) fn engine_regions(&self, py: Python<'_>) -> PyResult<Vec<Region>> {
        if self.regions.is_empty() {
            return Err(config_error(py, "no tensors lie behind this descriptor"));
        }
        let region = |memory: &RegionAddr| {
            // SAFETY: the addresses are those of tensors' storages. That they stay alive, and
            // that nobody touches blocks that are being copied, is what the Python caller is
            // told to keep to.
            #[allow(unsafe_code)]
            unsafe {
                Region::new(memory.address as usize, memory.len)
            }
        };
        Ok(self.regions.iter().map(region).collect())
    }

    fn direct(&self, py: Python<'_>, cuda_device: Option<i32>) -> PyResult<Arc<DirectCopy>> {
        let known = || self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(ordinal), Some((of, copies))) = (cuda_device, &*known())
            && *of == ordinal
        {
            return Ok(Arc::clone(copies));
        }
        let regions = self.engine_regions(py)?;
        let copies = py
            .detach(|| DirectCopy::new(device(cuda_device), self.layout.clone(), regions))
            .map(Arc::new)
            .map_err(|e| engine_error(py, &e))?;
        if let Some(ordinal) = cuda_device {
            *known() = Some((ordinal, Arc::clone(&copies)));
        }
        Ok(copies)
    }
}

#[pymethods]
impl Descriptor {
    /// Reproduces the layout of one tensor per layer, or refuses with the reason.
    ///
    /// `head_start` is the index in the model of the tensors' first head. `stage` has the layers of
    /// the pipeline stage, as `(first layer, past the last layer)`. A group of a hybrid model has
    /// only some of them. Without `stage`, the views' layers are consecutive.
    #[staticmethod]
    #[pyo3(signature = (views, *, head_start = 0, stage = None))]
    fn detect(
        py: Python<'_>,
        views: Vec<TensorView>,
        head_start: u16,
        stage: Option<(u16, u16)>,
    ) -> PyResult<Self> {
        let views: Vec<NativeView> = views.into_iter().map(TensorView::native).collect();
        let stage = stage.map(|(first, end)| first..end);
        let detected = detect(&views, head_start, stage).map_err(|e| layout_error(py, e))?;
        Ok(Self {
            layout: detected.descriptor,
            name: detected.layout,
            regions: detected.regions,
            copies: Mutex::default(),
        })
    }

    /// The descriptor of one region without gaps, in the layout of this name.
    #[staticmethod]
    #[pyo3(signature = (layout, share, *, blocks, tokens, content_bytes))]
    fn packed(
        py: Python<'_>,
        layout: &str,
        share: PySpan,
        blocks: u64,
        tokens: u64,
        content_bytes: u64,
    ) -> PyResult<Self> {
        let name: KvLayout = layout.parse().map_err(|e| layout_error(py, e))?;
        let layout = Layout::packed(name, share.0, blocks, tokens, content_bytes)
            .map_err(|e| layout_error(py, e))?;
        Ok(Self {
            layout,
            name: Some(name),
            regions: Vec::new(),
            copies: Mutex::default(),
        })
    }

    /// Gives the segments in another order of heads and tokens: "HNC" or "NHC". The bytes stay the
    /// same.
    fn with_interior(&self, py: Python<'_>, interior: &str) -> PyResult<Self> {
        let interior = match interior {
            "HNC" => Interior::Hnc,
            "NHC" => Interior::Nhc,
            other => {
                let message =
                    format!("no order of heads and tokens is named {other:?}; HNC or NHC");
                return Err(layout_error(py, message));
            }
        };
        Ok(Self {
            layout: self.layout.clone().with_interior(interior),
            name: self.name,
            regions: self.regions.clone(),
            copies: Mutex::default(),
        })
    }

    /// The layout's name, if exactly one fits.
    #[getter]
    fn layout(&self) -> Option<&'static str> {
        self.name.map(KvLayout::name)
    }

    /// Layers and heads that lie here.
    #[getter]
    fn share(&self) -> PySpan {
        PySpan(self.layout.share())
    }

    /// Layers that lie here: those of the share, without the layers of other groups.
    #[getter]
    fn layers(&self) -> Vec<u16> {
        self.layout.layers().collect()
    }

    /// Number of blocks.
    #[getter]
    fn blocks(&self) -> u64 {
        self.layout.blocks()
    }

    /// Tokens in a block.
    #[getter]
    fn tokens(&self) -> u64 {
        self.layout.tokens()
    }

    /// Bytes of key and value of one token and head.
    #[getter]
    fn content_bytes(&self) -> u64 {
        self.layout.content_bytes()
    }

    /// The order of heads and tokens in which segments are given: "HNC" or "NHC".
    #[getter]
    fn interior(&self) -> String {
        self.layout.interior().to_string()
    }

    /// For each of `layers`, its region and its first byte in it.
    #[getter]
    fn bases(&self) -> Vec<(u32, u64)> {
        let bases = self.layout.bases().iter();
        bases.map(|base| (base.region, base.offset)).collect()
    }

    /// Bytes from a block, a head and a token to the next one; a value has no meaning where there
    /// is only one.
    #[getter]
    fn strides(&self) -> [u64; 3] {
        self.layout.strides()
    }

    /// How a block lies in memory: "block" (all layers in one piece), "page" (each layer's page in
    /// one piece) or "scattered".
    #[getter]
    fn contiguity(&self) -> &'static str {
        self.layout.contiguity().name()
    }

    /// The bytes of each region.
    #[getter]
    fn region_bytes(&self) -> Vec<u64> {
        self.layout.region_lens().to_vec()
    }

    /// The address of each region, if the descriptor describes tensors.
    #[getter]
    fn region_addresses(&self) -> Vec<u64> {
        self.regions.iter().map(|region| region.address).collect()
    }

    /// Bytes of KV that one block holds for a span.
    fn block_bytes(&self, span: PySpan) -> u64 {
        self.layout.block_bytes(&span.0)
    }

    /// The fewest runs `(region, offset, bytes)` that hold a block's bytes of a span, in
    /// canonical order.
    fn segments(&self, py: Python<'_>, block: u64, span: PySpan) -> PyResult<Vec<(u32, u64, u64)>> {
        let span = span.0;
        let mut runs = Vec::new();
        self.layout
            .segments([block], &span, &mut runs)
            .map_err(|e| layout_error(py, e))?;
        Ok(runs
            .into_iter()
            .map(
                |Segment {
                     region,
                     offset,
                     len,
                 }| (region, offset, len),
            )
            .collect())
    }

    /// Copies a span of blocks, one after the other in canonical order, into a writable buffer;
    /// returns the number of bytes. The blocks are in the tensors that the descriptor was detected
    /// from: in host memory, or on a CUDA device given by its ordinal. With `checksum`, computes
    /// the checksum that storing the value would compute.
    #[pyo3(signature = (blocks, span, into, *, checksum = false, cuda_device = None))]
    fn gather(
        &self,
        py: Python<'_>,
        blocks: Vec<u64>,
        span: PySpan,
        into: &Bound<'_, PyAny>,
        checksum: bool,
        cuda_device: Option<i32>,
    ) -> PyResult<usize> {
        let span = span.0;
        let copy = self.direct(py, cuda_device)?;
        let target = Pinned::of(into, true)?;
        py.detach(|| {
            // SAFETY: only this call writes to it; what Python does with its buffer meanwhile is
            // as with any I/O into one.
            #[allow(unsafe_code)]
            let bytes = unsafe { target.bytes_mut() };
            copy.gather(&blocks, span, bytes, checksum)
        })
        .map_err(|e| engine_error(py, &e))
    }

    /// Copies the beginning of a buffer into a span of blocks, one after the other, in the tensors
    /// that the descriptor was detected from; returns the number of bytes.
    #[pyo3(signature = (blocks, span, source, *, cuda_device = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        blocks: Vec<u64>,
        span: PySpan,
        source: &Bound<'_, PyAny>,
        cuda_device: Option<i32>,
    ) -> PyResult<usize> {
        let span = span.0;
        let copy = self.direct(py, cuda_device)?;
        let source = Pinned::of(source, false)?;
        py.detach(|| copy.scatter(&blocks, span, source.bytes()))
            .map_err(|e| engine_error(py, &e))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.layout == other.layout && self.regions == other.regions
    }

    fn __repr__(&self) -> String {
        format!(
            "Descriptor({} {}, {} blocks of {} tokens, {} B a token and head)",
            self.name.map_or("unnamed", KvLayout::name),
            self.layout.share(),
            self.layout.blocks(),
            self.layout.tokens(),
            self.layout.content_bytes(),
        )
    }
}

/// The spans of the objects that hold one chunk of a share; without a size, one object of the whole
/// share.
#[pyfunction]
#[pyo3(signature = (share, *, layers_per_object = None, heads_per_object = None))]
pub(crate) fn objects(
    py: Python<'_>,
    share: PySpan,
    layers_per_object: Option<u16>,
    heads_per_object: Option<u16>,
) -> PyResult<Vec<PySpan>> {
    let spans = geometry(py, layers_per_object, heads_per_object)?
        .objects(&share.0)
        .map_err(|e| layout_error(py, e))?;
    Ok(spans.into_iter().map(PySpan).collect())
}

/// Checks that all ranks' shares together make up the model, and that their objects meet.
///
/// Returns the spans of a chunk's objects over all ranks, and `(replica, replicas)` for each rank:
/// its position among the ranks that hold the same share, and their number.
#[pyfunction]
#[pyo3(signature = (
    shares, layers, heads, *, layers_per_object = None, heads_per_object = None
))]
pub(crate) fn check_ranks(
    py: Python<'_>,
    shares: Vec<PySpan>,
    layers: u16,
    heads: u16,
    layers_per_object: Option<u16>,
    heads_per_object: Option<u16>,
) -> PyResult<(Vec<PySpan>, Vec<TurnTuple>)> {
    let shares = PySpan::all(shares);
    let geometry = geometry(py, layers_per_object, heads_per_object)?;
    let coverage =
        Coverage::new(&geometry, layers, heads, &shares).map_err(|e| layout_error(py, e))?;
    Ok((
        coverage.objects().iter().copied().map(PySpan).collect(),
        coverage
            .turns()
            .iter()
            .map(|turn| (turn.replica, turn.replicas))
            .collect(),
    ))
}
