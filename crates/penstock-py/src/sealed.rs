//! Values in Python's buffers: sealed on the way out, verified on the way in, encrypted and
//! decrypted if there are keys.

use std::io::{IoSlice, IoSliceMut};

use penstock_store::value::{self, Checksum, ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Rejection};
use penstock_store::{Key, Keyring};

use crate::buffer::Part;

/// What makes a value of the caller's buffers, which are not written to.
pub(crate) enum Sealed {
    /// The header of the buffers as they are.
    Plain([u8; HEADER_BYTES]),
    /// The header, and the buffers' content encrypted.
    Encrypted([u8; ENCRYPTED_HEADER_BYTES], Vec<u8>),
}

impl Sealed {
    pub(crate) fn of(
        key: &Key,
        parts: &[Part],
        keys: Option<&Keyring>,
    ) -> penstock_store::Result<Self> {
        let bytes = |part: &Part| part.pinned().bytes().len();
        let len: usize = parts.iter().map(bytes).sum();
        if let Some(keys) = keys {
            let mut payload = concatenated(parts, len);
            let header = keys.seal(key, b"", &mut payload)?;
            return Ok(Self::Encrypted(header, payload));
        }
        let mut checksum = Checksum::new();
        for part in parts {
            checksum.update(part.pinned().bytes());
        }
        let header = value::seal(key, len as u64, checksum.finish());
        Ok(Self::Plain(header))
    }

    /// The value, piece by piece.
    pub(crate) fn slices<'a>(&'a self, parts: &'a [Part]) -> Vec<IoSlice<'a>> {
        match self {
            Self::Plain(header) => std::iter::once(header.as_slice())
                .chain(parts.iter().map(|part| part.pinned().bytes()))
                .map(IoSlice::new)
                .collect(),
            Self::Encrypted(header, payload) => vec![IoSlice::new(header), IoSlice::new(payload)],
        }
    }
}

/// Where a value arrives: its header here, its payload in the caller's buffers.
pub(crate) struct Arrival<'a> {
    key: &'a Key,
    parts: &'a [Part],
    keys: Option<&'a Keyring>,
    header_bytes: usize,
    /// The header; what is left over lies behind the buffers. So a value that is encrypted arrives
    /// where there are no keys, and can be told from one that is too large.
    spare: [u8; ENCRYPTED_HEADER_BYTES],
}

/// What became of a value that arrived.
pub(crate) enum Verdict {
    /// The payload, of so many bytes, fills the buffers from their start.
    Payload(u64),
    /// It has so many, more than the buffers.
    TooLarge(u64),
    Rejected(Rejection),
}

impl<'a> Arrival<'a> {
    pub(crate) fn new(key: &'a Key, parts: &'a [Part], keys: Option<&'a Keyring>) -> Self {
        let header_bytes = match keys {
            Some(_) => ENCRYPTED_HEADER_BYTES,
            None => HEADER_BYTES,
        };
        Self {
            key,
            parts,
            keys,
            header_bytes,
            spare: [0; ENCRYPTED_HEADER_BYTES],
        }
    }

    /// Where the value's bytes go, in order.
    pub(crate) fn slices(&mut self) -> Vec<IoSliceMut<'_>> {
        let (header, rest) = self.spare.split_at_mut(self.header_bytes);
        let mut slices = Vec::with_capacity(2 + self.parts.len());
        slices.push(IoSliceMut::new(header));
        slices.extend(self.parts.iter().map(|part| {
            // SAFETY: destinations were checked not to overlap, and no other slice of theirs is
            // made until these are gone.
            #[allow(unsafe_code)]
            IoSliceMut::new(unsafe { part.pinned().bytes_mut() })
        }));
        slices.push(IoSliceMut::new(rest));
        slices
    }

    /// Whose value is awaited.
    pub(crate) fn key(&self) -> &'a Key {
        self.key
    }

    /// Payload bytes of a value that is larger than all there is room for.
    pub(crate) fn payload_of(&self, value_bytes: u64) -> u64 {
        value_bytes.saturating_sub(self.header_bytes as u64)
    }

    /// Verifies the value of so many bytes that arrived, and decrypts it; the store may have worked
    /// out its payload's checksum.
    pub(crate) fn verify(&self, value_bytes: u64, checksum: Option<u64>) -> Verdict {
        let checked = match self.keys {
            Some(keys) => self.open(keys, value_bytes),
            None => self.check(value_bytes, checksum),
        };
        checked.unwrap_or_else(Verdict::Rejected)
    }

    fn check(&self, value_bytes: u64, known: Option<u64>) -> Result<Verdict, Rejection> {
        let truncated = Rejection::Truncated {
            expected: HEADER_BYTES as u64,
            found: value_bytes,
        };
        let payload = value_bytes
            .checked_sub(HEADER_BYTES as u64)
            .ok_or(truncated)?;
        let header = self.spare.first_chunk().ok_or(truncated)?;
        let expected = value::verify(header, self.key, payload)?;
        let room: u64 = self
            .parts
            .iter()
            .map(|part| part.pinned().bytes().len() as u64)
            .sum();
        if payload > room {
            return Ok(Verdict::TooLarge(payload));
        }
        expected.check(known.unwrap_or_else(|| self.checksum(payload)))?;
        Ok(Verdict::Payload(payload))
    }

    fn checksum(&self, payload: u64) -> u64 {
        let mut checksum = Checksum::new();
        let mut rest = payload as usize;
        for part in self.parts {
            let bytes = part.pinned().bytes();
            let here = rest.min(bytes.len());
            checksum.update(&bytes[..here]);
            rest -= here;
        }
        checksum.finish()
    }

    fn open(&self, keys: &Keyring, value_bytes: u64) -> Result<Verdict, Rejection> {
        let arrived = usize::try_from(value_bytes).unwrap_or(usize::MAX);
        let header = &self.spare[..arrived.min(ENCRYPTED_HEADER_BYTES)];
        let payload = self.payload_of(value_bytes);
        let opener = keys.check(header, self.key, b"", payload)?;
        let len = arrived - header.len();
        if let [part] = self.parts {
            // SAFETY: the slices that the value arrived in are gone, and destinations do not
            // overlap.
            #[allow(unsafe_code)]
            let bytes = unsafe { part.pinned().bytes_mut() };
            opener.open(&mut bytes[..len])?;
            return Ok(Verdict::Payload(payload));
        }
        let mut whole = concatenated(self.parts, len);
        opener.open(&mut whole)?;
        let mut rest = whole.as_slice();
        for part in self.parts {
            // SAFETY: as above.
            #[allow(unsafe_code)]
            let bytes = unsafe { part.pinned().bytes_mut() };
            let (here, later) = rest.split_at(rest.len().min(bytes.len()));
            bytes[..here.len()].copy_from_slice(here);
            rest = later;
        }
        Ok(Verdict::Payload(payload))
    }
}

/// The first `len` bytes of the buffers, which must be in one piece to be encrypted or decrypted.
fn concatenated(parts: &[Part], len: usize) -> Vec<u8> {
    let mut whole = Vec::with_capacity(len);
    for part in parts {
        let bytes = part.pinned().bytes();
        whole.extend_from_slice(&bytes[..bytes.len().min(len - whole.len())]);
    }
    whole
}
