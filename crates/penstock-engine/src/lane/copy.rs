//! Copy lanes gather blocks into slots, so that the serving engine can reuse the blocks.

use std::time::Instant;

use penstock_layout::Segment;
use penstock_store::ErrorKind;

use super::Floor;
use crate::Outcome;
use crate::arena::{Empty, Slot};
use crate::queue::{CopyWork, Put};
use crate::region::NotCopied;
use crate::stats::add_time;
use crate::store::StoreTicket;

pub(super) fn run(floor: &Floor) {
    let mut segments = Vec::new();
    loop {
        let seen = floor.signals.copy.generation();
        match floor.queues.next_copy() {
            CopyWork::Gather(ticket, slot) => {
                floor.contain(|| gather(floor, ticket, slot, &mut segments));
            }
            CopyWork::Wait(until) => floor.signals.copy.wait(seen, until),
            CopyWork::Close => return,
        }
    }
}

fn gather(floor: &Floor, ticket: StoreTicket, mut slot: Slot<Empty>, segments: &mut Vec<Segment>) {
    let start = Instant::now();
    let transfer = ticket.transfer();
    let bytes = transfer.bytes;
    // What is encrypted is authenticated, later; a checksum would tell of the plaintext.
    let sum = floor.config.keys.is_none();
    let checksum = ticket.registration().gather(
        transfer.pages.clone(),
        &transfer.key.span,
        slot.payload_mut(bytes),
        sum,
        segments,
    );
    add_time(&floor.counters.gather_nanos, start);
    match checksum {
        Ok(checksum) => {
            let slot = slot.gathered(bytes, checksum);
            floor.queues.push_put(Put { ticket, slot });
        }
        Err(NotCopied::Closed) => ticket.resolve(Outcome::Dropped),
        Err(NotCopied::Device(_)) => ticket.resolve(Outcome::Failed(ErrorKind::Io)),
    }
}
