//! Groups of layers for Python: what their blocks are, and where the pool has them.

use penstock_catalogue::{Group, Reads};
use penstock_contract::{Namespace, Span, Tenancy, Tenant};
use penstock_engine::KeptGroup;
use penstock_lookup::Part;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::layout::PySpan;
use crate::store::PyNamespace;

/// What the blocks of a group of layers are: tokens in a block, the tokens that a layer attends to
/// (`window`; None for all), and whether the layers keep a state in place of each token's KV.
#[pyclass(frozen, get_all, eq, hash, module = "penstock._native")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupSpec {
    /// Tokens in a block.
    block_tokens: u64,
    /// Tokens that a layer attends to, the present one included. None: all tokens.
    window: Option<u64>,
    /// Whether the layers keep a state in place of each token's KV.
    keeps_state: bool,
}

#[pymethods]
impl GroupSpec {
    #[new]
    #[pyo3(signature = (block_tokens, *, window = None, keeps_state = false))]
    fn new(block_tokens: u64, window: Option<u64>, keeps_state: bool) -> Self {
        Self {
            block_tokens,
            window,
            keeps_state,
        }
    }

    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

impl GroupSpec {
    pub(crate) fn native(&self) -> Group {
        Group {
            block_tokens: self.block_tokens,
            reads: match self.window {
                _ if self.keeps_state => Reads::State,
                Some(window) => Reads::Window(window),
                None => Reads::All,
            },
        }
    }
}

/// Where the pool has the blocks of a group: its namespace, the spans of the objects that make up a
/// block on all ranks, and the bytes of a block on all ranks, if they are known.
#[pyclass(frozen, eq, hash, module = "penstock._native")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolGroup {
    namespace: Namespace,
    spans: Vec<Span>,
    /// Bytes of a block on all ranks together.
    #[pyo3(get)]
    block_bytes: Option<u64>,
}

#[pymethods]
impl PoolGroup {
    #[new]
    #[pyo3(signature = (namespace, spans, *, block_bytes = None))]
    fn new(namespace: PyNamespace, spans: Vec<PySpan>, block_bytes: Option<u64>) -> Self {
        Self {
            namespace: namespace.0,
            spans: PySpan::all(spans),
            block_bytes,
        }
    }

    /// The namespace of objects that no tenant owns: 16 bytes.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.namespace.0)
    }

    fn __repr__(&self) -> String {
        format!("{self:?}")
    }

    /// The spans of the objects that make up a block.
    #[getter]
    fn spans(&self) -> Vec<PySpan> {
        self.spans.iter().copied().map(PySpan).collect()
    }
}

impl PoolGroup {
    /// The namespace of a tenant's objects; without one, that of objects that no tenant owns.
    pub(crate) fn namespace_of(&self, tenant: Option<Tenant>) -> Namespace {
        tenant.map_or(self.namespace, |tenant| self.namespace.of_tenant(tenant))
    }

    pub(crate) fn block_spans(&self) -> &[Span] {
        &self.spans
    }

    /// The group as the keeper counts it. None if the bytes of a block are not known.
    pub(crate) fn kept(&self) -> Option<KeptGroup> {
        Some(KeptGroup {
            namespace: self.namespace,
            spans: self.spans.clone(),
            block_bytes: self.block_bytes?,
        })
    }

    pub(crate) fn part(&self) -> Part {
        Part {
            namespace: self.namespace,
            spans: self.spans.clone(),
        }
    }
}
