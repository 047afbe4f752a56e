//! Get lanes get values into empty slots, and scatter those that verify. A lane scatters what it
//! got itself, while other lanes wait for the store.

use std::io::IoSliceMut;
use std::iter;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_store::ErrorKind;
use penstock_store::sealed::{Destination, Got, Wanted};

use super::{Inner, in_place, node};
use crate::Outcome;
use crate::arena::{Empty, Slot, Verified};
use crate::host_tier::Value;
use crate::load_job::LoadTicket;
use crate::queue::LoadWork;
use crate::registration::NotCopied;
use crate::stats::add_time;

/// Time given to the removal of values that did not verify.
pub(super) const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

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
pub(super) struct Fetching {
    pub(super) ticket: LoadTicket,
    slot: Slot<Empty>,
    /// Whether node memory had a damaged value of it.
    was_damaged: bool,
}

impl Fetching {
    /// Notes that node memory had a damaged value of it.
    pub(super) fn damaged(self) -> Self {
        Self {
            was_damaged: true,
            ..self
        }
    }
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
    let batch = batch.into_iter().map(|(ticket, slot)| Fetching {
        ticket,
        slot,
        was_damaged: false,
    });
    if let Some(node) = &inner.node {
        let batch = node::load(inner, node, batch.collect(), segments);
        node::fetch_once(inner, node, batch, segments, |batch, segments| {
            fetch(inner, batch, segments);
        });
        return;
    }
    let is_left = |object: &Fetching| {
        let (store, ticket) = (&inner.store, &object.ticket);
        let read = in_place::load(inner, store, ticket, segments, Outcome::Loaded);
        !matches!(read, in_place::Read::Over)
    };
    let batch: Vec<Fetching> = batch.filter(is_left).collect();
    if !batch.is_empty() {
        fetch(inner, batch, segments);
    }
}

/// Fetches objects from the store.
fn fetch(inner: &Inner, batch: Vec<Fetching>, segments: &mut Vec<Segment>) {
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
            Ok((object, got)) => settle(inner, object, got, Outcome::Loaded, segments),
            Err(object) => rejected.push(object),
        }
    }
    // Objects that were whole do not wait for this.
    for object in rejected {
        let limit = object.destination().ticket.limit();
        let get_by = limit.min(Instant::now() + inner.config.get_timeout);
        let remove_by = get_by.max(Instant::now() + REMOVE_TIMEOUT);
        let (object, got) = inner.store.mend(object, get_by, remove_by);
        settle(inner, object, got, Outcome::Loaded, segments);
    }
}

/// Settles an object by what its get brought. `loaded` makes the outcome of the payload's bytes.
pub(super) fn settle(
    inner: &Inner,
    object: Fetching,
    got: Got,
    loaded: fn(u64) -> Outcome,
    segments: &mut Vec<Segment>,
) {
    let Fetching {
        ticket,
        slot,
        was_damaged,
    } = object;
    let outcome = match got {
        Got::Payload(verified) => {
            let slot = slot.verified(ticket.transfer(), verified);
            let is_mended = verified.is_mended() || was_damaged;
            return deliver(inner, &ticket, slot, is_mended, loaded, segments);
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

/// Writes a value into its blocks, unless it is for a prefetch, and keeps it. Does nothing if nobody
/// wants it any more.
fn deliver(
    inner: &Inner,
    ticket: &LoadTicket,
    slot: Slot<Verified>,
    is_mended: bool,
    loaded: fn(u64) -> Outcome,
    segments: &mut Vec<Segment>,
) {
    if !ticket.begin_scatter() {
        return;
    }
    let prefetch = ticket.prefetch();
    if prefetch.is_none()
        && let Err(outcome) = scatter(inner, ticket, &slot, segments)
    {
        return ticket.settle(outcome);
    }
    let outcome = loaded(ticket.transfer().bytes as u64);
    let is_from_store = matches!(outcome, Outcome::Loaded(_));
    if is_mended && is_from_store {
        let mended = &inner.counters.mended_objects;
        mended.fetch_add(1, Ordering::Relaxed);
    }
    match &inner.node {
        None => {
            let host_tier = inner.queues.host_tier();
            host_tier.keep(ticket.transfer(), slot, prefetch);
            ticket.settle(outcome);
        }
        // A prefetch is over once the value is there. A load does not wait for that.
        Some(node) if is_from_store && prefetch.is_some() => {
            node::keep(inner, node, ticket, slot);
            ticket.settle(outcome);
        }
        Some(node) if is_from_store => {
            ticket.settle(outcome);
            node::keep(inner, node, ticket, slot);
        }
        Some(_) => ticket.settle(outcome),
    }
}
