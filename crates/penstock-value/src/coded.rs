//! Values that may be coded: checked, and from the code back to the payload.

use std::io::IoSliceMut;
use std::ops::Deref;

use penstock_contract::{Key, slices};

use crate::compress::{self, Element, MOST_SHRINKING};
use crate::copies::SummedCopy;
use crate::header::{self, Checksum, ExpectedChecksum, HEADER_BYTES, Rejection};

/// A value whose header, length and, as far as that can be said, payload have been checked.
#[must_use = "a coded payload is not verified until it is decoded"]
pub(crate) enum Whole {
    /// The payload is there, and it is verified.
    Plain,
    /// The payload's code is there.
    Coded(Coded),
}

/// Checks a value of `value_bytes` bytes that lies in the slices from their start, with its header
/// in the first slice. `known` is the [`header::payload_checksum`] of a value that is not coded, if
/// that is known.
pub(crate) fn verify_slices(
    slices: &[impl Deref<Target = [u8]>],
    value_bytes: u64,
    key: &Key,
    payload_len: u64,
    known: Option<u64>,
) -> Result<Whole, Rejection> {
    let header = header::header_of(slices, value_bytes, payload_len)?;
    let (checksum, code) = header::verify_form(header, key, payload_len)?;
    if let Some(element) = code {
        let sum = Some(checksum);
        return Coded::checked(element, HEADER_BYTES, value_bytes, payload_len, sum)
            .map(Whole::Coded);
    }
    header::check_length(HEADER_BYTES, value_bytes, payload_len)?;
    checksum
        .check(known.unwrap_or_else(|| header::payload_checksum(slices, value_bytes)))
        .map(|()| Whole::Plain)
}

/// The code of a payload, in a value whose header and length have been checked. Whether it is what
/// was put shows only when it is decoded.
#[must_use = "a payload is not verified until it is decoded"]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coded {
    element: Element,
    header_bytes: usize,
    coded_bytes: usize,
    payload_bytes: usize,
    /// The payload's checksum; None if the code has been authenticated.
    checksum: Option<ExpectedChecksum>,
}

impl Coded {
    /// The code in a value of `value_bytes`, of a payload of `payload_len`. A code is shorter than
    /// its payload, but not by any amount: so a header does not make a reader reserve memory.
    pub(crate) fn checked(
        element: Element,
        header_bytes: usize,
        value_bytes: u64,
        payload_len: u64,
        checksum: Option<ExpectedChecksum>,
    ) -> Result<Self, Rejection> {
        let found = value_bytes.saturating_sub(header_bytes as u64);
        if found >= payload_len {
            return Err(Rejection::Length {
                expected: payload_len,
                found,
            });
        }
        let coded_bytes = usize::try_from(found).map_err(|_| Rejection::BadCode)?;
        let payload_bytes = usize::try_from(payload_len).map_err(|_| Rejection::BadCode)?;
        if payload_bytes > coded_bytes.saturating_mul(MOST_SHRINKING) {
            return Err(Rejection::BadCode);
        }
        Ok(Self {
            element,
            header_bytes,
            coded_bytes,
            payload_bytes,
            checksum,
        })
    }

    /// Decodes in the slices that the value lies in, from their start. There must be room for the
    /// payload, which then lies behind the header. If this fails, what lies there means nothing.
    /// `scratch` takes the code.
    pub(crate) fn decode(
        self,
        memory: &mut [IoSliceMut<'_>],
        scratch: &mut Vec<u8>,
    ) -> Result<(), Rejection> {
        let start = self.header_bytes;
        match slices::one_piece(memory, start..start + self.coded_bytes) {
            Some((slice, range)) => {
                scratch.clear();
                scratch.extend_from_slice(&memory[slice][range]);
            }
            None => {
                let from = &slices::remaining_mut(memory, start);
                *scratch = slices::first_bytes(from, self.coded_bytes);
            }
        }
        let payload = start..start + self.payload_bytes;
        if let Some((slice, range)) = slices::one_piece(memory, payload) {
            return self.decode_into(scratch, &mut memory[slice][range]);
        }
        let whole = self.decoded(scratch)?;
        slices::scatter(&whole, &mut slices::remaining_mut(memory, start));
        Ok(())
    }

    /// Decodes a value that lies in one piece, header in front, to where its payload is used. If this
    /// fails, what lies there means nothing.
    pub(crate) fn decode_to(
        self,
        value: &[u8],
        into: &mut [IoSliceMut<'_>],
    ) -> Result<(), Rejection> {
        let code = &value[self.header_bytes..][..self.coded_bytes];
        let mut copy = SummedCopy::new(self.payload_bytes as u64, true);
        let mut slices = into.iter_mut().map(|slice| &mut **slice);
        let mut slice: &mut [u8] = &mut [];
        let mut put_down = |mut piece: &[u8]| {
            while !piece.is_empty() {
                if slice.is_empty() {
                    slice = slices.next().expect("room for the payload");
                    continue;
                }
                let len = slice.len().min(piece.len());
                let (room, later_room) = std::mem::take(&mut slice).split_at_mut(len);
                let (now, later) = piece.split_at(len);
                copy.copy(now, room);
                (slice, piece) = (later_room, later);
            }
        };
        compress::decode_each(self.element, code, self.payload_bytes, &mut put_down)
            .map_err(|_| Rejection::BadCode)?;
        match self.checksum {
            Some(checksum) => checksum.check(copy.finish()),
            None => Ok(()),
        }
    }

    /// The payload of a code that lies in one piece.
    pub(crate) fn decoded(self, code: &[u8]) -> Result<Vec<u8>, Rejection> {
        let mut payload = vec![0; self.payload_bytes];
        self.decode_into(code, &mut payload)?;
        Ok(payload)
    }

    fn decode_into(self, code: &[u8], payload: &mut [u8]) -> Result<(), Rejection> {
        compress::decode(self.element, code, payload).map_err(|_| Rejection::BadCode)?;
        match self.checksum {
            Some(checksum) => checksum.check(Checksum::of(payload)),
            None => Ok(()),
        }
    }
}
