//! Loads from a store that is this machine's memory. Each byte is copied once, without a slot.
//!
//! Such a load verifies what it has copied. So bytes may come into a block before it is known
//! whether they are right. Nobody reads such a block: until its job has been reported, it is the
//! load's alone, and it is reported as loaded only if it verified in the end. If it did not, the
//! object is fetched as any other, or the block is reported as not loaded, and vLLM computes it.

use std::time::Instant;

use penstock_contract::ErrorKind;
use penstock_value::SealedStore;
use penstock_value::sealed::{Got, HeaderRoom, Wanted};

use super::Inner;
use crate::Outcome;
use crate::load_job::LoadTicket;
use crate::registration::NotCopied;
use crate::stats::add_time;

/// What came of a load in place.
pub(super) enum Read {
    /// The object has its outcome.
    Over,
    /// The store does not have it, or it cannot be read in place.
    Absent,
    /// The store has it damaged.
    Damaged,
}

/// Loads an object if the nearest store has it in memory of this machine. `loaded` makes the
/// outcome of the payload's bytes.
pub(super) fn load(
    inner: &Inner,
    store: &SealedStore,
    ticket: &LoadTicket,
    loaded: fn(u64) -> Outcome,
) -> Read {
    let can = inner.config.in_place
        && store.is_read_in_place()
        && ticket.prefetch().is_none()
        && ticket.registration().is_host();
    if !can {
        return Read::Absent;
    }
    if !ticket.begin_scatter() {
        return Read::Over;
    }
    let start = Instant::now();
    let got = read(inner, store, ticket);
    add_time(&inner.counters.scatter_nanos, start);
    let outcome = match got {
        Ok(Got::Payload(verified)) => loaded(verified.bytes()),
        Ok(got) => {
            ticket.scatter_later();
            return match got {
                Got::Rejected(_) => Read::Damaged,
                _ => Read::Absent,
            };
        }
        Err(NotCopied::Closed) => Outcome::Cancelled,
        Err(NotCopied::Device(_)) => Outcome::Failed(ErrorKind::Io),
    };
    ticket.settle(outcome);
    Read::Over
}

fn read(inner: &Inner, store: &SealedStore, ticket: &LoadTicket) -> Result<Got, NotCopied> {
    let transfer = ticket.transfer();
    let limit = ticket
        .limit()
        .min(Instant::now() + inner.config.get_timeout);
    ticket.registration().fill(
        transfer.pages.clone(),
        &transfer.key.span,
        transfer.bytes,
        |blocks| {
            let mut header = HeaderRoom::new();
            let wanted = Wanted {
                key: &transfer.key,
                context: &transfer.context,
                position: transfer.position,
                payload_bytes: Some(transfer.bytes as u64),
                memory: header.before(store.header_bytes(), blocks),
            };
            store.read_in_place(wanted, limit)
        },
    )
}
