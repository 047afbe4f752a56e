//! Stores for Python: keys and buffers in, sealed values on the wire, verified values out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use penstock_contract::{KEY_BYTES, Key, Namespace, PutOutcome, Tenancy, Tenant};
use penstock_store::OpenOptions;
use penstock_store::layers::{Breaker, BreakerSettings};
use penstock_value::header::Rejection;
use penstock_value::sealed::{Carried, Finding, Got};
use penstock_value::{Keyring, SealedStore, Trust};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffer::{check_apart, parts};
use crate::errors::{config_error, raised, store_error, without_gil};
use crate::keys::EncryptionKeys;
use crate::registered;
use crate::sealed::{self, Value};

/// The longest timeout, a day: anything longer has the same effect.
const LONGEST_SECONDS: f64 = 86_400.0;

/// A namespace's digest, objects, bytes and last use.
type Usage<'py> = (Bound<'py, PyBytes>, u64, u64, Option<f64>);

/// A handle on a store. Every operation returns by its timeout, in seconds, and runs without the
/// GIL. Any thread may use the handle.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Store {
    inner: SealedStore,
}

impl Store {
    /// The store itself, to share with native threads.
    pub(crate) fn shared(&self) -> Arc<dyn penstock_contract::Store> {
        Arc::clone(self.inner.store())
    }

    /// The keys that values are encrypted with.
    pub(crate) fn keys(&self) -> Option<Arc<Keyring>> {
        self.inner.keys().cloned()
    }

    fn with(inner: Arc<dyn penstock_contract::Store>, keys: Option<Arc<Keyring>>) -> Self {
        Self {
            inner: SealedStore::new(inner, keys),
        }
    }
}

/// The bytes of the payload, or None for a miss.
fn payload_bytes(py: Python<'_>, key: &Key, got: Got) -> PyResult<Option<u64>> {
    match got {
        Got::Payload(verified) => Ok(Some(verified.bytes())),
        Got::Miss => Ok(None),
        Got::TooLarge(bytes) => {
            let message = format!("the value has {bytes} bytes, more than its destination");
            Err(raised::TooSmall::new_err((message, bytes)))
        }
        Got::Rejected(rejection) => Err(rejected(key, rejection)),
        Got::Failed(error) => Err(store_error(py, &error)),
    }
}

fn rejected(key: &Key, rejection: Rejection) -> PyErr {
    let message = format!("{rejection} ({key})");
    let arguments = (message, rejection.name(), rejection.is_foreign());
    raised::Rejected::new_err(arguments)
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
) -> PyResult<Vec<Value>> {
    items
        .into_iter()
        .map(|(key, buffers)| value(py, key.as_bytes(), &buffers, writable))
        .collect()
}

fn value(
    py: Python<'_>,
    key: &[u8],
    buffers: &Bound<'_, PyAny>,
    writable: bool,
) -> PyResult<Value> {
    let (key, parts) = (self::key(py, key)?, parts(buffers, writable)?);
    Ok(Value { key, parts })
}

/// Keys, each with a whole value. Python does not change its bytes, so they may be read without the
/// GIL.
fn whole<'b>(
    py: Python<'_>,
    items: &'b [(Bound<'_, PyBytes>, Bound<'_, PyBytes>)],
) -> PyResult<Vec<(Key, &'b [u8])>> {
    items
        .iter()
        .map(|(key, value)| Ok((self::key(py, key.as_bytes())?, value.as_bytes())))
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

/// A namespace. In Python it is 16 bytes.
pub(crate) struct PyNamespace(pub(crate) Namespace);

impl<'py> FromPyObject<'_, 'py> for PyNamespace {
    type Error = PyErr;

    fn extract(digest: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let bytes: &[u8] = digest.extract()?;
        let digest = bytes.try_into().map_err(|_| {
            let message = format!("a namespace digest has 16 bytes, not {}", bytes.len());
            config_error(digest.py(), message)
        })?;
        Ok(Self(Namespace(digest)))
    }
}

/// The tenant of this name; none for an empty one.
pub(crate) fn tenant(py: Python<'_>, name: &str) -> PyResult<Option<Tenant>> {
    match name {
        "" => Ok(None),
        name => named(py, name).map(Some),
    }
}

fn named(py: Python<'_>, tenant: &str) -> PyResult<Tenant> {
    Tenant::named(tenant).map_err(|error| store_error(py, &error))
}

/// The namespace for those objects of a namespace, 16 bytes, that belong to the tenant of this
/// name.
#[pyfunction]
pub(crate) fn tenant_namespace<'py>(
    py: Python<'py>,
    namespace: PyNamespace,
    tenant: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let tenant = named(py, tenant)?;
    Ok(PyBytes::new(py, &namespace.0.of_tenant(tenant).0))
}

#[pymethods]
impl Store {
    /// Opens the store that a URL names. It does not wait for a server. `client_name` is what a
    /// server shows in its list of clients. `connect_timeout` (seconds) limits making a connection.
    /// `connections` is the most connections held to one server.
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
            registered: registered::stores_for(py, url)?,
        };
        let inner = without_gil(py, || penstock_store::open(url, &options))?;
        Ok(Self::with(inner, None))
    }

    /// A second handle on the store, behind a circuit breaker. After several failures in a row to
    /// reach the store, operations fail at once (`Unavailable`), except for a probe now and then.
    fn guarded(&self) -> Self {
        let breaker = Breaker::new(self.shared(), BreakerSettings::default());
        Self::with(Arc::new(breaker), self.keys())
    }

    /// A second handle on the store, with encryption. It encrypts what it puts, and takes only
    /// values that one of these keys has encrypted. So does an engine that is made with it.
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

    /// Bytes of the header that lies in front of each payload.
    #[getter]
    fn header_bytes(&self) -> usize {
        self.inner.header_bytes()
    }

    /// What the store can do: `shared`, `persistent`, `bounded`, `max_value_bytes` (including the
    /// value's header).
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

    /// Stores a value: a buffer, or a list or tuple of buffers. False if the store kept a value of
    /// this length that was there already.
    #[pyo3(signature = (key, value, *, timeout))]
    fn put(
        &self,
        py: Python<'_>,
        key: &[u8],
        value: &Bound<'_, PyAny>,
        timeout: f64,
    ) -> PyResult<bool> {
        let value = self::value(py, key, value, false)?;
        let deadline = deadline(py, timeout)?;
        let outcome = without_gil(py, || sealed::put(&self.inner, &value, deadline))?;
        Ok(outcome == PutOutcome::Stored)
    }

    /// Stores several values. For each, returns what `put` would return, or the exception that it
    /// would raise.
    #[pyo3(signature = (items, *, timeout))]
    fn put_many(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyAny>)>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let (batch, deadline) = (batch(py, items, false)?, deadline(py, timeout)?);
        without_gil(py, || Ok(sealed::put_many(&self.inner, &batch, deadline)))?
            .into_iter()
            .map(|outcome| match outcome {
                Ok(outcome) => (outcome == PutOutcome::Stored).into_py_any(py),
                Err(error) => Ok(store_error(py, &error).into_value(py).into_any()),
            })
            .collect()
    }

    /// Fetches a value into a writable buffer, or a list or tuple of them, from its start, and
    /// verifies it. Returns the number of its bytes, or None if there is no such value. A value
    /// that does not verify is removed, unless it is foreign. If this raises, the content of the
    /// buffers is undefined.
    #[pyo3(signature = (key, into, *, timeout))]
    fn get(
        &self,
        py: Python<'_>,
        key: &[u8],
        into: &Bound<'_, PyAny>,
        timeout: f64,
    ) -> PyResult<Option<u64>> {
        let into = value(py, key, into, true)?;
        check_apart(py, into.parts.iter())?;
        let deadline = deadline(py, timeout)?;
        let got = without_gil(py, || Ok(sealed::get(&self.inner, &into, deadline)))?;
        payload_bytes(py, &into.key, got)
    }

    /// Fetches several values. For each, returns what `get` would return, or the exception that it
    /// would raise.
    #[pyo3(signature = (items, *, timeout))]
    fn get_many(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyAny>)>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let batch = batch(py, items, true)?;
        check_apart(py, batch.iter().flat_map(|into| &into.parts))?;
        let deadline = deadline(py, timeout)?;
        without_gil(py, || Ok(sealed::get_many(&self.inner, &batch, deadline)))?
            .into_iter()
            .zip(&batch)
            .map(|(got, into)| match payload_bytes(py, &into.key, got) {
                Ok(bytes) => bytes.into_py_any(py),
                Err(error) => Ok(error.into_value(py).into_any()),
            })
            .collect()
    }

    /// Fetches several whole values: as they lie in the store, header in front, not verified. Each
    /// key comes with the bytes that its value is expected to have; a longer value costs a second
    /// fetch. For each, returns its bytes, None, or the exception. A directory or shared memory
    /// does not count this as a use of the values.
    #[pyo3(signature = (items, *, timeout))]
    fn get_whole(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, u64)>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let batch = items
            .iter()
            .map(|(key, bytes)| Ok((self::key(py, key.as_bytes())?, *bytes)))
            .collect::<PyResult<Vec<_>>>()?;
        let deadline = deadline(py, timeout)?;
        without_gil(py, || Ok(self.inner.get_whole(&batch, deadline)))?
            .into_iter()
            .map(|outcome| match outcome {
                Ok(value) => value.map(|value| PyBytes::new(py, &value)).into_py_any(py),
                Err(error) => Ok(store_error(py, &error).into_value(py).into_any()),
            })
            .collect()
    }

    /// Examines several whole values. For each, returns what was found, and why: `("sound", "")`,
    /// `("unreadable", reason)` or `("damaged", reason)`. The values stay as they are.
    fn examine(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyBytes>)>,
    ) -> PyResult<Vec<(&'static str, &'static str)>> {
        let batch = whole(py, &items)?;
        let findings = without_gil(py, || {
            let examine = |(key, value): &(Key, &[u8])| self.inner.examine(key, value);
            Ok(batch.iter().map(examine).collect::<Vec<_>>())
        })?;
        let words = |finding: Finding| match finding {
            Finding::Sound => ("sound", ""),
            Finding::Unreadable(rejection) => ("unreadable", rejection.name()),
            Finding::Damaged(rejection) => ("damaged", rejection.name()),
        };
        Ok(findings.into_iter().map(words).collect())
    }

    /// Stores several whole values as they are, each after an examination. For each, returns what
    /// `put` would return, or the exception: `Rejected` for a damaged value, which is not stored.
    #[pyo3(signature = (items, *, timeout))]
    fn put_whole(
        &self,
        py: Python<'_>,
        items: Vec<(Bound<'_, PyBytes>, Bound<'_, PyBytes>)>,
        timeout: f64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let (batch, deadline) = (whole(py, &items)?, deadline(py, timeout)?);
        without_gil(py, || Ok(self.inner.put_whole(&batch, deadline)))?
            .into_iter()
            .zip(&batch)
            .map(|(carried, (key, _))| match carried {
                Carried::Stored => true.into_py_any(py),
                Carried::AlreadyPresent => false.into_py_any(py),
                Carried::Refused(why) => Ok(rejected(key, why).into_value(py).into_any()),
                Carried::Failed(error) => Ok(store_error(py, &error).into_value(py).into_any()),
            })
            .collect()
    }

    /// Removes the keys that exist; returns how many did.
    #[pyo3(signature = (keys, *, timeout))]
    fn remove(&self, py: Python<'_>, keys: Vec<Bound<'_, PyBytes>>, timeout: f64) -> PyResult<u64> {
        let (keys, deadline) = (self::keys(py, &keys)?, deadline(py, timeout)?);
        without_gil(py, || self.inner.remove(&keys, deadline))
    }

    /// Removes values that did not verify, each as `(key, bytes)` with the length that it had. Of
    /// others' directories a store looks anew first, and keeps what has another length by now.
    #[pyo3(signature = (values, *, timeout))]
    fn remove_damaged(
        &self,
        py: Python<'_>,
        values: Vec<(Bound<'_, PyBytes>, u64)>,
        timeout: f64,
    ) -> PyResult<()> {
        let (named, lengths): (Vec<_>, Vec<_>) = values.into_iter().unzip();
        let (named, deadline) = (self::keys(py, &named)?, deadline(py, timeout)?);
        without_gil(py, || {
            let mut values = named.iter().zip(lengths);
            values.try_for_each(|(key, bytes)| self.inner.remove_damaged(key, bytes, deadline))
        })
    }

    /// Counts all values of a namespace as used before everything else in the store, so that they go
    /// first when room is short. What is used afterwards counts as used then.
    #[pyo3(signature = (namespace, *, timeout))]
    fn retire(&self, py: Python<'_>, namespace: PyNamespace, timeout: f64) -> PyResult<()> {
        let (namespace, deadline) = (namespace.0, deadline(py, timeout)?);
        without_gil(py, || self.inner.retire(namespace, deadline))
    }

    /// Every object of a namespace as `(key, bytes)`, including the header, in no particular order.
    #[pyo3(signature = (namespace, *, timeout))]
    fn list<'py>(
        &self,
        py: Python<'py>,
        namespace: PyNamespace,
        timeout: f64,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, u64)>> {
        let (namespace, deadline) = (namespace.0, deadline(py, timeout)?);
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

    /// For each namespace, its digest, objects, bytes (including headers), and when one of its
    /// objects was used last in seconds since 1970, by digest. None for the time if the store does
    /// not know it, and if the namespace was retired and not used since.
    #[pyo3(signature = (*, timeout))]
    fn usage<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Vec<Usage<'py>>> {
        let deadline = deadline(py, timeout)?;
        let usage = without_gil(py, || {
            let mut usage = BTreeMap::<Namespace, (u64, u64, u64)>::new();
            let mut count = |object: penstock_contract::Listed| {
                let (objects, bytes, last_use) = usage.entry(object.key.namespace).or_default();
                *objects += 1;
                *bytes += object.bytes;
                *last_use = object.last_use.max(*last_use);
            };
            self.inner.list(None, &mut count, deadline)?;
            Ok(usage)
        })?;
        Ok(usage
            .into_iter()
            .map(|(namespace, (objects, bytes, last_use))| {
                let used_at = self.inner.used_at(last_use);
                let since_1970 = used_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                let used_at = since_1970.map(|since| since.as_secs_f64());
                (PyBytes::new(py, &namespace.0), objects, bytes, used_at)
            })
            .collect())
    }

    /// Facts about the store's own settings and state.
    #[pyo3(signature = (*, timeout))]
    fn describe(&self, py: Python<'_>, timeout: f64) -> PyResult<BTreeMap<String, String>> {
        let deadline = deadline(py, timeout)?;
        without_gil(py, || self.inner.describe(deadline)).map(BTreeMap::from_iter)
    }

    /// Whom engines of the pool have found to be wrong, see `penstock-value/src/sealed/trust.rs`: writer,
    /// witness, the time in seconds since 1970, the namespace of the value, and whether the mark
    /// counts.
    #[pyo3(signature = (*, timeout))]
    #[expect(clippy::type_complexity, reason = "a row of plain values")]
    fn marks<'py>(
        &self,
        py: Python<'py>,
        timeout: f64,
    ) -> PyResult<Vec<(String, String, u64, Bound<'py, PyBytes>, bool)>> {
        let deadline = deadline(py, timeout)?;
        let trust = Trust::new(self.inner.store(), self.inner.keys());
        without_gil(py, || trust.read(deadline))?;
        let marks = trust.marks().into_iter();
        Ok(marks
            .map(|(mark, counts)| {
                let namespace = PyBytes::new(py, &mark.namespace.0);
                let (writer, witness) = (mark.writer.to_string(), mark.witness.to_string());
                (writer, witness, mark.at, namespace, counts)
            })
            .collect())
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
            ("rejected", self.inner.rejected()),
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

/// The number of bytes that a text such as "64KiB", "1.5 GB" or "4096" stands for.
#[pyfunction]
pub(crate) fn parse_size(py: Python<'_>, text: &str) -> PyResult<u64> {
    penstock_value::parse_size(text).map_err(|error| store_error(py, &error))
}
