//! Copy lanes gather blocks into slots, so that the serving engine can reuse the blocks.

use std::sync::Arc;
use std::time::Instant;

use penstock_layout::Segment;
use penstock_store::ErrorKind;

use super::Inner;
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::queue::{CopyWork, Put};
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
                inner.queues.push_put(Put { ticket, slot });
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
