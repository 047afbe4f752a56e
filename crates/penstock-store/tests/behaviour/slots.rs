//! Memory in which sealed values arrive, and what is done with it.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use penstock_contract::{Key, PutOutcome, Result, Store};
use penstock_value::header::Rejection;
use penstock_value::sealed::{
    Destination, Got, HeaderRoom, LARGEST_HEADER_BYTES, SealedStore, Wanted,
};
use penstock_value::{Keyring, MemoryStore};

use super::soon;

pub const OURS: &str = "ours:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
pub const THEIRS: &str = "theirs://79/Pv6+fj39vX08/Lx8O/u7ezr6uno5+bl5OPi4eA=";
/// What goes into the encryption of what these functions put.
pub const CONTEXT: &[u8] = b"tenant";

pub fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(64 << 20))
}

pub fn over(store: &Arc<dyn Store>, keys: Option<&str>) -> SealedStore {
    let keys = keys.map(|line| Arc::new(Keyring::parse(line).unwrap()));
    SealedStore::new(Arc::clone(store), keys)
}

pub fn has(store: &dyn Store, key: &Key) -> bool {
    store.contains(&[*key], soon()).unwrap()[0]
}

/// The value as it lies in a store.
pub fn raw(store: &dyn Store, key: &Key) -> Vec<u8> {
    super::get(store, key).expect("a value")
}

pub fn plant(store: &dyn Store, key: &Key, value: &[u8]) {
    store.remove(&[*key], soon()).unwrap();
    store.put(key, &[IoSlice::new(value)], soon()).unwrap();
}

/// Memory in one piece, for a payload of one length: an arena's slot.
pub struct Slot {
    pub key: Key,
    pub context: &'static [u8],
    bytes: usize,
    memory: Vec<u8>,
}

impl Slot {
    pub fn of(key: Key, bytes: usize) -> Self {
        Self {
            key,
            context: CONTEXT,
            bytes,
            memory: vec![0xee; LARGEST_HEADER_BYTES + bytes],
        }
    }

    pub fn payload(&self, store: &SealedStore) -> &[u8] {
        &self.memory[store.header_bytes()..][..self.bytes]
    }
}

impl Destination for Slot {
    fn wanted(&mut self, _header_bytes: usize) -> Wanted<'_> {
        Wanted {
            key: &self.key,
            context: self.context,
            position: 0,
            payload_bytes: Some(self.bytes as u64),
            memory: std::iter::once(IoSliceMut::new(&mut self.memory)).collect(),
        }
    }
}

/// Buffers for a payload of any length that they have room for.
pub struct Buffers {
    key: Key,
    header: HeaderRoom,
    buffers: Vec<Vec<u8>>,
}

impl Buffers {
    pub fn of(key: Key, lens: &[usize]) -> Self {
        Self {
            key,
            header: HeaderRoom::new(),
            buffers: lens.iter().map(|len| vec![0xee; *len]).collect(),
        }
    }

    pub fn payload(&self, bytes: u64) -> Vec<u8> {
        let mut payload = self.buffers.concat();
        payload.truncate(bytes as usize);
        payload
    }
}

impl Destination for Buffers {
    fn wanted(&mut self, header_bytes: usize) -> Wanted<'_> {
        let buffers = self.buffers.iter_mut();
        Wanted {
            key: &self.key,
            context: CONTEXT,
            position: 0,
            payload_bytes: None,
            memory: self
                .header
                .before(header_bytes, buffers.map(|buffer| IoSliceMut::new(buffer))),
        }
    }
}

pub fn put(store: &SealedStore, key: &Key, payload: &[u8]) -> Result<PutOutcome> {
    let seal = store.seal(key, CONTEXT, std::iter::once(payload))?;
    let value = seal.value(std::iter::once(payload), 0);
    store.put_many(&[value], soon()).remove(0)
}

/// Fetched, verified and, if need be, mended.
pub fn get<D: Destination>(store: &SealedStore, destination: D) -> (D, Got) {
    let arrival = store.fetch(vec![destination], soon()).remove(0);
    store
        .verify(arrival)
        .unwrap_or_else(|rejected| store.mend(rejected, soon(), soon()))
}

pub fn assert_payload(store: &SealedStore, key: Key, payload: &[u8]) {
    let (slot, got) = get(store, Slot::of(key, payload.len()));
    assert!(matches!(got, Got::Payload(_)), "{got:?}");
    assert!(slot.payload(store) == payload);
}

pub fn rejection(got: &Got) -> Rejection {
    match got {
        Got::Rejected(rejection) => *rejection,
        other => panic!("{other:?}"),
    }
}
