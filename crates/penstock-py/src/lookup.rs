//! Look-ups for routers, for Python: prompts in, tokens that an engine would find out.

use std::time::Instant;

use penstock_catalogue::{Group, Groups};
use penstock_lookup::{Algorithm, Belief, Extra, Finder, HashError, Hasher, Part, Prefix, Variant};
use penstock_store::Tenant;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};

use crate::errors::{config_error, raised, store_error, without_gil};
use crate::layout::{SpanTuple, span};
use crate::store::{Store, namespace, seconds};

fn raising<T>(result: Result<T, HashError>) -> PyResult<T> {
    result.map_err(|error| raised::ConfigError::new_err((error.to_string(),)))
}

/// Reads a prompt. Whole numbers alone are tokens; `True` is none.
fn tokens(prompt: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
    prompt
        .iter()
        .map(|token| {
            let number = token.is_exact_instance_of::<PyInt>();
            number
                .then(|| token.extract::<u32>().ok())
                .flatten()
                .ok_or_else(|| {
                    let what = "a prompt is a list of token ids: whole numbers from 0 on";
                    config_error(prompt.py(), what.to_owned())
                })
        })
        .collect()
}

/// Hashes blocks as the engines of one model do: vLLM's chained hashes. `algorithm` is vLLM's name
/// for it, `seed` is the hash that starts every chain, and each hash adds `block_tokens` tokens.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct PrefixHasher {
    inner: Hasher,
}

#[pymethods]
impl PrefixHasher {
    #[new]
    fn new(algorithm: &str, seed: &[u8], block_tokens: usize) -> PyResult<Self> {
        let algorithm = raising(Algorithm::named(algorithm))?;
        let inner = raising(Hasher::new(algorithm, seed, block_tokens))?;
        Ok(Self { inner })
    }

    /// The hashes of all full blocks of a prompt. `lora` has what names the adapter in the hashes:
    /// its name, its path and the digest of its content.
    #[pyo3(signature = (prompt, *, lora = Vec::new(), cache_salt = None))]
    fn prefix(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyList>,
        lora: Vec<String>,
        cache_salt: Option<String>,
    ) -> PyResult<PromptPrefix> {
        let tokens = tokens(prompt)?;
        let hashed = py.detach(|| {
            let lora: Vec<&str> = lora.iter().map(String::as_str).collect();
            let extra = Extra {
                lora: &lora,
                salt: cache_salt.as_deref(),
            };
            self.inner.prefix(&tokens, extra)
        });
        Ok(PromptPrefix {
            inner: raising(hashed)?,
        })
    }
}

/// A prompt's block hashes.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct PromptPrefix {
    inner: Prefix,
}

#[pymethods]
impl PromptPrefix {
    /// Tokens of the prompt.
    #[getter]
    fn tokens(&self) -> u64 {
        self.inner.tokens
    }

    /// The hash of each full block; a shorter hash is followed by zeros.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let hashes = self.inner.hashes.iter();
        hashes.map(|hash| PyBytes::new(py, hash)).collect()
    }
}

/// A group as (namespace, tokens of a block, window, spans).
type GroupTuple = (Vec<u8>, u64, Option<u64>, Vec<SpanTuple>);

/// One way to serve a model: its groups, and the tokens that each hash adds.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct ModelVariant {
    inner: Variant,
}

#[pymethods]
impl ModelVariant {
    #[new]
    fn new(py: Python<'_>, groups: Vec<GroupTuple>, hash_tokens: u64) -> PyResult<Self> {
        let sizes = groups.iter().map(|&(_, block_tokens, window, _)| Group {
            block_tokens,
            window,
        });
        let sizes = Groups::new(sizes.collect(), hash_tokens)
            .map_err(|error| config_error(py, error.to_string()))?;
        let parts = groups.iter().map(|(digest, _, _, spans)| {
            Ok(Part {
                namespace: namespace(py, digest)?,
                spans: spans
                    .iter()
                    .map(|&tuple| span(py, tuple))
                    .collect::<PyResult<_>>()?,
            })
        });
        let inner = Variant::new(sizes, parts.collect::<PyResult<_>>()?)
            .map_err(|error| store_error(py, &error))?;
        Ok(Self { inner })
    }

    /// The same for the objects of the tenant of this name alone.
    fn of_tenant(&self, py: Python<'_>, name: &str) -> PyResult<Self> {
        let tenant = Tenant::named(name).map_err(|error| store_error(py, &error))?;
        Ok(Self {
            inner: self.inner.of_tenant(tenant),
        })
    }
}

/// Answers for one pool, from an index of `blocks` blocks and from the pool itself. The pool's
/// answers are believed for `believe_found` seconds if a block was there, else for
/// `believe_missing` seconds. Any thread may ask.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct PoolFinder {
    inner: Finder,
}

#[pymethods]
impl PoolFinder {
    #[new]
    #[pyo3(signature = (store, *, blocks, believe_found, believe_missing))]
    fn new(
        py: Python<'_>,
        store: &Store,
        blocks: usize,
        believe_found: f64,
        believe_missing: f64,
    ) -> PyResult<Self> {
        let belief = Belief {
            there: seconds(py, believe_found)?,
            missing: seconds(py, believe_missing)?,
        };
        let inner = Finder::new(store.shared(), blocks, belief);
        Ok(Self { inner })
    }

    /// The tokens that an engine would find; None if the index does not know. Does no I/O.
    fn known(&self, variant: &ModelVariant, prefix: &PromptPrefix) -> Option<u64> {
        self.inner.known(&variant.inner, &prefix.inner)
    }

    /// The tokens that an engine would find. Asks the pool for what the index does not know.
    #[pyo3(signature = (variant, prefix, *, timeout))]
    fn find(
        &self,
        py: Python<'_>,
        variant: &ModelVariant,
        prefix: &PromptPrefix,
        timeout: f64,
    ) -> PyResult<u64> {
        let deadline = Instant::now() + seconds(py, timeout)?;
        without_gil(py, || {
            self.inner.find(&variant.inner, &prefix.inner, deadline)
        })
    }

    /// Blocks that the index has an answer for, and blocks that the pool was asked for.
    fn stats(&self) -> (usize, u64) {
        (self.inner.indexed(), self.inner.asked())
    }

    /// Forgets what the pool said.
    fn forget(&self) {
        self.inner.forget();
    }
}
