//! Stores for Python: keys and buffers in, sealed values on the wire, verified values out.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_store::layers::{Breaker, BreakerSettings, Look, look_again};
use penstock_store::value::Rejection;
use penstock_store::{
    GetOutcome, GetRequest, KEY_BYTES, Key, Keyring, Namespace, OpenOptions, PutOutcome, PutRequest,
};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffer::{Part, check_apart, parts};
use crate::errors::{config_error, exception, store_error, without_gil};
use crate::keys::EncryptionKeys;
use crate::sealed::{Arrival, Sealed, Verdict};

/// Longest timeout, a day: anything longer is as good as this.
const LONGEST_SECONDS: f64 = 86_400.0;
/// Payload bytes handed at once to a store that does not pipeline.
const PIECE_BYTES: usize = 1 << 20;

/// A handle on a store. Every operation returns by its timeout, in seconds, and runs without the
/// GIL; any thread may use it.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Store {
    inner: Arc<dyn penstock_store::Store>,
    keys: Option<Arc<Keyring>>,
    rejected: AtomicU64,
}

impl Store {
    /// The store itself, to share with native threads.
    pub(crate) fn shared(&self) -> Arc<dyn penstock_store::Store> {
        Arc::clone(&self.inner)
    }

    /// The keys that values are encrypted with.
    pub(crate) fn keys(&self) -> Option<Arc<Keyring>> {
        self.keys.clone()
    }

    fn with(inner: Arc<dyn penstock_store::Store>, keys: Option<Arc<Keyring>>) -> Self {
        Self {
            inner,
            keys,
            rejected: AtomicU64::new(0),
        }
    }

    /// A batch in the pieces that are handed to the store at once, so that it is sealed or verified
    /// in the processor's caches. All of it, where cutting it up would cost more than that saves.
    fn pieces<'b>(
        &self,
        batch: &'b [(Key, Vec<Part>)],
    ) -> impl Iterator<Item = &'b [(Key, Vec<Part>)]> {
        let most = match self.inner.capabilities().pipelined {
            true => usize::MAX,
            false => PIECE_BYTES,
        };
        let mut rest = batch;
        std::iter::from_fn(move || {
            let mut bytes = 0_usize;
            let fits = |(_, buffers): &&(Key, Vec<Part>)| {
                let own: usize = buffers.iter().map(|part| part.pinned().bytes().len()).sum();
                bytes = bytes.saturating_add(own);
                bytes <= most
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (piece, later) = rest.split_at_checked(count)?;
            rest = later;
            Some(piece)
        })
    }

    fn get_verified(&self, batch: &[(Key, Vec<Part>)], deadline: Instant) -> Vec<Got> {
        self.pieces(batch)
            .flat_map(|piece| self.get_piece(piece, deadline))
            .collect()
    }

    fn get_piece(&self, batch: &[(Key, Vec<Part>)], deadline: Instant) -> Vec<Got> {
        let keys = self.keys.as_deref();
        let mut arrivals: Vec<Arrival<'_>> = batch
            .iter()
            .map(|(key, into)| Arrival::new(key, into, keys))
            .collect();
        let outcomes: Vec<_> = {
            let mut slices: Vec<_> = arrivals.iter_mut().map(Arrival::slices).collect();
            let mut requests: Vec<GetRequest<'_, '_>> = batch
                .iter()
                .zip(&mut slices)
                .map(|((key, _), into)| GetRequest {
                    wants_checksum: keys.is_none(),
                    ..GetRequest::new(*key, into)
                })
                .collect();
            self.inner.get_many(&mut requests, deadline);
            requests
                .into_iter()
                .map(|request| (request.outcome, request.checksum))
                .collect()
        };
        outcomes
            .into_iter()
            .zip(&mut arrivals)
            .map(|((outcome, checksum), arrival)| match outcome {
                Some(Ok(GetOutcome::Hit(bytes))) => match arrival.verify(bytes, checksum) {
                    Verdict::Payload(payload) => Got::Hit(payload),
                    Verdict::TooLarge(payload) => Got::TooLarge(payload),
                    Verdict::Rejected(rejection) => self.reject(arrival, rejection, deadline),
                },
                Some(Ok(GetOutcome::Miss)) => Got::Miss,
                Some(Ok(GetOutcome::TooLarge(bytes))) => Got::TooLarge(arrival.payload_of(bytes)),
                Some(Err(error)) => Got::Failed(error),
                None => Got::Failed(unanswered()),
            })
            .collect()
    }

    /// Removes damaged copies of a value that did not verify, and gets a whole one if another
    /// tier has it.
    fn reject(&self, arrival: &mut Arrival<'_>, rejection: Rejection, deadline: Instant) -> Got {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        if rejection.is_foreign() && self.inner.tiers().is_empty() {
            return Got::Rejected(rejection);
        }
        let key = arrival.key();
        let whole = look_again(&*self.inner, key, deadline, |tier| {
            let got = tier.get(key, &mut arrival.slices(), deadline);
            match got {
                Ok(GetOutcome::Hit(bytes)) => match arrival.verify(bytes, None) {
                    Verdict::Payload(payload) => Look::Whole(Got::Hit(payload)),
                    Verdict::TooLarge(payload) => Look::Whole(Got::TooLarge(payload)),
                    Verdict::Rejected(rejection) if rejection.is_foreign() => Look::Nothing,
                    Verdict::Rejected(_) => Look::Damaged,
                },
                Ok(GetOutcome::TooLarge(bytes)) => {
                    Look::Whole(Got::TooLarge(arrival.payload_of(bytes)))
                }
                Ok(GetOutcome::Miss) | Err(_) => Look::Nothing,
            }
        });
        whole.unwrap_or(Got::Rejected(rejection))
    }

    fn put_sealed(
        &self,
        batch: &[(Key, Vec<Part>)],
        deadline: Instant,
    ) -> Vec<penstock_store::Result<PutOutcome>> {
        self.pieces(batch)
            .flat_map(|piece| self.put_piece(piece, deadline))
            .collect()
    }

    fn put_piece(
        &self,
        batch: &[(Key, Vec<Part>)],
        deadline: Instant,
    ) -> Vec<penstock_store::Result<PutOutcome>> {
        let keys = self.keys.as_deref();
        let sealed: Vec<_> = batch
            .iter()
            .map(|(key, value)| Sealed::of(key, value, keys))
            .collect();
        let slices: Vec<(Key, Vec<IoSlice<'_>>)> = batch
            .iter()
            .zip(&sealed)
            .filter_map(|((key, value), sealed)| Some((*key, sealed.as_ref().ok()?.slices(value))))
            .collect();
        let mut requests: Vec<PutRequest<'_>> = slices
            .iter()
            .map(|(key, value)| PutRequest::new(*key, value))
            .collect();
        self.inner.put_many(&mut requests, deadline);
        let outcomes: Vec<_> = requests
            .into_iter()
            .map(|request| request.outcome.unwrap_or_else(|| Err(unanswered())))
            .collect();
        drop(slices);
        let mut outcomes = outcomes.into_iter();
        sealed
            .into_iter()
            .map(|sealed| sealed.and_then(|_| outcomes.next().unwrap_or_else(|| Err(unanswered()))))
            .collect()
    }
}

/// What became of a get, verification included.
enum Got {
    Hit(u64),
    Miss,
    TooLarge(u64),
    Rejected(Rejection),
    Failed(penstock_store::Error),
}

impl Got {
    /// Bytes of the payload, or None for a miss.
    fn into_result(self, py: Python<'_>, key: &Key) -> PyResult<Option<u64>> {
        match self {
            Got::Hit(bytes) => Ok(Some(bytes)),
            Got::Miss => Ok(None),
            Got::TooLarge(bytes) => {
                let message = format!("the value has {bytes} bytes, more than its destination");
                Err(exception(py, "TooSmall", (message, bytes)))
            }
            Got::Rejected(rejection) => Err(exception(
                py,
                "Rejected",
                (
                    format!("{rejection} ({key})"),
                    rejection.name(),
                    rejection.is_foreign(),
                ),
            )),
            Got::Failed(error) => Err(store_error(py, &error)),
        }
    }
}

fn unanswered() -> penstock_store::Error {
    let kind = penstock_store::ErrorKind::Protocol;
    penstock_store::Error::new(kind, "the store left a request without an outcome")
}

fn key(py: Python<'_>, bytes: &[u8]) -> PyResult<Key> {
    let fixed: &[u8; KEY_BYTES] = bytes.try_into().map_err(|_| {
        config_error(
            py,
            format!("a key has {KEY_BYTES} bytes, not {}", bytes.len()),
        )
    })?;
    Key::from_bytes(fixed).map_err(|error| config_error(py, error.to_string()))
}

fn keys(py: Python<'_>, bytes: &[Bound<'_, PyBytes>]) -> PyResult<Vec<Key>> {
    bytes
        .iter()
        .map(|bytes| key(py, bytes.as_bytes()))
        .collect()
}

fn batch(
    py: Python<'_>,
    items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyAny>)>,
    writable: bool,
) -> PyResult<Vec<(Key, Vec<Part>)>> {
    items
        .into_iter()
        .map(|(bytes, buffers)| Ok((key(py, bytes.as_bytes())?, parts(&buffers, writable)?)))
        .collect()
}

pub(crate) fn seconds(py: Python<'_>, timeout: f64) -> PyResult<Duration> {
    if timeout > 0.0 {
        Ok(Duration::from_secs_f64(timeout.min(LONGEST_SECONDS)))
    } else {
        Err(config_error(
            py,
            format!("a timeout must be over 0 seconds, not {timeout}"),
        ))
    }
}

fn deadline(py: Python<'_>, timeout: f64) -> PyResult<Instant> {
    Ok(Instant::now() + seconds(py, timeout)?)
}

pub(crate) fn namespace(py: Python<'_>, digest: &[u8]) -> PyResult<Namespace> {
    digest.try_into().map(Namespace).map_err(|_| {
        config_error(
            py,
            format!("a namespace digest has 16 bytes, not {}", digest.len()),
        )
    })
}

#[pymethods]
impl Store {
    /// Opens the store that a URL names; does not wait for a server. `client_name` is what a
    /// server's list of clients shows, `connect_timeout` (seconds) bounds making a connection,
    /// `connections` is the most held to one server.
    #[staticmethod]
    #[pyo3(signature = (url, *, client_name = "penstock", connect_timeout = 1.0, connections = 8))]
    fn open(
        py: Python<'_>,
        url: &str,
        client_name: &str,
        connect_timeout: f64,
        connections: usize,
    ) -> PyResult<Self> {
        let options = OpenOptions {
            client_name: client_name.to_owned(),
            connect_timeout: seconds(py, connect_timeout)?,
            pool_connections: connections,
        };
        let inner = without_gil(py, || penstock_store::open(url, &options))?;
        Ok(Self::with(inner, None))
    }

    /// A second handle on the store, behind a circuit breaker: after failures in a row to reach it,
    /// operations fail at once (`Unavailable`) but for a probe now and then.
    fn guarded(&self) -> Self {
        let breaker = Breaker::new(self.shared(), BreakerSettings::default());
        Self::with(Arc::new(breaker), self.keys())
    }

    /// A second handle on the store, which encrypts what it puts and takes nothing but what one of
    /// these keys has encrypted. An engine made with it does so too.
    fn encrypted(&self, keys: &EncryptionKeys) -> Self {
        Self::with(self.shared(), Some(keys.shared()))
    }

    /// A second handle on the store, without keys.
    fn unencrypted(&self) -> Self {
        Self::with(self.shared(), None)
    }

    /// The URL, without credentials.
    #[getter]
    fn url(&self) -> String {
        self.inner.url()
    }

    /// What the store can do: `shared`, `persistent`, `bounded`, `max_value_bytes` (the value's
    /// header included).
    fn capabilities<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let can = self.inner.capabilities();
        let dict = PyDict::new(py);
        dict.set_item("shared", can.shared)?;
        dict.set_item("persistent", can.persistent)?;
        dict.set_item("bounded", can.bounded)?;
        dict.set_item("max_value_bytes", can.max_value_bytes)?;
        Ok(dict)
    }

    /// For each key, whether the store has it.
    #[pyo3(signature = (keys, *, timeout))]
    fn contains(
        &self,
        py: Python<'_>,
        keys: Vec<Bound<'_, PyBytes>>,
        timeout: f64,
    ) -> PyResult<Vec<bool>> {
        let (keys, deadline) = (self::keys(py, &keys)?, deadline(py, timeout)?);
        without_gil(py, || self.inner.contains(&keys, deadline))
    }

    /// Stores a value: a buffer, or a list or tuple of buffers. False if the store kept one of
    /// this length that was there already.
    #[pyo3(signature = (key, value, *, timeout))]
    fn put(
        &self,
        py: Python<'_>,
        key: &[u8],
        value: &Bound<'_, PyAny>,
        timeout: f64,
    ) -> PyResult<bool> {
        let batch = [(self::key(py, key)?, parts(value, false)?)];
        let deadline = deadline(py, timeout)?;
        let outcome = without_gil(py, || {
            self.put_sealed(&batch, deadline)
                .pop()
                .unwrap_or_else(|| Err(unanswered()))
        })?;
        Ok(outcome == PutOutcome::Stored)
    }

    /// Stores several values; for each, what `put` would return, or the exception it would raise.
    #[pyo3(signature = (items, *, timeout))]
    fn put_many(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyAny>)>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let (batch, deadline) = (batch(py, items, false)?, deadline(py, timeout)?);
        without_gil(py, || Ok(self.put_sealed(&batch, deadline)))?
            .into_iter()
            .map(|outcome| match outcome {
                Ok(outcome) => (outcome == PutOutcome::Stored).into_py_any(py),
                Err(error) => Ok(store_error(py, &error).into_value(py).into_any()),
            })
            .collect()
    }

    /// Fetches a value into a writable buffer, or a list or tuple of them, from its start, and
    /// verifies it. Returns its bytes, or None if there is no such value. What does not verify is
    /// removed, unless it is foreign. If it raises, what the buffers hold is undefined.
    #[pyo3(signature = (key, into, *, timeout))]
    fn get(
        &self,
        py: Python<'_>,
        key: &[u8],
        into: &Bound<'_, PyAny>,
        timeout: f64,
    ) -> PyResult<Option<u64>> {
        let key = self::key(py, key)?;
        let batch = [(key, parts(into, true)?)];
        check_apart(py, batch[0].1.iter())?;
        let deadline = deadline(py, timeout)?;
        let got = without_gil(py, || Ok(self.get_verified(&batch, deadline).pop()))?;
        got.unwrap_or_else(|| Got::Failed(unanswered()))
            .into_result(py, &key)
    }

    /// Fetches several values; for each, what `get` would return, or the exception it would
    /// raise.
    #[pyo3(signature = (items, *, timeout))]
    fn get_many(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyAny>)>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let batch = batch(py, items, true)?;
        check_apart(py, batch.iter().flat_map(|(_, parts)| parts))?;
        let deadline = deadline(py, timeout)?;
        without_gil(py, || Ok(self.get_verified(&batch, deadline)))?
            .into_iter()
            .zip(&batch)
            .map(|(got, (key, _))| match got.into_result(py, key) {
                Ok(bytes) => bytes.into_py_any(py),
                Err(error) => Ok(error.into_value(py).into_any()),
            })
            .collect()
    }

    /// Removes the keys that exist; returns how many did.
    #[pyo3(signature = (keys, *, timeout))]
    fn remove(&self, py: Python<'_>, keys: Vec<Bound<'_, PyBytes>>, timeout: f64) -> PyResult<u64> {
        let (keys, deadline) = (self::keys(py, &keys)?, deadline(py, timeout)?);
        without_gil(py, || self.inner.remove(&keys, deadline))
    }

    /// Every object of a namespace as `(key, bytes)`, header included, in no order.
    #[pyo3(signature = (namespace, *, timeout))]
    fn list<'py>(
        &self,
        py: Python<'py>,
        namespace: &[u8],
        timeout: f64,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, u64)>> {
        let (namespace, deadline) = (self::namespace(py, namespace)?, deadline(py, timeout)?);
        let listed = without_gil(py, || {
            let mut listed = Vec::new();
            self.inner
                .list(Some(namespace), &mut |object| listed.push(object), deadline)?;
            Ok(listed)
        })?;
        Ok(listed
            .into_iter()
            .map(|object| (PyBytes::new(py, &object.key.to_bytes()), object.bytes))
            .collect())
    }

    /// For each namespace, its digest, objects and bytes (headers included), by digest.
    #[pyo3(signature = (*, timeout))]
    fn usage<'py>(
        &self,
        py: Python<'py>,
        timeout: f64,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, u64, u64)>> {
        let deadline = deadline(py, timeout)?;
        let usage = without_gil(py, || {
            let mut usage = BTreeMap::<Namespace, (u64, u64)>::new();
            let mut count = |object: penstock_store::Listed| {
                let (objects, bytes) = usage.entry(object.key.namespace).or_default();
                *objects += 1;
                *bytes += object.bytes;
            };
            self.inner.list(None, &mut count, deadline)?;
            Ok(usage)
        })?;
        Ok(usage
            .into_iter()
            .map(|(namespace, (objects, bytes))| (PyBytes::new(py, &namespace.0), objects, bytes))
            .collect())
    }

    /// Facts about the store's own settings and state.
    #[pyo3(signature = (*, timeout))]
    fn describe(&self, py: Python<'_>, timeout: f64) -> PyResult<BTreeMap<String, String>> {
        let deadline = deadline(py, timeout)?;
        without_gil(py, || self.inner.describe(deadline)).map(BTreeMap::from_iter)
    }

    /// Counters of this handle since it was opened.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let dict = PyDict::new(py);
        for (name, count) in [
            ("lookups", stats.lookups),
            ("lookup_hits", stats.lookup_hits),
            ("gets", stats.gets),
            ("misses", stats.misses),
            ("rejected", self.rejected.load(Ordering::Relaxed)),
            ("puts", stats.puts),
            ("puts_present", stats.puts_present),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("evictions", stats.evictions),
            ("errors", stats.errors),
            ("connects", stats.connects),
        ] {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("Store({:?})", self.inner.url())
    }
}

/// Bytes that a text such as "64KiB", "1.5 GB" or "4096" stands for.
#[pyfunction]
pub(crate) fn parse_size(py: Python<'_>, text: &str) -> PyResult<u64> {
    penstock_store::parse_size(text).map_err(|error| store_error(py, &error))
}
