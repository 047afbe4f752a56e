//! Put lanes make values of gathered slots and put them into the store. They give way to other
//! threads that want the processor. They also encrypt, rather than the copy lanes. So encryption
//! does not delay the release of blocks, and nothing is encrypted that the store already has.

use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_store::sealed::SealedValue;
use penstock_store::{ErrorKind, Key, PutOutcome, SealedStore};

use super::Inner;
use crate::Outcome;
use crate::arena::{Gathered, Sealed, Slot};
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
    let (tickets, mut ready): (Vec<_>, Vec<_>) = batch
        .into_iter()
        .map(|Put { ticket, slot }| (ticket, Ready::Gathered(slot)))
        .unzip();
    if let Some(node) = &inner.node {
        // The other engines of this machine can load them from here on, whatever the store does.
        seal(inner, &tickets, &mut ready, |_| true);
        put_sealed(node, &tickets, &ready, |_| true, deadline);
        if inner.queues.is_store_failing() {
            for ticket in tickets {
                ticket.resolve(Outcome::Dropped);
            }
            return;
        }
    }
    let outcomes = put_into_store(inner, &tickets, &mut ready, deadline);
    for (ticket, ready) in tickets.iter().zip(ready) {
        keep(inner, ticket, ready);
    }
    inner.counters.put_calls.fetch_add(1, Ordering::Relaxed);
    for (ticket, outcome) in tickets.into_iter().zip(outcomes) {
        ticket.resolve(outcome);
    }
}

/// Puts the objects that the store does not have. Notes whether it takes puts.
fn put_into_store(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &mut [Ready],
    deadline: Instant,
) -> Vec<Outcome> {
    let start = Instant::now();
    let keys: Vec<Key> = tickets.iter().map(|ticket| ticket.transfer().key).collect();
    // Another node may have stored the same chunk meanwhile. Asking costs a round trip; sending the
    // value again costs the whole value.
    let present = inner.store.contains(&keys, deadline);
    add_time(&inner.counters.put_nanos, start);
    let is_there = present.is_ok();
    let outcomes: Vec<Outcome> = match present {
        Ok(present) => {
            seal(inner, tickets, ready, |index| !present[index]);
            let is_absent = |index: usize| !present[index];
            let start = Instant::now();
            let outcomes = put_sealed(&inner.store, tickets, ready, is_absent, deadline);
            add_time(&inner.counters.put_nanos, start);
            outcomes
        }
        Err(error) => vec![Outcome::Failed(error.kind()); tickets.len()],
    };
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
    outcomes
}

/// Leaves a value to the host tier, whatever the store answered.
fn keep(inner: &Inner, ticket: &StoreTicket, ready: Ready) {
    let slot = match ready {
        Ready::Gathered(slot) => Some(slot.into_verified(ticket.transfer())),
        Ready::Sealed(slot) => slot.into_verified(),
        Ready::Failed(_) => None,
    };
    if let Some(slot) = slot {
        inner.queues.host_tier().keep(ticket.transfer(), slot, None);
    }
}

/// An object before it is put.
#[expect(
    clippy::large_enum_variant,
    reason = "a checksum in the making; a batch has few"
)]
enum Ready {
    Gathered(Slot<Gathered>),
    Sealed(Slot<Sealed>),
    Failed(ErrorKind),
}

/// Makes values of the gathered objects that are wanted, by their index.
fn seal(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &mut [Ready],
    is_wanted: impl Fn(usize) -> bool,
) {
    let start = Instant::now();
    for (index, (ticket, ready)) in tickets.iter().zip(ready).enumerate() {
        if is_wanted(index)
            && let Ready::Gathered(_) = ready
            && let Ready::Gathered(slot) =
                std::mem::replace(ready, Ready::Failed(ErrorKind::Protocol))
        {
            *ready = slot
                .seal(&inner.store, ticket.transfer())
                .map_or_else(Ready::Failed, Ready::Sealed);
        }
    }
    add_time(&inner.counters.seal_nanos, start);
}

/// Puts the sealed objects that are wanted, by their index. The others count as present.
fn put_sealed(
    store: &SealedStore,
    tickets: &[StoreTicket],
    ready: &[Ready],
    is_wanted: impl Fn(usize) -> bool,
    deadline: Instant,
) -> Vec<Outcome> {
    let each = || tickets.iter().zip(ready).enumerate();
    let values: Vec<SealedValue<'_>> = each()
        .filter_map(|(index, (ticket, ready))| match ready {
            Ready::Sealed(slot) if is_wanted(index) => Some(slot.value(ticket.transfer().position)),
            _ => None,
        })
        .collect();
    let mut answers = store.put_many(&values, deadline).into_iter();
    each()
        .map(|(index, (ticket, ready))| match ready {
            Ready::Failed(kind) => Outcome::Failed(*kind),
            Ready::Sealed(_) if is_wanted(index) => match answers.next() {
                Some(Ok(PutOutcome::Stored)) => Outcome::Stored(ticket.transfer().bytes as u64),
                Some(Ok(PutOutcome::AlreadyPresent)) => Outcome::AlreadyPresent,
                Some(Err(error)) => Outcome::Failed(error.kind()),
                None => Outcome::Failed(ErrorKind::Protocol),
            },
            Ready::Gathered(_) | Ready::Sealed(_) => Outcome::AlreadyPresent,
        })
        .collect()
}
