//! Copy lanes gather blocks into slots, so that the serving engine can reuse the blocks.

use std::time::Instant;

use penstock_layout::Segment;
use penstock_store::ErrorKind;

use super::Inner;
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::queue::{CopyWork, Put};
use crate::registration::NotCopied;
use crate::stats::add_time;
use crate::store_job::StoreTicket;

pub(super) fn run(inner: &Inner) {
    let mut segments = Vec::new();
    loop {
        let seen = inner.signals.copy.generation();
        match inner.queues.next_copy() {
            CopyWork::Gather(ticket, slot) => {
                inner.contain(|| gather(inner, ticket, slot, &mut segments));
            }
            CopyWork::Wait(until) => inner.signals.copy.wait(seen, until),
            CopyWork::Close => return,
        }
    }
}

fn gather(inner: &Inner, ticket: StoreTicket, mut slot: Slot<Empty>, segments: &mut Vec<Segment>) {
    let start = Instant::now();
    let transfer = ticket.transfer();
    let bytes = transfer.bytes;
    // An encrypted value is authenticated later. A checksum would reveal something about the
    // plaintext.
    let sum = inner.config.keys.is_none();
    let checksum = ticket.registration().gather(
        transfer.pages.clone(),
        &transfer.key.span,
        slot.payload_mut(bytes),
        sum,
        segments,
    );
    add_time(&inner.counters.gather_nanos, start);
    match checksum {
        Ok(checksum) => {
            let slot = slot.gathered(bytes, checksum);
            inner.queues.push_put(Put { ticket, slot });
        }
        Err(NotCopied::Closed) => ticket.resolve(Outcome::Dropped),
        Err(NotCopied::Device(_)) => ticket.resolve(Outcome::Failed(ErrorKind::Io)),
    }
}
