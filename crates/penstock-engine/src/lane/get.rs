//! Get lanes get values into empty slots, and scatter those that verify. A lane scatters what it
//! got itself, while other lanes wait for the store.

use std::io::IoSliceMut;
use std::iter;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_store::ErrorKind;
use penstock_store::sealed::{Destination, Got, Wanted};

use super::{Inner, in_place};
use crate::Outcome;
use crate::arena::{Empty, Slot, Verified};
use crate::host_tier::Value;
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

/// An object that is being fetched, and the slot that it is fetched into.
struct Fetching {
    ticket: LoadTicket,
    slot: Slot<Empty>,
}

impl Destination for Fetching {
    fn wanted(&mut self, _header_bytes: usize) -> Wanted<'_> {
        let transfer = self.ticket.transfer();
        Wanted {
            key: &transfer.key,
            context: &transfer.context,
            position: transfer.position,
            payload_bytes: Some(transfer.bytes as u64),
            memory: iter::once(IoSliceMut::new(self.slot.value_mut(transfer.bytes))).collect(),
        }
    }
}

fn load(inner: &Inner, batch: Vec<(LoadTicket, Slot<Empty>)>, segments: &mut Vec<Segment>) {
    let batch: Vec<Fetching> = batch
        .into_iter()
        .filter_map(|(ticket, slot)| {
            let ticket = in_place::load(inner, ticket, segments)?;
            Some(Fetching { ticket, slot })
        })
        .collect();
    if batch.is_empty() {
        return;
    }
    let start = Instant::now();
    // Objects that other lanes bring may give the job more time meanwhile.
    let limits = batch.iter().map(|object| object.ticket.limit());
    let limit = limits.min().unwrap_or(start);
    let arrivals = inner
        .store
        .fetch(batch, limit.min(start + inner.config.get_timeout));
    add_time(&inner.counters.get_nanos, start);
    inner.counters.get_calls.fetch_add(1, Ordering::Relaxed);

    let mut rejected = Vec::new();
    for arrival in arrivals {
        if !arrival.destination().ticket.is_wanted() {
            continue;
        }
        let start = Instant::now();
        let verified = inner.store.verify(arrival);
        add_time(&inner.counters.verify_nanos, start);
        match verified {
            Ok((object, got)) => settle(inner, object, got, segments),
            Err(object) => rejected.push(object),
        }
    }
    // Objects that were whole do not wait for this.
    for object in rejected {
        let limit = object.destination().ticket.limit();
        let get_by = limit.min(Instant::now() + inner.config.get_timeout);
        let remove_by = get_by.max(Instant::now() + REMOVE_TIMEOUT);
        let (object, got) = inner.store.mend(object, get_by, remove_by);
        settle(inner, object, got, segments);
    }
}

/// Settles an object by what its get brought.
fn settle(inner: &Inner, object: Fetching, got: Got, segments: &mut Vec<Segment>) {
    let Fetching { ticket, slot } = object;
    let outcome = match got {
        Got::Payload(verified) => {
            let slot = slot.verified(ticket.transfer(), verified);
            let Some(outcome) = deliver(inner, &ticket, slot, segments) else {
                return;
            };
            if verified.is_mended() && matches!(outcome, Outcome::Loaded(_)) {
                let mended = &inner.counters.mended_objects;
                mended.fetch_add(1, Ordering::Relaxed);
            }
            outcome
        }
        Got::Miss => Outcome::Miss,
        Got::Rejected(rejection) => Outcome::Rejected(rejection),
        Got::Failed(error) if error.kind() == ErrorKind::TimedOut => Outcome::TimedOut,
        Got::Failed(error) => Outcome::Failed(error.kind()),
        Got::TooLarge(_) => unreachable!("a transfer has one length, any other is rejected"),
    };
    ticket.resolve(outcome);
}

/// Writes a value of the host tier into its blocks.
fn scatter_held(inner: &Inner, ticket: LoadTicket, value: Value, segments: &mut Vec<Segment>) {
    if ticket.begin_scatter() {
        let outcome = match scatter(inner, &ticket, &value, segments) {
            Ok(()) => Outcome::Kept(ticket.transfer().bytes as u64),
            Err(outcome) => outcome,
        };
        // Dropped first, so that giving up the value once the job is over frees its slot.
        drop(value);
        ticket.resolve(outcome);
    }
}

fn scatter(
    inner: &Inner,
    ticket: &LoadTicket,
    value: &Slot<Verified>,
    segments: &mut Vec<Segment>,
) -> Result<(), Outcome> {
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

/// Writes a value into its blocks, unless it is for a prefetch, and keeps it. None if nobody wants
/// it any more.
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
