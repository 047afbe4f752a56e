//! The engine and the look-up for Python.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::HostChange;
use penstock_engine::{
    Deadline, Device, Engine as Native, EngineConfig, EngineStats, Fault, Fence as NativeFence,
    KvGroup, Lookup as NativeLookup, LookupConfig, Owner, Replica,
};
use penstock_value::header::Writer;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyBytesMethods};

use crate::blocks::{Blocks, padded};
use crate::completion::Completion;
use crate::compress::{element_named, numbers_named};
use crate::cuda::device;
use crate::errors::{config_error, engine_error, interruptibly};
use crate::layout::{Descriptor, PySpan};
use crate::store::{PyNamespace, Store, seconds, tenant};

/// A point in a CUDA device's work that jobs wait for. It is passed once the device has computed
/// everything that a stream had been given when the fence was raised.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Fence {
    native: NativeFence,
}

/// The fence that a job waits for. Without one, it waits for nothing.
fn behind(after: Option<&Bound<'_, Fence>>) -> NativeFence {
    after.map_or(NativeFence::NONE, |fence| fence.get().native.clone())
}

/// Moves blocks between KV memory and a store on native threads.
///
/// The caller chooses the ids of jobs. An id may be used again after the job's last completion was
/// polled.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Engine {
    native: Native,
    /// Longer than any operation of a lane.
    last_wait: Duration,
}

#[pymethods]
impl Engine {
    /// Reserves host memory of `slots` times `slot_bytes` and starts the threads. Values are
    /// encrypted if the store's are. With `keep`, values stay in host memory until the room is
    /// needed, and are loaded from there. `step_objects` is the most objects that one step stores:
    /// the queues hold several times as many. With `compress`, values of groups with an element type
    /// are compressed without loss, and compressed values are loaded.
    ///
    /// From when a block can be read, it waits up to `store_wait` seconds for host memory; then it is
    /// dropped. One put has `store_timeout` seconds.
    ///
    /// With `trusts`, values of a writer that others have found to be wrong are not loaded, and this
    /// engine tells the others whom it has found to be wrong: see `penstock-value/src/sealed/trust.rs`.
    ///
    /// Loads from shared memory go straight into the blocks, or with `in_place` false through slots.
    ///
    /// With `node`, memory that the engines of this machine share, values stay there, and are
    /// loaded from there.
    #[new]
    #[pyo3(signature = (
        store, *, slot_bytes, slots, node = None, keep = true, in_place = true, copy_lanes = 1,
        get_lanes = 2, put_lanes = 1, step_objects = 0, compress = false, store_wait = 0.1,
        store_timeout = 5.0, trusts = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        store: &Store,
        slot_bytes: usize,
        slots: usize,
        node: Option<&Store>,
        keep: bool,
        in_place: bool,
        copy_lanes: usize,
        get_lanes: usize,
        put_lanes: usize,
        step_objects: usize,
        compress: bool,
        store_wait: f64,
        store_timeout: f64,
        trusts: bool,
    ) -> PyResult<Self> {
        let mut config = EngineConfig::new(slot_bytes, slots).with_steps_of(step_objects);
        config.keep = keep;
        config.in_place = in_place;
        config.copy_lanes = copy_lanes;
        config.get_lanes = get_lanes;
        config.put_lanes = put_lanes;
        config.keys = store.keys();
        config.compress = compress;
        config.trusts = trusts;
        config.store_wait = named_seconds(py, "store_wait", store_wait)?;
        config.put_timeout = named_seconds(py, "store_timeout", store_timeout)?;
        let last_wait = config.put_timeout + LAST_WAIT;
        let (store, node) = (store.shared(), node.map(Store::shared));
        py.detach(|| match node {
            Some(node) => Native::with_node_memory(store, node, config),
            None => Native::new(store, config),
        })
        .map(|native| Self { native, last_wait })
        .map_err(|error| engine_error(py, &error))
    }

    /// Registers a group of layers. The tensors that the descriptor was detected from must stay
    /// alive until `unregister` or `shutdown` has returned. Groups may lie over each other, as long
    /// as no two of them use the same block at the same time.
    ///
    /// A block is stored as one object for each of `spans`; without `spans`, as one object of all
    /// that the descriptor describes. The serving engine's block is `pages_per_block` pages, which
    /// are the descriptor's blocks. `replica` is an index and a count: so many engines hold the
    /// same, and each stores its part of the blocks. `cuda_device` is the ordinal of the device
    /// that the tensors are on. Without it, they are in host memory. `element` names the type of the
    /// numbers that the tensors hold, one of `Coder.elements`; None for any other, or several. `numbers`
    /// names the same for comparisons, where it may also be `fp32`. For these, `reads_tokens` says that
    /// the layer of index 0 reads embeddings of tokens alone, and `routes` that the model routes tokens
    /// to experts.
    #[pyo3(signature = (
        descriptor, group = 0, *, spans = None, pages_per_block = 1, replica = (0, 1),
        cuda_device = None, element = None, numbers = None,
        reads_tokens = false, routes = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn register(
        &self,
        py: Python<'_>,
        descriptor: &Descriptor,
        group: u16,
        spans: Option<Vec<PySpan>>,
        pages_per_block: u64,
        replica: (u8, u8),
        cuda_device: Option<i32>,
        element: Option<&str>,
        numbers: Option<&str>,
        reads_tokens: bool,
        routes: bool,
    ) -> PyResult<()> {
        let regions = descriptor.engine_regions(py)?;
        let mut held = KvGroup::new(device(cuda_device), descriptor.inner().clone(), regions);
        if let Some(spans) = spans {
            held.spans = PySpan::all(spans);
        }
        held.pages_per_block = pages_per_block;
        let (index, count) = replica;
        held.replica = Replica { index, count };
        held.element = element.map(|name| element_named(py, name)).transpose()?;
        held.numbers = numbers.map(|name| numbers_named(py, name)).transpose()?;
        held.reads_tokens = reads_tokens;
        held.routes = routes;
        self.native
            .register(group, held)
            .map_err(|error| engine_error(py, &error))
    }

    /// Registers a group of which this engine holds nothing: its blocks count as already there.
    fn register_elsewhere(&self, py: Python<'_>, group: u16) -> PyResult<()> {
        self.native
            .register_elsewhere(group)
            .map_err(|error| engine_error(py, &error))
    }

    /// Sets the namespace, 16 bytes, under which a group's objects are stored: before its first job,
    /// and again once other weights compute. Host memory gives up what it has of the one before.
    fn name_group(&self, py: Python<'_>, group: u16, namespace: PyNamespace) -> PyResult<()> {
        self.native
            .name(group, namespace.0)
            .map_err(|error| engine_error(py, &error))
    }

    /// Says who computes what jobs store from now on: a number, the same for all ranks of the serving
    /// engine, and of nobody else. The upper 24 bits stand for all that decides how numbers are
    /// rounded, if the same block is always computed to the same bits. All zero for nobody that could
    /// be asked.
    fn set_writer(&self, writer: u64) {
        self.native.set_writer(Writer(writer));
    }

    /// Forgets the registered memory, once no copy touches it any more.
    fn unregister(&self, py: Python<'_>) {
        py.detach(|| while !self.native.unregister(Duration::from_secs(60)) {});
    }

    /// Raises a fence behind all work that a stream of the CUDA device has been given until now.
    /// `stream` is its handle (`torch.cuda.Stream.cuda_stream`), and must be one. Zero is the
    /// default stream.
    #[pyo3(signature = (stream, *, cuda_device))]
    #[allow(unsafe_code)]
    fn raise_fence(&self, py: Python<'_>, stream: u64, cuda_device: i32) -> PyResult<Fence> {
        // SAFETY: the handle is a stream's, as the documentation demands of the caller, as the
        // tensors of a descriptor are.
        unsafe { self.native.raise_fence(Device::Cuda(cuda_device), stream) }
            .map(|native| Fence { native })
            .map_err(|error| engine_error(py, &error))
    }

    /// Stores blocks. They must not change until the job's event `RELEASED`. Nothing is read before
    /// the fence `after` is passed. If too many jobs are outstanding, all blocks are dropped.
    ///
    /// `salt` goes into the encryption beside the keys. With `tenant`, a name, the objects lie in
    /// namespaces of this tenant. A load must give the same of both.
    ///
    /// If the blocks are `awaited` by another engine, they are put before all others that wait. If not,
    /// the last `witnesses` of them are compared with what the store has of them, if it has them. This
    /// engine must have computed these, and all that they were computed from.
    #[pyo3(signature = (
        job, blocks, *, salt = None, tenant = "", awaited = false, witnesses = 0, after = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn submit_store(
        &self,
        py: Python<'_>,
        job: u64,
        blocks: &Bound<'_, Blocks>,
        salt: Option<&[u8]>,
        tenant: &str,
        awaited: bool,
        witnesses: usize,
        after: Option<&Bound<'_, Fence>>,
    ) -> PyResult<()> {
        let owner = owner(py, salt, tenant)?;
        let (blocks, after) = (&blocks.get().blocks, behind(after));
        let submitted = if awaited {
            self.native.submit_awaited_store(job, blocks, &owner, after)
        } else if witnesses > 0 {
            self.native
                .submit_witness(job, blocks, witnesses, &owner, after)
        } else {
            self.native.submit_store(job, blocks, &owner, after)
        };
        submitted.map_err(|error| engine_error(py, &error))
    }

    /// Loads blocks, which must be left alone until the job's event `LOADED`. Nothing is fetched or
    /// written before `after` is passed, and the job's time counts from there. `salt`, `tenant`
    /// and too many jobs are as for a store. After `timeout` seconds, the rest is given up. This
    /// moment is later by a part of `pace` seconds: the same part as the part of the bytes that has
    /// come. With `prefix`, everything after an object that was not loaded is skipped.
    #[pyo3(signature = (
        job, blocks, timeout, *, prefix = false, pace = 0.0, salt = None, tenant = "",
        after = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn submit_load(
        &self,
        py: Python<'_>,
        job: u64,
        blocks: &Bound<'_, Blocks>,
        timeout: f64,
        prefix: bool,
        pace: f64,
        salt: Option<&[u8]>,
        tenant: &str,
        after: Option<&Bound<'_, Fence>>,
    ) -> PyResult<()> {
        let at = Instant::now() + seconds(py, timeout)?;
        let deadline = Deadline::paced(at, bound(py, pace)?);
        let (blocks, after) = (&blocks.get().blocks, behind(after));
        let owner = owner(py, salt, tenant)?;
        self.native
            .submit_load(job, blocks, &owner, deadline, prefix, after)
            .map_err(|error| engine_error(py, &error))
    }

    /// Gets blocks into host memory, where they stay until the job is released: a load finds them
    /// there. A prefetch goes behind all loads, and objects that find no room are dropped. The
    /// blocks' ids mean nothing. After `timeout` seconds, the rest is given up.
    #[pyo3(signature = (job, blocks, timeout, *, salt = None, tenant = ""))]
    fn submit_prefetch(
        &self,
        py: Python<'_>,
        job: u64,
        blocks: &Bound<'_, Blocks>,
        timeout: f64,
        salt: Option<&[u8]>,
        tenant: &str,
    ) -> PyResult<()> {
        let deadline = Instant::now() + seconds(py, timeout)?;
        let owner = owner(py, salt, tenant)?;
        self.native
            .submit_prefetch(job, &blocks.get().blocks, &owner, deadline)
            .map_err(|error| engine_error(py, &error))
    }

    /// Completes a store at once as dropped: for one that must not be done.
    fn decline_store(&self, py: Python<'_>, job: u64, blocks: &Bound<'_, Blocks>) -> PyResult<()> {
        self.native
            .decline_store(job, &blocks.get().blocks)
            .map_err(|error| engine_error(py, &error))
    }

    /// Completes a load at once as dropped: for one that must not be done.
    fn decline_load(&self, py: Python<'_>, job: u64, blocks: &Bound<'_, Blocks>) -> PyResult<()> {
        self.native
            .decline_load(job, &blocks.get().blocks)
            .map_err(|error| engine_error(py, &error))
    }

    /// Notes that nobody waits any more for what a prefetch brings, or has brought. To be called
    /// once for each prefetch, whether it is over or not.
    fn release(&self, job: u64) {
        self.native.release(job);
    }

    /// Which blocks changed in host memory since the last call: blocks that came, with all that
    /// this engine keeps of them, and blocks that are no longer whole there. The first call returns
    /// all blocks that are there. Before the first call, nothing is remembered. The result is bytes
    /// for `host_changes`, or for a catalogue; empty for no changes.
    fn take_host_changes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &HostChange::encode(&self.native.take_host_changes()))
    }

    /// What happened since the last call, in order. Does not wait.
    fn poll(&self) -> Vec<Completion> {
        let mut completions = Vec::new();
        self.native.poll(&mut completions);
        completions.into_iter().map(Completion::from).collect()
    }

    /// Waits until there is something to poll; False if the time is over first.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        interruptibly(py, || self.native.wait(timeout))
    }

    /// Waits until no block of these store jobs is being read; False if the time is over first.
    /// What was not read yet is dropped.
    fn wait_released(&self, py: Python<'_>, jobs: Vec<u64>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        interruptibly(py, || self.native.wait_released(&jobs, timeout))
    }

    /// Gives up what can be given up of a job. The job completes all the same.
    fn cancel(&self, job: u64) {
        self.native.cancel(job);
    }

    /// Waits until all stores are over. If the time is over first, drops the rest and returns
    /// False.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        interruptibly(py, || self.native.drain(timeout))
    }

    /// Gives up all jobs and ends the threads. False if one is still inside the store, or waits for a
    /// device, when the time is over. Registered memory is not touched afterwards, unless
    /// `is_copying`.
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        interruptibly(py, || self.native.shutdown(timeout))
    }

    /// Whether registered memory is still copied from or to, after a `shutdown` that returned False.
    /// It must stay until this is False.
    fn is_copying(&self) -> bool {
        self.native.is_copying()
    }

    /// Leaves the engine, and the memory that it may still copy, to the end of the process: nothing of
    /// them is ever freed. For an engine whose `shutdown` returned False, as its end would wait.
    #[staticmethod]
    fn leave(engine: Py<Self>, memory: Vec<Py<PyAny>>) {
        std::mem::forget((engine, memory));
    }

    /// What failed in the background since the last call. Jobs go on meanwhile, but slower. For
    /// each fault: a text, and the bytes of host memory that are not pinned because of it.
    fn take_faults(&self) -> Vec<(String, u64)> {
        let faults = self.native.take_faults();
        let told = |fault: &Fault| (fault.to_string(), fault.unpinned_bytes());
        faults.iter().map(told).collect()
    }

    /// Counters since the engine was made. Rejections and failures are also counted by reason, as
    /// `rejected:<reason>` and `failed:<kind>`.
    fn stats(&self) -> HashMap<String, u64> {
        let stats: EngineStats = self.native.stats();
        let plain = stats
            .counters()
            .into_iter()
            .map(|(name, n)| (name.to_owned(), n));
        let rejected = stats
            .rejected
            .iter()
            .map(|(name, n)| (format!("rejected:{name}"), *n));
        let failed = stats
            .failed
            .iter()
            .map(|(name, n)| (format!("failed:{name}"), *n));
        plain.chain(rejected).chain(failed).collect()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // If the engine is collected without a shutdown, other Python threads run on while lanes
        // end.
        Python::attach(|py| py.detach(|| self.native.shutdown(self.last_wait)));
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        Python::attach(|py| py.detach(|| self.native.shutdown(LAST_WAIT)));
    }
}

/// Longer than any operation of a lane but a put.
const LAST_WAIT: Duration = Duration::from_secs(60);

/// Whose blocks a job moves.
fn owner(py: Python<'_>, salt: Option<&[u8]>, name: &str) -> PyResult<Owner> {
    Ok(Owner {
        salt: salt.map_or_else(Arc::default, Arc::from),
        tenant: tenant(py, name)?,
    })
}

/// Host memory that a slot takes if its payload has up to `slot_bytes`.
#[pyfunction]
pub(crate) fn slot_stride(slot_bytes: usize) -> usize {
    penstock_engine::slot_stride(slot_bytes)
}

/// A time that an argument gives.
fn named_seconds(py: Python<'_>, name: &str, value: f64) -> PyResult<Duration> {
    if value > 0.0 {
        return seconds(py, value);
    }
    let message = format!("{name} must be over 0 seconds, not {value}");
    Err(config_error(py, message))
}

/// A time to wait. Zero means only to look.
fn bound(py: Python<'_>, timeout: f64) -> PyResult<Duration> {
    if timeout == 0.0 {
        Ok(Duration::ZERO)
    } else {
        seconds(py, timeout)
    }
}

/// Asks a store which chunks it has, on native threads.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Lookup {
    native: NativeLookup,
}

impl Lookup {
    pub(crate) fn native(&self) -> &NativeLookup {
        &self.native
    }
}

#[pymethods]
impl Lookup {
    /// Starts the threads.
    #[new]
    #[pyo3(signature = (store, *, threads = 2))]
    fn new(py: Python<'_>, store: &Store, threads: usize) -> PyResult<Self> {
        let config = LookupConfig {
            threads,
            ..LookupConfig::default()
        };
        let store = store.shared();
        py.detach(|| NativeLookup::new(store, config))
            .map(|native| Self { native })
            .map_err(|error| engine_error(py, &error))
    }

    /// Asks for each chunk (an identity of at most 32 bytes) whether the store has it with every
    /// span. The answer comes within `timeout` seconds.
    fn submit(
        &self,
        py: Python<'_>,
        id: u64,
        namespace: PyNamespace,
        chunks: Vec<Bound<'_, PyBytes>>,
        spans: Vec<PySpan>,
        timeout: f64,
    ) -> PyResult<()> {
        let timeout = seconds(py, timeout)?;
        let chunks = chunks
            .iter()
            .map(|chunk| padded(py, chunk.as_bytes()))
            .collect::<PyResult<Vec<_>>>()?;
        self.native
            .submit(id, namespace.0, chunks, &PySpan::all(spans), timeout)
            .map_err(|error| engine_error(py, &error))
    }

    /// All answers that are there, each with the seconds that it took: `(id, [present], seconds)`,
    /// or `(id, kind of error, seconds)`. Does not wait.
    fn poll(&self, py: Python<'_>) -> PyResult<Vec<(u64, Py<PyAny>, f64)>> {
        self.native
            .poll()
            .into_iter()
            .map(|(id, answer, took)| {
                let answer = match answer {
                    Ok(present) => present.into_py_any(py)?,
                    Err(kind) => kind.name().into_py_any(py)?,
                };
                Ok((id, answer, took.as_secs_f64()))
            })
            .collect()
    }

    /// Waits until there is an answer to poll; False if the time is over first.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        interruptibly(py, || self.native.wait(timeout))
    }

    /// Forgets a look-up, answered or not.
    fn cancel(&self, id: u64) {
        self.native.cancel(id);
    }

    /// Ends the threads. False if one is still inside the store when the time is over.
    #[pyo3(signature = (timeout = 5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        interruptibly(py, || self.native.shutdown(timeout))
    }
}
