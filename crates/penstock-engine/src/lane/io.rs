//! I/O lanes put sealed slots, get values into empty ones, and scatter what verifies. A lane
//! scatters what it got itself, while the others wait for the store.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_store::value::{HEADER_BYTES, Rejection};
use penstock_store::{ErrorKind, GetOutcome, GetRequest, Key, PutOutcome, PutRequest, Result};

use super::Floor;
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::load::LoadTicket;
use crate::queue::{IoWork, Put};
use crate::region::NotCopied;
use crate::stats::add_time;

/// Time given to the removal of values that did not verify.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(floor: &Floor) {
    let mut segments = Vec::new();
    loop {
        let seen = floor.signals.io.generation();
        match floor.queues.next_io() {
            IoWork::Load(batch) => floor.contain(|| load(floor, batch, &mut segments)),
            IoWork::Put(batch) => {
                floor.contain(|| put(floor, batch));
                floor.queues.put_done();
            }
            IoWork::Wait => floor.signals.io.wait(seen, None),
            IoWork::Close => return,
        }
    }
}

fn put(floor: &Floor, batch: Vec<Put>) {
    let start = Instant::now();
    let deadline = start + floor.config.put_timeout;
    let keys: Vec<Key> = batch.iter().map(|put| put.ticket.transfer().key).collect();
    // Another node may have stored the same chunk meanwhile: asking costs a round trip, sending
    // it again the whole value.
    let outcomes: Vec<Outcome> = match floor.store.contains(&keys, deadline) {
        Ok(present) => put_absent(floor, &batch, &present, deadline),
        Err(error) => vec![Outcome::Failed(error.kind()); batch.len()],
    };
    add_time(&floor.counters.put_nanos, start);
    floor.counters.put_calls.fetch_add(1, Ordering::Relaxed);

    // A value that the store will never accept says nothing of the next one.
    let failed =
        |outcome: &Outcome| matches!(outcome, Outcome::Failed(kind) if *kind != ErrorKind::Config);
    floor.queues.store_takes_puts(!outcomes.iter().all(failed));
    for (Put { ticket, slot }, outcome) in batch.into_iter().zip(outcomes) {
        drop(slot);
        ticket.resolve(outcome);
    }
}

fn put_absent(floor: &Floor, batch: &[Put], present: &[bool], deadline: Instant) -> Vec<Outcome> {
    let values: Vec<[IoSlice<'_>; 1]> = batch
        .iter()
        .map(|put| [IoSlice::new(put.slot.value())])
        .collect();
    let mut requests: Vec<PutRequest<'_>> = batch
        .iter()
        .zip(&values)
        .zip(present)
        .filter(|(_, present)| !**present)
        .map(|((put, value), _)| PutRequest {
            key: put.ticket.transfer().key,
            value,
            outcome: None,
        })
        .collect();
    if !requests.is_empty() {
        floor.store.put_many(&mut requests, deadline);
    }
    let mut answers = requests.into_iter().map(|request| request.outcome);
    batch
        .iter()
        .zip(present)
        .map(|(put, present)| {
            if *present {
                return Outcome::AlreadyPresent;
            }
            match answers.next().flatten() {
                Some(Ok(PutOutcome::Stored)) => Outcome::Stored(put.ticket.transfer().bytes as u64),
                Some(Ok(PutOutcome::AlreadyPresent)) => Outcome::AlreadyPresent,
                Some(Err(error)) => Outcome::Failed(error.kind()),
                None => Outcome::Failed(ErrorKind::Protocol),
            }
        })
        .collect()
}

fn load(floor: &Floor, batch: Vec<(LoadTicket, Slot<Empty>)>, segments: &mut Vec<Segment>) {
    let (tickets, mut slots): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    let start = Instant::now();
    let job_deadline = tickets
        .iter()
        .map(LoadTicket::deadline)
        .min()
        .unwrap_or(start);
    let outcomes: Vec<Option<Result<GetOutcome>>> = {
        let mut slices: Vec<[IoSliceMut<'_>; 1]> = tickets
            .iter()
            .zip(&mut slots)
            .map(|(ticket, slot)| [IoSliceMut::new(slot.value_mut(ticket.transfer().bytes))])
            .collect();
        let mut requests: Vec<GetRequest<'_, '_>> = tickets
            .iter()
            .zip(&mut slices)
            .map(|(ticket, into)| GetRequest {
                key: ticket.transfer().key,
                into,
                outcome: None,
            })
            .collect();
        floor.store.get_many(
            &mut requests,
            job_deadline.min(start + floor.config.get_timeout),
        );
        requests
            .into_iter()
            .map(|request| request.outcome)
            .collect()
    };
    add_time(&floor.counters.get_nanos, start);
    floor.counters.get_calls.fetch_add(1, Ordering::Relaxed);

    let mut rejected = Vec::new();
    for ((ticket, slot), outcome) in tickets.into_iter().zip(slots).zip(outcomes) {
        let key = ticket.transfer().key;
        let outcome = match outcome {
            Some(Ok(GetOutcome::Hit(bytes))) => {
                match deliver(floor, &ticket, slot, bytes, segments) {
                    Some(outcome) => outcome,
                    None => continue,
                }
            }
            Some(Ok(GetOutcome::Miss)) => Outcome::Miss,
            Some(Ok(GetOutcome::TooLarge(found))) => Outcome::Rejected(Rejection::Length {
                expected: ticket.transfer().bytes as u64,
                found: found.saturating_sub(HEADER_BYTES as u64),
            }),
            Some(Err(error)) if error.kind() == ErrorKind::TimedOut => Outcome::TimedOut,
            Some(Err(error)) => Outcome::Failed(error.kind()),
            None => Outcome::Failed(ErrorKind::Protocol),
        };
        if matches!(outcome, Outcome::Rejected(_)) {
            rejected.push(key);
        }
        ticket.resolve(outcome);
    }
    remove(floor, &rejected);
}

/// Verifies a value and writes it into its blocks; none if nobody wants it any more.
fn deliver(
    floor: &Floor,
    ticket: &LoadTicket,
    slot: Slot<Empty>,
    value_bytes: u64,
    segments: &mut Vec<Segment>,
) -> Option<Outcome> {
    if !ticket.is_wanted() {
        return None;
    }
    let transfer = ticket.transfer();
    let start = Instant::now();
    let verified = slot.verify(&transfer.key, value_bytes, transfer.bytes);
    add_time(&floor.counters.verify_nanos, start);
    let slot = match verified {
        Ok(slot) => slot,
        Err(rejection) => return Some(Outcome::Rejected(rejection)),
    };
    if !ticket.begin_scatter() {
        return None;
    }
    let start = Instant::now();
    let scattered = ticket
        .registration()
        .scatter(transfer, slot.payload(), segments);
    add_time(&floor.counters.scatter_nanos, start);
    Some(match scattered {
        Ok(()) => Outcome::Loaded(transfer.bytes as u64),
        Err(NotCopied::Closed) => Outcome::Cancelled,
        Err(NotCopied::Device(_)) => Outcome::Failed(ErrorKind::Io),
    })
}

/// Removes values that did not verify, so that they are put anew. Best effort: one that stays
/// is rejected again.
fn remove(floor: &Floor, keys: &[Key]) {
    if !keys.is_empty() {
        let _ = floor.store.remove(keys, Instant::now() + REMOVE_TIMEOUT);
    }
}
