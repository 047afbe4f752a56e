//! Blocks for Python: as jobs carry them, and as bytes between processes.

use penstock_contract::{Block, Chunk, HostChange, Parent};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use crate::errors::config_error;

/// Blocks of a prompt, in its order. For each block: its group, its id in the serving engine, the
/// hash that names its content, and what comes before it.
#[pyclass(frozen, eq, module = "penstock._native")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) blocks: Vec<Block>,
}

/// A group, a block id, a hash, and the hash before it with the tokens until there, if any.
type BlockTuple<'py> = (
    u16,
    u64,
    Bound<'py, PyBytes>,
    Option<(Bound<'py, PyBytes>, u64)>,
);

#[pymethods]
impl Blocks {
    /// Blocks from tuples `(group, block id, hash, parent)`. `parent` is `(hash, tokens)` of what
    /// comes before the block, or None for the first block of a prompt. Hashes have 32 bytes at
    /// most.
    #[new]
    fn new(py: Python<'_>, blocks: Vec<BlockTuple<'_>>) -> PyResult<Self> {
        let block = |(group, id, hash, parent): BlockTuple<'_>| {
            let parent = parent.map(|(hash, tokens)| {
                let chunk = padded(py, hash.as_bytes())?;
                Ok::<_, PyErr>(Parent { chunk, tokens })
            });
            Ok(Block {
                group,
                id,
                chunk: padded(py, hash.as_bytes())?,
                parent: parent.transpose()?,
            })
        };
        let blocks = blocks.into_iter().map(block).collect::<PyResult<_>>()?;
        Ok(Self { blocks })
    }

    /// The blocks from the bytes that `encode` gave.
    #[classmethod]
    fn decode(cls: &Bound<'_, PyType>, encoded: &[u8]) -> PyResult<Self> {
        Block::decode(encoded)
            .map(|blocks| Self { blocks })
            .map_err(|error| config_error(cls.py(), error.to_string()))
    }

    /// Bytes from which `decode` makes the same blocks.
    fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &Block::encode(&self.blocks))
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let decode = slf.get_type().getattr("decode")?;
        Ok((decode, (slf.get().encode(slf.py()),)))
    }

    /// Each block's id in the serving engine.
    #[getter]
    fn block_ids(&self) -> Vec<u64> {
        self.blocks.iter().map(|block| block.id).collect()
    }

    /// Each block's group, and the tokens before it in its prompt.
    #[getter]
    fn places(&self) -> Vec<(u16, u64)> {
        let before = |block: &Block| block.parent.as_ref().map_or(0, |parent| parent.tokens);
        self.blocks
            .iter()
            .map(|block| (block.group, before(block)))
            .collect()
    }

    fn __len__(&self) -> usize {
        self.blocks.len()
    }

    fn __repr__(&self) -> String {
        format!("Blocks({} of them)", self.blocks.len())
    }
}

/// What came into host memory, and what went, from bytes that engines give: for each change a
/// group, the zero-padded hash of a block, and whether it came. The bytes of several calls may be
/// concatenated.
#[pyfunction]
pub(crate) fn host_changes(
    py: Python<'_>,
    encoded: &[u8],
) -> PyResult<Vec<(u16, Py<PyBytes>, bool)>> {
    let changes =
        HostChange::decode(encoded).map_err(|error| config_error(py, error.to_string()))?;
    let tuple = |change: &HostChange| {
        let chunk = PyBytes::new(py, &change.chunk).unbind();
        (change.group, chunk, change.came)
    };
    Ok(changes.iter().map(tuple).collect())
}

/// A block's hash, zero-padded.
pub(crate) fn padded(py: Python<'_>, hash: &[u8]) -> PyResult<Chunk> {
    penstock_contract::pad_hash(hash).map_err(|error| config_error(py, error.to_string()))
}
