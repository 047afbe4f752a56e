//! Copy lanes take blocks away, so that the serving engine can reuse them: straight into node
//! memory, or into slots.

use std::sync::Arc;
use std::time::Instant;

use penstock_layout::Segment;
use penstock_store::ErrorKind;

use super::Inner;
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::queue::{CopyWork, Payload, Put};
use crate::registration::{NotCopied, Object};
use crate::stats::add_time;
use crate::store_job::StoreTicket;

pub(super) fn run(inner: &Inner) {
    let mut segments = Vec::new();
    loop {
        let seen = inner.signals.copy.generation();
        match inner.queues.next_copy() {
            CopyWork::Gather(batch) => {
                inner.contain(|| gather(inner, batch, &mut segments));
            }
            CopyWork::Place(ticket) => inner.contain(|| place(inner, ticket, &mut segments)),
            CopyWork::Wait(until) => inner.signals.copy.wait(seen, until),
            CopyWork::Close => return,
        }
    }
}

fn gather(inner: &Inner, mut batch: Vec<(StoreTicket, Slot<Empty>)>, segments: &mut Vec<Segment>) {
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
    let checksums = registration.gather(objects, sum, segments);
    add_time(&inner.counters.gather_nanos, start);
    let outcome = match checksums {
        Ok(checksums) => {
            for ((ticket, slot), checksum) in batch.into_iter().zip(checksums) {
                let slot = slot.gathered(ticket.transfer().bytes, checksum);
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

/// Copies an object's blocks straight into node memory. If it has no room, the object goes on in a
/// slot.
fn place(inner: &Inner, ticket: StoreTicket, segments: &mut Vec<Segment>) {
    let node = inner.node.as_ref().expect("objects are placed there");
    let start = Instant::now();
    let transfer = ticket.transfer();
    // The blocks are held meanwhile, as if they waited for a slot.
    let deadline = start + inner.config.store_wait.min(inner.config.put_timeout);
    let placed = ticket.registration().read(
        transfer.pages.clone(),
        &transfer.key.span,
        transfer.bytes,
        segments,
        |blocks| node.put_in_place(&transfer.key, blocks, transfer.position, deadline),
    );
    add_time(&inner.counters.gather_nanos, start);
    match placed {
        Ok(Ok(_)) => {
            let payload = Payload::InNode;
            inner.queues.push_put(Put { ticket, payload });
        }
        Ok(Err(_)) => inner.queues.gather_instead(ticket),
        Err(NotCopied::Closed) => ticket.resolve(Outcome::Dropped),
        Err(NotCopied::Device(_)) => ticket.resolve(Outcome::Failed(ErrorKind::Io)),
    }
}
