//! The format of an object's value: a 64-byte header, then the payload.
//!
//! | bytes  | content |
//! |--------|---------|
//! | 0..4   | `PNSK` |
//! | 4..6   | format version, little endian, now 2 |
//! | 6..8   | flags, little endian: bit 0 if encrypted, bit 1 if coded, the others zero but for the code's |
//! | 8..16  | payload length in bytes, little endian |
//! | 16..32 | namespace digest |
//! | 32..40 | XXH3-64 of the key's bytes ([`Key::to_bytes`]), little endian |
//! | 40..48 | the [`Writer`], little endian |
//! | 48..56 | checksum, little endian: of the payload, or if encrypted of bytes 64..128 |
//! | 56..64 | checksum of bytes 0..56, little endian |
//!
//! A coded value has its payload's code ([`compress`](crate::compress)) where others have their
//! payload. The code is shorter than the payload. Bits 2 and 3 of the flags are the type of its
//! elements: 0 for bf16, 1 for fp16, 2 for E4M3, 3 for E5M2. Length and checksum in the header are
//! the payload's own.
//!
//! An encrypted value has a header that is 64 bytes longer. What follows is ciphertext, as long as
//! the payload, or as its code (see [`Keyring`](crate::Keyring)):
//!
//! | bytes    | content |
//! |----------|---------|
//! | 64..80   | fingerprint of the encryption key |
//! | 80..112  | salt, random for every value |
//! | 112..128 | AES-256-GCM's tag |
//!
//! A reader accepts a value only if all of it checks out. Anything else is a [`Rejection`], which
//! the reader treats as a miss. The checksum is XXH3-64, a non-cryptographic hash. It catches
//! damage and mix-ups, but not an adversary who can write to the store. The tag of an encrypted
//! value catches that adversary too.

use std::cmp::Ordering;
use std::fmt;
use std::hash::Hasher;
use std::ops::Deref;

use penstock_contract::slices::one_piece;
use penstock_contract::{Key, NAMESPACE_BYTES};
use twox_hash::XxHash3_64;

use crate::compress::Element;

/// Bytes of the header in front of a payload that is not encrypted.
pub use penstock_contract::memory::HEADER_BYTES;
/// Bytes of the header in front of a payload that is encrypted.
pub const ENCRYPTED_HEADER_BYTES: usize = 128;
/// The format version that this library writes, and the only one it reads.
pub const FORMAT_VERSION: u16 = 2;

/// Flag of values whose payload is encrypted.
const ENCRYPTED: u16 = 1;
/// Flag of values whose payload is coded.
const CODED: u16 = 1 << 1;
/// Where the flags hold the number of a coded payload's element type.
const ELEMENT_SHIFT: u32 = 2;
const MAGIC: [u8; 4] = *b"PNSK";
const VERSION_AT: usize = 4;
const FLAGS_AT: usize = 6;
const LENGTH_AT: usize = 8;
const NAMESPACE_AT: usize = 16;
const KEY_AT: usize = NAMESPACE_AT + NAMESPACE_BYTES;
const WRITER_AT: usize = 40;
pub(crate) const PAYLOAD_CHECKSUM_AT: usize = 48;
const HEADER_CHECKSUM_AT: usize = 56;

/// Who computed a payload: an engine, from when it was started, or its weights were changed, until it
/// ends, or they are changed again.
///
/// The lower 40 bits are drawn at random, so that no two are the same. The upper 24 stand for all that
/// decides how numbers are rounded (device, kernels, options), if the engine always computes the same
/// block to the same bits; they are zero if it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Writer(pub u64);

impl Writer {
    /// Whether both always compute the same bits for the same block.
    pub fn rounds_as(self, other: Self) -> bool {
        self.0 >> 40 != 0 && self.0 >> 40 == other.0 >> 40
    }

    /// Nobody knows who. Of such a value, nobody can be asked to answer for it.
    pub const UNKNOWN: Self = Self(0);
}

impl fmt::Display for Writer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

/// What a payload is sealed under.
#[derive(Clone, Copy, Debug)]
pub struct Label<'a> {
    /// The object's name.
    pub key: &'a Key,
    /// Who computed the payload.
    pub writer: Writer,
    /// What goes into the encryption besides the keys; empty for nothing.
    pub context: &'a [u8],
}

impl<'a> Label<'a> {
    /// The label of a payload that nobody is known to have computed, without a context.
    pub fn of(key: &'a Key) -> Self {
        Self {
            key,
            writer: Writer::UNKNOWN,
            context: &[],
        }
    }
}

/// Why a value was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Rejection {
    /// The value ends before its header or its payload does.
    #[error("value ends after {found} of {expected} bytes")]
    Truncated {
        /// Bytes that the whole value has, header included.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// Not one of our values at all.
    #[error("value does not begin like one of Penstock's")]
    BadMagic,
    /// Written in a format that this library does not read.
    #[error("value has format version {found}, not {FORMAT_VERSION}")]
    Version {
        /// The version in the header.
        found: u16,
    },
    /// The header is damaged.
    #[error("header checksum does not match")]
    HeaderChecksum,
    /// The header asks for something that this library does not know.
    #[error("value has unknown flags {found:#06x}")]
    Flags {
        /// The flags in the header.
        found: u16,
    },
    /// The value belongs to engines that this one must not share with.
    #[error("value belongs to another namespace")]
    Namespace,
    /// The value was stored under another key.
    #[error("value belongs to another key")]
    Key,
    /// The payload is not as long as the reader's geometry makes it.
    #[error("payload of {found} bytes where {expected} were expected")]
    Length {
        /// Payload bytes that the reader expects.
        expected: u64,
        /// Payload bytes that there are.
        found: u64,
    },
    /// The payload is damaged.
    #[error("payload checksum does not match")]
    PayloadChecksum,
    /// The reader takes no coded values, and the value is coded.
    #[error("value is coded, and only values that are not coded are accepted here")]
    Coded,
    /// The payload is coded, and its code is damaged.
    #[error("coded payload does not decode")]
    BadCode,
    /// The reader has no keys, and the value is encrypted.
    #[error("value is encrypted, and no encryption keys are set")]
    Encrypted,
    /// The reader has keys and the value is not encrypted. Anybody can write such a value, so the
    /// reader does not accept it.
    #[error("value is not encrypted, and with encryption keys only encrypted ones are accepted")]
    Unencrypted,
    /// Encrypted with a key that the reader does not have.
    #[error("value is encrypted with a key that is not among those set")]
    UnknownKey,
    /// The header or the payload is not what the key's owner encrypted.
    #[error("value does not pass its authentication")]
    Authentication,
    /// Whoever computed the payload has computed other KV than others did, see
    /// [`Trust`](crate::Trust).
    #[error("value is of writer {0}, whose KV was found to be wrong")]
    Distrusted(Writer),
}

impl Rejection {
    /// Stable lower-case name, used in counters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Truncated { .. } => "truncated",
            Self::BadMagic => "bad_magic",
            Self::Version { .. } => "version",
            Self::HeaderChecksum => "header_checksum",
            Self::Flags { .. } => "flags",
            Self::Namespace => "namespace",
            Self::Key => "key",
            Self::Length { .. } => "length",
            Self::PayloadChecksum => "payload_checksum",
            Self::Coded => "coded",
            Self::BadCode => "bad_code",
            Self::Encrypted => "encrypted",
            Self::Unencrypted => "unencrypted",
            Self::UnknownKey => "unknown_key",
            Self::Authentication => "authentication",
            Self::Distrusted(_) => "distrusted",
        }
    }

    /// Whether the value may be good for readers with other keys, or for those that take coded
    /// values. Such a value stays in the store. All others are removed, so that they are put anew.
    pub fn is_foreign(self) -> bool {
        matches!(self, Self::Encrypted | Self::UnknownKey | Self::Coded)
    }
}

/// A payload's checksum in the making. It is fed piece by piece; the size of the pieces does not
/// matter.
#[derive(Clone)]
pub struct Checksum(XxHash3_64);

impl Checksum {
    /// The checksum of nothing yet.
    pub fn new() -> Self {
        Self(XxHash3_64::with_seed(0))
    }

    /// Takes in the payload's next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of everything taken in so far.
    pub fn finish(&self) -> u64 {
        self.0.finish()
    }

    /// The checksum of a payload that lies in one piece.
    pub fn of(payload: &[u8]) -> u64 {
        XxHash3_64::oneshot(payload)
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

/// The payload's checksum, of a header that was verified and is not encrypted.
pub(crate) fn stated_checksum(header: &[u8; HEADER_BYTES]) -> u64 {
    u64_at(header, PAYLOAD_CHECKSUM_AT)
}

/// Who computed the payload, of a header that was verified.
pub(crate) fn writer_of(header: &[u8; HEADER_BYTES]) -> Writer {
    Writer(u64_at(header, WRITER_AT))
}

/// The payload's checksum, as a verified header states it. The payload is not verified until
/// [`check`](Self::check) has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the payload is not verified until its checksum is checked"]
pub struct ExpectedChecksum(u64);

impl ExpectedChecksum {
    /// Compares with the checksum of the payload that arrived.
    pub fn check(self, found: u64) -> Result<(), Rejection> {
        if self.0 == found {
            Ok(())
        } else {
            Err(Rejection::PayloadChecksum)
        }
    }
}

/// What the flags of a header say about what follows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) is_encrypted: bool,
    /// The type of the payload's elements, if the payload is coded.
    pub(crate) code: Option<Element>,
}

impl Form {
    fn flags(self) -> u16 {
        let encrypted = if self.is_encrypted { ENCRYPTED } else { 0 };
        let code = self.code.map_or(0, |element| {
            let number = match element {
                Element::Bf16 => 0,
                Element::Fp16 => 1,
                Element::Fp8E4M3 => 2,
                Element::Fp8E5M2 => 3,
            };
            CODED | number << ELEMENT_SHIFT
        });
        encrypted | code
    }

    /// The form that has these flags, if there is one.
    fn of(flags: u16) -> Option<Self> {
        let codes = Element::ALL.into_iter().map(Some).chain([None]);
        codes
            .flat_map(|code| [false, true].map(|is_encrypted| Self { is_encrypted, code }))
            .find(|form| form.flags() == flags)
    }
}

/// The header for a payload of this length and checksum, computed by `writer` and stored under this
/// key as it is.
pub fn seal(key: &Key, writer: Writer, payload_len: u64, checksum: u64) -> [u8; HEADER_BYTES] {
    seal_form(Form::default(), key, writer, payload_len, checksum)
}

/// The header for a value of any form, stored under this key. Of an encrypted value, the part of
/// the header that others have too; then the checksum is that of the other part. See [`seal`].
pub(crate) fn seal_form(
    form: Form,
    key: &Key,
    writer: Writer,
    payload_len: u64,
    checksum: u64,
) -> [u8; HEADER_BYTES] {
    let flags = form.flags();
    let mut header = [0; HEADER_BYTES];
    header[..VERSION_AT].copy_from_slice(&MAGIC);
    header[VERSION_AT..FLAGS_AT].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    header[FLAGS_AT..LENGTH_AT].copy_from_slice(&flags.to_le_bytes());
    header[LENGTH_AT..NAMESPACE_AT].copy_from_slice(&payload_len.to_le_bytes());
    header[NAMESPACE_AT..KEY_AT].copy_from_slice(&key.namespace.0);
    header[KEY_AT..WRITER_AT].copy_from_slice(&key_digest(key));
    header[WRITER_AT..PAYLOAD_CHECKSUM_AT].copy_from_slice(&writer.0.to_le_bytes());
    header[PAYLOAD_CHECKSUM_AT..HEADER_CHECKSUM_AT].copy_from_slice(&checksum.to_le_bytes());
    let own = Checksum::of(&header[..HEADER_CHECKSUM_AT]);
    header[HEADER_CHECKSUM_AT..].copy_from_slice(&own.to_le_bytes());
    header
}

/// Checks a header against what the reader asked for. The payload is accepted only if this passes
/// and the payload matches the checksum returned. This is for values that are not coded.
pub fn verify(
    header: &[u8; HEADER_BYTES],
    key: &Key,
    expected_payload_len: u64,
) -> Result<ExpectedChecksum, Rejection> {
    match verify_form(header, key, expected_payload_len)? {
        (checksum, None) => Ok(checksum),
        (_, Some(_)) => Err(Rejection::Coded),
    }
}

/// Checks a header, also of a value that may be coded, against what the reader asked for. Returns
/// what [`verify`] returns, and the type of the payload's elements if it is coded.
pub(crate) fn verify_form(
    header: &[u8; HEADER_BYTES],
    key: &Key,
    expected_payload_len: u64,
) -> Result<(ExpectedChecksum, Option<Element>), Rejection> {
    let (checksum, code) = check(header, key, expected_payload_len, false)?;
    Ok((ExpectedChecksum(checksum), code))
}

/// Checks the header of an encrypted value, as far as others have it too, against what the reader
/// asked for. Returns the checksum of the header's other part, and the type of the payload's
/// elements if it is coded.
pub(crate) fn verify_encrypted(
    header: &[u8; HEADER_BYTES],
    key: &Key,
    expected_payload_len: u64,
) -> Result<(u64, Option<Element>), Rejection> {
    check(header, key, expected_payload_len, true)
}

/// The payload's length, as far as that shows before anything is verified: what a coded value's
/// header states, and what follows the header of any other. The value has `value_bytes` bytes, and
/// begins with these.
pub(crate) fn payload_len(beginning: &[u8], value_bytes: u64, header_bytes: usize) -> u64 {
    let stated = beginning.first_chunk::<HEADER_BYTES>().and_then(|header| {
        let form = Form::of(u16_at(header, FLAGS_AT))?;
        form.code.map(|_| u64_at(header, LENGTH_AT))
    });
    stated.unwrap_or_else(|| value_bytes.saturating_sub(header_bytes as u64))
}

/// The most bytes that a value can have that begins so: the code of a payload is shorter than the
/// payload. `None` if no value begins so.
pub fn longest(header: &[u8; HEADER_BYTES]) -> Option<u64> {
    let stated = u64_at(header, HEADER_CHECKSUM_AT);
    if header[..VERSION_AT] != MAGIC
        || u16_at(header, VERSION_AT) != FORMAT_VERSION
        || stated != Checksum::of(&header[..HEADER_CHECKSUM_AT])
    {
        return None;
    }
    let is_encrypted = Form::of(u16_at(header, FLAGS_AT))?.is_encrypted;
    let header_bytes = if is_encrypted {
        ENCRYPTED_HEADER_BYTES
    } else {
        HEADER_BYTES
    };
    u64_at(header, LENGTH_AT).checked_add(header_bytes as u64)
}

fn u16_at(header: &[u8; HEADER_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([header[at], header[at + 1]])
}

fn u64_at(header: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&header[at..at + 8]);
    u64::from_le_bytes(bytes)
}

fn check(
    header: &[u8; HEADER_BYTES],
    key: &Key,
    expected_payload_len: u64,
    expects_encrypted: bool,
) -> Result<(u64, Option<Element>), Rejection> {
    if header[..VERSION_AT] != MAGIC {
        return Err(Rejection::BadMagic);
    }
    // Check this before the header's own checksum: another version may have changed its form.
    let version = u16_at(header, VERSION_AT);
    if version != FORMAT_VERSION {
        return Err(Rejection::Version { found: version });
    }
    if u64_at(header, HEADER_CHECKSUM_AT) != Checksum::of(&header[..HEADER_CHECKSUM_AT]) {
        return Err(Rejection::HeaderChecksum);
    }
    let found = u16_at(header, FLAGS_AT);
    let form = Form::of(found).ok_or(Rejection::Flags { found })?;
    match (expects_encrypted, form.is_encrypted) {
        (true, false) => return Err(Rejection::Unencrypted),
        // Check this before the length: a reader without keys counts the larger header of an
        // encrypted value as payload.
        (false, true) => return Err(Rejection::Encrypted),
        (false, false) | (true, true) => {}
    }
    if header[NAMESPACE_AT..KEY_AT] != key.namespace.0 {
        return Err(Rejection::Namespace);
    }
    if header[KEY_AT..WRITER_AT] != key_digest(key) {
        return Err(Rejection::Key);
    }
    let found = u64_at(header, LENGTH_AT);
    if found != expected_payload_len {
        return Err(Rejection::Length {
            expected: expected_payload_len,
            found,
        });
    }
    Ok((u64_at(header, PAYLOAD_CHECKSUM_AT), form.code))
}

/// The checksum of the payload of a value that is not encrypted. The value has `value_bytes` bytes
/// and lies in the slices from their start. If the value is no longer than a header, this is the
/// checksum of nothing.
pub fn payload_checksum(slices: &[impl Deref<Target = [u8]>], value_bytes: u64) -> u64 {
    let value_bytes = usize::try_from(value_bytes).unwrap_or(usize::MAX);
    if let Some((slice, range)) = one_piece(slices, HEADER_BYTES..value_bytes) {
        return Checksum::of(&slices[slice][range]);
    }
    let mut checksum = Checksum::new();
    let mut skip = HEADER_BYTES;
    let mut left = value_bytes;
    for slice in slices {
        let here = &slice[..left.min(slice.len())];
        left -= here.len();
        let skipped = skip.min(here.len());
        skip -= skipped;
        checksum.update(&here[skipped..]);
    }
    checksum.finish()
}

/// Checks a whole value that is not coded: header and payload in one piece, with nothing after them.
pub fn verify_value(value: &[u8], key: &Key, expected_payload_len: u64) -> Result<(), Rejection> {
    let value_bytes = value.len() as u64;
    let checksum = verify(
        header_of(&[value], value_bytes, expected_payload_len)?,
        key,
        expected_payload_len,
    )?;
    check_length(HEADER_BYTES, value_bytes, expected_payload_len)?;
    checksum.check(Checksum::of(&value[HEADER_BYTES..]))
}

/// The header of a value of `value_bytes` bytes that lies in the slices from their start, with its
/// header in the first slice.
pub(crate) fn header_of(
    slices: &[impl Deref<Target = [u8]>],
    value_bytes: u64,
    expected_payload_len: u64,
) -> Result<&[u8; HEADER_BYTES], Rejection> {
    // Bytes past the value's end are not part of it: they must not be looked at.
    beginning(slices, value_bytes)
        .first_chunk()
        .ok_or(Rejection::Truncated {
            expected: (HEADER_BYTES as u64).saturating_add(expected_payload_len),
            found: value_bytes,
        })
}

/// The beginning of a value of `value_bytes` bytes: as much of it as the first slice holds.
pub(crate) fn beginning(slices: &[impl Deref<Target = [u8]>], value_bytes: u64) -> &[u8] {
    let first = slices.first().map_or(&[][..], |first| first);
    &first[..usize::try_from(value_bytes).map_or(first.len(), |bytes| bytes.min(first.len()))]
}

/// Checks that a value is as long as its header and its payload together.
pub(crate) fn check_length(
    header_bytes: usize,
    value_bytes: u64,
    expected_payload_len: u64,
) -> Result<(), Rejection> {
    let expected = (header_bytes as u64).saturating_add(expected_payload_len);
    match value_bytes.cmp(&expected) {
        Ordering::Less => Err(Rejection::Truncated {
            expected,
            found: value_bytes,
        }),
        Ordering::Equal => Ok(()),
        Ordering::Greater => Err(Rejection::Length {
            expected: expected_payload_len,
            found: value_bytes - header_bytes as u64,
        }),
    }
}

fn key_digest(key: &Key) -> [u8; 8] {
    XxHash3_64::oneshot(&key.to_bytes()).to_le_bytes()
}
