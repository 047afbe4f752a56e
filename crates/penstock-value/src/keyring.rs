//! Keyrings: the keys that encrypt values, and where these keys come from.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use penstock_contract::{Error, ErrorKind, Result};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk};
use zeroize::Zeroizing;

/// The environment variable with the text of a keyring. It is used if no file is named.
pub const KEYS_VARIABLE: &str = "PENSTOCK_ENCRYPTION_KEYS";

pub(crate) const SECRET_BYTES: usize = 32;
pub(crate) const FINGERPRINT_BYTES: usize = 16;

/// Most bytes of a keyring's text: hundreds of keys.
const TEXT_LIMIT: usize = 64 << 10;
const ID_LIMIT: usize = 32;
/// Permissions that nobody may have on a file of keys: writing for anyone but its owner, and
/// anything for users outside its group. (The group may read it, because secrets are mounted into
/// containers that way.)
const FORBIDDEN_MODE: u32 = 0o027;

const FINGERPRINT_DOMAIN: &[u8] = b"penstock key fingerprint 1";

/// Encryption keys. The first key encrypts; each key decrypts what it has encrypted.
///
/// The secrets are wiped from memory when the keyring is dropped. They are in no error and no debug
/// output. A value names its key by a fingerprint, which only an owner of the key can compute. So
/// ids are for people and need not agree between machines.
pub struct Keyring {
    /// Not empty.
    secrets: Vec<Secret>,
}

pub(crate) struct Secret {
    id: String,
    /// Boxed: moving it leaves no copy behind.
    pub(crate) bytes: Box<Zeroizing<[u8; SECRET_BYTES]>>,
    pub(crate) fingerprint: [u8; FINGERPRINT_BYTES],
}

impl Keyring {
    /// Loads the keyring from the file or, if no file is named, from the environment variable
    /// [`KEYS_VARIABLE`]. Returns `None` if neither is given.
    ///
    /// Fails with [`ErrorKind::Config`] if the text is not a keyring, or if others may read or
    /// write the file. Fails with [`ErrorKind::Io`] if the file cannot be read.
    pub fn load(file: Option<&Path>) -> Result<Option<Self>> {
        if let Some(path) = file {
            let in_file = |error: Error| error.with("file", path.display());
            return read_private(path)
                .and_then(|text| Self::parse(&text))
                .map(Some)
                .map_err(in_file);
        }
        let Some(text) = std::env::var_os(KEYS_VARIABLE) else {
            return Ok(None);
        };
        let text = Zeroizing::new(text.into_vec());
        std::str::from_utf8(&text)
            .map_err(|_| config("the keys are not text"))
            .and_then(Self::parse)
            .map(Some)
            .map_err(|error| error.with("environment variable", KEYS_VARIABLE))
    }

    /// Reads lines `ID:KEY`. ID is a short name (letters, digits, `.`, `_` and `-`), and KEY is the
    /// base64 text of 32 bytes. Empty lines and lines that begin with `#` are ignored.
    ///
    /// Fails with [`ErrorKind::Config`]. Errors repeat nothing of a line but a well-formed id.
    pub fn parse(text: &str) -> Result<Self> {
        let mut secrets: Vec<Secret> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let secret = Secret::parse(line)
                .map_err(|problem| config(format!("line {number} of the keys: {problem}")))?;
            if let Some(same) = secrets
                .iter()
                .find(|other| other.id == secret.id || other.fingerprint == secret.fingerprint)
            {
                return Err(config(format!(
                    "line {number} of the keys: the id or the key of {:?} for a second time",
                    same.id
                )));
            }
            secrets.push(secret);
        }
        if secrets.is_empty() {
            return Err(config(
                "no encryption key: at least one line ID:KEY is needed",
            ));
        }
        Ok(Self { secrets })
    }

    /// Each key's id and fingerprint (in hexadecimal), to compare the keyrings of machines that
    /// share a pool. The first key encrypts.
    pub fn fingerprints(&self) -> Vec<(&str, String)> {
        self.secrets
            .iter()
            .map(|secret| {
                let digits = secret.fingerprint.iter();
                let hex = digits.map(|byte| format!("{byte:02x}")).collect();
                (secret.id.as_str(), hex)
            })
            .collect()
    }

    pub(crate) fn first(&self) -> &Secret {
        &self.secrets[0]
    }

    /// The fingerprints, the first key's first.
    pub(crate) fn each_fingerprint(&self) -> impl Iterator<Item = &[u8]> {
        self.secrets.iter().map(|secret| &secret.fingerprint[..])
    }

    pub(crate) fn by_fingerprint(&self, fingerprint: &[u8]) -> Option<&Secret> {
        self.secrets
            .iter()
            .find(|secret| secret.fingerprint == fingerprint)
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids = self.secrets.iter().map(|secret| &secret.id);
        f.write_str("Keyring")?;
        f.debug_list().entries(ids).finish()
    }
}

impl PartialEq for Keyring {
    fn eq(&self, other: &Self) -> bool {
        let name = |secret: &Secret| secret.fingerprint;
        self.secrets
            .iter()
            .map(name)
            .eq(other.secrets.iter().map(name))
    }
}

impl Eq for Keyring {}

impl Secret {
    /// Reads one line. If it is not a key, the error states the problem and repeats nothing of the
    /// line but a well-formed id.
    fn parse(line: &str) -> std::result::Result<Self, String> {
        let (id, text) = line
            .split_once(':')
            .ok_or("it has no ':' between id and key")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if id.is_empty() || id.len() > ID_LIMIT || !id.chars().all(is_plain) {
            return Err(format!(
                "an id is 1 to {ID_LIMIT} letters, digits, '.', '_' or '-'"
            ));
        }
        let wrong = |what: &str| {
            format!(
                "the key {id:?} is {what}, not the base64 text of {SECRET_BYTES} bytes; \
                 `openssl rand -base64 {SECRET_BYTES}` makes one"
            )
        };
        // The room is larger than a key, so that an error can state the length of a text that is
        // too long.
        let mut decoded = Zeroizing::new([0_u8; 2 * SECRET_BYTES]);
        let len = STANDARD
            .decode_slice(text.trim(), &mut *decoded)
            .map_err(|_| wrong("malformed or much too long"))?;
        if len != SECRET_BYTES {
            return Err(wrong(&format!("the text of {len} bytes")));
        }
        let mut bytes = Box::new(Zeroizing::new([0_u8; SECRET_BYTES]));
        bytes.copy_from_slice(&decoded[..SECRET_BYTES]);
        let fingerprint = fingerprint(&bytes);
        Ok(Self {
            id: id.to_owned(),
            bytes,
            fingerprint,
        })
    }
}

struct Fingerprint;

impl KeyType for Fingerprint {
    fn len(&self) -> usize {
        FINGERPRINT_BYTES
    }
}

fn fingerprint(secret: &[u8; SECRET_BYTES]) -> [u8; FINGERPRINT_BYTES] {
    let mut fingerprint = [0; FINGERPRINT_BYTES];
    Prk::new_less_safe(HKDF_SHA256, secret)
        .expand(&[FINGERPRINT_DOMAIN], Fingerprint)
        .and_then(|okm| okm.fill(&mut fingerprint))
        .expect("a length that HKDF gives");
    fingerprint
}

/// The text of a file that only its owner may write and users outside its group may not read.
fn read_private(path: &Path) -> Result<Zeroizing<String>> {
    let failed = |error| Error::new(ErrorKind::Io, "cannot read the keys").caused_by(error);
    let file = File::open(path).map_err(failed)?;
    // Ask the open file, not its path: the path may name another file by now.
    let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
    if mode & FORBIDDEN_MODE != 0 {
        return Err(config(format!(
            "others may read or write the keys (mode {mode:03o}): chmod 600"
        )));
    }
    // Allocate only once: a vector that grows leaves copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(TEXT_LIMIT + 1));
    let limit = TEXT_LIMIT as u64;
    file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() == TEXT_LIMIT {
        return Err(config("too long for a file of keys"));
    }
    match String::from_utf8(std::mem::take(&mut *bytes)) {
        Ok(text) => Ok(Zeroizing::new(text)),
        Err(error) => {
            drop(Zeroizing::new(error.into_bytes()));
            Err(config("the keys are not text"))
        }
    }
}

fn config(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, problem)
}
