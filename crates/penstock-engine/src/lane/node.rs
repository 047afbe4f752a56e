//! Loads by way of node memory, which the engines of a machine share.
//!
//! What node memory has goes into the blocks from there. What comes from the store is put there too,
//! once: of several engines that want a value, one fetches it, and the others wait until it has come.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use penstock_contract::ErrorKind;
use penstock_contract::memory::{Claim, Run};
use penstock_layout::Span;
use penstock_value::SealedStore;
use penstock_value::sealed::{Got, Lent};

use super::delivery::Deliveries;
use super::fetching::{Fetching, REMOVE_TIMEOUT};
use super::{Inner, in_place};
use crate::Outcome;
use crate::arena::PIN_BYTES;
use crate::copy::Way;
use crate::registration::NotCopied;
use crate::stats::add_time;

/// Time given to a look into node memory, which waits for nothing.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);
/// How often to look whether the value has come.
const LOOK: Duration = Duration::from_micros(200);

/// Loads what node memory has. Returns the other objects.
pub(super) fn load(inner: &Inner, node: &SealedStore, batch: Vec<Fetching>) -> Vec<Fetching> {
    let mut others = Vec::new();
    for object in batch {
        match in_place::load(inner, node, &object.ticket, Outcome::Kept) {
            in_place::Read::Over => {}
            in_place::Read::Absent => others.push(object),
            in_place::Read::Damaged => {
                node.discard(
                    &object.ticket.transfer().key,
                    Instant::now() + REMOVE_TIMEOUT,
                );
                others.push(object.damaged());
            }
        }
    }
    let others = by_device(inner, node, others);
    through_slots(inner, node, others)
}

/// Has a device copy what node memory has into its blocks, from where it lies. Returns the other
/// objects.
///
/// Each value is verified first, and after the copy it must be the same still: pages of node memory
/// are never written to while the value that they belong to can be found. Until then, nobody is told
/// of the load.
fn by_device(inner: &Inner, node: &SealedStore, batch: Vec<Fetching>) -> Vec<Fetching> {
    let mut others = Vec::new();
    let mut waiting: Vec<(Fetching, Lent<'_>)> = Vec::new();
    let mut bytes = 0;
    for object in batch {
        let ticket = &object.ticket;
        let registration = ticket.registration();
        let can = !registration.is_host()
            && ticket.prefetch().is_none()
            && inner.queues.reaches_node(registration);
        if !can {
            others.push(object);
            continue;
        }
        let transfer = ticket.transfer();
        let soon = Instant::now() + LOOK_TIMEOUT;
        let start = Instant::now();
        let lent = node.lend(
            &transfer.key,
            transfer.bytes as u64,
            transfer.position,
            soon,
        );
        add_time(&inner.counters.verify_nanos, start);
        match lent {
            Ok(Some(lent)) => {
                let is_alike = waiting.first().is_none_or(|(first, _)| {
                    Arc::ptr_eq(first.ticket.registration(), registration)
                });
                if !is_alike {
                    others.extend(scatter_lent(inner, std::mem::take(&mut waiting)));
                    bytes = 0;
                }
                bytes += transfer.bytes;
                let is_full = bytes >= registration.copy_bytes();
                waiting.push((object, lent));
                if is_full {
                    others.extend(scatter_lent(inner, std::mem::take(&mut waiting)));
                    bytes = 0;
                }
            }
            Ok(None) => others.push(object),
            Err(_) => {
                node.discard(&transfer.key, Instant::now() + REMOVE_TIMEOUT);
                others.push(object.damaged());
            }
        }
    }
    others.extend(scatter_lent(inner, waiting));
    others
}

/// Copies lent values of one registration into their blocks, in one copy. Returns those that were
/// given up meanwhile.
fn scatter_lent(inner: &Inner, mut wanted: Vec<(Fetching, Lent<'_>)>) -> Vec<Fetching> {
    wanted.retain(|(object, _)| object.ticket.begin_scatter());
    let Some((first, _)) = wanted.first() else {
        return Vec::new();
    };
    let start = Instant::now();
    let objects = wanted.iter().map(|(object, lent)| {
        let transfer = object.ticket.transfer();
        (transfer.pages.clone(), transfer.key.span, lent.runs())
    });
    let registration = Arc::clone(first.ticket.registration());
    let copied = registration.copy_shared(Way::Scatter, cut(inner, objects));
    add_time(&inner.counters.scatter_nanos, start);
    let mut others = Vec::new();
    for (object, lent) in wanted {
        let ticket = &object.ticket;
        match &copied {
            Ok(()) if lent.is_still() => {
                ticket.settle(Outcome::Kept(ticket.transfer().bytes as u64));
            }
            Ok(()) => {
                ticket.scatter_later();
                others.push(object);
            }
            Err(NotCopied::Closed) => ticket.settle(Outcome::Cancelled),
            Err(NotCopied::Device(_)) => ticket.settle(Outcome::Failed(ErrorKind::Io)),
        }
    }
    others
}

/// Cuts runs where pinned pieces of node memory meet: no copy may cross from one into the next.
pub(super) fn cut<P>(
    inner: &Inner,
    objects: impl Iterator<Item = (P, Span, Vec<Run>)>,
) -> impl Iterator<Item = (P, Span, Vec<Run>)> {
    let memory = inner.node.as_ref().and_then(SealedStore::memory);
    let begin = memory.map_or(0, |memory| memory.start().addr());
    objects.map(move |(pages, span, runs)| {
        let runs = runs.into_iter().flat_map(|run| run.cut(begin, PIN_BYTES));
        (pages, span, runs.collect())
    })
}

/// Loads objects that cannot be read in place: encrypted ones, those of devices that do not reach
/// node memory, and those that only have to be here. Returns those that it did not load.
fn through_slots(inner: &Inner, node: &SealedStore, batch: Vec<Fetching>) -> Vec<Fetching> {
    let is_here = |object: &Fetching| {
        let key = object.ticket.transfer().key;
        let soon = Instant::now() + LOOK_TIMEOUT;
        matches!(node.contains(&[key], soon).as_deref(), Ok([true]))
    };
    let (here, mut absent): (Vec<_>, Vec<_>) = batch.into_iter().partition(is_here);
    let mut fetched = Vec::new();
    for object in here {
        if object.ticket.prefetch().is_some() {
            object
                .ticket
                .settle(Outcome::Kept(object.ticket.transfer().bytes as u64));
        } else {
            fetched.push(object);
        }
    }
    if fetched.is_empty() {
        return absent;
    }
    let get_by = Instant::now() + inner.config.get_timeout;
    let mut deliveries = Deliveries::new(inner, Outcome::Kept);
    for arrival in node.fetch(fetched, get_by) {
        match node.verify(arrival) {
            Ok((object, got @ Got::Payload(_))) => deliveries.settle(object, got),
            Ok((object, _)) => absent.push(object),
            Err(rejected) => {
                // Node memory has one copy, so this removes it, and gets nothing.
                let remove_by = Instant::now() + REMOVE_TIMEOUT;
                let (object, _) = node.mend(rejected, get_by, remove_by);
                absent.push(object.damaged());
            }
        }
    }
    deliveries.flush();
    absent
}

/// Fetches objects from the store with `fetch`, but none that another engine is fetching: those are
/// waited for, and loaded from node memory.
pub(super) fn fetch_once(
    inner: &Inner,
    node: &SealedStore,
    batch: Vec<Fetching>,
    fetch: impl Fn(Vec<Fetching>),
) {
    let give_up = Instant::now() + inner.config.claim_wait;
    let mut waiting = batch;
    while !waiting.is_empty() {
        let (claims, own, others) = claim(node, waiting, Instant::now() >= give_up);
        // Between the last look and the claim, another engine may have brought it.
        let own = load(inner, node, own);
        if !own.is_empty() {
            fetch(own);
        }
        drop(claims);
        waiting = others
            .into_iter()
            .filter(|object| object.ticket.is_wanted())
            .collect();
        if !waiting.is_empty() {
            thread::sleep(LOOK);
            waiting = load(inner, node, waiting);
        }
    }
}

/// Claims of objects, the objects, and those that another engine has claimed; with `anyway`, none
/// of these are left.
fn claim(
    node: &SealedStore,
    batch: Vec<Fetching>,
    anyway: bool,
) -> (Vec<Claim<'_>>, Vec<Fetching>, Vec<Fetching>) {
    let (mut claims, mut own, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for object in batch {
        match node.claim(&object.ticket.transfer().key) {
            Some(claim) => {
                claims.push(claim);
                own.push(object);
            }
            None if anyway => own.push(object),
            None => others.push(object),
        }
    }
    (claims, own, others)
}
