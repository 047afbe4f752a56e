//! Put lanes put sealed slots into the store, and give way to whoever else wants the processor.

use std::io::IoSlice;
use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_store::{ErrorKind, Key, PutOutcome, PutRequest};

use super::Floor;
use crate::Outcome;
use crate::queue::{Put, PutWork};
use crate::stats::add_time;

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
    let keys: Vec<Key> = batch.iter().map(|put| put.ticket.transfer().key).collect();
    // Another node may have stored the same chunk meanwhile: asking costs a round trip, sending
    // it again the whole value.
    let present = floor.store.contains(&keys, deadline);
    let is_there = present.is_ok();
    let outcomes: Vec<Outcome> = match present {
        Ok(present) => put_absent(floor, &batch, &present, deadline),
        Err(error) => vec![Outcome::Failed(error.kind()); batch.len()],
    };
    add_time(&floor.counters.put_nanos, start);
    floor.counters.put_calls.fetch_add(1, Ordering::Relaxed);

    // A value that the store will never accept says nothing of the next one.
    let failed =
        |outcome: &Outcome| matches!(outcome, Outcome::Failed(kind) if *kind != ErrorKind::Config);
    floor
        .queues
        .store_takes_puts(is_there && !outcomes.iter().all(failed));
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
