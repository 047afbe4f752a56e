//! Put lanes make values of gathered slots and put them into the store, and give way to whoever else
//! wants the processor. Encryption is theirs, not the copy lanes': it keeps no block from being
//! released, and nothing is encrypted that the store has already.

use std::io::IoSlice;
use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_store::{ErrorKind, Key, PutOutcome, PutRequest};

use super::Floor;
use crate::Outcome;
use crate::arena::{Gathered, Sealed, Slot};
use crate::queue::{Put, PutWork};
use crate::stats::add_time;
use crate::store::StoreTicket;

/// A tenth of the processor time that a thread of the model gets beside it. Stores can wait, and
/// are dropped when they wait too long; what the request after them computes cannot.
const NICE: i32 = 10;

pub(super) fn run(floor: &Floor) {
    // Of this thread alone on Linux. Where it is refused, puts only get in the way more.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(NICE);
    loop {
        let seen = floor.signals.put.generation();
        match floor.queues.next_put() {
            PutWork::Put(batch) => floor.contain(|| put(floor, batch)),
            PutWork::Wait => floor.signals.put.wait(seen, None),
            PutWork::Close => return,
        }
    }
}

fn put(floor: &Floor, batch: Vec<Put>) {
    let start = Instant::now();
    let deadline = start + floor.config.put_timeout;
    let (tickets, slots): (Vec<_>, Vec<_>) = batch
        .into_iter()
        .map(|Put { ticket, slot }| (ticket, slot))
        .unzip();
    let keys: Vec<Key> = tickets.iter().map(|ticket| ticket.transfer().key).collect();
    // Another node may have stored the same chunk meanwhile: asking costs a round trip, sending
    // it again the whole value.
    let present = floor.store.contains(&keys, deadline);
    add_time(&floor.counters.put_nanos, start);
    let is_there = present.is_ok();
    let outcomes: Vec<Outcome> = match present {
        Ok(present) => {
            let start = Instant::now();
            let absent = seal_absent(&tickets, slots, &present);
            add_time(&floor.counters.seal_nanos, start);
            put_sealed(floor, &tickets, &absent, deadline)
        }
        Err(error) => {
            drop(slots);
            vec![Outcome::Failed(error.kind()); tickets.len()]
        }
    };
    floor.counters.put_calls.fetch_add(1, Ordering::Relaxed);

    // A value that the store will never accept says nothing of the next one.
    let failed =
        |outcome: &Outcome| matches!(outcome, Outcome::Failed(kind) if *kind != ErrorKind::Config);
    floor
        .queues
        .store_takes_puts(is_there && !outcomes.iter().all(failed));
    for (ticket, outcome) in tickets.into_iter().zip(outcomes) {
        ticket.resolve(outcome);
    }
}

/// Values of what the store does not have; slots of what it has go back.
fn seal_absent(
    tickets: &[StoreTicket],
    slots: Vec<Slot<Gathered>>,
    present: &[bool],
) -> Vec<Option<Result<Slot<Sealed>, ErrorKind>>> {
    tickets
        .iter()
        .zip(slots)
        .zip(present)
        .map(|((ticket, slot), present)| (!present).then(|| slot.seal(ticket.transfer())))
        .collect()
}

fn put_sealed(
    floor: &Floor,
    tickets: &[StoreTicket],
    absent: &[Option<Result<Slot<Sealed>, ErrorKind>>],
    deadline: Instant,
) -> Vec<Outcome> {
    let start = Instant::now();
    let values: Vec<(Key, [IoSlice<'_>; 1])> = tickets
        .iter()
        .zip(absent)
        .filter_map(|(ticket, sealed)| match sealed {
            Some(Ok(slot)) => Some((ticket.transfer().key, [IoSlice::new(slot.value())])),
            Some(Err(_)) | None => None,
        })
        .collect();
    let mut requests: Vec<PutRequest<'_>> = values
        .iter()
        .map(|(key, value)| PutRequest {
            key: *key,
            value,
            outcome: None,
        })
        .collect();
    if !requests.is_empty() {
        floor.store.put_many(&mut requests, deadline);
    }
    add_time(&floor.counters.put_nanos, start);
    let mut answers = requests.into_iter().map(|request| request.outcome);
    tickets
        .iter()
        .zip(absent)
        .map(|(ticket, sealed)| match sealed {
            None => Outcome::AlreadyPresent,
            Some(Err(kind)) => Outcome::Failed(*kind),
            Some(Ok(_)) => match answers.next().flatten() {
                Some(Ok(PutOutcome::Stored)) => Outcome::Stored(ticket.transfer().bytes as u64),
                Some(Ok(PutOutcome::AlreadyPresent)) => Outcome::AlreadyPresent,
                Some(Err(error)) => Outcome::Failed(error.kind()),
                None => Outcome::Failed(ErrorKind::Protocol),
            },
        })
        .collect()
}
