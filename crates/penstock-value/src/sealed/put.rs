//! Puts: sealed, then sent.

use std::io::IoSlice;
use std::time::Instant;

use penstock_contract::slices::len_of;
use penstock_contract::{Key, PutOutcome, PutRequest, Result, unanswered};
use smallvec::SmallVec;

use super::SealedStore;
use crate::compress::{self, Element};
use crate::header::{self, Checksum, ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Label};

/// A value that was made in place, where its payload lay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedInPlace {
    key: Key,
    bytes: usize,
    is_encrypted: bool,
}

/// A whole value that lies in memory of its own: a coded one beside its payload, or one that was
/// copied out of this machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedBeside<'r> {
    key: Key,
    value: &'r [u8],
}

/// The seal of a payload that itself stays as it is.
pub struct Seal {
    key: Key,
    form: Form,
}

enum Form {
    /// The header of the payload.
    Plain([u8; HEADER_BYTES]),
    /// The header, and the payload encrypted.
    Encrypted([u8; ENCRYPTED_HEADER_BYTES], Vec<u8>),
}

/// A whole value, ready to be put.
pub struct SealedValue<'a> {
    key: Key,
    position: u64,
    slices: SmallVec<[IoSlice<'a>; 3]>,
}

impl SealedInPlace {
    /// The value, which lies at the beginning of `memory`. `position` is as
    /// [`PutRequest::position`].
    pub fn value<'a>(&self, memory: &'a [u8], position: u64) -> SealedValue<'a> {
        SealedValue {
            key: self.key,
            position,
            slices: std::iter::once(IoSlice::new(&memory[..self.bytes])).collect(),
        }
    }

    /// Bytes of the value, header included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the memory now holds ciphertext in place of the payload.
    pub fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }
}

impl<'r> SealedBeside<'r> {
    /// A value that was verified, and is neither encrypted nor coded.
    pub(super) fn verified(key: Key, value: &'r [u8]) -> Self {
        Self { key, value }
    }

    /// The value. `position` is as [`PutRequest::position`].
    pub fn value(&self, position: u64) -> SealedValue<'_> {
        SealedValue {
            key: self.key,
            position,
            slices: std::iter::once(IoSlice::new(self.value)).collect(),
        }
    }
}

impl Seal {
    /// The value, made of the payload that was sealed. `position` is as [`PutRequest::position`].
    pub fn value<'a>(
        &'a self,
        payload: impl Iterator<Item = &'a [u8]>,
        position: u64,
    ) -> SealedValue<'a> {
        let slices = match &self.form {
            Form::Plain(header) => std::iter::once(header.as_slice())
                .chain(payload)
                .map(IoSlice::new)
                .collect(),
            Form::Encrypted(header, payload) => [header.as_slice(), payload]
                .into_iter()
                .map(IoSlice::new)
                .collect(),
        };
        SealedValue {
            key: self.key,
            position,
            slices,
        }
    }
}

impl SealedValue<'_> {
    /// Bytes of the value, header included.
    pub fn bytes(&self) -> u64 {
        len_of(&self.slices)
    }
}

impl SealedStore {
    /// Makes a value of a payload that lies behind room for the header. With keys, it is encrypted
    /// in place. `checksum` is the payload's; with keys it is not looked at.
    ///
    /// Fails as [`Keyring::seal`](crate::Keyring::seal) does.
    pub fn seal_in_place(
        &self,
        label: Label<'_>,
        value: &mut [u8],
        checksum: u64,
    ) -> Result<SealedInPlace> {
        let (header, payload) = value.split_at_mut(self.header_bytes());
        match &self.keys {
            Some(keys) => header.copy_from_slice(&keys.seal(label, payload)?),
            None => {
                let len = payload.len() as u64;
                header.copy_from_slice(&header::seal(label.key, label.writer, len, checksum));
            }
        }
        Ok(SealedInPlace {
            key: *label.key,
            bytes: value.len(),
            is_encrypted: self.keys.is_some(),
        })
    }

    /// Makes a coded value of a payload of such elements, at the beginning of `room`, and takes that
    /// from it. The payload stays as it is. Room for header and payload is always enough. `checksum`
    /// is as for [`seal_in_place`](Self::seal_in_place).
    ///
    /// `None` if a coded value would be no shorter. Otherwise fails as
    /// [`Keyring::seal`](crate::Keyring::seal) does.
    ///
    /// # Panics
    ///
    /// If there is no room for the header.
    pub fn seal_coded<'r>(
        &self,
        label: Label<'_>,
        element: Element,
        payload: &[u8],
        checksum: u64,
        room: &mut &'r mut [u8],
    ) -> Result<Option<SealedBeside<'r>>> {
        let header_bytes = self.header_bytes();
        let Some(bytes) = compress::encode(element, payload, &mut room[header_bytes..]) else {
            return Ok(None);
        };
        let (value, rest) = std::mem::take(room).split_at_mut(header_bytes + bytes);
        *room = rest;
        let (header, code) = value.split_at_mut(header_bytes);
        let payload_len = payload.len() as u64;
        let code_of = Some(element);
        match &self.keys {
            Some(keys) => {
                let sealed = keys.seal_form(label, code, payload_len, code_of)?;
                header.copy_from_slice(&sealed);
            }
            None => {
                let form = header::Form {
                    is_encrypted: false,
                    code: code_of,
                };
                header.copy_from_slice(&header::seal_form(
                    form,
                    label.key,
                    label.writer,
                    payload_len,
                    checksum,
                ));
            }
        }
        Ok(Some(SealedBeside {
            key: *label.key,
            value,
        }))
    }

    /// Makes a coded value of one that was [copied along](Self::copy_along), see
    /// [`seal_coded`](Self::seal_coded).
    pub fn code_beside<'r>(
        &self,
        whole: &SealedBeside<'_>,
        element: Element,
        room: &mut &'r mut [u8],
    ) -> Result<Option<SealedBeside<'r>>> {
        let (header, payload) =
            (whole.value.split_first_chunk()).expect("a whole value has a header");
        let checksum = header::stated_checksum(header);
        let label = Label {
            writer: header::writer_of(header),
            ..Label::of(&whole.key)
        };
        self.seal_coded(label, element, payload, checksum, room)
    }

    /// Makes a value of a payload that lies in pieces, and that nobody is known to have computed. The
    /// pieces are not written to: with keys, a
    /// copy is encrypted.
    ///
    /// Fails as [`Keyring::seal`](crate::Keyring::seal) does.
    pub fn seal<'a>(
        &self,
        key: &Key,
        context: &[u8],
        payload: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<Seal> {
        let label = Label {
            context,
            ..Label::of(key)
        };
        let bytes = payload.clone().map(<[u8]>::len).sum();
        let form = match &self.keys {
            Some(keys) => {
                let mut copy = Vec::with_capacity(bytes);
                payload.for_each(|piece| copy.extend_from_slice(piece));
                Form::Encrypted(keys.seal(label, &mut copy)?, copy)
            }
            None => {
                let mut checksum = Checksum::new();
                payload.for_each(|piece| checksum.update(piece));
                Form::Plain(header::seal(
                    key,
                    label.writer,
                    bytes as u64,
                    checksum.finish(),
                ))
            }
        };
        Ok(Seal { key: *key, form })
    }

    /// Puts a batch, pipelined where the store can. The outcomes are in the batch's order.
    pub fn put_many(
        &self,
        batch: &[SealedValue<'_>],
        deadline: Instant,
    ) -> Vec<Result<PutOutcome>> {
        let mut requests: Vec<PutRequest<'_>> = batch
            .iter()
            .map(|value| PutRequest {
                position: value.position,
                ..PutRequest::new(value.key, &value.slices)
            })
            .collect();
        if !requests.is_empty() {
            self.store.put_many(&mut requests, deadline);
        }
        requests
            .into_iter()
            .map(|request| request.outcome.unwrap_or_else(|| Err(unanswered())))
            .collect()
    }
}
