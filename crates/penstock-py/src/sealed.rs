//! Values in Python's buffers, put and got through the layer for sealed values.

use std::io::IoSliceMut;
use std::time::Instant;
use std::{iter, slice};

use penstock_contract::{Key, PutOutcome, Result};
use penstock_value::SealedStore;
use penstock_value::sealed::{Destination, Got, HeaderRoom, Wanted};

use crate::buffer::Part;

/// Payload bytes that are handed at once to a store that does not pipeline.
const PIECE_BYTES: usize = 1 << 20;

/// The payload of a value in the caller's buffers, or the buffers where it is to go.
pub(crate) struct Value {
    pub(crate) key: Key,
    pub(crate) parts: Vec<Part>,
}

impl Value {
    fn bytes(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.parts.iter().map(|part| part.pinned().bytes())
    }

    fn len(&self) -> usize {
        self.bytes().map(<[u8]>::len).sum()
    }
}

pub(crate) fn get(store: &SealedStore, into: &Value, deadline: Instant) -> Got {
    let mut got = get_piece(store, slice::from_ref(into), deadline).into_iter();
    got.next().expect("an answer for each")
}

pub(crate) fn get_many(store: &SealedStore, batch: &[Value], deadline: Instant) -> Vec<Got> {
    pieces(store, batch)
        .flat_map(|piece| get_piece(store, piece, deadline))
        .collect()
}

fn get_piece(store: &SealedStore, batch: &[Value], deadline: Instant) -> Vec<Got> {
    let mut headers = vec![HeaderRoom::new(); batch.len()];
    let wanted = batch.iter().zip(&mut headers);
    let wanted = wanted.map(|(into, header)| Arrival { into, header });
    store
        .fetch(wanted.collect(), deadline)
        .into_iter()
        .map(|arrival| {
            let (_, got) = store
                .verify(arrival)
                .unwrap_or_else(|rejected| store.mend(rejected, deadline, deadline));
            got
        })
        .collect()
}

pub(crate) fn put(store: &SealedStore, value: &Value, deadline: Instant) -> Result<PutOutcome> {
    let mut put = put_piece(store, slice::from_ref(value), deadline).into_iter();
    put.next().expect("an answer for each")
}

pub(crate) fn put_many(
    store: &SealedStore,
    batch: &[Value],
    deadline: Instant,
) -> Vec<Result<PutOutcome>> {
    pieces(store, batch)
        .flat_map(|piece| put_piece(store, piece, deadline))
        .collect()
}

fn put_piece(store: &SealedStore, batch: &[Value], deadline: Instant) -> Vec<Result<PutOutcome>> {
    let seals: Vec<_> = batch
        .iter()
        .map(|value| store.seal(&value.key, b"", value.bytes()))
        .collect();
    let sealed: Vec<_> = seals
        .iter()
        .zip(batch)
        .filter_map(|(seal, value)| Some(seal.as_ref().ok()?.value(value.bytes(), 0)))
        .collect();
    let mut outcomes = store.put_many(&sealed, deadline).into_iter();
    drop(sealed);
    seals
        .into_iter()
        .map(|seal| seal.and_then(|_| outcomes.next().expect("an answer for each")))
        .collect()
}

/// Cuts a batch into the pieces that are handed to the store at once, so that it is sealed or
/// verified in the processor's caches. The whole batch is one piece where cutting costs more than
/// that saves.
fn pieces<'b>(store: &SealedStore, batch: &'b [Value]) -> impl Iterator<Item = &'b [Value]> {
    let most = match store.capabilities().pipelined {
        true => usize::MAX,
        false => PIECE_BYTES,
    };
    let mut rest = batch;
    iter::from_fn(move || {
        let mut bytes = 0_usize;
        let fits = |value: &&Value| {
            bytes = bytes.saturating_add(value.len());
            bytes <= most
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (piece, later) = rest.split_at_checked(count)?;
        rest = later;
        Some(piece)
    })
}

/// Where a value arrives: the header here, and the payload in the caller's buffers.
struct Arrival<'a> {
    into: &'a Value,
    header: &'a mut HeaderRoom,
}

impl Destination for Arrival<'_> {
    fn wanted(&mut self, header_bytes: usize) -> Wanted<'_> {
        let buffers = self.into.parts.iter().map(|part| {
            // SAFETY: destinations were checked not to overlap, each arrives once, and its slices
            // borrow it uniquely.
            #[allow(unsafe_code)]
            IoSliceMut::new(unsafe { part.pinned().bytes_mut() })
        });
        Wanted {
            key: &self.into.key,
            context: &[],
            position: 0,
            payload_bytes: None,
            memory: self.header.before(header_bytes, buffers),
        }
    }
}
