//! Put lanes make values of gathered slots and put them into the store. They give way to other
//! threads that want the processor. They also encrypt, rather than the copy lanes. So encryption
//! does not delay the release of blocks, and nothing is encrypted that the store already has.

use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_store::sealed::SealedValue;
use penstock_store::{ErrorKind, Key, PutOutcome, SealedStore};

use super::Inner;
use crate::Outcome;
use crate::arena::{Gathered, Sealed, Slot, Verified};
use crate::queue::{Put, PutWork};
use crate::stats::add_time;
use crate::store_job::StoreTicket;

pub(super) fn run(inner: &Inner) {
    // Stores can wait, and are dropped if they wait too long. The next request's computation cannot
    // wait.
    super::give_way();
    loop {
        let seen = inner.signals.put.generation();
        match inner.queues.next_put() {
            PutWork::Put(batch) => inner.contain(|| put(inner, batch)),
            PutWork::Wait => inner.signals.put.wait(seen, None),
            PutWork::Close => return,
        }
    }
}

fn put(inner: &Inner, batch: Vec<Put>) {
    let start = Instant::now();
    let deadline = start + inner.config.put_timeout;
    let (tickets, slots): (Vec<_>, Vec<_>) = batch
        .into_iter()
        .map(|Put { ticket, slot }| (ticket, slot))
        .unzip();
    let keys: Vec<Key> = tickets.iter().map(|ticket| ticket.transfer().key).collect();
    // Another node may have stored the same chunk meanwhile. Asking costs a round trip; sending the
    // value again costs the whole value.
    let present = inner.store.contains(&keys, deadline);
    add_time(&inner.counters.put_nanos, start);
    let is_there = present.is_ok();
    let outcomes: Vec<Outcome> = match present {
        Ok(present) => {
            let start = Instant::now();
            let ready = seal_absent(&inner.store, &tickets, slots, &present);
            add_time(&inner.counters.seal_nanos, start);
            let outcomes = put_sealed(inner, &tickets, &ready, deadline);
            for (ticket, ready) in tickets.iter().zip(ready) {
                match ready {
                    Ready::Present(slot) => keep(inner, ticket, Some(slot)),
                    Ready::Sealed(slot) => keep(inner, ticket, slot.into_verified()),
                    Ready::Failed(_) => {}
                }
            }
            outcomes
        }
        Err(error) => {
            for (ticket, slot) in tickets.iter().zip(slots) {
                keep(inner, ticket, Some(slot.into_verified(ticket.transfer())));
            }
            vec![Outcome::Failed(error.kind()); tickets.len()]
        }
    };
    inner.counters.put_calls.fetch_add(1, Ordering::Relaxed);

    // A value that the store will never accept, or not from this tenant now, says nothing about the
    // next one.
    let failed = |outcome: &Outcome| {
        let Outcome::Failed(kind) = outcome else {
            return false;
        };
        !matches!(kind, ErrorKind::Config | ErrorKind::OverQuota)
    };
    inner
        .queues
        .store_takes_puts(is_there && !outcomes.iter().all(failed));
    for (ticket, outcome) in tickets.into_iter().zip(outcomes) {
        ticket.resolve(outcome);
    }
}

/// Leaves a value to the host tier, whatever the store answered.
fn keep(inner: &Inner, ticket: &StoreTicket, slot: Option<Slot<Verified>>) {
    if let Some(slot) = slot {
        inner.queues.host_tier().keep(ticket.transfer(), slot, None);
    }
}

/// A gathered object before it is put.
enum Ready {
    /// The store has it already.
    Present(Slot<Verified>),
    Sealed(Slot<Sealed>),
    Failed(ErrorKind),
}

/// Makes values of the objects that the store does not have.
fn seal_absent(
    store: &SealedStore,
    tickets: &[StoreTicket],
    slots: Vec<Slot<Gathered>>,
    present: &[bool],
) -> Vec<Ready> {
    tickets
        .iter()
        .zip(slots)
        .zip(present)
        .map(|((ticket, slot), present)| {
            let transfer = ticket.transfer();
            if *present {
                return Ready::Present(slot.into_verified(transfer));
            }
            slot.seal(store, transfer)
                .map_or_else(Ready::Failed, Ready::Sealed)
        })
        .collect()
}

fn put_sealed(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &[Ready],
    deadline: Instant,
) -> Vec<Outcome> {
    let start = Instant::now();
    let values: Vec<SealedValue<'_>> = tickets
        .iter()
        .zip(ready)
        .filter_map(|(ticket, ready)| match ready {
            Ready::Sealed(slot) => Some(slot.value(ticket.transfer().position)),
            Ready::Present(_) | Ready::Failed(_) => None,
        })
        .collect();
    let mut answers = inner.store.put_many(&values, deadline).into_iter();
    add_time(&inner.counters.put_nanos, start);
    tickets
        .iter()
        .zip(ready)
        .map(|(ticket, ready)| match ready {
            Ready::Present(_) => Outcome::AlreadyPresent,
            Ready::Failed(kind) => Outcome::Failed(*kind),
            Ready::Sealed(_) => match answers.next() {
                Some(Ok(PutOutcome::Stored)) => Outcome::Stored(ticket.transfer().bytes as u64),
                Some(Ok(PutOutcome::AlreadyPresent)) => Outcome::AlreadyPresent,
                Some(Err(error)) => Outcome::Failed(error.kind()),
                None => Outcome::Failed(ErrorKind::Protocol),
            },
        })
        .collect()
}
