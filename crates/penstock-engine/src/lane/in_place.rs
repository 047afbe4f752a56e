//! Loads from a store that is this machine's memory. Each byte is copied once, without a slot.
//!
//! Such a load verifies what it has copied. So bytes may come into a block before it is known whether they
//! are right. Nobody reads such a block: until its job has been reported, it is the load's alone, and
//! it is reported as loaded only if it verified in the end. If it did not, the object is fetched as
//! any other, or the block is reported as not loaded, and vLLM computes it.

use std::time::Instant;

use penstock_layout::Segment;
use penstock_store::ErrorKind;
use penstock_store::sealed::{HeaderRoom, Wanted};

use super::Inner;
use crate::Outcome;
use crate::load_job::LoadTicket;
use crate::registration::NotCopied;
use crate::stats::add_time;

/// Loads an object if the nearest store has it in memory of this machine. Gives the ticket back if
/// it is to be fetched.
pub(super) fn load(
    inner: &Inner,
    ticket: LoadTicket,
    segments: &mut Vec<Segment>,
) -> Option<LoadTicket> {
    let can = inner.store.is_read_in_place()
        && ticket.prefetch().is_none()
        && ticket.registration().is_host();
    if !can {
        return Some(ticket);
    }
    if !ticket.begin_scatter() {
        return None;
    }
    let start = Instant::now();
    let loaded = read(inner, &ticket, segments);
    add_time(&inner.counters.scatter_nanos, start);
    let outcome = match loaded {
        Ok(true) => Outcome::Loaded(ticket.transfer().bytes as u64),
        Ok(false) => {
            ticket.scatter_later();
            return Some(ticket);
        }
        Err(NotCopied::Closed) => Outcome::Cancelled,
        Err(NotCopied::Device(_)) => Outcome::Failed(ErrorKind::Io),
    };
    ticket.resolve(outcome);
    None
}

/// Whether the store had the object, and it verified.
fn read(
    inner: &Inner,
    ticket: &LoadTicket,
    segments: &mut Vec<Segment>,
) -> Result<bool, NotCopied> {
    let transfer = ticket.transfer();
    let limit = ticket
        .limit()
        .min(Instant::now() + inner.config.get_timeout);
    ticket.registration().fill(
        transfer.pages.clone(),
        &transfer.key.span,
        transfer.bytes,
        segments,
        |blocks| {
            let mut header = HeaderRoom::new();
            let wanted = Wanted {
                key: &transfer.key,
                context: &transfer.context,
                position: transfer.position,
                payload_bytes: Some(transfer.bytes as u64),
                memory: header.before(inner.store.header_bytes(), blocks),
            };
            inner.store.read_in_place(wanted, limit).is_some()
        },
    )
}
