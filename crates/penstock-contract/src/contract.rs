//! The contract that every store fulfils.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Instant;

use crate::memory::SharedMemory;
use crate::{Error, Key, Namespace, Result};

/// What a store can do. The behaviour suite reads this to know what to expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Other processes see what this one puts.
    pub shared: bool,
    /// Values outlive the process.
    pub persistent: bool,
    /// The store itself keeps within a bound and evicts to do so.
    pub bounded: bool,
    /// A batch takes less time than its requests one by one. If this is false, small batches are
    /// better: their values are still in the cache when they are verified.
    pub pipelined: bool,
    /// Largest value accepted, header included, in bytes.
    pub max_value_bytes: u64,
}

/// What became of a put that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The value is in the store.
    Stored,
    /// The store already had a value of this length under the key and kept it.
    AlreadyPresent,
}

/// What became of a get that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetOutcome {
    /// The whole value, of this many bytes, now fills the destination from its start. It may
    /// be shorter than the destination.
    Hit(u64),
    /// No such key.
    Miss,
    /// The value, of this many bytes, does not fit the destination, whose content is now
    /// unspecified.
    TooLarge(u64),
}

/// One value to put: its bytes are the slices' concatenation.
pub struct PutRequest<'a> {
    /// The object's name.
    pub key: Key,
    /// The value's bytes, in order.
    pub value: &'a [IoSlice<'a>],
    /// Tokens before this value in its prompt, as far as is known, else 0. A prefix is only useful
    /// from its beginning, but plain LRU evicts the beginning first. So a store that evicts the
    /// least recently used value may count values further on in a prompt as used earlier: then it
    /// evicts the end before the beginning.
    pub position: u64,
    /// Filled in by the store.
    pub outcome: Option<Result<PutOutcome>>,
}

impl<'a> PutRequest<'a> {
    /// A request that no store has seen, for a value whose place in a prompt is not known.
    pub fn new(key: Key, value: &'a [IoSlice<'a>]) -> Self {
        Self {
            key,
            value,
            position: 0,
            outcome: None,
        }
    }
}

/// One value to get into the caller's memory.
pub struct GetRequest<'a, 'b> {
    /// The object's name.
    pub key: Key,
    /// Where the value's bytes go, in order.
    pub into: &'a mut [IoSliceMut<'b>],
    /// Tokens before the value in its prompt, as in [`PutRequest::position`]; or
    /// [`GetRequest::NO_USE`].
    pub position: u64,
    /// Whether [`Self::checksum`] is wanted.
    pub wants_checksum: bool,
    /// Whether the bytes are used where they arrive. Otherwise they are copied on at once, so they
    /// are worth room in the processor's caches.
    pub is_in_place: bool,
    /// The checksum that `penstock-store` computes of what the destination holds now, if this is a
    /// hit and the store had time to compute it. A store has time while other values are on their
    /// way and this one is still in the processor's caches. Whoever changes the destination
    /// afterwards resets this to `None`. A store that leaves it `None` is right too.
    pub checksum: Option<u64>,
    /// Filled in by the store.
    pub outcome: Option<Result<GetOutcome>>,
}

impl<'a, 'b> GetRequest<'a, 'b> {
    /// The position of a get that is no use of its value. Stores that note positions then keep the
    /// time of use that they have noted.
    pub const NO_USE: u64 = u64::MAX;

    /// A request that no store has seen. Its value's checksum is not wanted, its place in a prompt
    /// is not known, and it is not used where it arrives.
    pub fn new(key: Key, into: &'a mut [IoSliceMut<'b>]) -> Self {
        Self {
            key,
            into,
            position: 0,
            wants_checksum: false,
            is_in_place: false,
            checksum: None,
            outcome: None,
        }
    }
}

/// An object as a listing reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The object's name.
    pub key: Key,
    /// Bytes of its value, header included.
    pub bytes: u64,
    /// When the object was used last, in a unit of the store's own: of two objects in one listing,
    /// the one with the smaller number was used earlier. 0 from stores on servers, which do not
    /// say. To be listed is no use.
    pub last_use: u64,
}

/// Counters of one store handle since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Keys asked for in look-ups.
    pub lookups: u64,
    /// Keys that a look-up found.
    pub lookup_hits: u64,
    /// Gets that returned a value.
    pub gets: u64,
    /// Gets that found no value.
    pub misses: u64,
    /// Puts that stored a value.
    pub puts: u64,
    /// Puts that found the value already there.
    pub puts_present: u64,
    /// Bytes received by gets.
    pub bytes_read: u64,
    /// Bytes sent by puts.
    pub bytes_written: u64,
    /// Objects this handle evicted.
    pub evictions: u64,
    /// Operations that failed, of any kind.
    pub errors: u64,
    /// Connections opened.
    pub connects: u64,
}

/// How many bytes of values one call takes best. 0 stands for as many as the caller likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchBytes {
    /// Bytes in one call to [`Store::put_many`].
    pub put: u64,
    /// Bytes in one call to [`Store::get_many`].
    pub get: u64,
}

/// A place where objects live.
///
/// Implementations are shared by threads; any method may be called from any number of them at
/// once. Every method returns by its deadline plus scheduling noise, whatever the other side
/// does. Values are opaque bytes here: `SealedStore` seals and verifies them above all stores.
///
/// A put is atomic: no get ever sees a part of it, even if the process dies in the middle. A get
/// that returns [`GetOutcome::Hit`] delivered one whole value that some put stored, as long as
/// the store itself kept it intact.
///
/// A put under a key that exists replaces the value, unless the two values have the same length.
/// Then the store may keep the old one and return [`PutOutcome::AlreadyPresent`], because keys name
/// content. So whoever finds a value damaged removes it before putting it anew. A value larger than
/// [`Capabilities::max_value_bytes`] fails with [`crate::ErrorKind::Config`].
pub trait Store: Send + Sync {
    /// What this store can do.
    fn capabilities(&self) -> Capabilities;

    /// The URL that opens this store, without credentials.
    fn url(&self) -> String;

    /// For each key, in order, whether the store has it.
    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>>;

    /// Puts a batch, pipelined where the store can; fills in every request's outcome.
    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant);

    /// Gets a batch, pipelined where the store can; fills in every request's outcome.
    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant);

    /// Counts values as used now, without getting them. For each, in order, whether the store has
    /// it. Positions are as in [`PutRequest::position`]: the values of one prompt belong into one
    /// call. A store that evicts the least recently used value then evicts these values later than
    /// others.
    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>>;

    /// Removes the keys that exist; returns how many did.
    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64>;

    /// Visits every object, of one namespace if one is given, in no particular order. Objects put
    /// or removed meanwhile may or may not be seen.
    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()>;

    /// Facts about the store's own settings and state, as name and value. A server gives what it
    /// reports about itself; a directory gives its bound and use.
    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>>;

    /// Counters since this handle was opened.
    fn stats(&self) -> StoreStats;

    /// What a value of this length takes up of the store's bound, in bytes, if the store has one.
    fn charge(&self, value_bytes: u64) -> u64 {
        self.inner()
            .map_or(value_bytes, |inner| inner.charge(value_bytes))
    }

    /// How large a batch should be, if calls with little in them are slow or cost much.
    fn batch_bytes(&self) -> BatchBytes {
        self.inner()
            .map_or_else(BatchBytes::default, |inner| inner.batch_bytes())
    }

    /// For a layer: the store beneath. It answers what the layer itself leaves to the contract, so
    /// that no layer loses an ability by saying nothing of it.
    fn inner(&self) -> Option<&dyn Store> {
        None
    }

    /// The stores that this one is made of, the nearest first. Empty if it is not made of several.
    /// If a value does not verify, the reader looks at each of them.
    fn tiers(&self) -> &[Arc<dyn Store>] {
        self.inner().map_or(&[], |inner| inner.tiers())
    }

    /// The memory of this machine that values lie in. None if they lie elsewhere.
    fn memory(&self) -> Option<&dyn SharedMemory> {
        self.inner()?.memory()
    }

    /// Puts one value.
    fn put(&self, key: &Key, value: &[IoSlice<'_>], deadline: Instant) -> Result<PutOutcome> {
        let mut batch = [PutRequest::new(*key, value)];
        self.put_many(&mut batch, deadline);
        let [request] = batch;
        request.outcome.unwrap_or_else(|| Err(unanswered()))
    }

    /// Gets one value.
    fn get(&self, key: &Key, into: &mut [IoSliceMut<'_>], deadline: Instant) -> Result<GetOutcome> {
        let mut batch = [GetRequest::new(*key, into)];
        self.get_many(&mut batch, deadline);
        let [request] = batch;
        request.outcome.unwrap_or_else(|| Err(unanswered()))
    }
}

/// The error if a store broke its contract and left a request without an outcome.
pub fn unanswered() -> Error {
    Error::new(
        crate::ErrorKind::Protocol,
        "the store left a request without an outcome",
    )
}
