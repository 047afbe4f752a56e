//! Blocks for Python: opaque there, named and packed here.

use penstock_engine::Parent;
use pyo3::prelude::*;

/// TEMPORARY: replaced by the engine's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) group: u16,
    pub(crate) block: u64,
    pub(crate) chunk: [u8; 32],
    pub(crate) parent: Option<Parent>,
}

/// TEMPORARY
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Blocks {
    pub(crate) blocks: Vec<Block>,
}

#[pymethods]
impl Blocks {
    fn __len__(&self) -> usize {
        self.blocks.len()
    }

    #[getter]
    fn block_ids(&self) -> Vec<u64> {
        self.blocks.iter().map(|block| block.block).collect()
    }

    #[getter]
    fn chunks<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, pyo3::types::PyBytes>> {
        self.blocks
            .iter()
            .map(|block| pyo3::types::PyBytes::new(py, &block.chunk))
            .collect()
    }
}
