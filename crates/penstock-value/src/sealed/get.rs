//! Gets: fetched, verified, mended.

use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_contract::slices::room_of;
use penstock_contract::{Error, GetOutcome, GetRequest, Key, Result, Store, unanswered};

use super::{LARGEST_HEADER_BYTES, Memory, SealedStore};
use crate::coded::{self, Coded, Whole};
use crate::header::{self, Rejection, Writer};

/// One value that is wanted, and the memory in which it arrives.
pub struct Wanted<'a> {
    /// The object's name.
    pub key: &'a Key,
    /// What went into the value's encryption besides the keys; empty for nothing.
    pub context: &'a [u8],
    /// Tokens before the value in its prompt, as in [`GetRequest::position`].
    pub position: u64,
    /// Bytes that the payload must have. `None` accepts any number for which there is room.
    pub payload_bytes: Option<u64>,
    /// In all, [`LARGEST_HEADER_BYTES`] more than the room for the payload. The first slice has
    /// room for the header.
    pub memory: Memory<'a>,
}

/// Whoever wants a value and has the memory in which it arrives. A destination is passed on
/// together with its value, so a small one is faster.
pub trait Destination {
    /// What is wanted: the same at each call. Headers have `header_bytes` bytes.
    fn wanted(&mut self, header_bytes: usize) -> Wanted<'_>;
}

/// A value as the store gave it, or the store's answer that it gave none. Nobody has judged it yet.
#[must_use = "nothing is known of a value before it is verified"]
pub struct Arrival<D> {
    destination: D,
    outcome: Result<GetOutcome>,
    checksum: Option<u64>,
}

impl<D> Arrival<D> {
    /// Who asked for the value. If nobody wants the value any more, it need not be verified.
    pub fn destination(&self) -> &D {
        &self.destination
    }
}

/// A value that did not verify.
#[must_use = "a damaged value stays in the store until it is mended"]
pub struct Rejected<D> {
    destination: D,
    rejection: Rejection,
    /// The length that the store said.
    bytes: u64,
}

impl<D> Rejected<D> {
    /// Where the value arrived.
    pub fn destination(&self) -> &D {
        &self.destination
    }

    /// Why the value was not accepted.
    pub fn rejection(&self) -> Rejection {
        self.rejection
    }
}

/// Proof that a destination holds the payload of a value that arrived whole, under its own key, and
/// matched its checksum or its authentication. Only a [`SealedStore`] gives this proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    bytes: u64,
    writer: Writer,
    mended: bool,
}

impl Verified {
    pub(super) fn as_it_came(bytes: u64, writer: Writer) -> Self {
        Self {
            bytes,
            writer,
            mended: false,
        }
    }

    /// Who computed the payload.
    pub fn writer(self) -> Writer {
        self.writer
    }

    /// Bytes of the payload, which lies behind the header.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// Whether it was mended: the copy that arrived first did not verify, and a tier then gave a
    /// whole one.
    pub fn is_mended(self) -> bool {
        self.mended
    }
}

/// What became of a get, verification included. What the destination holds has a meaning only with
/// [`Got::Payload`].
#[derive(Debug)]
pub enum Got {
    /// The payload is there.
    Payload(Verified),
    /// The store has no such value.
    Miss,
    /// The payload, of so many bytes, is larger than the room for it. If not even a code of it found
    /// room, the bytes are the code's.
    TooLarge(u64),
    /// The value did not verify, and no tier had one that does.
    Rejected(Rejection),
    /// The store failed.
    Failed(Error),
}

/// The length that a store said of a value.
fn bytes_of(outcome: &Result<GetOutcome>) -> u64 {
    match outcome {
        Ok(GetOutcome::Hit(bytes) | GetOutcome::TooLarge(bytes)) => *bytes,
        Ok(GetOutcome::Miss) | Err(_) => 0,
    }
}

impl SealedStore {
    /// Gets a batch from the store, as it lies there, not verified. The answers are in the batch's
    /// order.
    pub fn fetch<D: Destination>(&self, mut batch: Vec<D>, deadline: Instant) -> Vec<Arrival<D>> {
        let header_bytes = self.header_bytes();
        let answers: Vec<_> = {
            let mut wanted: Vec<Wanted<'_>> = batch
                .iter_mut()
                .map(|destination| destination.wanted(header_bytes))
                .collect();
            let mut requests: Vec<GetRequest<'_, '_>> = wanted
                .iter_mut()
                .map(|wanted| GetRequest {
                    position: wanted.position,
                    // The checksum of an encrypted or coded value covers other bytes.
                    wants_checksum: self.keys.is_none() && !self.takes_coded,
                    ..GetRequest::new(*wanted.key, &mut wanted.memory)
                })
                .collect();
            self.store.get_many(&mut requests, deadline);
            requests
                .into_iter()
                .map(|request| (request.outcome, request.checksum))
                .collect()
        };
        batch
            .into_iter()
            .zip(answers)
            .map(|(destination, (outcome, checksum))| Arrival {
                destination,
                outcome: outcome.unwrap_or_else(|| Err(unanswered())),
                checksum,
            })
            .collect()
    }

    /// Verifies a value, and decrypts and decodes it in place. Whole values should be used before
    /// rejected ones are mended, because mending takes further round trips.
    pub fn verify<D: Destination>(
        &self,
        arrival: Arrival<D>,
    ) -> std::result::Result<(D, Got), Rejected<D>> {
        let Arrival {
            mut destination,
            outcome,
            checksum,
        } = arrival;
        let bytes = bytes_of(&outcome);
        match self.judge(&mut destination, outcome, checksum) {
            Got::Rejected(rejection) => {
                self.rejected.fetch_add(1, Ordering::Relaxed);
                Err(Rejected {
                    destination,
                    rejection,
                    bytes,
                })
            }
            got => Ok((destination, got)),
        }
    }

    /// Mends a value that did not verify. Removes its damaged copies, so that the value is put
    /// anew, and gets a whole copy if another tier has one. Copies that may be good for readers
    /// with other keys stay.
    ///
    /// A store without tiers has only the one copy, which is removed without getting it again. A copy
    /// that cannot be removed by `remove_by` stays, and will be found damaged again. So does one that
    /// the store doubts, see [`Store::remove_damaged`].
    pub fn mend<D: Destination>(
        &self,
        rejected: Rejected<D>,
        get_by: Instant,
        remove_by: Instant,
    ) -> (D, Got) {
        let Rejected {
            mut destination,
            rejection,
            bytes,
        } = rejected;
        let key = *destination.wanted(self.header_bytes()).key;
        let remove = |store: &dyn Store, bytes| {
            // Best effort, as the documentation says.
            let _ = store.remove_damaged(&key, bytes, remove_by);
        };
        let tiers = self.store.tiers();
        if tiers.is_empty() && !rejection.is_foreign() {
            remove(&*self.store, bytes);
        }
        for tier in tiers {
            let outcome = {
                let mut wanted = destination.wanted(self.header_bytes());
                tier.get(&key, &mut wanted.memory, get_by)
            };
            let bytes = bytes_of(&outcome);
            match self.judge(&mut destination, outcome, None) {
                Got::Payload(verified) => {
                    self.mended.fetch_add(1, Ordering::Relaxed);
                    let mended = true;
                    return (destination, Got::Payload(Verified { mended, ..verified }));
                }
                too_large @ Got::TooLarge(_) => return (destination, too_large),
                Got::Rejected(why) if !why.is_foreign() => remove(&**tier, bytes),
                Got::Rejected(_) | Got::Miss | Got::Failed(_) => {}
            }
        }
        (destination, Got::Rejected(rejection))
    }

    /// What a store's answer amounts to. `checksum` is the payload's, if the store computed it.
    fn judge(
        &self,
        destination: &mut impl Destination,
        outcome: Result<GetOutcome>,
        checksum: Option<u64>,
    ) -> Got {
        self.judge_wanted(destination.wanted(self.header_bytes()), outcome, checksum)
    }

    /// What a store's answer amounts to, where the destination is gone.
    pub(super) fn judge_wanted(
        &self,
        wanted: Wanted<'_>,
        outcome: Result<GetOutcome>,
        checksum: Option<u64>,
    ) -> Got {
        let payload_bytes = wanted.payload_bytes;
        self.judge_by(outcome, payload_bytes, |bytes| {
            self.check(wanted, bytes, checksum)
        })
    }

    /// What a store's answer amounts to, if `check` judges a value that has arrived.
    pub(super) fn judge_by(
        &self,
        outcome: Result<GetOutcome>,
        payload_bytes: Option<u64>,
        check: impl FnOnce(u64) -> std::result::Result<Got, Rejection>,
    ) -> Got {
        match outcome {
            Ok(GetOutcome::Hit(bytes)) => check(bytes).unwrap_or_else(Got::Rejected),
            Ok(GetOutcome::TooLarge(bytes)) => {
                let found = bytes.saturating_sub(self.header_bytes() as u64);
                match payload_bytes {
                    Some(expected) => Got::Rejected(Rejection::Length { expected, found }),
                    None => Got::TooLarge(found),
                }
            }
            Ok(GetOutcome::Miss) => Got::Miss,
            Err(error) => Got::Failed(error),
        }
    }

    fn check(
        &self,
        wanted: Wanted<'_>,
        value_bytes: u64,
        checksum: Option<u64>,
    ) -> std::result::Result<Got, Rejection> {
        let Wanted {
            key,
            context,
            payload_bytes,
            mut memory,
            ..
        } = wanted;
        let room = room_of(&memory);
        // A store that reports more bytes than there is room for has broken its contract.
        let arrived = value_bytes.min(room);
        let bytes = payload_bytes.unwrap_or_else(|| {
            let beginning = header::beginning(&memory, arrived);
            header::payload_len(beginning, arrived, self.header_bytes())
        });
        let whole = match &self.keys {
            Some(keys) => keys.open_slices(&mut memory, arrived, key, context, bytes)?,
            None => coded::verify_slices(&memory, arrived, key, bytes, checksum)?,
        };
        if matches!(whole, Whole::Coded(_)) && !self.takes_coded {
            return Err(Rejection::Coded);
        }
        let writer = header::writer_of(header::header_of(&memory, arrived, bytes)?);
        self.check_writer(writer)?;
        if bytes > room.saturating_sub(LARGEST_HEADER_BYTES as u64) {
            return Ok(Got::TooLarge(bytes));
        }
        if let Whole::Coded(coded) = whole {
            self.decode(coded, &mut memory)?;
        }
        Ok(Got::Payload(Verified::as_it_came(bytes, writer)))
    }

    fn decode(&self, coded: Coded, memory: &mut Memory<'_>) -> std::result::Result<(), Rejection> {
        let mut scratch = self.scratch.lock().pop().unwrap_or_default();
        let decoded = coded.decode(memory, &mut scratch);
        self.scratch.lock().push(scratch);
        decoded
    }
}
