//! Copy lanes take blocks away, so that the serving engine can reuse them: straight into node
//! memory, or into slots.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::{ErrorKind, PutOutcome};

use super::Inner;
use super::node::cut;
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::copy::Way;
use crate::queue::{CopyWork, Payload, Put};
use crate::registration::{NotCopied, Object};
use crate::stats::add_time;
use crate::store_job::StoreTicket;

pub(super) fn run(inner: &Inner) {
    let lane = &inner.lanes.copy;
    loop {
        let seen = inner.signals.copy.generation();
        match inner.queues.next_copy() {
            CopyWork::Gather(batch) => {
                inner.run(lane, || gather(inner, batch));
            }
            CopyWork::Place(batch) => inner.run(lane, || place(inner, batch)),
            CopyWork::Wait(until) => inner.signals.copy.wait(seen, until),
            CopyWork::Close => return,
        }
    }
}

fn gather(inner: &Inner, mut batch: Vec<(StoreTicket, Slot<Empty>)>) {
    let Some((first, _)) = batch.first() else {
        return;
    };
    let start = Instant::now();
    // An encrypted value is authenticated later. A checksum would reveal something about the
    // plaintext.
    let sum = inner.config.keys.is_none();
    let registration = Arc::clone(first.registration());
    let objects = batch.iter_mut().map(|(ticket, slot)| {
        let transfer = ticket.transfer();
        Object {
            pages: transfer.pages.clone(),
            span: &transfer.key.span,
            payload: slot.payload_mut(transfer.bytes),
        }
    });
    let checksums = registration.gather(objects, sum);
    add_time(&inner.counters.gather_nanos, start);
    let outcome = match checksums {
        Ok(checksums) => {
            for ((ticket, slot), checksum) in batch.into_iter().zip(checksums) {
                let slot = slot.gathered(ticket.transfer(), checksum);
                let payload = Payload::InSlot(slot);
                inner.queues.push_put(Put { ticket, payload });
            }
            return;
        }
        Err(NotCopied::Closed) => Outcome::Dropped,
        Err(NotCopied::Device(_)) => Outcome::Failed(ErrorKind::Io),
    };
    for (ticket, _) in batch {
        ticket.resolve(outcome);
    }
}

/// The most time that a batch waits for room in node memory. The owner may wait for its blocks
/// meanwhile.
const LONGEST_PLACE: Duration = Duration::from_secs(1);

/// Copies objects' blocks straight into node memory. An object for which it has no room goes on in a
/// slot.
fn place(inner: &Inner, batch: Vec<StoreTicket>) {
    let node = inner.node.as_ref().expect("objects are placed there");
    let start = Instant::now();
    // The blocks are held meanwhile, as if they waited for a slot. But nobody who needs them can end
    // this wait, as with a slot.
    let deadline = start + inner.config.store_wait.min(LONGEST_PLACE);
    let mut placed = Vec::new();
    for ticket in batch {
        if let Some(given_up) = ticket.given_up() {
            ticket.resolve(given_up.outcome());
            continue;
        }
        let transfer = ticket.transfer();
        let bytes = transfer.bytes as u64;
        match node.reserve(
            &transfer.key,
            transfer.writer,
            bytes,
            transfer.position,
            deadline,
        ) {
            Ok(Some(room)) => placed.push((ticket, room)),
            Ok(None) => pass_on(inner, ticket),
            Err(_) => inner.queues.gather_instead(ticket),
        }
    }
    let Some((first, _)) = placed.first() else {
        return;
    };
    let registration = Arc::clone(first.registration());
    if registration.is_host() {
        for (ticket, room) in placed {
            let transfer = ticket.transfer();
            let copied = registration.read(
                transfer.pages.clone(),
                &transfer.key.span,
                transfer.bytes,
                |blocks| room.fill(blocks),
            );
            show(inner, ticket, copied);
        }
    } else {
        let objects = placed.iter().map(|(ticket, room)| {
            let transfer = ticket.transfer();
            (transfer.pages.clone(), transfer.key.span, room.runs())
        });
        let copied = registration.copy_shared(Way::Gather, cut(inner, objects));
        if copied.is_ok() {
            // They are summed where they are now.
            placed.iter_mut().for_each(|(ticket, _)| ticket.gathered());
        }
        for (ticket, room) in placed {
            show(inner, ticket, copied.clone().map(|()| room.publish()));
        }
    }
    add_time(&inner.counters.gather_nanos, start);
}

/// Goes on with an object that was copied, and then published or not.
fn show(
    inner: &Inner,
    ticket: StoreTicket,
    copied: Result<penstock_contract::Result<PutOutcome>, NotCopied>,
) {
    match copied {
        Ok(Ok(_)) => pass_on(inner, ticket),
        Ok(Err(error)) => ticket.resolve(Outcome::Failed(error.kind())),
        Err(NotCopied::Closed) => ticket.resolve(Outcome::Dropped),
        Err(NotCopied::Device(_)) => ticket.resolve(Outcome::Failed(ErrorKind::Io)),
    }
}

/// Node memory has the object: the store is next.
fn pass_on(inner: &Inner, ticket: StoreTicket) {
    let payload = Payload::InNode;
    inner.queues.push_put(Put { ticket, payload });
}
