//! Verified values on their way into their blocks. A device takes several in one copy, as far as
//! that gains anything; host memory takes each at once, while it is in the core's cache.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_contract::ErrorKind;
use penstock_value::SealedStore;
use penstock_value::header::Rejection;
use penstock_value::sealed::Got;

use super::Inner;
use super::fetching::Fetching;
use crate::Outcome;
use crate::arena::{Slot, Verified};
use crate::host_tier::Value;
use crate::load_job::LoadTicket;
use crate::registration::{NotCopied, Object};
use crate::stats::add_time;

/// Where a value comes from.
enum Source {
    Store {
        slot: Slot<Verified>,
        /// Whether a damaged value was there before.
        replaces_damaged: bool,
    },
    HostTier(Value),
}

/// A value, and the object that it is for.
struct Delivery {
    ticket: LoadTicket,
    from: Source,
}

impl Delivery {
    fn payload(&self) -> &[u8] {
        match &self.from {
            Source::Store { slot, .. } => slot.payload(),
            Source::HostTier(value) => value.payload(),
        }
    }
}

/// Values that wait for their copy. They all are of one registration.
///
/// Those that still wait when this is dropped have failed: whoever adds any flushes in the end.
pub(super) struct Deliveries<'a> {
    inner: &'a Inner,
    /// Makes the outcome of the payload's bytes.
    loaded: fn(u64) -> Outcome,
    waiting: Vec<Delivery>,
    /// Payload bytes of those that wait.
    bytes: usize,
}

impl<'a> Deliveries<'a> {
    /// Deliveries without a value yet. `loaded` makes the outcome of a value's payload bytes.
    pub(super) fn new(inner: &'a Inner, loaded: fn(u64) -> Outcome) -> Self {
        Self {
            inner,
            loaded,
            waiting: Vec::new(),
            bytes: 0,
        }
    }

    /// Settles an object by what its get brought. A payload is delivered at once, or with the next
    /// ones.
    pub(super) fn settle(&mut self, object: Fetching, got: Got) {
        let Fetching {
            ticket,
            slot,
            was_damaged,
        } = object;
        let outcome = match got {
            Got::Payload(verified) => {
                let slot = slot.verified(ticket.transfer(), verified);
                let from = Source::Store {
                    slot,
                    replaces_damaged: verified.is_mended() || was_damaged,
                };
                return self.add(Delivery { ticket, from });
            }
            Got::Miss => Outcome::Miss,
            Got::Rejected(rejection) => Outcome::Rejected(rejection),
            Got::Failed(error) if error.kind() == ErrorKind::TimedOut => Outcome::TimedOut,
            Got::Failed(error) => Outcome::Failed(error.kind()),
            Got::TooLarge(_) => unreachable!("a transfer has one length, any other is rejected"),
        };
        ticket.resolve(outcome);
    }

    /// Delivers a value of the host tier.
    pub(super) fn held(&mut self, ticket: LoadTicket, value: Value) {
        let writer = value.writer();
        if self.inner.is_distrusted(writer) {
            drop(value);
            self.inner
                .queues
                .host_tier()
                .discard(&ticket.transfer().key);
            return ticket.resolve(Outcome::Rejected(Rejection::Distrusted(writer)));
        }
        let from = Source::HostTier(value);
        self.add(Delivery { ticket, from });
    }

    fn add(&mut self, delivery: Delivery) {
        let registration = delivery.ticket.registration();
        let copy_bytes = registration.copy_bytes();
        if let Some(first) = self.waiting.first()
            && !Arc::ptr_eq(first.ticket.registration(), registration)
        {
            self.flush();
        }
        self.bytes += delivery.payload().len();
        self.waiting.push(delivery);
        if self.bytes >= copy_bytes {
            self.flush();
        }
    }

    /// Writes all that wait into their blocks, but for those that nobody wants any more and those
    /// that are for a prefetch. Keeps what came from a store.
    pub(super) fn flush(&mut self) {
        self.bytes = 0;
        let mut wanted = mem::take(&mut self.waiting);
        wanted.retain(|delivery| delivery.ticket.begin_scatter());
        let scattered = self.scatter(&wanted);
        for Delivery { ticket, from } in wanted {
            let outcome = match scattered {
                Err(outcome) if ticket.prefetch().is_none() => Err(outcome),
                _ => Ok(()),
            };
            match from {
                Source::Store {
                    slot,
                    replaces_damaged,
                } => match outcome {
                    Ok(()) => self.keep(&ticket, slot, replaces_damaged),
                    Err(outcome) => ticket.resolve(outcome),
                },
                Source::HostTier(value) => {
                    // Dropped first, so that giving up the value once the job is over frees its
                    // slot.
                    drop(value);
                    let bytes = ticket.transfer().bytes as u64;
                    let outcome = outcome.err().unwrap_or(Outcome::Kept(bytes));
                    ticket.resolve(outcome);
                }
            }
        }
    }

    /// Writes values into their blocks, in one copy.
    fn scatter(&self, wanted: &[Delivery]) -> Result<(), Outcome> {
        let for_blocks = || (wanted.iter()).filter(|delivery| delivery.ticket.prefetch().is_none());
        let Some(first) = for_blocks().next() else {
            return Ok(());
        };
        let start = Instant::now();
        let objects = for_blocks().map(|delivery| {
            let transfer = delivery.ticket.transfer();
            Object {
                pages: transfer.pages.clone(),
                span: &transfer.key.span,
                payload: delivery.payload(),
            }
        });
        let scattered = first.ticket.registration().scatter(objects);
        add_time(&self.inner.counters.scatter_nanos, start);
        scattered.map_err(|why| match why {
            NotCopied::Closed => Outcome::Cancelled,
            NotCopied::Device(_) => Outcome::Failed(ErrorKind::Io),
        })
    }

    /// Keeps a value that is in its blocks, or that is for a prefetch, and settles its object.
    fn keep(&self, ticket: &LoadTicket, slot: Slot<Verified>, replaces_damaged: bool) {
        let inner = self.inner;
        let outcome = (self.loaded)(ticket.transfer().bytes as u64);
        let is_from_store = matches!(outcome, Outcome::Loaded(_));
        if replaces_damaged && is_from_store {
            let mended = &inner.counters.mended_objects;
            mended.fetch_add(1, Ordering::Relaxed);
        }
        let prefetch = ticket.prefetch();
        match &inner.node {
            None => {
                let host_tier = inner.queues.host_tier();
                host_tier.keep(ticket.transfer(), slot, prefetch);
                ticket.settle(outcome);
            }
            // A prefetch is over once the value is there. A load does not wait for that.
            Some(node) if is_from_store && prefetch.is_some() => {
                put_into(node, inner, ticket, slot);
                ticket.settle(outcome);
            }
            Some(node) if is_from_store => {
                ticket.settle(outcome);
                put_into(node, inner, ticket, slot);
            }
            Some(_) => ticket.settle(outcome),
        }
    }
}

/// Puts what came from the store into node memory. If it has no room, it just has one value less.
fn put_into(node: &SealedStore, inner: &Inner, ticket: &LoadTicket, slot: Slot<Verified>) {
    let transfer = ticket.transfer();
    let deadline = Instant::now() + inner.config.put_timeout;
    let sum = node.keys().is_none();
    if let Ok(value) = slot.into_gathered(sum).seal(node, transfer) {
        node.put_many(&[value.value(transfer.position)], deadline);
    }
}
