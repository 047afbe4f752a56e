//! The engine and the look-up for Python: plain integers, bytes and tuples in and out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_engine::{
    Completion, Deadline, Device, Engine as Native, EngineConfig, EngineError, EngineStats, Fault,
    Fence as NativeFence, Lookup as NativeLookup, LookupConfig, Object, Outcome, Parent,
};
use penstock_store::{CHUNK_BYTES, Key};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyBytesMethods};

use crate::errors::{config_error, exception};
use crate::layout::{Descriptor, SpanTuple, span};
use crate::store::{Store, key, namespace, seconds};

pub(crate) fn engine_error(py: Python<'_>, error: &EngineError) -> PyErr {
    let class = match error {
        EngineError::NotInLayout(_)
        | EngineError::RegionCount { .. }
        | EngineError::RegionTooSmall { .. } => "LayoutError",
        EngineError::Busy { .. } => "Full",
        EngineError::Closed => "Closed",
        EngineError::Device(_) => "Unavailable",
        _ => "ConfigError",
    };
    exception(py, class, (error.to_string(),))
}

/// `loaded`, `miss`, `rejected:payload_checksum`, `failed:unreachable`, …
fn outcome_name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Rejected(reason) => format!("{}:{}", outcome.name(), reason.name()),
        Outcome::Failed(kind) => format!("{}:{}", outcome.name(), kind.name()),
        _ => outcome.name().to_owned(),
    }
}

/// Where memory lies, from the ordinal of a CUDA device or none.
pub(crate) fn device(cuda_device: Option<i32>) -> Device {
    cuda_device.map_or(Device::Host, Device::Cuda)
}

/// An object: its group, its key, its blocks.
type ObjectTuple<'py> = (u16, Bound<'py, PyBytes>, Vec<u64>);

/// For each object, the chunk before its own in the prompt, and the tokens until there; empty and 0
/// for a prompt's first.
type Parents<'py> = Option<Vec<(Bound<'py, PyBytes>, u64)>>;

fn objects(
    py: Python<'_>,
    objects: Vec<ObjectTuple<'_>>,
    parents: Parents<'_>,
    context: Option<&[u8]>,
) -> PyResult<Vec<Object>> {
    let context = Arc::from(context.unwrap_or_default());
    let parents = parents.unwrap_or_default();
    if !parents.is_empty() && parents.len() != objects.len() {
        let message = format!("{} parents of {} objects", parents.len(), objects.len());
        return Err(config_error(py, message));
    }
    let mut parents = parents.iter();
    objects
        .into_iter()
        .map(|(group, bytes, blocks)| {
            let parent = parents
                .next()
                .filter(|(chunk, _)| !chunk.as_bytes().is_empty());
            let parent = parent.map(|(chunk, tokens)| {
                Ok::<_, PyErr>(Parent {
                    chunk: padded(py, chunk.as_bytes())?,
                    tokens: *tokens,
                })
            });
            Ok(Object {
                group,
                key: key(py, bytes.as_bytes())?,
                parent: parent.transpose()?,
                blocks,
                context: Arc::clone(&context),
            })
        })
        .collect()
}

/// A completion: job, event, for each object what became of it and its bytes, and the seconds since
/// the job was submitted, or since its fence was passed.
type CompletionTuple = (u64, &'static str, Vec<(String, u64)>, f64);

/// A point in what a CUDA device computes, which jobs wait for: passed once it has computed all that
/// a stream had been given when it was raised.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Fence {
    native: NativeFence,
}

/// What a job waits for; nothing without a fence.
fn behind(after: Option<&Bound<'_, Fence>>) -> NativeFence {
    after.map_or(NativeFence::NONE, |fence| fence.get().native.clone())
}

/// Moves blocks between KV memory and a store on native threads.
///
/// Jobs have ids that the caller chooses; one may be used again after the job's last completion
/// was polled.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Engine {
    native: Native,
}

#[pymethods]
impl Engine {
    /// Reserves host memory of `slots` times `slot_bytes` and starts the threads. Values are
    /// encrypted if the store's are. With `keep`, values stay in host memory until the room is
    /// needed, and are loaded from there. `step_objects` are stored at most by what one step
    /// computes: the queues hold several times as many.
    #[new]
    #[pyo3(signature = (
        store, *, slot_bytes, slots, keep = true, copy_lanes = 1, get_lanes = 2, put_lanes = 1,
        step_objects = 0
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        store: &Store,
        slot_bytes: usize,
        slots: usize,
        keep: bool,
        copy_lanes: usize,
        get_lanes: usize,
        put_lanes: usize,
        step_objects: usize,
    ) -> PyResult<Self> {
        let mut config = EngineConfig::new(slot_bytes, slots).with_steps_of(step_objects);
        config.keep = keep;
        config.copy_lanes = copy_lanes;
        config.get_lanes = get_lanes;
        config.put_lanes = put_lanes;
        config.keys = store.keys();
        let store = store.shared();
        py.detach(|| Native::new(store, config))
            .map(|native| Self { native })
            .map_err(|error| engine_error(py, &error))
    }

    /// Names the memory that a group's objects lie in. The tensors that the descriptor was
    /// detected from must stay alive until `unregister` or `shutdown` has returned. Groups may lie
    /// over each other, as long as no block is in use by two of them at a time.
    /// `cuda_device` is the ordinal of the device that they are on; without it, in host memory.
    #[pyo3(signature = (descriptor, group = 0, *, cuda_device = None))]
    fn register(
        &self,
        py: Python<'_>,
        descriptor: &Descriptor,
        group: u16,
        cuda_device: Option<i32>,
    ) -> PyResult<()> {
        let regions = descriptor.engine_regions(py)?;
        self.native
            .register(
                group,
                device(cuda_device),
                descriptor.inner().clone(),
                regions,
            )
            .map_err(|error| engine_error(py, &error))
    }

    /// Forgets the memory, once no copy touches it any more.
    fn unregister(&self, py: Python<'_>) {
        py.detach(|| self.native.unregister());
    }

    /// A fence behind all that a stream of the CUDA device has been given until now. `stream` is its
    /// handle (`torch.cuda.Stream.cuda_stream`), which has to be one; zero is the default stream.
    #[pyo3(signature = (stream, *, cuda_device))]
    #[allow(unsafe_code)]
    fn raise_fence(&self, py: Python<'_>, stream: u64, cuda_device: i32) -> PyResult<Fence> {
        // SAFETY: the handle is a stream's, as the documentation demands of the caller, as the
        // tensors of a descriptor are.
        unsafe { self.native.raise_fence(Device::Cuda(cuda_device), stream) }
            .map(|native| Fence { native })
            .map_err(|error| engine_error(py, &error))
    }

    /// Stores objects, each a group, a key of 56 bytes and its blocks. The blocks must not change until
    /// the job's event `released`; nothing is read before the fence `after` is passed. `context` goes into the encryption of all of
    /// them beside the keys; whoever loads them gives the same. `parents` are the chunks before the
    /// objects' in their prompts and the tokens until there, empty and 0 for a prompt's first: with them,
    /// host memory, and stores that can, keep beginnings longer than what follows.
    #[pyo3(signature = (job, objects, *, parents = None, after = None, context = None))]
    fn submit_store(
        &self,
        py: Python<'_>,
        job: u64,
        objects: Vec<ObjectTuple<'_>>,
        parents: Parents<'_>,
        after: Option<&Bound<'_, Fence>>,
        context: Option<&[u8]>,
    ) -> PyResult<()> {
        let objects = self::objects(py, objects, parents, context)?;
        self.native
            .submit_store(job, objects, behind(after))
            .map_err(|error| engine_error(py, &error))
    }

    /// Loads objects into their blocks, which must be left alone until the job's event `loaded`.
    /// Nothing is fetched or written before `after` is passed; it, `parents` and `context` are as for a
    /// store. `timeout` seconds after that what is left is given up, and later by that part of `pace`
    /// seconds which is the part of its bytes that has come. With `prefix`, whatever follows an object that was not
    /// loaded is skipped.
    #[pyo3(signature = (
        job, objects, timeout, prefix = false, *, parents = None, pace = 0.0, after = None,
        context = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn submit_load(
        &self,
        py: Python<'_>,
        job: u64,
        objects: Vec<ObjectTuple<'_>>,
        timeout: f64,
        prefix: bool,
        parents: Parents<'_>,
        pace: f64,
        after: Option<&Bound<'_, Fence>>,
        context: Option<&[u8]>,
    ) -> PyResult<()> {
        let objects = self::objects(py, objects, parents, context)?;
        let at = Instant::now() + seconds(py, timeout)?;
        let deadline = Deadline::paced(at, bound(py, pace)?);
        self.native
            .submit_load(job, objects, deadline, prefix, behind(after))
            .map_err(|error| engine_error(py, &error))
    }

    /// Gets objects into host memory, where they stay until the job is released: a load finds them
    /// there. It goes behind all loads; what finds no room is dropped. Of the objects' blocks only
    /// the number matters. After `timeout` seconds what is left is given up.
    #[pyo3(signature = (job, objects, timeout, *, parents = None, context = None))]
    fn submit_prefetch(
        &self,
        py: Python<'_>,
        job: u64,
        objects: Vec<ObjectTuple<'_>>,
        timeout: f64,
        parents: Parents<'_>,
        context: Option<&[u8]>,
    ) -> PyResult<()> {
        let objects = self::objects(py, objects, parents, context)?;
        let deadline = Instant::now() + seconds(py, timeout)?;
        self.native
            .submit_prefetch(job, objects, deadline)
            .map_err(|error| engine_error(py, &error))
    }

    /// Nobody waits any more for what a prefetch brings, or has brought. To be called once for
    /// each, whether it is over or not.
    fn release(&self, job: u64) {
        self.native.release(job);
    }

    /// Which keys came into host memory (True) and went since the last call; at first, all that are
    /// there. Nothing is remembered before the first call.
    fn take_host_changes(&self, py: Python<'_>) -> Vec<(Py<PyBytes>, bool)> {
        let changes = self.native.take_host_changes();
        let bytes = |key: &Key| PyBytes::new(py, &key.to_bytes()).unbind();
        changes
            .iter()
            .map(|(key, came)| (bytes(key), *came))
            .collect()
    }

    /// What happened since the last call, in order: `(job, event, [(outcome, bytes)], seconds)`,
    /// where event is `released`, `stored`, `loaded` or `prefetched`, and the seconds are those since
    /// the job was submitted, or since its fence was passed. Does not wait.
    fn poll(&self) -> Vec<CompletionTuple> {
        let mut completions = Vec::new();
        self.native.poll(&mut completions);
        completions
            .iter()
            .map(|Completion { job, event, took }| {
                let outcomes = event.outcomes().iter();
                let outcomes = outcomes.map(|o| (outcome_name(o), o.bytes())).collect();
                (*job, event.name(), outcomes, took.as_secs_f64())
            })
            .collect()
    }

    /// Waits until there is something to poll; False if the time is over first.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        Ok(py.detach(|| self.native.wait(timeout)))
    }

    /// Waits until no block of these store jobs is being read, dropping what was not read yet;
    /// False if the time is over first.
    fn wait_released(&self, py: Python<'_>, jobs: Vec<u64>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        Ok(py.detach(|| self.native.wait_released(&jobs, timeout)))
    }

    /// Gives up what can be given up of a job; it completes all the same.
    fn cancel(&self, job: u64) {
        self.native.cancel(job);
    }

    /// Waits until all stores are over; if the time is over first, drops the rest and returns
    /// False.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        Ok(py.detach(|| self.native.drain(timeout)))
    }

    /// Gives up all jobs and ends the threads; False if one is still inside the store when the
    /// time is over. Registered memory is not touched afterwards in any case.
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        Ok(py.detach(|| self.native.shutdown(timeout)))
    }

    /// What failed in the background since the last call, while jobs go on, slower: in words, and
    /// the bytes of host memory that are not pinned for it.
    fn take_faults(&self) -> Vec<(String, u64)> {
        let faults = self.native.take_faults();
        let told = |fault: &Fault| (fault.to_string(), fault.unpinned_bytes());
        faults.iter().map(told).collect()
    }

    /// Counters since the engine was made; rejections and failures also by reason, as
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
        // Collected without a shutdown: other Python threads run on while lanes end.
        Python::attach(|py| py.detach(|| self.native.shutdown(LAST_WAIT)));
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        Python::attach(|py| py.detach(|| self.native.shutdown(LAST_WAIT)));
    }
}

/// Longer than any operation of a lane.
const LAST_WAIT: Duration = Duration::from_secs(60);

/// A chunk's identity, zero-padded.
pub(crate) fn padded(py: Python<'_>, chunk: &[u8]) -> PyResult<[u8; CHUNK_BYTES]> {
    let mut padded = [0; CHUNK_BYTES];
    match padded.get_mut(..chunk.len()) {
        Some(start) => start.copy_from_slice(chunk),
        None => {
            let message = format!(
                "a chunk has {CHUNK_BYTES} bytes at most, not {}",
                chunk.len()
            );
            return Err(config_error(py, message));
        }
    }
    Ok(padded)
}

/// A time to wait; zero only looks.
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
    /// span. Answered within `timeout` seconds.
    fn submit(
        &self,
        py: Python<'_>,
        id: u64,
        namespace: &[u8],
        chunks: Vec<Bound<'_, PyBytes>>,
        spans: Vec<SpanTuple>,
        timeout: f64,
    ) -> PyResult<()> {
        let namespace = self::namespace(py, namespace)?;
        let spans = spans
            .into_iter()
            .map(|tuple| span(py, tuple))
            .collect::<PyResult<Vec<_>>>()?;
        let timeout = seconds(py, timeout)?;
        let chunks = chunks
            .iter()
            .map(|chunk| padded(py, chunk.as_bytes()))
            .collect::<PyResult<Vec<_>>>()?;
        self.native
            .submit(id, namespace, &chunks, &spans, timeout)
            .map_err(|error| engine_error(py, &error))
    }

    /// All answers there are, each with the seconds that it took: `(id, [present], seconds)`, or
    /// `(id, kind of error, seconds)`. Does not wait.
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
        Ok(py.detach(|| self.native.wait(timeout)))
    }

    /// Forgets a look-up, answered or not.
    fn cancel(&self, id: u64) {
        self.native.cancel(id);
    }

    /// Ends the threads; False if one is still inside the store when the time is over.
    #[pyo3(signature = (timeout = 5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = bound(py, timeout)?;
        Ok(py.detach(|| self.native.shutdown(timeout)))
    }
}
