//! The catalogue for Python: hashes, block tables and steps in, numbers and blocks out.

use std::time::Duration;

use penstock_catalogue::{
    Asker, Begun, Catalogue as Native, CatalogueError, Groups, Holding, LookupState,
    Moved as NativeMoved, Query, Scheduled,
};
use penstock_contract::{Chunk, HostChange, Tenant};
use penstock_engine::{EngineError, Lookup as NativeLookup, look_up_now};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySequence, PyString};

use crate::advisor::Reach;
use crate::blocks::{Blocks, padded};
use crate::engine::Lookup;
use crate::errors::{config_error, engine_error, raised};
use crate::groups::{GroupSpec, PoolGroup};
use crate::keeper::{Keeper, blocks};
use crate::store::{Store, seconds, tenant};

/// The exception for an error of the catalogue, or of whoever asks the pool for it.
struct AskError(PyErr);

impl From<CatalogueError> for AskError {
    fn from(error: CatalogueError) -> Self {
        Self(match error {
            CatalogueError::Config(what) => raised::ConfigError::new_err((what,)),
            // The scheduler half's own mistake, not a user's.
            _ => PyRuntimeError::new_err(error.to_string()),
        })
    }
}

impl From<AskError> for PyErr {
    fn from(error: AskError) -> Self {
        error.0
    }
}

/// The result, or the exception for its error.
fn raising<T>(result: Result<T, CatalogueError>) -> PyResult<T> {
    result.map_err(|error| AskError::from(error).into())
}

/// What a load or a prefetch moves, over all ranks.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub(crate) struct Moved {
    /// Bytes that host memory has.
    host_bytes: u64,
    /// Bytes that come from the pool.
    pool_bytes: u64,
    /// Objects on one rank.
    objects: u64,
}

impl From<NativeMoved> for Moved {
    fn from(moved: NativeMoved) -> Self {
        Self {
            host_bytes: moved.host_bytes,
            pool_bytes: moved.pool_bytes,
            objects: moved.objects,
        }
    }
}

/// What the answers of look-ups say that have come.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub(crate) struct Answers {
    /// Blocks that the pool has.
    found: usize,
    /// Look-ups that failed.
    failed: usize,
    /// Seconds that each look-up took, infinite if it failed; the last one at the end.
    seconds: Vec<f64>,
}

/// Reads the hashes of a list, starting at index `known`.
fn read_hashes(hashes: &Bound<'_, PyList>, known: usize, chunks: &mut Vec<Chunk>) -> PyResult<()> {
    chunks.clear();
    for index in known..hashes.len() {
        let (mut bytes, mut len) = (std::ptr::null_mut(), 0);
        // Two calls for each hash: taking its own reference would take as long again.
        // SAFETY: the list has so many, and keeps what it has, as do bytes: nothing here runs
        // Python code, and the GIL is held. Only of bytes are there a pointer and a length.
        #[allow(unsafe_code)]
        let hash = unsafe {
            let item = ffi::PyList_GetItem(hashes.as_ptr(), index as ffi::Py_ssize_t);
            if item.is_null() || ffi::PyBytes_AsStringAndSize(item, &mut bytes, &mut len) < 0 {
                return Err(PyErr::fetch(hashes.py()));
            }
            std::slice::from_raw_parts(bytes.cast::<u8>(), len as usize)
        };
        chunks.push(match Chunk::try_from(hash) {
            Ok(chunk) => chunk,
            // Hashes of another kind are shorter.
            Err(_) => padded(hashes.py(), hash)?,
        });
    }
    Ok(())
}

/// A function that reads a request's block tables. There is one table for each group of the
/// catalogue.
fn reader<'a, 'py>(
    tables: &'a [Bound<'py, PySequence>],
) -> impl Fn(usize, usize) -> Option<u64> + use<'a, 'py> {
    move |group, index| tables.get(group)?.get_item(index).ok()?.extract().ok()
}

/// What a step does. Requests are named by their positions in the step.
#[pyclass(frozen, get_all, module = "penstock._native")]
pub(crate) struct Step {
    /// Requests that begin.
    started: Vec<usize>,
    /// Requests that fill a block, each with its computed tokens after the step.
    filled: Vec<(usize, u64)>,
    /// Ranges of tokens of prompts that are computed: first token, and the token behind the last.
    prompts: Vec<(u64, u64)>,
}

/// What a scheduler half knows about blocks: which are in the pool, which are in host memory, and
/// which are on their way.
#[pyclass(module = "penstock._native")]
pub(crate) struct Catalogue {
    native: Native,
    /// The number of groups.
    groups: usize,
    /// Hashes on their way. The memory is reused.
    chunks: Vec<Chunk>,
}

impl Catalogue {
    /// The pool's groups, if there is one for each of the catalogue's.
    fn checked<'g>(&self, groups: &'g [Py<PoolGroup>]) -> PyResult<&'g [Py<PoolGroup>]> {
        if groups.len() == self.groups {
            return Ok(groups);
        }
        let (given, known) = (groups.len(), self.groups);
        let message = format!("{given} groups of the pool for {known} groups of layers");
        Err(raised::ConfigError::new_err((message,)))
    }
}

/// Puts a request's queries to the pool.
struct Questions<'a> {
    py: Python<'a>,
    lookup: &'a NativeLookup,
    groups: &'a [Py<PoolGroup>],
    tenant: Option<Tenant>,
    timeout: Duration,
}

impl Asker for Questions<'_> {
    type Error = AskError;

    fn put(
        &mut self,
        query: &Query,
        chunks: impl ExactSizeIterator<Item = Chunk>,
    ) -> Result<bool, AskError> {
        let group = self.groups[query.group].get();
        let (namespace, spans) = (group.namespace_of(self.tenant), group.block_spans());
        let put = self
            .lookup
            .submit(query.number, namespace, chunks, spans, self.timeout);
        match put {
            Ok(()) => Ok(true),
            Err(EngineError::Busy { .. }) => Ok(false),
            Err(error) => Err(AskError(engine_error(self.py, &error))),
        }
    }

    fn cancel(&mut self, number: u64) {
        self.lookup.cancel(number);
    }
}

#[pymethods]
impl Catalogue {
    /// `groups` say what the blocks of each group are. `hash_tokens` is the number of tokens that a
    /// block hash adds to its chain. With `drops_last`, loads end one unit before what is found. Up
    /// to `remembered` blocks that the pool has and no request names are remembered.
    #[new]
    #[pyo3(signature = (groups, hash_tokens, *, drops_last = false, remembered = 262_144))]
    fn new(
        groups: Vec<Py<GroupSpec>>,
        hash_tokens: u64,
        drops_last: bool,
        remembered: usize,
    ) -> PyResult<Self> {
        let specs = groups.iter().map(|spec| spec.get().native()).collect();
        let specs = raising(Groups::new(specs, hash_tokens))?.dropping_last(drops_last);
        Ok(Self {
            native: Native::new(specs, remembered),
            groups: groups.len(),
            chunks: Vec::new(),
        })
    }

    /// Sets what the ranks hold. For each group: the ranks that hold a part of its blocks, the
    /// bytes of a block on all of these ranks, and its objects on one of them.
    fn set_holdings(&mut self, holdings: Vec<(u32, u64, u64)>) -> PyResult<()> {
        let holding = |(ranks, bytes, objects)| Holding {
            ranks,
            bytes,
            objects,
        };
        raising(
            self.native
                .set_holdings(holdings.into_iter().map(holding).collect()),
        )
    }

    /// The number of tokens in the shortest run that is whole blocks in every group.
    #[getter]
    fn alignment(&self) -> u64 {
        self.native.groups().alignment()
    }

    /// Where a load of a prompt of so many tokens may end at the latest. Its last token is left to
    /// compute.
    fn last_end(&self, tokens: u64) -> u64 {
        self.native.groups().last_end(tokens)
    }

    /// The number of blocks that are known, for whatever reason.
    fn __len__(&self) -> usize {
        self.native.len()
    }

    /// Adds a request that has come. With `tenant`, a name, its blocks are in namespaces of this
    /// tenant.
    #[pyo3(signature = (request, prompt_tokens, *, tenant = ""))]
    fn add(
        &mut self,
        py: Python<'_>,
        request: &str,
        prompt_tokens: u64,
        tenant: &str,
    ) -> PyResult<()> {
        let tenant = self::tenant(py, tenant)?;
        raising(self.native.add(request, prompt_tokens, tenant))
    }

    /// Takes in the request's block hashes. The list has all of them; it begins with those that are
    /// known.
    fn extend(&mut self, request: &str, hashes: &Bound<'_, PyList>) -> PyResult<()> {
        let known = raising(self.native.hashes(request))?;
        read_hashes(hashes, known, &mut self.chunks)?;
        raising(self.native.extend(request, &self.chunks))
    }

    /// Removes a request that is gone. Jobs of its blocks go on.
    fn remove(&mut self, request: &str) -> PyResult<()> {
        raising(self.native.remove(request))
    }

    // --- look-ups -------------------------------------------------------------------------

    /// Starts the request's look-up, in the pool's groups: one for each group of layers. Returns the number of blocks that are
    /// asked for. Returns None if too many look-ups wait: then the request does without.
    fn ask(
        &mut self,
        py: Python<'_>,
        request: &str,
        lookup: &Lookup,
        groups: Vec<Py<PoolGroup>>,
        timeout: f64,
    ) -> PyResult<Option<usize>> {
        let mut questions = Questions {
            py,
            lookup: lookup.native(),
            groups: self.checked(&groups)?,
            tenant: raising(self.native.tenant(request))?,
            timeout: seconds(py, timeout)?,
        };
        Ok(self.native.ask_through(request, &mut questions)?)
    }

    /// Looks which of the request's blocks node memory has: host memory has these. That memory is
    /// this machine's, so the answer is there at once.
    fn look_up_node_memory(
        &mut self,
        request: &str,
        node: &Store,
        groups: Vec<Py<PoolGroup>>,
    ) -> PyResult<()> {
        let tenant = raising(self.native.tenant(request))?;
        for (position, group) in self.checked(&groups)?.iter().enumerate() {
            let (namespace, spans) = (group.get().namespace_of(tenant), group.get().block_spans());
            let chunks = raising(self.native.chunks_of_group(request, position))?;
            let present = look_up_now(&*node.shared(), namespace, chunks, spans);
            raising(self.native.note_node(request, position, &present))?;
        }
        Ok(())
    }

    /// Takes in the answers that have come.
    fn take_answers(&mut self, lookup: &Lookup) -> Answers {
        let (mut found, mut failed, mut seconds) = (0, 0, Vec::new());
        let mut answers = lookup.native().poll();
        answers.sort_unstable_by_key(|&(number, ..)| number);
        for (number, answer, took) in answers {
            found += self.native.answer(number, answer.as_deref().ok());
            failed += usize::from(answer.is_err());
            seconds.push(answer.map_or(f64::INFINITY, |_| took.as_secs_f64()));
        }
        Answers {
            found,
            failed,
            seconds,
        }
    }

    /// Notes that the request is a miss: the pool is not asked.
    fn set_miss(&mut self, request: &str) -> PyResult<()> {
        raising(self.native.set_miss(request))
    }

    /// Drops the request's look-up: nobody waits for it any more.
    fn drop_lookup(&mut self, request: &str, lookup: &Lookup) {
        for number in self.native.drop_lookup(request) {
            lookup.native().cancel(number);
        }
    }

    /// Whether the request's look-up is under way (True) or over (False); None if there was none.
    fn is_asked(&self, request: &str) -> PyResult<Option<bool>> {
        Ok(match raising(self.native.lookup(request))? {
            LookupState::None => None,
            state => Some(state == LookupState::Asked),
        })
    }

    // --- loads ----------------------------------------------------------------------------

    /// Where loads of the request's tokens from `first` may end, up to `limit`, the nearest end
    /// first. Each end comes with its bytes in host memory and in the pool.
    fn reaches(&self, request: &str, first: u64, limit: u64) -> PyResult<Vec<Reach>> {
        let reaches = raising(self.native.reaches(request, first, limit))?;
        Ok(reaches.into_iter().map(Reach).collect())
    }

    /// What a load of the tokens from `first` to `limit` would move, if the pool had all of it.
    fn whole(&self, request: &str, first: u64, limit: u64) -> PyResult<Reach> {
        raising(self.native.whole(request, first, limit)).map(Reach)
    }

    /// The group of the first block of such a load that host memory does not have. None if host
    /// memory has all of them.
    fn lacking(&self, request: &str, first: u64, end: u64) -> PyResult<Option<usize>> {
        raising(self.native.lacking(request, first, end))
    }

    /// Whether a load under way brings the first block that this load would bring.
    fn is_loading(&self, request: &str, first: u64, end: u64) -> PyResult<bool> {
        raising(self.native.is_loading(request, first, end))
    }

    /// Begins a load of the request's tokens from `first` to `end`. `tables` has its block tables,
    /// one for each group.
    fn begin_load(
        &mut self,
        request: &str,
        job: u64,
        first: u64,
        end: u64,
        tables: Vec<Bound<'_, PySequence>>,
    ) -> PyResult<(Blocks, Moved)> {
        raising(
            self.native
                .begin_load(request, job, first, end, reader(&tables)),
        )
        .map(|(blocks, moved)| (Blocks { blocks }, moved.into()))
    }

    /// Begins a prefetch of the first `most` blocks of such a load; with `lacking`, of the first
    /// `most` that host memory does not have. Blocks that another prefetch keeps are left out. None
    /// if nothing is left.
    #[pyo3(signature = (request, job, first, end, most, *, lacking = false))]
    fn begin_prefetch(
        &mut self,
        request: &str,
        job: u64,
        first: u64,
        end: u64,
        most: usize,
        lacking: bool,
    ) -> PyResult<Option<(Blocks, Moved)>> {
        let begun = raising(
            self.native
                .begin_prefetch(request, job, first, end, most, lacking),
        )?;
        Ok(begun.map(|(blocks, moved)| (Blocks { blocks }, moved.into())))
    }

    /// Ends a load or a prefetch.
    fn end(&mut self, job: u64) -> PyResult<()> {
        raising(self.native.end(job))
    }

    /// Notes that nobody waits for a prefetch any more, whether it is over or not.
    fn release(&mut self, job: u64) -> PyResult<()> {
        raising(self.native.release(job))
    }

    /// Notes blocks of a job, by their positions in it, that are not in the pool, or not whole.
    fn lose(&mut self, job: u64, positions: Vec<usize>) -> PyResult<()> {
        raising(self.native.lose(job, &positions))
    }

    /// Notes blocks of a job, by their positions in it, that are in the pool but cannot be
    /// decrypted here.
    fn set_foreign(&mut self, job: u64, positions: Vec<usize>) -> PyResult<()> {
        raising(self.native.set_foreign(job, &positions))
    }

    /// The number of loads under way.
    #[getter]
    fn loads(&self) -> usize {
        self.native.loads()
    }

    /// The number of blocks that prefetches keep or bring.
    #[getter]
    fn prefetched(&self) -> usize {
        self.native.prefetched()
    }

    // --- stores ---------------------------------------------------------------------------

    /// Begins the store of the request's blocks that are full after `tokens` tokens and new, and of
    /// up to `witnesses` that the pool has, to be compared. None if there are none. `tables` has the
    /// request's block tables, one for each group. In them, `null` stands for no block.
    ///
    /// Returns the blocks, how many at their end are witnesses, and whether this engine has computed
    /// all of them, each on top of its own.
    #[pyo3(signature = (request, job, tokens, tables, null, *, witnesses = 0))]
    fn begin_store(
        &mut self,
        request: &str,
        job: u64,
        tokens: u64,
        tables: Vec<Bound<'_, PySequence>>,
        null: u64,
        witnesses: usize,
    ) -> PyResult<Option<(Blocks, usize, bool)>> {
        let table = reader(&tables);
        let begun = self
            .native
            .begin_store(request, job, tokens, null, witnesses, table);
        let parts = |Begun {
                         blocks,
                         witnesses,
                         is_own,
                     }| (Blocks { blocks }, witnesses, is_own);
        raising(begun).map(|begun| begun.map(parts))
    }

    /// Whether this engine has computed all that it has of the request's first `tokens` tokens, each
    /// block on top of its own.
    fn is_own(&self, request: &str, tokens: u64) -> PyResult<bool> {
        raising(self.native.is_own(request, tokens))
    }

    /// Notes that no rank reads a store's blocks any more.
    fn on_read(&mut self, job: u64) {
        self.native.on_read(job);
    }

    /// Ends a store on all ranks: its blocks are in the pool, except those at the positions in
    /// `unstored`. Returns how many are in the pool, without the witnesses. The pool has lost those
    /// at the positions in `disagreed`.
    #[pyo3(signature = (job, unstored, disagreed = None))]
    fn end_store(
        &mut self,
        job: u64,
        unstored: Vec<usize>,
        disagreed: Option<Vec<usize>>,
    ) -> PyResult<usize> {
        let disagreed = disagreed.unwrap_or_default();
        raising(self.native.end_store(job, &unstored, &disagreed))
    }

    /// Whether some store still reads blocks that the engine may give away while their request
    /// runs.
    #[getter]
    fn is_reading(&self) -> bool {
        self.native.is_reading()
    }

    /// The stores that have yet to read one of these blocks of the engine.
    fn readers(&self, blocks: Vec<u64>) -> Vec<u64> {
        self.native.readers(blocks.into_iter())
    }

    // --- hints ----------------------------------------------------------------------------

    /// Has a keeper keep the blocks that a load of the request's first `end` tokens needs, for so
    /// many seconds. `account` is whose room they take.
    #[pyo3(signature = (request, keeper, *, end, account, seconds))]
    fn keep(
        &self,
        py: Python<'_>,
        request: &str,
        keeper: &Keeper,
        end: u64,
        account: &[u8],
        seconds: f64,
    ) -> PyResult<()> {
        let time = self::seconds(py, seconds)?;
        let tenant = raising(self.native.tenant(request))?;
        let places = raising(self.native.places(request, end))?;
        let kept = keeper.native().keep(account, tenant, blocks(places), time);
        kept.map_err(|error| engine_error(py, &error))
    }

    /// Stores no block of the request that has tokens beyond the first `tokens`.
    fn limit_stores(&mut self, request: &str, tokens: u64) -> PyResult<()> {
        raising(self.native.limit_stores(request, tokens))
    }

    /// Has a keeper remove those of the request's blocks beyond the first `tokens` tokens that this
    /// engine has put into the pool and that nothing else names.
    fn let_go(
        &mut self,
        py: Python<'_>,
        request: &str,
        keeper: &Keeper,
        tokens: u64,
    ) -> PyResult<()> {
        let tenant = raising(self.native.tenant(request))?;
        let places = raising(self.native.let_go(request, tokens))?;
        let gone = keeper.native().let_go(tenant, blocks(places));
        gone.map_err(|error| engine_error(py, &error))
    }

    // --- steps ----------------------------------------------------------------------------

    /// Notes that a step computes these requests. `computed` has the tokens of each that were
    /// computed before; `tokens` says how many the step computes of each. Unless `are_final`, the step
    /// may compute tokens that are rejected.
    #[pyo3(signature = (requests, computed, tokens, *, are_final = true))]
    fn step(
        &mut self,
        requests: Vec<Bound<'_, PyString>>,
        computed: Vec<u64>,
        tokens: &Bound<'_, PyDict>,
        are_final: bool,
    ) -> PyResult<Step> {
        let mut scheduled = Vec::with_capacity(requests.len());
        for (request, &computed) in requests.iter().zip(&computed) {
            let count = tokens.get_item(request)?;
            scheduled.push(Scheduled {
                id: request.to_str()?,
                computed,
                tokens: count.map_or(Ok(0), |count| count.extract())?,
            });
        }
        let step = self.native.step(scheduled.into_iter(), are_final);
        Ok(Step {
            started: step.started,
            filled: step.filled,
            prompts: step.prompts,
        })
    }

    /// Notes that a block of the request's table holds the state after its first `tokens` tokens, or
    /// will after the present step. `group` is the group's position.
    fn note_state(&mut self, request: &str, group: usize, tokens: u64) {
        self.native.note_state(request, group, tokens);
    }

    /// Notes that somebody else has loaded the request's tokens from `first` to `end`. What it computes
    /// after them does not count as this engine's own.
    fn note_loaded(&mut self, request: &str, first: u64, end: u64) {
        self.native.note_loaded(request, first, end);
    }

    /// Notes that the request was preempted: it begins anew.
    fn pause(&mut self, request: &str, lookup: &Lookup) -> PyResult<()> {
        let dropped = raising(self.native.pause(request))?;
        for number in dropped {
            lookup.native().cancel(number);
        }
        Ok(())
    }

    // --- host memory, and the pool --------------------------------------------------------

    /// Takes in blocks that came into the host memory of ranks, or went, as their engines have
    /// packed them.
    fn change_host(&mut self, py: Python<'_>, changes: &[u8]) -> PyResult<()> {
        let changes =
            HostChange::decode(changes).map_err(|error| config_error(py, error.to_string()))?;
        for change in &changes {
            raising(self.native.change_host(change))?;
        }
        Ok(())
    }

    /// Forgets which blocks the pool has, and which ones this engine has computed. Later look-ups
    /// tell again what the pool has.
    fn forget_pool(&mut self) {
        self.native.forget_pool();
    }

    /// Forgets what host memory has: blocks have other names there from now on.
    fn forget_host(&mut self) {
        self.native.forget_host();
    }
}
