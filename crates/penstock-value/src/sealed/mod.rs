//! Sealed values. What is put into a store has a header that fits it. What comes out of a store is
//! verified before anybody uses it. With keys, payloads are encrypted on the way out and decrypted
//! on the way in. A store that takes coded values decodes them on the way in.
//!
//! A get has three steps, so that nobody waits for the mending of a damaged value:
//!
//! 1. [`SealedStore::fetch`] gets a batch from the store.
//! 2. [`SealedStore::verify`] judges one value of the batch, and decrypts and decodes it in place.
//! 3. [`SealedStore::mend`] is for a value that was rejected. It removes the damaged copies, and
//!    gets a whole one from another tier.
//!
//! A put has two: [`SealedStore::seal`], [`SealedStore::seal_in_place`] or
//! [`SealedStore::seal_coded`], then [`SealedStore::put_many`].
//!
//! If the nearest store is this machine's memory, [`SealedStore::read_in_place`] gets a value in one
//! copy. If the store is this machine's memory, [`SealedStore::reserve`] and [`SealedStore::lend`] give
//! the places of values, for copies straight there and from there.
//!
//! [`SealedStore::get_whole`], [`SealedStore::examine`] and [`SealedStore::put_whole`] are for
//! operators: they judge and carry values as they lie, without removing any.

mod get;
mod in_place;
mod placed;
mod put;
mod trust;
mod whole;

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use smallvec::SmallVec;

pub use get::{Arrival, Destination, Got, Rejected, Verified, Wanted};
pub use placed::{Lent, Reserved};
pub use put::{Seal, SealedBeside, SealedInPlace, SealedValue};
pub use trust::{Accused, Mark, ROLL, Trust};
pub use whole::{Carried, Finding};

use penstock_contract::{Capabilities, Key, Listed, Namespace, Result, Store, StoreStats};

use crate::Keyring;
use crate::header::{ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Rejection, Writer};

/// Bytes that a destination has beyond its payload's. A value that arrives may have either header,
/// whether the reader has keys or not. Only when the value is there does it show whether it is
/// encrypted.
pub const LARGEST_HEADER_BYTES: usize = ENCRYPTED_HEADER_BYTES;

/// Bytes in front of a payload, with these keys.
pub fn header_bytes(keys: Option<&Keyring>) -> usize {
    match keys {
        Some(_) => ENCRYPTED_HEADER_BYTES,
        None => HEADER_BYTES,
    }
}

/// The memory in which one value arrives, in order. Up to three pieces (the header, the payload and
/// the rest) need no allocation.
pub type Memory<'a> = SmallVec<[IoSliceMut<'a>; 3]>;

/// A store of sealed values.
pub struct SealedStore {
    store: Arc<dyn Store>,
    keys: Option<Arc<Keyring>>,
    takes_coded: bool,
    /// Whom the pool trusts no more; None if that is not looked at.
    trust: Option<Arc<Trust>>,
    /// Memory for codes while they are decoded: a piece for each thread that was ever decoding at
    /// the same time as others.
    scratch: Mutex<Vec<Vec<u8>>>,
    rejected: AtomicU64,
    mended: AtomicU64,
}

impl SealedStore {
    /// With keys, values are encrypted, and only encrypted values are accepted.
    pub fn new(store: Arc<dyn Store>, keys: Option<Arc<Keyring>>) -> Self {
        Self {
            store,
            keys,
            takes_coded: false,
            trust: None,
            scratch: Mutex::default(),
            rejected: AtomicU64::new(0),
            mended: AtomicU64::new(0),
        }
    }

    /// Has this store take values that may be coded. Without this, coded values are not accepted.
    #[must_use]
    pub fn taking_coded(mut self) -> Self {
        self.takes_coded = true;
        self
    }

    /// Has this store accept no values of writers that the pool trusts no more.
    #[must_use]
    pub fn trusting(mut self, trust: Arc<Trust>) -> Self {
        self.trust = Some(trust);
        self
    }

    /// Whom the pool trusts no more, if that is looked at.
    pub fn trust(&self) -> Option<&Trust> {
        self.trust.as_deref()
    }

    /// Reads whom the pool trusts no more, if that is looked at and it is time to.
    pub fn refresh_trust(&self, deadline: Instant) {
        if let Some(trust) = &self.trust {
            trust.refresh(Instant::now(), deadline);
        }
    }

    fn check_writer(&self, writer: Writer) -> std::result::Result<(), Rejection> {
        match &self.trust {
            Some(trust) if trust.is_distrusted(writer) => Err(Rejection::Distrusted(writer)),
            _ => Ok(()),
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

    /// Bytes in front of a payload in the values that this store puts.
    pub fn header_bytes(&self) -> usize {
        header_bytes(self.keys.as_deref())
    }

    /// Values that did not verify when they were got, since this handle was made. Values that were
    /// then mended count too.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Values that did not verify at first, and of which a tier then gave a whole copy.
    pub fn mended(&self) -> u64 {
        self.mended.load(Ordering::Relaxed)
    }

    /// What the store can do, see [`Store::capabilities`].
    pub fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    /// The URL that opens the store, without credentials, see [`Store::url`].
    pub fn url(&self) -> String {
        self.store.url()
    }

    /// For each key, in order, whether the store has it, see [`Store::contains`]. Ask before you
    /// put large values: another process may have put the same ones meanwhile. Asking costs a round
    /// trip; sending a value again costs the whole value.
    pub fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.store.contains(keys, deadline)
    }

    /// Counts values as used now, see [`Store::touch`].
    pub fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        self.store.touch(values, deadline)
    }

    /// Counts a namespace's values as used before all others, see [`Store::retire`].
    pub fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        self.store.retire(namespace, deadline)
    }

    /// Removes the keys that exist; returns how many did. See [`Store::remove`].
    pub fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.store.remove(keys, deadline)
    }

    /// Removes a value that did not verify, see [`Store::remove_damaged`].
    pub fn remove_damaged(&self, key: &Key, bytes: u64, deadline: Instant) -> Result<()> {
        self.store.remove_damaged(key, bytes, deadline)
    }

    /// Visits every object, see [`Store::list`]. Bytes are those of values, header included.
    pub fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.store.list(namespace, visit, deadline)
    }

    /// The time of day of a listed object's last use, see [`Store::used_at`].
    pub fn used_at(&self, last_use: u64) -> Option<SystemTime> {
        self.store.used_at(last_use)
    }

    /// Facts about the store's own settings and state, see [`Store::describe`].
    pub fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.store.describe(deadline)
    }

    /// Counters of the store since it was opened, see [`Store::stats`].
    pub fn stats(&self) -> StoreStats {
        self.store.stats()
    }
}

/// Room for a value's header, if the payload's destination has none.
#[derive(Clone)]
pub struct HeaderRoom([u8; LARGEST_HEADER_BYTES]);

impl HeaderRoom {
    /// Room for either header.
    pub fn new() -> Self {
        Self([0; LARGEST_HEADER_BYTES])
    }

    /// The memory of a value: as much of this room as the header needs, then the payload's memory,
    /// then what is left of this room. So a value with the larger header can arrive where the
    /// smaller one is expected. It can then be told from a value that is too large.
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
