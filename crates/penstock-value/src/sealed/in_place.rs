//! Stores in this machine's memory: values come from them to where they are used in one copy, and
//! processes agree on which of them brings a value there.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_contract::memory::Claim;
use penstock_contract::slices::{remaining_mut, room_of, scatter};
use penstock_contract::{GetOutcome, GetRequest, Key, Result, Store, unanswered};

use super::{Got, LARGEST_HEADER_BYTES, SealedStore, Verified, Wanted};
use crate::coded::{self, Whole};
use crate::header::{self, HEADER_BYTES};

impl SealedStore {
    /// Whether the store is this machine's memory.
    pub fn is_in_memory(&self) -> bool {
        self.store.memory().is_some()
    }

    /// Whether values can be read in place: the nearest store is this machine's memory, and values
    /// are not encrypted.
    pub fn is_read_in_place(&self) -> bool {
        self.keys.is_none() && self.nearest().memory().is_some()
    }

    /// Gets a value from the nearest store straight to where it is used. If that store is not read
    /// in place, this is a miss.
    ///
    /// What the memory holds afterwards has a meaning only with [`Got::Payload`]. Otherwise the
    /// value may be elsewhere. A damaged value stays where it is: get it as usual to have it mended,
    /// or [discard](Self::discard) it.
    pub fn read_in_place(&self, mut wanted: Wanted<'_>, deadline: Instant) -> Got {
        if !self.is_read_in_place() {
            return Got::Miss;
        }
        if self.takes_coded {
            let mut scratch = self.scratch.lock().pop().unwrap_or_default();
            let got = self.read_coded(wanted, &mut scratch, deadline);
            self.scratch.lock().push(scratch);
            return got;
        }
        let request = GetRequest {
            position: wanted.position,
            is_in_place: true,
            ..GetRequest::new(*wanted.key, &mut wanted.memory)
        };
        let (outcome, checksum) = get_summed(self.nearest(), request, deadline);
        self.judge_wanted(wanted, outcome, checksum)
    }

    /// Gets a value that may be coded: it comes into `scratch`, and from there to where it is used.
    fn read_coded(&self, wanted: Wanted<'_>, scratch: &mut Vec<u8>, deadline: Instant) -> Got {
        let Wanted {
            key,
            position,
            payload_bytes,
            mut memory,
            ..
        } = wanted;
        let room = room_of(&memory);
        let Some(most) = room.checked_sub(LARGEST_HEADER_BYTES as u64) else {
            return Got::Miss;
        };
        // What is left of an earlier value need not be cleared: a store says how much it wrote.
        if (scratch.len() as u64) < room {
            scratch.resize(room as usize, 0);
        }
        let mut into = [IoSliceMut::new(&mut scratch[..room as usize])];
        let request = GetRequest {
            position,
            ..GetRequest::new(*key, &mut into)
        };
        let (outcome, checksum) = get_summed(self.nearest(), request, deadline);
        self.judge_by(outcome, payload_bytes, |value_bytes| {
            let arrived = value_bytes.min(room);
            let value = &scratch[..arrived as usize];
            let bytes =
                payload_bytes.unwrap_or_else(|| header::payload_len(value, arrived, HEADER_BYTES));
            let whole = coded::verify_slices(&[value], arrived, key, bytes, checksum)?;
            let writer = header::writer_of(header::header_of(&[value], arrived, bytes)?);
            self.check_writer(writer)?;
            if bytes > most {
                return Ok(Got::TooLarge(bytes));
            }
            let memory = &mut remaining_mut(&mut memory, HEADER_BYTES);
            match whole {
                Whole::Plain => scatter(&value[HEADER_BYTES..], memory),
                Whole::Coded(coded) => coded.decode_to(value, memory)?,
            }
            Ok(Got::Payload(Verified::as_it_came(bytes, writer)))
        })
    }

    /// Removes a value that was damaged when it was read in place, and counts it as rejected.
    pub fn discard(&self, key: &Key, deadline: Instant) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        // If this fails, the value will be found damaged again.
        let _ = self.store.remove(&[*key], deadline);
    }

    /// Maps memory that the stores share with other processes, until `stop` says so. The first
    /// loads and stores then need not do it. To be called from a thread that nobody waits for.
    pub fn warm_up(&self, stop: &dyn Fn() -> bool) {
        warm_up(&*self.store, stop);
    }

    /// Asks to be the one process that brings a value into this store from elsewhere. None while
    /// another process is bringing it. A store that no other process uses always agrees.
    pub fn claim(&self, key: &Key) -> Option<Claim<'_>> {
        match self.store.memory() {
            Some(memory) => memory.claim(key),
            None => Some(Box::new(())),
        }
    }

    fn nearest(&self) -> &dyn Store {
        let tiers = self.store.tiers();
        &**tiers.first().unwrap_or(&self.store)
    }
}

fn warm_up(store: &dyn Store, stop: &dyn Fn() -> bool) {
    if let Some(memory) = store.memory() {
        memory.warm_up(stop);
    }
    for tier in store.tiers() {
        warm_up(&**tier, stop);
    }
}

/// Gets one value, with its payload's checksum if the store computes it.
pub(super) fn get_summed(
    store: &dyn Store,
    request: GetRequest<'_, '_>,
    deadline: Instant,
) -> (Result<GetOutcome>, Option<u64>) {
    let mut batch = [GetRequest {
        wants_checksum: true,
        ..request
    }];
    store.get_many(&mut batch, deadline);
    let [request] = batch;
    let outcome = request.outcome.unwrap_or_else(|| Err(unanswered()));
    (outcome, request.checksum)
}
