//! Keys: the name of an object in every store.

use std::fmt;

use penstock_layout::Span;

/// Bytes of a namespace digest.
pub const NAMESPACE_BYTES: usize = 16;
/// Bytes of a block hash, zero-padded (SHA-256 fills them).
pub const CHUNK_BYTES: usize = 32;

/// The content of a block and of all blocks before it in its prompt: the serving engine's chained
/// block hash, zero-padded. (All hashes in a namespace are of one kind, so they have one length.)
pub type Chunk = [u8; CHUNK_BYTES];

/// A block hash has more than [`CHUNK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a block hash has {CHUNK_BYTES} bytes at most, not {0}")]
pub struct HashTooLong(pub usize);

/// Pads a block hash with zeros.
pub fn pad_hash(hash: &[u8]) -> Result<Chunk, HashTooLong> {
    let mut chunk = [0; CHUNK_BYTES];
    let start = chunk.get_mut(..hash.len());
    start.ok_or(HashTooLong(hash.len()))?.copy_from_slice(hash);
    Ok(chunk)
}

/// The fingerprint of everything that must agree before two engines share objects.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(pub [u8; NAMESPACE_BYTES]);

/// The name of one object: a namespace, a chunk and a span.
///
/// The text form, used by stores whose keys are strings, is
/// `penstock:<namespace hex>:<chunk hex>:<span>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Which engines may share the object.
    pub namespace: Namespace,
    /// The chained hash of the block, zero-padded.
    pub chunk: Chunk,
    /// The layers and heads the object holds.
    pub span: Span,
}

/// Bytes of a key in its fixed-width form.
pub const KEY_BYTES: usize = NAMESPACE_BYTES + CHUNK_BYTES + 8;

/// Prefix of every key in its text form.
pub const KEY_PREFIX: &str = "penstock:";

/// Why a text is not a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a Penstock key: {0:?}")]
pub struct NotAKey(pub String);

/// Most bytes of a key's text form.
const TEXT_BYTES: usize =
    KEY_PREFIX.len() + 2 * NAMESPACE_BYTES + 2 * CHUNK_BYTES + "::l65535-65535.h65535-65535".len();

/// The two digits of every byte.
const HEX: [[u8; 2]; 256] = {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut pairs = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [DIGITS[byte >> 4], DIGITS[byte & 15]];
        byte += 1;
    }
    pairs
};

fn append_hex(bytes: &[u8], text: &mut Vec<u8>) {
    let start = text.len();
    text.resize(start + 2 * bytes.len(), 0);
    for (pair, byte) in text[start..].chunks_exact_mut(2).zip(bytes) {
        pair.copy_from_slice(&HEX[usize::from(*byte)]);
    }
}

fn show(text: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(std::str::from_utf8(text).map_err(|_| fmt::Error)?)
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |c: u8| (c as char).to_digit(16);
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some(bytes)
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::with_capacity(2 * NAMESPACE_BYTES);
        append_hex(&self.0, &mut text);
        show(&text, f)
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({self})")
    }
}

impl Namespace {
    /// Reads the hexadecimal form.
    pub fn parse(text: &str) -> Result<Self, NotAKey> {
        unhex(text)
            .map(Self)
            .ok_or_else(|| NotAKey(text.to_owned()))
    }
}

impl Key {
    /// A key for the block of this hash, which is [padded](pad_hash).
    pub fn new(namespace: Namespace, hash: &[u8], span: Span) -> Result<Self, HashTooLong> {
        Ok(Self {
            namespace,
            chunk: pad_hash(hash)?,
            span,
        })
    }

    /// Reads the text form.
    pub fn parse(text: &str) -> Result<Self, NotAKey> {
        Self::parse_parts(text).ok_or_else(|| NotAKey(text.to_owned()))
    }

    fn parse_parts(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix(KEY_PREFIX)?.split(':');
        let namespace = Namespace(unhex(parts.next()?)?);
        let chunk = unhex(parts.next()?)?;
        let (layers, heads) = parts.next()?.strip_prefix('l')?.split_once(".h")?;
        if parts.next().is_some() {
            return None;
        }
        let range = |text: &str| {
            let (start, end) = text.split_once('-')?;
            Some(start.parse().ok()?..end.parse().ok()?)
        };
        let span = Span::new(range(layers)?, range(heads)?).ok()?;
        Some(Self {
            namespace,
            chunk,
            span,
        })
    }

    /// Appends the text form. It avoids `std::fmt`, because a look-up writes thousands of keys.
    pub fn append_text(&self, text: &mut Vec<u8>) {
        text.extend_from_slice(KEY_PREFIX.as_bytes());
        append_hex(&self.namespace.0, text);
        text.push(b':');
        append_hex(&self.chunk, text);
        let mut digits = itoa::Buffer::new();
        let (layers, heads) = (self.span.layers(), self.span.heads());
        for (before, bound) in [
            (":l", layers.start),
            ("-", layers.end),
            (".h", heads.start),
            ("-", heads.end),
        ] {
            text.extend_from_slice(before.as_bytes());
            text.extend_from_slice(digits.format(bound).as_bytes());
        }
    }

    /// The fixed-width form of the key, with every field. A value's header holds a digest of it.
    pub fn to_bytes(&self) -> [u8; KEY_BYTES] {
        let mut bytes = [0; KEY_BYTES];
        bytes[..NAMESPACE_BYTES].copy_from_slice(&self.namespace.0);
        bytes[NAMESPACE_BYTES..][..CHUNK_BYTES].copy_from_slice(&self.chunk);
        let (layers, heads) = (self.span.layers(), self.span.heads());
        for (i, n) in [layers.start, layers.end, heads.start, heads.end]
            .into_iter()
            .enumerate()
        {
            bytes[NAMESPACE_BYTES + CHUNK_BYTES + 2 * i..][..2].copy_from_slice(&n.to_le_bytes());
        }
        bytes
    }

    /// Reads the form that [`Key::to_bytes`] gives.
    pub fn from_bytes(bytes: &[u8; KEY_BYTES]) -> Result<Self, NotAKey> {
        let (namespace, rest) = bytes.split_at(NAMESPACE_BYTES);
        let (chunk, bounds) = rest.split_at(CHUNK_BYTES);
        let bound = |i: usize| u16::from_le_bytes([bounds[2 * i], bounds[2 * i + 1]]);
        let span = Span::new(bound(0)..bound(1), bound(2)..bound(3))
            .map_err(|empty| NotAKey(empty.to_string()))?;
        let mut key = Self {
            namespace: Namespace([0; NAMESPACE_BYTES]),
            chunk: [0; CHUNK_BYTES],
            span,
        };
        key.namespace.0.copy_from_slice(namespace);
        key.chunk.copy_from_slice(chunk);
        Ok(key)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::with_capacity(TEXT_BYTES);
        self.append_text(&mut text);
        show(&text, f)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_read_back_and_an_empty_span_is_no_key() {
        let key = Key {
            namespace: Namespace(*b"0123456789abcdef"),
            chunk: std::array::from_fn(|i| i as u8 * 7),
            span: Span::new(258..300, 4..513).unwrap(),
        };
        assert_eq!(Key::from_bytes(&key.to_bytes()), Ok(key));
        assert_eq!(Key::parse(&key.to_string()), Ok(key));
        assert_eq!(
            key.to_string(),
            "penstock:30313233343536373839616263646566:\
             00070e151c232a31383f464d545b626970777e858c939aa1a8afb6bdc4cbd2d9:l258-300.h4-513"
        );
        assert!(key.to_string().ends_with(&format!(":{}", key.span)));
        let mut bytes = key.to_bytes();
        bytes[KEY_BYTES - 8..KEY_BYTES - 4].copy_from_slice(&[9, 0, 9, 0]);
        assert!(Key::from_bytes(&bytes).is_err());
    }
}
