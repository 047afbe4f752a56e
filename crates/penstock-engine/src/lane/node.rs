//! Loads by way of node memory, which the engines of a machine share.
//!
//! What node memory has goes into the blocks from there. What comes from the store is put there too,
//! once: of several engines that want a value, one fetches it, and the others wait until it has come.

use std::thread;
use std::time::{Duration, Instant};

use penstock_layout::Segment;
use penstock_store::sealed::Got;
use penstock_store::{Claim, SealedStore};

use super::delivery::Deliveries;
use super::get::{Fetching, REMOVE_TIMEOUT};
use super::{Inner, in_place};
use crate::Outcome;
use crate::arena::{Slot, Verified};
use crate::load_job::LoadTicket;

/// Time given to a look into node memory, which waits for nothing.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);
/// How often to look whether the value has come.
const LOOK: Duration = Duration::from_micros(200);

/// Loads what node memory has. Returns the other objects.
pub(super) fn load(
    inner: &Inner,
    node: &SealedStore,
    batch: Vec<Fetching>,
    segments: &mut Vec<Segment>,
) -> Vec<Fetching> {
    let mut others = Vec::new();
    for object in batch {
        match in_place::load(inner, node, &object.ticket, segments, Outcome::Kept) {
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
    through_slots(inner, node, others, segments)
}

/// The same for objects that cannot be read in place: those of devices, encrypted ones, and those
/// that only have to be here.
fn through_slots(
    inner: &Inner,
    node: &SealedStore,
    batch: Vec<Fetching>,
    segments: &mut Vec<Segment>,
) -> Vec<Fetching> {
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
            Ok((object, got @ Got::Payload(_))) => deliveries.settle(object, got, segments),
            Ok((object, _)) => absent.push(object),
            Err(rejected) => {
                // Node memory has one copy, so this removes it, and gets nothing.
                let remove_by = Instant::now() + REMOVE_TIMEOUT;
                let (object, _) = node.mend(rejected, get_by, remove_by);
                absent.push(object.damaged());
            }
        }
    }
    deliveries.flush(segments);
    absent
}

/// Fetches objects from the store with `fetch`, but none that another engine is fetching: those are
/// waited for, and loaded from node memory.
pub(super) fn fetch_once(
    inner: &Inner,
    node: &SealedStore,
    batch: Vec<Fetching>,
    segments: &mut Vec<Segment>,
    fetch: impl Fn(Vec<Fetching>, &mut Vec<Segment>),
) {
    let give_up = Instant::now() + inner.config.claim_wait;
    let mut waiting = batch;
    while !waiting.is_empty() {
        let (claims, own, others) = claim(node, waiting, Instant::now() >= give_up);
        // Between the last look and the claim, another engine may have brought it.
        let own = load(inner, node, own, segments);
        if !own.is_empty() {
            fetch(own, segments);
        }
        drop(claims);
        waiting = others
            .into_iter()
            .filter(|object| object.ticket.is_wanted())
            .collect();
        if !waiting.is_empty() {
            thread::sleep(LOOK);
            waiting = load(inner, node, waiting, segments);
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

/// Puts what came from the store into node memory. If it has no room, it just has one value less.
pub(super) fn keep(inner: &Inner, node: &SealedStore, ticket: &LoadTicket, slot: Slot<Verified>) {
    let transfer = ticket.transfer();
    let deadline = Instant::now() + inner.config.put_timeout;
    let sum = node.keys().is_none();
    if let Ok(value) = slot.into_gathered(sum).seal(node, transfer) {
        node.put_many(&[value.value(transfer.position)], deadline);
    }
}
