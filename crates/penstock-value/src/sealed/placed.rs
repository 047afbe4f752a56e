//! Values that are put and lent where they lie, in this machine's memory: for copies from blocks
//! straight into values, and back, whoever makes them.

use std::io::{IoSlice, IoSliceMut};
use std::time::Instant;

use penstock_contract::memory::{self, Run, SharedMemory};
use penstock_contract::{GetRequest, Key, PutOutcome, Result};

use super::in_place::get_summed;
use super::{Got, LARGEST_HEADER_BYTES, SealedBeside, SealedStore, Wanted};
use crate::header::{self, HEADER_BYTES, Rejection, Writer};

/// Room for a value, in this machine's memory. Nobody sees the value before it is published. If this
/// is dropped before, the room is free again.
pub struct Reserved<'a> {
    room: Box<dyn memory::Reserved + 'a>,
    key: Key,
    writer: Writer,
    payload_bytes: u64,
}

/// A verified value that lies in this machine's memory. Others may give it up at any time: what was
/// copied from it counts only if it [is still there](Self::is_still) afterwards.
pub struct Lent<'a>(Box<dyn memory::Lent + 'a>);

impl Reserved<'_> {
    /// Where the payload goes, in order. Until this is published or dropped, the memory is mapped,
    /// and nobody else writes there.
    pub fn runs(&self) -> Vec<Run> {
        self.room.runs()
    }

    /// Copies the payload there, sums it on the way, and publishes the value.
    ///
    /// # Panics
    ///
    /// If the payload has more bytes than there is room for.
    pub fn fill<'b>(
        mut self,
        payload: impl IntoIterator<Item = IoSlice<'b>>,
    ) -> Result<PutOutcome> {
        let checksum = self.room.fill(&mut payload.into_iter());
        self.show(checksum)
    }

    /// Sums the payload that the caller has copied to the [runs](Self::runs), and publishes the
    /// value.
    pub fn publish(self) -> Result<PutOutcome> {
        let checksum = self.room.sum();
        self.show(checksum)
    }

    fn show(self, checksum: u64) -> Result<PutOutcome> {
        let header = header::seal(&self.key, self.writer, self.payload_bytes, checksum);
        self.room.publish(&header)
    }
}

impl Lent<'_> {
    /// Where the payload lies, in order. The memory is mapped while this lives, but others may write
    /// there.
    pub fn runs(&self) -> Vec<Run> {
        self.0.runs()
    }

    /// Whether the value was there all the time until now.
    pub fn is_still(&self) -> bool {
        self.0.is_still()
    }
}

impl SealedStore {
    /// Whether values can be put in place, and lent: the store is this machine's memory, and values
    /// are neither encrypted nor coded. The store may still refuse to have one put in place.
    pub fn is_put_in_place(&self) -> bool {
        self.places().is_some()
    }

    /// The memory of the store, if values lie there as they are.
    fn places(&self) -> Option<&dyn SharedMemory> {
        let plain = self.keys.is_none() && !self.takes_coded;
        self.store.memory().filter(|_| plain)
    }

    /// The memory that values lie in. None unless the store is this machine's memory.
    pub fn memory(&self) -> Option<Run> {
        self.store.memory().map(|memory| memory.region())
    }

    /// Room for a value that `writer` computes. None if the value is there already. `position` is as
    /// [`PutRequest::position`](penstock_contract::PutRequest::position).
    ///
    /// Fails as a put does, and with
    /// [`ErrorKind::Unsupported`](penstock_contract::ErrorKind::Unsupported) if this value must be
    /// put the usual way.
    ///
    /// # Panics
    ///
    /// Unless values can be [put in place](Self::is_put_in_place).
    pub fn reserve(
        &self,
        key: &Key,
        writer: Writer,
        payload_bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> Result<Option<Reserved<'_>>> {
        let memory = self.places().expect("values are put in place in memory");
        let room = memory.reserve(key, payload_bytes, position, deadline)?;
        Ok(room.map(|room| Reserved {
            room,
            key: *key,
            writer,
            payload_bytes,
        }))
    }

    /// A value with a payload of so many bytes, where it lies, verified there. None if it is not
    /// there.
    ///
    /// # Panics
    ///
    /// Unless values can be [put in place](Self::is_put_in_place).
    pub fn lend(
        &self,
        key: &Key,
        payload_bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> std::result::Result<Option<Lent<'_>>, Rejection> {
        let memory = self.places().expect("values are lent in memory");
        let Some(lent) = memory.lend(key, position, deadline) else {
            return Ok(None);
        };
        let verified = header::verify_form(lent.header(), key, payload_bytes);
        let verified = verified.and_then(|(checksum, code)| {
            if code.is_some() {
                return Err(Rejection::Coded);
            }
            header::check_length(HEADER_BYTES, lent.bytes(), payload_bytes)?;
            checksum.check(lent.sum())?;
            self.check_writer(header::writer_of(lent.header()))
        });
        match verified {
            Ok(()) => Ok(Some(Lent(lent))),
            // It was given up, so this says nothing about it.
            Err(_) if !lent.is_still() => Ok(None),
            Err(rejection) => Err(rejection),
        }
    }

    /// Copies a value that was put in place, to be put into another store too. It then lies at the
    /// beginning of `room`, which is taken from that: [`LARGEST_HEADER_BYTES`] more than the payload
    /// are needed. None if the value is not there any more, or is damaged.
    pub fn copy_along<'r>(
        &self,
        key: &Key,
        payload_bytes: usize,
        room: &mut &'r mut [u8],
        deadline: Instant,
    ) -> Option<SealedBeside<'r>> {
        let needed = LARGEST_HEADER_BYTES + payload_bytes;
        let (memory, rest) = std::mem::take(room).split_at_mut(needed);
        *room = rest;
        let position = GetRequest::NO_USE;
        let mut into = [IoSliceMut::new(memory)];
        let request = GetRequest {
            position,
            ..GetRequest::new(*key, &mut into)
        };
        let (outcome, checksum) = get_summed(&*self.store, request, deadline);
        let wanted = Wanted {
            key,
            context: &[],
            position,
            payload_bytes: Some(payload_bytes as u64),
            memory: into.into_iter().collect(),
        };
        match self.judge_wanted(wanted, outcome, checksum) {
            Got::Payload(_) => {
                let memory: &'r [u8] = memory;
                let value = &memory[..HEADER_BYTES + payload_bytes];
                Some(SealedBeside::verified(*key, value))
            }
            _ => None,
        }
    }
}
