//! Values that are written and read where they lie, by whoever has means of its own for that: a
//! processor that sums on the way, or a device that copies by itself.
//!
//! A reserved value belongs to whoever reserved it, as any value that is being put. A lent one is
//! nobody's: it may be given up at any time. Whoever has copied it asks whether it was there all the
//! time.

use std::io::IoSlice;
use std::time::Instant;

use penstock_contract::memory::{Lent, Reserved, Run};
use penstock_contract::{Error, ErrorKind, GetOutcome, Key, PutOutcome, Result};
use penstock_value::copies::SummedCopy;
use penstock_value::header::HEADER_BYTES;

use super::ShmStore;
use super::index::{Claim, Found, Name};

/// Places of a value's payload: where runs of it begin in the segment, and their bytes.
type Places = Vec<(u64, usize)>;

/// A value that is being put.
pub(super) struct ReservedValue<'a> {
    store: &'a ShmStore,
    claim: Claim<'a>,
    name: Name,
    bytes: u64,
    first: u64,
    position: u64,
    payload: Places,
}

/// A value as it was found.
pub(super) struct LentValue<'a> {
    store: &'a ShmStore,
    found: Found,
    header: [u8; HEADER_BYTES],
    payload: Places,
}

impl ShmStore {
    /// Room for a value, unless it is there already.
    pub(super) fn reserve_one(
        &self,
        key: &Key,
        payload_bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> Result<Option<ReservedValue<'_>>> {
        let name = Name::of(key);
        let bytes = HEADER_BYTES as u64 + payload_bytes;
        let reserved = self.ready(deadline);
        let reserved = reserved.and_then(|()| self.take_room(&name, bytes, position, deadline));
        let reserved = reserved.and_then(|room| {
            let Some((claim, first)) = room else {
                return Ok(None);
            };
            let payload = self.places(first, bytes, deadline)?.ok_or_else(damaged)?;
            Ok(Some(ReservedValue {
                store: self,
                claim,
                name,
                bytes,
                first,
                position,
                payload,
            }))
        });
        match &reserved {
            Ok(None) => self.counters.put(&Ok(PutOutcome::AlreadyPresent), bytes),
            Err(_) => self.counters.failed(),
            Ok(Some(_)) => {}
        }
        reserved.map_err(|error| self.place(error, key))
    }

    /// A value, if it is there.
    pub(super) fn lend_one(
        &self,
        key: &Key,
        position: u64,
        deadline: Instant,
    ) -> Option<LentValue<'_>> {
        self.segment.check().ok()?;
        let found = self.segment.find(&Name::of(key))?;
        let payload = self.places(found.first, found.bytes, deadline).ok()??;
        let mut header = [0; HEADER_BYTES];
        let start = self.segment.geometry.page_at(found.first);
        self.segment.mapping().copy_out(start, &mut header);
        self.segment.note_use(&found, position);
        self.counters.got(&Ok(GetOutcome::Hit(found.bytes)));
        Some(LentValue {
            store: self,
            found,
            header,
            payload,
        })
    }

    /// Where a value's payload lies. None if the value has none, or is being changed.
    fn places(&self, first: u64, bytes: u64, deadline: Instant) -> Result<Option<Places>> {
        let mut places = Places::new();
        let mut header = HEADER_BYTES;
        let whole = self.segment.each_run(first, bytes, deadline, |at, run| {
            let (at, run) = (at + header as u64, (run as usize).checked_sub(header));
            header = 0;
            places.extend(run.filter(|&run| run > 0).map(|run| (at, run)));
        })?;
        Ok((whole && bytes >= HEADER_BYTES as u64).then_some(places))
    }

    fn runs(&self, places: &Places) -> Vec<Run> {
        let mapping = self.segment.mapping();
        places
            .iter()
            .map(|&(at, len)| mapping.run(at, len))
            .collect()
    }

    fn sum(&self, places: &Places) -> u64 {
        let bytes = places.iter().map(|&(_, len)| len as u64).sum();
        let mut sum = SummedCopy::new(bytes, false);
        for &(at, len) in places {
            self.segment.mapping().sum(at, len, &mut sum);
        }
        sum.finish()
    }
}

// SAFETY: the store, which is borrowed, keeps the segment mapped. The claim makes the pages this one's
// alone until it is published or dropped, and no page is in two runs.
#[allow(unsafe_code)]
unsafe impl Reserved for ReservedValue<'_> {
    fn runs(&self) -> Vec<Run> {
        self.store.runs(&self.payload)
    }

    fn fill(&mut self, payload: &mut dyn Iterator<Item = IoSlice<'_>>) -> u64 {
        let mut copy = SummedCopy::new(self.bytes - HEADER_BYTES as u64, true);
        let mut places = self.payload.iter().copied();
        let (mut at, mut left) = (0, 0);
        for slice in payload {
            let mut slice = &*slice;
            while !slice.is_empty() {
                if left == 0 {
                    (at, left) = places.next().expect("room for the payload");
                }
                let (now, later) = slice.split_at(slice.len().min(left));
                let mapping = self.store.segment.mapping();
                mapping.copy_in_summed(at, now, &mut copy);
                (at, left, slice) = (at + now.len() as u64, left - now.len(), later);
            }
        }
        copy.finish()
    }

    fn sum(&self) -> u64 {
        self.store.sum(&self.payload)
    }

    fn publish(self: Box<Self>, header: &[u8; HEADER_BYTES]) -> Result<PutOutcome> {
        let Self {
            store,
            claim,
            name,
            bytes,
            first,
            position,
            ..
        } = *self;
        let start = store.segment.geometry.page_at(first);
        store.segment.mapping().copy_in(start, header);
        let outcome = store.publish(claim, &name, bytes, first, position);
        store.counters.put(&outcome, bytes);
        outcome
    }
}

// SAFETY: the store, which is borrowed, keeps the segment mapped.
#[allow(unsafe_code)]
unsafe impl Lent for LentValue<'_> {
    fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    fn bytes(&self) -> u64 {
        self.found.bytes
    }

    fn runs(&self) -> Vec<Run> {
        self.store.runs(&self.payload)
    }

    fn sum(&self) -> u64 {
        self.store.sum(&self.payload)
    }

    fn is_still(&self) -> bool {
        let state = self.store.segment.state(self.found.entry);
        self.found.state.is_still(state)
    }
}

fn damaged() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "the pool's segment was changed by something that is not a pool",
    )
}
