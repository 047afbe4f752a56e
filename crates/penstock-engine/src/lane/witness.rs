//! Witnesses: what the store has already is compared with what was computed here.
//!
//! The put lane does it, which gives way to all that computes. The scheduler half says how often.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_contract::GetRequest;
use penstock_value::compare::{Compared, compare};
use penstock_value::header::Writer;
use penstock_value::sealed::{Destination, Got, LARGEST_HEADER_BYTES, Verified, Wanted};
use penstock_value::{Accused, SealedStore};

use super::Inner;
use super::fetching::REMOVE_TIMEOUT;
use crate::arena::{Gathered, Slot};
use crate::job::Transfer;
use crate::queue::{Payload, Put};
use crate::stats::add_time;
use crate::store_job::StoreTicket;
use crate::{Fault, Outcome};

/// An object that is to be compared.
pub(super) type Witness = (StoreTicket, Slot<Gathered>);

/// The objects of a batch that are to be compared, and the others.
pub(super) fn split(inner: &Inner, batch: Vec<Put>) -> (Vec<Witness>, Vec<Put>) {
    let (mut witnesses, mut others) = (Vec::new(), Vec::new());
    for put in batch {
        match put {
            Put {
                ticket,
                payload: Payload::InSlot(slot),
            } if ticket.is_witness() && is_heard(inner, &ticket) => witnesses.push((ticket, slot)),
            other => others.push(other),
        }
    }
    (witnesses, others)
}

/// Whether this engine's marks count. Those of an engine do that one other alone has marked: else the
/// first of two to compare would always be right.
fn is_heard(inner: &Inner, ticket: &StoreTicket) -> bool {
    let writer = ticket.transfer().writer;
    let trust = inner.store.trust();
    trust.is_none_or(|trust| !trust.is_distrusted(writer) || trust.is_heard(writer))
}

/// Compares objects with what the store has. Returns those that it does not have, or not from a writer
/// that is trusted.
pub(super) fn bear(inner: &Inner, witnesses: Vec<Witness>, scratch: &mut Vec<u8>) -> Vec<Put> {
    let mut absent = Vec::new();
    if witnesses.is_empty() {
        return absent;
    }
    let start = Instant::now();
    let deadline = start + inner.config.put_timeout;
    let keys: Vec<_> = (witnesses.iter())
        .map(|(ticket, _)| ticket.transfer().key)
        .collect();
    // If this fails, the put that follows tells of it.
    let present = inner.store.contains(&keys, deadline).unwrap_or_default();
    for (place, (ticket, slot)) in witnesses.into_iter().enumerate() {
        let is_there = present.get(place) == Some(&true);
        let found = is_there.then(|| find(inner, ticket.transfer(), scratch, deadline));
        match found {
            Some(Got::Payload(verified)) => {
                let theirs = &scratch[inner.store.header_bytes()..][..ticket.transfer().bytes];
                absent.extend(judge(inner, ticket, slot, theirs, verified));
            }
            Some(Got::Failed(error)) => ticket.resolve(Outcome::Failed(error.kind())),
            Some(Got::Miss | Got::Rejected(_) | Got::TooLarge(_)) | None => absent.push(Put {
                ticket,
                payload: Payload::InSlot(slot),
            }),
        }
    }
    add_time(&inner.counters.witness_nanos, start);
    absent
}

/// Gets what the store has, into `scratch`. A value that does not verify is removed, or mended.
fn find(inner: &Inner, transfer: &Transfer, scratch: &mut Vec<u8>, deadline: Instant) -> Got {
    let room = LARGEST_HEADER_BYTES + transfer.bytes;
    if scratch.len() < room {
        scratch.resize(room, 0);
    }
    let memory = &mut scratch[..room];
    let wanted = vec![Theirs { transfer, memory }];
    let arrival = inner.evidence.fetch(wanted, deadline).pop();
    match arrival.map(|arrival| inner.evidence.verify(arrival)) {
        Some(Ok((_, got))) => got,
        Some(Err(rejected)) => {
            let remove_by = deadline.max(Instant::now() + REMOVE_TIMEOUT);
            inner.evidence.mend(rejected, deadline, remove_by).1
        }
        None => Got::Miss,
    }
}

/// Where the store's value arrives.
struct Theirs<'a> {
    transfer: &'a Transfer,
    memory: &'a mut [u8],
}

impl Destination for Theirs<'_> {
    fn wanted(&mut self, _header_bytes: usize) -> Wanted<'_> {
        Wanted {
            key: &self.transfer.key,
            context: &self.transfer.context,
            position: GetRequest::NO_USE,
            payload_bytes: Some(self.transfer.bytes as u64),
            memory: std::iter::once(IoSliceMut::new(self.memory)).collect(),
        }
    }
}

/// Returns the object if it is to take the place of the value, as nobody would load that.
fn judge(
    inner: &Inner,
    ticket: StoreTicket,
    slot: Slot<Gathered>,
    theirs: &[u8],
    verified: Verified,
) -> Option<Put> {
    let transfer = ticket.transfer();
    let found = compare(
        transfer.content,
        slot.payload(),
        theirs,
        transfer.writer.rounds_as(verified.writer()),
    );
    let counter = &inner.counters.witnessed_objects;
    counter.fetch_add(1, Ordering::Relaxed);
    let writer = verified.writer();
    match found {
        Compared::Same | Compared::Alike(_) | Compared::Unknown if inner.is_distrusted(writer) => {
            quarantine(inner, transfer);
            let payload = Payload::InSlot(slot);
            return Some(Put { ticket, payload });
        }
        Compared::Same | Compared::Alike(_) | Compared::Unknown => {
            let slot = slot.into_verified(transfer);
            inner.queues.host_tier().keep(transfer, slot, None);
            ticket.resolve(Outcome::AlreadyPresent);
        }
        Compared::Apart(distance) => {
            quarantine(inner, transfer);
            let by = Instant::now() + REMOVE_TIMEOUT;
            let accused = accuse(inner, transfer, writer, by);
            if accused != Some(Accused::Again) {
                inner.faults.lock().push(Fault::Disagreement {
                    key: transfer.key,
                    writer,
                    witness: transfer.writer,
                    distance,
                    accused,
                });
            }
            ticket.resolve(Outcome::Disagreed);
        }
    }
    None
}

/// Removes a value from wherever it would be loaded from. What cannot be removed is not loaded all the
/// same, as its writer is marked.
fn quarantine(inner: &Inner, transfer: &Transfer) {
    let by = || Instant::now() + REMOVE_TIMEOUT;
    let remove = |store: &SealedStore| {
        let _ = store.remove(&[transfer.key], by());
    };
    remove(&inner.store);
    inner.node.iter().for_each(remove);
    inner.queues.host_tier().discard(&transfer.key);
}

/// Marks the writer of a value. None if it is not known, or if this engine tells nobody.
fn accuse(inner: &Inner, transfer: &Transfer, writer: Writer, by: Instant) -> Option<Accused> {
    let trust = inner.store.trust()?;
    // A value that this engine has stored itself tells of its memory, and accuses nobody else.
    if [Writer::UNKNOWN, transfer.writer].contains(&writer) || transfer.writer == Writer::UNKNOWN {
        return None;
    }
    // If the pool could not be told now, it is told when the roll is read again.
    let (accused, _) = trust.accuse(writer, transfer.writer, transfer.key.namespace, by);
    Some(accused)
}

impl Inner {
    /// Whether no value of this writer is to be loaded.
    pub(super) fn is_distrusted(&self, writer: Writer) -> bool {
        let trust = self.store.trust();
        trust.is_some_and(|trust| trust.is_distrusted(writer))
    }
}

/// The objects that are stored: none while others have found this engine's KV to be wrong, for
/// nobody would load them.
pub(super) fn trusted(inner: &Inner, batch: Vec<Put>) -> Vec<Put> {
    let Some(trust) = inner.store.trust() else {
        return batch;
    };
    let is_trusted = |put: &Put| !trust.is_distrusted(put.ticket.transfer().writer);
    let (trusted, others): (Vec<Put>, Vec<Put>) = batch.into_iter().partition(is_trusted);
    for put in others {
        let writer = put.ticket.transfer().writer;
        if inner.told_of_distrust.swap(writer.0, Ordering::Relaxed) != writer.0 {
            inner.faults.lock().push(Fault::Distrusted { writer });
        }
        put.ticket.resolve(Outcome::Dropped);
    }
    trusted
}
