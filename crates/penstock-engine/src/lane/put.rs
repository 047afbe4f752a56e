//! Put lanes make values of gathered slots and put them into the store. What was copied straight
//! into node memory they send from there. They give way to other threads that want the processor.
//! They also compress and encrypt, rather than the copy lanes. So neither delays the release of
//! blocks, and nothing is encrypted that the store already has.

use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_contract::{ErrorKind, Key, PutOutcome};
use penstock_value::SealedStore;
use penstock_value::sealed::{LARGEST_HEADER_BYTES, SealedBeside, SealedValue};

use super::{Inner, witness};
use crate::Outcome;
use crate::arena::{Gathered, Sealed, Slot};
use crate::queue::{Payload, Put, PutWork};
use crate::stats::add_time;
use crate::store_job::StoreTicket;

pub(super) fn run(inner: &Inner) {
    // Stores can wait, and are dropped if they wait too long. The next request's computation cannot
    // wait.
    super::give_way();
    let mut scratch = Vec::new();
    let lane = &inner.lanes.put;
    loop {
        let seen = inner.signals.put.generation();
        match inner.queues.next_put() {
            PutWork::Put(batch) => inner.run(lane, || put(inner, batch, &mut scratch)),
            PutWork::Wait => inner.signals.put.wait(seen, None),
            PutWork::Close => return,
        }
    }
}

fn put(inner: &Inner, batch: Vec<Put>, scratch: &mut Vec<u8>) {
    let soon = Instant::now() + inner.config.put_timeout;
    inner.store.refresh_trust(soon);
    // Others may wait for what is put. Nobody waits for a comparison.
    let (witnesses, others) = witness::split(inner, batch);
    put_trusted(inner, others, scratch);
    let absent = witness::bear(inner, witnesses, scratch);
    put_trusted(inner, absent, scratch);
}

/// `scratch` takes the batch's values that lie beside their slots, until they are in the store.
fn put_trusted(inner: &Inner, batch: Vec<Put>, scratch: &mut Vec<u8>) {
    let batch = witness::trusted(inner, batch);
    if batch.is_empty() {
        return;
    }
    let deadline = Instant::now() + inner.config.put_timeout;
    let (tickets, mut ready): (Vec<_>, Vec<_>) = batch
        .into_iter()
        .map(|Put { ticket, payload }| (ticket, Ready::from(payload)))
        .unzip();
    let room = &mut room_beside(inner, &tickets, &ready, scratch);
    if let Some(node) = &inner.node {
        // Node memory gets values that are not coded: loads come from there in place. In slots,
        // these are made of the payloads where they lie, so the codes come first.
        code(inner, &tickets, &mut ready, room, |_| true);
        seal(inner, &tickets, &mut ready, |_, _| true);
        // The other engines of this machine can load them from here on, whatever the store does.
        put_sealed(node, &tickets, &ready, Ready::in_slot, |_| true, deadline);
        if inner.queues.is_store_failing() {
            for ticket in tickets {
                ticket.resolve(Outcome::Dropped);
            }
            return;
        }
    }
    let outcomes = put_into_store(inner, &tickets, &mut ready, room, deadline);
    for (ticket, ready) in tickets.iter().zip(ready) {
        keep(inner, ticket, ready);
    }
    inner.counters.put_calls.fetch_add(1, Ordering::Relaxed);
    for (ticket, outcome) in tickets.into_iter().zip(outcomes) {
        ticket.resolve(outcome);
    }
}

/// Puts the objects that the store does not have. Notes whether it takes puts.
fn put_into_store<'r>(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &mut [Ready<'r>],
    room: &mut &'r mut [u8],
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
            let is_absent = |index: usize| !present[index];
            copy_along(inner, tickets, ready, room, is_absent, deadline);
            code(inner, tickets, ready, room, is_absent);
            seal(inner, tickets, ready, |index, ready| {
                is_absent(index) && ready.beside.is_none()
            });
            let start = Instant::now();
            let outcomes = put_sealed(
                &inner.store,
                tickets,
                ready,
                Ready::for_store,
                is_absent,
                deadline,
            );
            add_time(&inner.counters.put_nanos, start);
            let stored = ready.iter().zip(&outcomes).filter_map(|(ready, outcome)| {
                let value = ready.for_store(0)?;
                matches!(outcome, Outcome::Stored(_)).then(|| value.bytes())
            });
            let counter = &inner.counters.stored_value_bytes;
            counter.fetch_add(stored.sum(), Ordering::Relaxed);
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
fn keep(inner: &Inner, ticket: &StoreTicket, ready: Ready<'_>) {
    let slot = match ready.state {
        State::Gathered(slot) => Some(slot.into_verified(ticket.transfer())),
        State::Sealed(slot) => slot.into_verified(),
        State::InNode | State::Gone | State::Failed(_) => None,
    };
    if let Some(slot) = slot {
        inner.queues.host_tier().keep(ticket.transfer(), slot, None);
    }
}

/// An object before it is put.
struct Ready<'r> {
    state: State,
    /// The coded value, or a copy of the one in node memory.
    beside: Option<SealedBeside<'r>>,
}

enum State {
    Gathered(Slot<Gathered>),
    Sealed(Slot<Sealed>),
    InNode,
    /// The object was in node memory, and no longer is.
    Gone,
    Failed(ErrorKind),
}

impl From<Payload> for Ready<'_> {
    fn from(payload: Payload) -> Self {
        Self {
            state: match payload {
                Payload::InSlot(slot) => State::Gathered(slot),
                Payload::InNode => State::InNode,
            },
            beside: None,
        }
    }
}

impl Ready<'_> {
    /// The value that lies in the slot, if it is sealed.
    fn in_slot(&self, position: u64) -> Option<SealedValue<'_>> {
        match &self.state {
            State::Sealed(slot) => Some(slot.value(position)),
            _ => None,
        }
    }

    /// The value that the store gets.
    fn for_store(&self, position: u64) -> Option<SealedValue<'_>> {
        match &self.beside {
            Some(value) => Some(value.value(position)),
            None => self.in_slot(position),
        }
    }
}

/// Room for the coded values of a batch, and for copies of those in node memory.
fn room_beside<'r>(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &[Ready<'_>],
    scratch: &'r mut Vec<u8>,
) -> &'r mut [u8] {
    let bytes = (tickets.iter().zip(ready))
        .map(|(ticket, ready)| {
            let transfer = ticket.transfer();
            let coded = usize::from(transfer.element.is_some());
            let copied = usize::from(matches!(ready.state, State::InNode));
            coded * (inner.store.header_bytes() + transfer.bytes)
                + copied * (LARGEST_HEADER_BYTES + transfer.bytes)
        })
        .sum();
    if scratch.len() < bytes {
        scratch.resize(bytes, 0);
    }
    &mut scratch[..bytes]
}

/// Copies the values that are wanted, by their index, out of node memory, and codes them there.
fn copy_along<'r>(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &mut [Ready<'r>],
    room: &mut &'r mut [u8],
    is_wanted: impl Fn(usize) -> bool,
    deadline: Instant,
) {
    let Some(node) = &inner.node else { return };
    let start = Instant::now();
    for (index, (ticket, ready)) in tickets.iter().zip(ready).enumerate() {
        if !is_wanted(index) || !matches!(ready.state, State::InNode) {
            continue;
        }
        let transfer = ticket.transfer();
        let Some(whole) = node.copy_along(&transfer.key, transfer.bytes, room, deadline) else {
            ready.state = State::Gone;
            continue;
        };
        let coded = match transfer.element {
            Some(element) => inner.store.code_beside(&whole, element, room),
            None => Ok(None),
        };
        match coded {
            Ok(coded) => ready.beside = Some(coded.unwrap_or(whole)),
            Err(error) => ready.state = State::Failed(error.kind()),
        }
    }
    add_time(&inner.counters.seal_nanos, start);
}

/// Makes coded values, in `room`, of the gathered objects that are wanted, by their index.
fn code<'r>(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &mut [Ready<'r>],
    room: &mut &'r mut [u8],
    is_wanted: impl Fn(usize) -> bool,
) {
    let start = Instant::now();
    for (index, (ticket, ready)) in tickets.iter().zip(ready).enumerate() {
        if is_wanted(index)
            && ready.beside.is_none()
            && let State::Gathered(slot) = &ready.state
        {
            match slot.code(&inner.store, ticket.transfer(), room) {
                Ok(code) => ready.beside = code,
                Err(kind) => ready.state = State::Failed(kind),
            }
        }
    }
    add_time(&inner.counters.seal_nanos, start);
}

/// Makes values, in their slots, of the gathered objects that are wanted, by their index.
fn seal(
    inner: &Inner,
    tickets: &[StoreTicket],
    ready: &mut [Ready<'_>],
    is_wanted: impl Fn(usize, &Ready<'_>) -> bool,
) {
    let start = Instant::now();
    for (index, (ticket, ready)) in tickets.iter().zip(ready).enumerate() {
        if is_wanted(index, ready)
            && let State::Gathered(_) = ready.state
            && let State::Gathered(slot) =
                std::mem::replace(&mut ready.state, State::Failed(ErrorKind::Internal))
        {
            ready.state = slot
                .seal(&inner.store, ticket.transfer())
                .map_or_else(State::Failed, State::Sealed);
        }
    }
    add_time(&inner.counters.seal_nanos, start);
}

/// Puts the values of the objects that are wanted, by their index. The others count as present.
fn put_sealed<'r>(
    store: &SealedStore,
    tickets: &[StoreTicket],
    ready: &[Ready<'r>],
    value: for<'v> fn(&'v Ready<'r>, u64) -> Option<SealedValue<'v>>,
    is_wanted: impl Fn(usize) -> bool,
    deadline: Instant,
) -> Vec<Outcome> {
    let (indices, values): (Vec<_>, Vec<_>) = tickets
        .iter()
        .zip(ready)
        .enumerate()
        .filter(|(index, _)| is_wanted(*index))
        .filter_map(|(index, (ticket, ready))| {
            Some((index, value(ready, ticket.transfer().position)?))
        })
        .unzip();
    let mut outcomes: Vec<Outcome> = ready
        .iter()
        .map(|ready| match ready.state {
            State::Failed(kind) => Outcome::Failed(kind),
            State::Gone => Outcome::Dropped,
            State::Gathered(_) | State::Sealed(_) | State::InNode => Outcome::AlreadyPresent,
        })
        .collect();
    for (index, answer) in indices.into_iter().zip(store.put_many(&values, deadline)) {
        outcomes[index] = match answer {
            Ok(PutOutcome::Stored) => Outcome::Stored(tickets[index].transfer().bytes as u64),
            Ok(PutOutcome::AlreadyPresent) => Outcome::AlreadyPresent,
            Err(error) => Outcome::Failed(error.kind()),
        };
    }
    outcomes
}
