//! Look-ups for routers, for Python: prompts in, tokens that an engine would find out.

use std::time::Instant;

use parking_lot::Mutex;
use penstock_catalogue::Groups;
use penstock_contract::Tenant;
use penstock_lookup::{
    Adapter, Algorithm, Belief, Body, Extra, Finder, HashError, Hasher, OwnCache, Prefix, Prompt,
    Variant, told,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyTuple};

use crate::errors::{config_error, raised, store_error, without_gil};
use crate::groups::{GroupSpec, PoolGroup};
use crate::store::{Store, seconds};

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

/// A prompt's token ids, which Python does not look at.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct TokenIds {
    inner: Vec<u32>,
}

#[pymethods]
impl TokenIds {
    fn __len__(&self) -> usize {
        self.inner.len()
    }
}

/// A prompt as a list of numbers, or as it was read from a body.
#[derive(FromPyObject)]
enum Tokens<'py> {
    Read(Bound<'py, TokenIds>),
    List(Bound<'py, PyList>),
}

/// Reads a router's question from JSON: model, prompt (token ids or text), cache salt, adapter (its
/// name, or its name, path and digest) and tenant.
#[pyfunction]
pub(crate) fn read_question<'py>(
    py: Python<'py>,
    body: &[u8],
    most_tokens: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    let read = py
        .detach(|| Body::read(body, most_tokens))
        .map_err(|error| config_error(py, error.to_string()))?;
    let prompt = match read.prompt {
        Prompt::Text(text) => text.into_pyobject(py)?.into_any(),
        Prompt::Tokens(inner) => TokenIds { inner }.into_pyobject(py)?.into_any(),
    };
    let lora = match read.lora {
        None => py.None().into_bound(py),
        Some(Adapter::Named(name)) => name.into_pyobject(py)?.into_any(),
        Some(Adapter::Given(content)) => {
            PyTuple::new(py, [content.name, content.path, content.digest])?.into_any()
        }
    };
    (read.model, prompt, read.cache_salt, lora, read.tenant).into_pyobject(py)
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
        prompt: Tokens<'_>,
        lora: Vec<String>,
        cache_salt: Option<String>,
    ) -> PyResult<PromptPrefix> {
        let listed;
        let tokens = match &prompt {
            Tokens::Read(read) => &read.get().inner,
            Tokens::List(list) => {
                listed = tokens(list)?;
                &listed
            }
        };
        let hashed = py.detach(|| {
            let lora: Vec<&str> = lora.iter().map(String::as_str).collect();
            let extra = Extra {
                lora: &lora,
                salt: cache_salt.as_deref(),
            };
            self.inner.prefix(tokens, extra)
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

/// One way to serve a model: its groups, and the tokens that each hash adds.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct ModelVariant {
    inner: Variant,
}

#[pymethods]
impl ModelVariant {
    /// A group is what its blocks are, and where the pool has them. With `drops_last`, engines load
    /// one unit less than they find.
    #[new]
    #[pyo3(signature = (groups, hash_tokens, *, drops_last = false))]
    fn new(
        py: Python<'_>,
        groups: Vec<(Py<GroupSpec>, Py<PoolGroup>)>,
        hash_tokens: u64,
        drops_last: bool,
    ) -> PyResult<Self> {
        let sizes = groups.iter().map(|(spec, _)| spec.get().native()).collect();
        let sizes =
            Groups::new(sizes, hash_tokens).map_err(|error| config_error(py, error.to_string()))?;
        let parts = groups.iter().map(|(_, group)| group.get().part()).collect();
        let inner = Variant::new(sizes.dropping_last(drops_last), parts)
            .map_err(|error| store_error(py, &error))?;
        Ok(Self { inner })
    }

    /// This variant, for the objects of the tenant of this name alone.
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

    /// The tokens that an engine would find, if it has the first `own` of them itself; None if the
    /// index does not know. Does no I/O.
    #[pyo3(signature = (variant, prefix, *, own = 0))]
    fn known(&self, variant: &ModelVariant, prefix: &PromptPrefix, own: u64) -> Option<u64> {
        self.inner.known(&variant.inner, &prefix.inner, own)
    }

    /// The tokens that an engine would find, if it has the first `own` of them itself. Asks the
    /// pool for what the index does not know.
    #[pyo3(signature = (variant, prefix, *, timeout, own = 0))]
    fn find(
        &self,
        py: Python<'_>,
        variant: &ModelVariant,
        prefix: &PromptPrefix,
        timeout: f64,
        own: u64,
    ) -> PyResult<u64> {
        let deadline = Instant::now() + seconds(py, timeout)?;
        without_gil(py, || {
            let (variant, prefix) = (&variant.inner, &prefix.inner);
            self.inner.find(variant, prefix, own, deadline)
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

/// A block's hash as vLLM's events have it: the whole hash, or a number.
#[derive(FromPyObject)]
enum ToldHash<'py> {
    Number(u64),
    Whole(Bound<'py, PyBytes>),
}

fn numbers(hashes: &[ToldHash<'_>]) -> Vec<u64> {
    let number = |hash: &ToldHash<'_>| match hash {
        ToldHash::Number(number) => *number,
        ToldHash::Whole(bytes) => told(bytes.as_bytes()),
    };
    hashes.iter().map(number).collect()
}

/// The blocks in an engine's own cache, as its events tell of them; at most so many. Any thread may
/// ask while another tells.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct EngineCache {
    inner: Mutex<OwnCache>,
}

#[pymethods]
impl EngineCache {
    #[new]
    fn new(blocks: usize) -> Self {
        Self {
            inner: Mutex::new(OwnCache::new(blocks)),
        }
    }

    /// The engine has blocks of a group, each of so many tokens.
    fn stored(&self, group: u32, block_tokens: u64, hashes: Vec<ToldHash<'_>>) {
        let hashes = numbers(&hashes);
        self.inner.lock().stored(group, block_tokens, &hashes);
    }

    /// The engine has blocks of a group no more.
    fn removed(&self, group: u32, hashes: Vec<ToldHash<'_>>) {
        self.inner.lock().removed(group, &numbers(&hashes));
    }

    /// The engine has nothing, or nothing is known of it.
    fn clear(&self) {
        self.inner.lock().clear();
    }

    /// Blocks that are known, and whether there were too many to know all.
    fn stats(&self) -> (usize, bool) {
        let inner = self.inner.lock();
        (inner.len(), inner.is_short())
    }

    /// The tokens that the engine finds in its own cache; None if its blocks are of other sizes
    /// than this variant's. `groups` has vLLM's number of each of the variant's groups.
    fn tokens(
        &self,
        variant: &ModelVariant,
        groups: Vec<u32>,
        prefix: &PromptPrefix,
    ) -> Option<u64> {
        let inner = self.inner.lock();
        inner.tokens(&variant.inner, &groups, &prefix.inner)
    }
}
