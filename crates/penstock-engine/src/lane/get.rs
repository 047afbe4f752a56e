//! Get lanes get values into empty slots, and scatter those that verify. A lane scatters what it
//! got itself, while other lanes wait for the store.

use std::io::IoSliceMut;
use std::iter;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_value::sealed::{Destination, Wanted};

use super::delivery::Deliveries;
use super::{Inner, in_place, node};
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::load_job::LoadTicket;
use crate::queue::LoadWork;
use crate::stats::add_time;

/// Time given to the removal of values that did not verify.
pub(super) const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(inner: &Inner) {
    let mut segments = Vec::new();
    let lane = &inner.lanes.get;
    loop {
        let seen = inner.signals.get.generation();
        match inner.queues.next_load() {
            LoadWork::Load(batch) => inner.run(lane, || load(inner, batch, &mut segments)),
            LoadWork::Scatter(batch) => inner.run(lane, || {
                let mut deliveries = Deliveries::new(inner, Outcome::Kept);
                for (ticket, value) in batch {
                    deliveries.held(ticket, value, &mut segments);
                }
                deliveries.flush(&mut segments);
            }),
            LoadWork::Wait => inner.signals.get.wait(seen, None),
            LoadWork::Close => return,
        }
    }
}

/// An object that is being fetched, and the slot that it is fetched into.
pub(super) struct Fetching {
    pub(super) ticket: LoadTicket,
    pub(super) slot: Slot<Empty>,
    /// Whether node memory had a damaged value of it.
    pub(super) was_damaged: bool,
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

    let mut deliveries = Deliveries::new(inner, Outcome::Loaded);
    let mut rejected = Vec::new();
    for arrival in arrivals {
        if !arrival.destination().ticket.is_wanted() {
            continue;
        }
        let start = Instant::now();
        let verified = inner.store.verify(arrival);
        add_time(&inner.counters.verify_nanos, start);
        match verified {
            Ok((object, got)) => deliveries.settle(object, got, segments),
            Err(object) => rejected.push(object),
        }
    }
    deliveries.flush(segments);
    // Objects that were whole do not wait for this.
    for object in rejected {
        let limit = object.destination().ticket.limit();
        let get_by = limit.min(Instant::now() + inner.config.get_timeout);
        let remove_by = get_by.max(Instant::now() + REMOVE_TIMEOUT);
        let (object, got) = inner.store.mend(object, get_by, remove_by);
        deliveries.settle(object, got, segments);
        deliveries.flush(segments);
    }
}
