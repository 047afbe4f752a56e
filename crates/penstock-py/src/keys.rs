//! Encryption keys for Python. Python sees their names, and never the keys themselves.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_value::Keyring;
use pyo3::prelude::*;

use crate::errors::without_gil;

/// Keys that values are encrypted with. The first key encrypts. Each key decrypts what it has
/// encrypted.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct EncryptionKeys {
    keyring: Arc<Keyring>,
}

impl EncryptionKeys {
    pub(crate) fn shared(&self) -> Arc<Keyring> {
        Arc::clone(&self.keyring)
    }
}

#[pymethods]
impl EncryptionKeys {
    /// The keys of a file. Without a file, those of the environment variable
    /// PENSTOCK_ENCRYPTION_KEYS. None if neither is given. The text has lines `ID:KEY`, where KEY
    /// is the base64 text of 32 bytes.
    #[staticmethod]
    #[pyo3(signature = (file = None))]
    fn load(py: Python<'_>, file: Option<PathBuf>) -> PyResult<Option<Self>> {
        let keyring = without_gil(py, || Keyring::load(file.as_deref()))?;
        Ok(keyring.map(|keyring| Self {
            keyring: Arc::new(keyring),
        }))
    }

    /// The id and fingerprint of each key, with the key that encrypts first. Two machines can read
    /// each other's values if each has the fingerprint that is first on the other.
    #[getter]
    fn fingerprints(&self) -> Vec<(String, String)> {
        let named = |(id, fingerprint): (&str, String)| (id.to_owned(), fingerprint);
        self.keyring.fingerprints().into_iter().map(named).collect()
    }

    fn __repr__(&self) -> String {
        let ids: Vec<_> = self.keyring.fingerprints();
        let ids: Vec<&str> = ids.iter().map(|(id, _)| *id).collect();
        format!("EncryptionKeys({ids:?})")
    }
}
