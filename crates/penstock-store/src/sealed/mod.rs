//! Sealed values: what is put into a store has a header that fits it, and what comes out of one is
//! verified before anybody uses it. With keys, payloads are encrypted on the way out and decrypted
//! on the way in.
//!
//! A get has three steps, so that nobody waits for what a damaged value costs:
//!
//! 1. [`SealedStore::fetch`] gets a batch from the store.
//! 2. [`SealedStore::verify`] judges one value of it, decrypted where it lies.
//! 3. [`SealedStore::mend`], for one that was rejected: removes the damaged copies, and gets a whole one
//!    from another tier.
//!
//! A put has two: [`SealedStore::seal`] or [`SealedStore::seal_in_place`], then
//! [`SealedStore::put_many`].

mod get;
mod put;

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use smallvec::SmallVec;

pub use get::{Arrival, Destination, Got, Rejected, Verified, Wanted};
pub use put::{Seal, SealedInPlace, SealedValue};

use crate::value::{ENCRYPTED_HEADER_BYTES, HEADER_BYTES};
use crate::{Capabilities, Key, Keyring, Listed, Namespace, Result, Store, StoreStats};

/// Bytes that a destination has beyond its payload's. A value that arrives may have either header,
/// keys or not: only when it is there can it be told that it is encrypted.
pub const LARGEST_HEADER_BYTES: usize = ENCRYPTED_HEADER_BYTES;

/// Bytes in front of a payload, with these keys.
pub fn header_bytes(keys: Option<&Keyring>) -> usize {
    match keys {
        Some(_) => ENCRYPTED_HEADER_BYTES,
        None => HEADER_BYTES,
    }
}

/// The memory in which one value arrives, in order. What lies in one piece, or in one between header
/// and rest, needs no allocation.
pub type Memory<'a> = SmallVec<[IoSliceMut<'a>; 3]>;

/// A store of sealed values.
pub struct SealedStore {
    store: Arc<dyn Store>,
    keys: Option<Arc<Keyring>>,
    rejected: AtomicU64,
    mended: AtomicU64,
}

impl SealedStore {
    /// With keys, values are encrypted, and no others accepted.
    pub fn new(store: Arc<dyn Store>, keys: Option<Arc<Keyring>>) -> Self {
        Self {
            store,
            keys,
            rejected: AtomicU64::new(0),
            mended: AtomicU64::new(0),
        }
    }

    /// The store beneath, whose values are opaque bytes.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The keys that values are encrypted with.
    pub fn keys(&self) -> Option<&Arc<Keyring>> {
        self.keys.as_ref()
    }

    /// Bytes in front of a payload that this store puts.
    pub fn header_bytes(&self) -> usize {
        header_bytes(self.keys.as_deref())
    }

    /// Values that did not verify when they were got, since this handle was made; those that were
    /// mended count.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Values of which another tier than the nearest had a whole copy.
    pub fn mended(&self) -> u64 {
        self.mended.load(Ordering::Relaxed)
    }

    /// As [`Store::capabilities`].
    pub fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    /// As [`Store::url`].
    pub fn url(&self) -> String {
        self.store.url()
    }

    /// As [`Store::contains`]. Whoever puts large values asks first: another may have put the same
    /// meanwhile, and asking costs a round trip, sending it again the whole value.
    pub fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.store.contains(keys, deadline)
    }

    /// As [`Store::remove`].
    pub fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.store.remove(keys, deadline)
    }

    /// As [`Store::list`]: bytes are those of values, header included.
    pub fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.store.list(namespace, visit, deadline)
    }

    /// As [`Store::describe`].
    pub fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.store.describe(deadline)
    }

    /// As [`Store::stats`].
    pub fn stats(&self) -> StoreStats {
        self.store.stats()
    }
}

/// Room for a value's header, apart from its payload's destination.
#[derive(Clone)]
pub struct HeaderRoom([u8; LARGEST_HEADER_BYTES]);

impl HeaderRoom {
    /// Room for either header.
    pub fn new() -> Self {
        Self([0; LARGEST_HEADER_BYTES])
    }

    /// The memory of a value: so much of the room as the header needs, the payload's, and what is left
    /// of the room. So one with the larger header arrives where the smaller is expected, and can
    /// be told from one that is too large.
    pub fn before<'a>(
        &'a mut self,
        header_bytes: usize,
        payload: impl IntoIterator<Item = IoSliceMut<'a>>,
    ) -> Memory<'a> {
        let (header, rest) = self.0.split_at_mut(header_bytes);
        let mut memory = Memory::new();
        memory.push(IoSliceMut::new(header));
        memory.extend(payload);
        memory.push(IoSliceMut::new(rest));
        memory
    }
}

impl Default for HeaderRoom {
    fn default() -> Self {
        Self::new()
    }
}
