//! Get lanes get values into empty slots, and scatter those that verify. A lane scatters what it
//! got itself, while other lanes wait for the store.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::delivery::Deliveries;
use super::fetching::{Fetching, REMOVE_TIMEOUT};
use super::{Inner, in_place, node};
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::load_job::LoadTicket;
use crate::queue::LoadWork;
use crate::stats::add_time;

pub(super) fn run(inner: &Inner) {
    let lane = &inner.lanes.get;
    loop {
        let seen = inner.signals.get.generation();
        match inner.queues.next_load() {
            LoadWork::Load(batch) => inner.run(lane, || load(inner, batch)),
            LoadWork::Scatter(batch) => inner.run(lane, || {
                let mut deliveries = Deliveries::new(inner, Outcome::Kept);
                for (ticket, value) in batch {
                    deliveries.held(ticket, value);
                }
                deliveries.flush();
                // What is kept does not wait for that.
                inner
                    .store
                    .refresh_trust(Instant::now() + inner.config.get_timeout);
            }),
            LoadWork::Wait => inner.signals.get.wait(seen, None),
            LoadWork::Close => return,
        }
    }
}

fn load(inner: &Inner, batch: Vec<(LoadTicket, Slot<Empty>)>) {
    let limits = batch.iter().map(|(ticket, _)| ticket.limit());
    let soon = Instant::now() + inner.config.get_timeout;
    inner
        .store
        .refresh_trust(limits.min().map_or(soon, |limit| limit.min(soon)));
    let batch = batch.into_iter().map(|(ticket, slot)| Fetching {
        ticket,
        slot,
        was_damaged: false,
    });
    if let Some(node) = &inner.node {
        let batch = node::load(inner, node, batch.collect());
        node::fetch_once(inner, node, batch, |batch| fetch(inner, batch));
        return;
    }
    let is_left = |object: &Fetching| {
        let (store, ticket) = (&inner.store, &object.ticket);
        let read = in_place::load(inner, store, ticket, Outcome::Loaded);
        !matches!(read, in_place::Read::Over)
    };
    let batch: Vec<Fetching> = batch.filter(is_left).collect();
    if !batch.is_empty() {
        fetch(inner, batch);
    }
}

/// Fetches objects from the store.
fn fetch(inner: &Inner, batch: Vec<Fetching>) {
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
            Ok((object, got)) => deliveries.settle(object, got),
            Err(object) => rejected.push(object),
        }
    }
    deliveries.flush();
    // Objects that were whole do not wait for this.
    for object in rejected {
        let limit = object.destination().ticket.limit();
        let get_by = limit.min(Instant::now() + inner.config.get_timeout);
        let remove_by = get_by.max(Instant::now() + REMOVE_TIMEOUT);
        let (object, got) = inner.store.mend(object, get_by, remove_by);
        deliveries.settle(object, got);
        deliveries.flush();
    }
}
