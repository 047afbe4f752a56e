//! Get lanes get values into empty slots, and scatter what verifies. A lane scatters what it got
//! itself, while the others wait for the store.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_store::value::Rejection;
use penstock_store::{ErrorKind, GetOutcome, GetRequest, Key, Result};

use super::Floor;
use crate::Outcome;
use crate::arena::{Empty, Slot, Verified};
use crate::kept::Value;
use crate::load::LoadTicket;
use crate::queue::LoadWork;
use crate::region::NotCopied;
use crate::stats::add_time;

/// Time given to the removal of values that did not verify.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(floor: &Floor) {
    let mut segments = Vec::new();
    loop {
        let seen = floor.signals.get.generation();
        match floor.queues.next_load() {
            LoadWork::Load(batch) => floor.contain(|| load(floor, batch, &mut segments)),
            LoadWork::Scatter(batch) => floor.contain(|| {
                for (ticket, value) in batch {
                    scatter_held(floor, ticket, value, &mut segments);
                }
            }),
            LoadWork::Wait => floor.signals.get.wait(seen, None),
            LoadWork::Close => return,
        }
    }
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
                found: found.saturating_sub(floor.config.header_bytes() as u64),
            }),
            Some(Err(error)) if error.kind() == ErrorKind::TimedOut => Outcome::TimedOut,
            Some(Err(error)) => Outcome::Failed(error.kind()),
            None => Outcome::Failed(ErrorKind::Protocol),
        };
        if matches!(outcome, Outcome::Rejected(reason) if !reason.is_foreign()) {
            rejected.push(key);
        }
        ticket.resolve(outcome);
    }
    remove(floor, &rejected);
}

/// Writes what the host tier has into its blocks.
fn scatter_held(floor: &Floor, ticket: LoadTicket, value: Value, segments: &mut Vec<Segment>) {
    if ticket.begin_scatter() {
        let outcome = match scatter(floor, &ticket, &value, segments) {
            Ok(()) => Outcome::Kept(ticket.transfer().bytes as u64),
            Err(outcome) => outcome,
        };
        // Once the job is over, giving the value up frees its slot.
        drop(value);
        ticket.resolve(outcome);
    }
}

fn scatter(
    floor: &Floor,
    ticket: &LoadTicket,
    value: &Slot<Verified>,
    segments: &mut Vec<Segment>,
) -> std::result::Result<(), Outcome> {
    let start = Instant::now();
    let scattered = ticket
        .registration()
        .scatter(ticket.transfer(), value.payload(), segments);
    add_time(&floor.counters.scatter_nanos, start);
    scattered.map_err(|why| match why {
        NotCopied::Closed => Outcome::Cancelled,
        NotCopied::Device(_) => Outcome::Failed(ErrorKind::Io),
    })
}

/// Verifies a value, writes it into its blocks unless it is for a prefetch, and keeps it; none if
/// nobody wants it any more.
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
    let verified = slot.verify(transfer, value_bytes);
    add_time(&floor.counters.verify_nanos, start);
    let slot = match verified {
        Ok(slot) => slot,
        Err(rejection) => return Some(Outcome::Rejected(rejection)),
    };
    if !ticket.begin_scatter() {
        return None;
    }
    let prefetch = ticket.prefetch();
    if prefetch.is_none()
        && let Err(outcome) = scatter(floor, ticket, &slot, segments)
    {
        return Some(outcome);
    }
    floor.queues.kept().keep(transfer.key, slot, prefetch);
    Some(Outcome::Loaded(transfer.bytes as u64))
}

/// Removes values that did not verify, so that they are put anew. Best effort: one that stays
/// is rejected again.
fn remove(floor: &Floor, keys: &[Key]) {
    if !keys.is_empty() {
        let _ = floor.store.remove(keys, Instant::now() + REMOVE_TIMEOUT);
    }
}
