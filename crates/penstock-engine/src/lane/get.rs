//! Get lanes get values into empty slots, and scatter what verifies. A lane scatters what it got
//! itself, while the others wait for the store.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_store::layers::{Look, look_again};
use penstock_store::value::Rejection;
use penstock_store::{ErrorKind, GetOutcome, GetRequest, Result};

use super::Inner;
use crate::Outcome;
use crate::arena::{Empty, Slot, Verified};
use crate::host_tier::Value;
use crate::job::Transfer;
use crate::load_job::LoadTicket;
use crate::queue::LoadWork;
use crate::registration::NotCopied;
use crate::stats::add_time;

/// Time given to the removal of values that did not verify.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(inner: &Inner) {
    let mut segments = Vec::new();
    loop {
        let seen = inner.signals.get.generation();
        match inner.queues.next_load() {
            LoadWork::Load(batch) => inner.contain(|| load(inner, batch, &mut segments)),
            LoadWork::Scatter(batch) => inner.contain(|| {
                for (ticket, value) in batch {
                    scatter_held(inner, ticket, value, &mut segments);
                }
            }),
            LoadWork::Wait => inner.signals.get.wait(seen, None),
            LoadWork::Close => return,
        }
    }
}

fn load(inner: &Inner, batch: Vec<(LoadTicket, Slot<Empty>)>, segments: &mut Vec<Segment>) {
    let (tickets, mut slots): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    let start = Instant::now();
    // What comes from the others may give the job more time meanwhile.
    let limit = tickets.iter().map(LoadTicket::limit).min().unwrap_or(start);
    // An encrypted value has another.
    let wants_checksum = inner.config.keys.is_none();
    let answers: Vec<(Option<Result<GetOutcome>>, Option<u64>)> = {
        let mut slices: Vec<[IoSliceMut<'_>; 1]> = tickets
            .iter()
            .zip(&mut slots)
            .map(|(ticket, slot)| [IoSliceMut::new(slot.value_mut(ticket.transfer().bytes))])
            .collect();
        let mut requests: Vec<GetRequest<'_, '_>> = tickets
            .iter()
            .zip(&mut slices)
            .map(|(ticket, into)| GetRequest {
                position: ticket.transfer().position,
                wants_checksum,
                ..GetRequest::new(ticket.transfer().key, into)
            })
            .collect();
        inner
            .store
            .get_many(&mut requests, limit.min(start + inner.config.get_timeout));
        requests
            .into_iter()
            .map(|request| (request.outcome, request.checksum))
            .collect()
    };
    add_time(&inner.counters.get_nanos, start);
    inner.counters.get_calls.fetch_add(1, Ordering::Relaxed);

    let mut rejected = Vec::new();
    for ((ticket, slot), (outcome, checksum)) in tickets.into_iter().zip(slots).zip(answers) {
        let outcome = match outcome {
            Some(Ok(GetOutcome::Hit(_))) if !ticket.is_wanted() => continue,
            Some(Ok(GetOutcome::Hit(bytes))) => {
                match verify(inner, slot, ticket.transfer(), bytes, checksum) {
                    Ok(slot) => match deliver(inner, &ticket, slot, segments) {
                        Some(outcome) => outcome,
                        None => continue,
                    },
                    Err((rejection, slot)) => {
                        rejected.push((ticket, slot, rejection));
                        continue;
                    }
                }
            }
            Some(Ok(GetOutcome::TooLarge(found))) => {
                let rejection = too_large(inner, &ticket, found);
                rejected.push((ticket, slot, rejection));
                continue;
            }
            Some(Ok(GetOutcome::Miss)) => Outcome::Miss,
            Some(Err(error)) if error.kind() == ErrorKind::TimedOut => Outcome::TimedOut,
            Some(Err(error)) => Outcome::Failed(error.kind()),
            None => Outcome::Failed(ErrorKind::Protocol),
        };
        ticket.resolve(outcome);
    }
    // Those that were whole do not wait for this.
    for (ticket, slot, rejection) in rejected {
        reject(inner, ticket, slot, rejection, segments);
    }
}

/// Writes what the host tier has into its blocks.
fn scatter_held(inner: &Inner, ticket: LoadTicket, value: Value, segments: &mut Vec<Segment>) {
    if ticket.begin_scatter() {
        let outcome = match scatter(inner, &ticket, &value, segments) {
            Ok(()) => Outcome::Kept(ticket.transfer().bytes as u64),
            Err(outcome) => outcome,
        };
        // Once the job is over, giving the value up frees its slot.
        drop(value);
        ticket.resolve(outcome);
    }
}

fn scatter(
    inner: &Inner,
    ticket: &LoadTicket,
    value: &Slot<Verified>,
    segments: &mut Vec<Segment>,
) -> std::result::Result<(), Outcome> {
    let start = Instant::now();
    let transfer = ticket.transfer();
    let scattered = ticket.registration().scatter(
        transfer.pages.clone(),
        &transfer.key.span,
        value.payload(),
        segments,
    );
    add_time(&inner.counters.scatter_nanos, start);
    scattered.map_err(|why| match why {
        NotCopied::Closed => Outcome::Cancelled,
        NotCopied::Device(_) => Outcome::Failed(ErrorKind::Io),
    })
}

fn too_large(inner: &Inner, ticket: &LoadTicket, found: u64) -> Rejection {
    Rejection::Length {
        expected: ticket.transfer().bytes as u64,
        found: found.saturating_sub(inner.config.header_bytes() as u64),
    }
}

fn verify(
    inner: &Inner,
    slot: Slot<Empty>,
    transfer: &Transfer,
    value_bytes: u64,
    checksum: Option<u64>,
) -> std::result::Result<Slot<Verified>, (Rejection, Slot<Empty>)> {
    let start = Instant::now();
    let verified = slot.verify(transfer, value_bytes, checksum);
    add_time(&inner.counters.verify_nanos, start);
    verified
}

/// Writes a value into its blocks, unless it is for a prefetch, and keeps it; none if nobody wants it
/// any more.
fn deliver(
    inner: &Inner,
    ticket: &LoadTicket,
    slot: Slot<Verified>,
    segments: &mut Vec<Segment>,
) -> Option<Outcome> {
    if !ticket.begin_scatter() {
        return None;
    }
    let prefetch = ticket.prefetch();
    if prefetch.is_none()
        && let Err(outcome) = scatter(inner, ticket, &slot, segments)
    {
        return Some(outcome);
    }
    inner
        .queues
        .host_tier()
        .keep(ticket.transfer(), slot, prefetch);
    Some(Outcome::Loaded(ticket.transfer().bytes as u64))
}

/// Removes damaged copies of a value that did not verify, so that they are put anew, and loads a
/// whole one if another tier has it.
fn reject(
    inner: &Inner,
    ticket: LoadTicket,
    slot: Slot<Empty>,
    rejection: Rejection,
    segments: &mut Vec<Segment>,
) {
    let (store, transfer) = (&*inner.store, ticket.transfer());
    if rejection.is_foreign() && store.tiers().is_empty() {
        return ticket.resolve(Outcome::Rejected(rejection));
    }
    let get_deadline = ticket
        .limit()
        .min(Instant::now() + inner.config.get_timeout);
    let remove_deadline = get_deadline.max(Instant::now() + REMOVE_TIMEOUT);
    let mut empty = Some(slot);
    let whole = look_again(store, &transfer.key, remove_deadline, |tier| {
        let Some(mut slot) = empty.take() else {
            return Look::Nothing;
        };
        let into = &mut [IoSliceMut::new(slot.value_mut(transfer.bytes))];
        let (look, slot) = match tier.get(&transfer.key, into, get_deadline) {
            Ok(GetOutcome::Hit(bytes)) => match verify(inner, slot, transfer, bytes, None) {
                Ok(slot) => return Look::Whole(slot),
                Err((rejection, slot)) if rejection.is_foreign() => (Look::Nothing, slot),
                Err((_, slot)) => (Look::Damaged, slot),
            },
            Ok(GetOutcome::TooLarge(_)) => (Look::Damaged, slot),
            Ok(GetOutcome::Miss) | Err(_) => (Look::Nothing, slot),
        };
        empty = Some(slot);
        look
    });
    let Some(slot) = whole else {
        return ticket.resolve(Outcome::Rejected(rejection));
    };
    if let Some(outcome) = deliver(inner, &ticket, slot, segments) {
        if matches!(outcome, Outcome::Loaded(_)) {
            inner
                .counters
                .mended_objects
                .fetch_add(1, Ordering::Relaxed);
        }
        ticket.resolve(outcome);
    }
}
