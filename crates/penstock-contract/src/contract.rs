//! The contract that every store fulfils.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use crate::memory::SharedMemory;
use crate::{Error, GetOutcome, GetRequest, Key, Namespace, PutOutcome, PutRequest, Result};

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

    /// Counts all values of a namespace as used before everything else in the store: when room is
    /// short, they go first. A value that is used afterwards (got, touched, put anew) counts as used
    /// then. A store that does not evict by itself does nothing, nor does one whose server evicts by
    /// rules of its own.
    fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        self.inner()
            .map_or(Ok(()), |inner| inner.retire(namespace, deadline))
    }

    /// The time of day that a [`Listed::last_use`] stands for. None if the store's unit is no time,
    /// and for a value that was [retired](Self::retire) and not used since.
    fn used_at(&self, last_use: u64) -> Option<SystemTime> {
        self.inner()?.used_at(last_use)
    }

    /// Removes the keys that exist; returns how many did.
    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64>;

    /// Removes a value that did not verify. It had so many `bytes` when it was got. A store that may
    /// have shown an old state of the value looks again, and keeps a value of another length: that one
    /// was put meanwhile.
    fn remove_damaged(&self, key: &Key, bytes: u64, deadline: Instant) -> Result<()> {
        match self.inner() {
            Some(inner) => inner.remove_damaged(key, bytes, deadline),
            None => self.remove(&[*key], deadline).map(|_| ()),
        }
    }

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Span;

    const BEST: BatchBytes = BatchBytes {
        put: 3 << 20,
        get: 1 << 20,
    };

    /// What every store has to write. None of it is called here.
    macro_rules! required {
        () => {
            fn capabilities(&self) -> Capabilities {
                unimplemented!()
            }
            fn url(&self) -> String {
                unimplemented!()
            }
            fn contains(&self, _: &[Key], _: Instant) -> Result<Vec<bool>> {
                unimplemented!()
            }
            fn put_many(&self, _: &mut [PutRequest<'_>], _: Instant) {
                unimplemented!()
            }
            fn get_many(&self, _: &mut [GetRequest<'_, '_>], _: Instant) {
                unimplemented!()
            }
            fn touch(&self, _: &[(Key, u64)], _: Instant) -> Result<Vec<bool>> {
                unimplemented!()
            }
            fn remove(&self, _: &[Key], _: Instant) -> Result<u64> {
                unimplemented!()
            }
            fn list(
                &self,
                _: Option<Namespace>,
                _: &mut dyn FnMut(Listed),
                _: Instant,
            ) -> Result<()> {
                unimplemented!()
            }
            fn describe(&self, _: Instant) -> Result<Vec<(String, String)>> {
                unimplemented!()
            }
            fn stats(&self) -> StoreStats {
                unimplemented!()
            }
        };
    }

    /// A store that says something besides.
    struct Able(Vec<Arc<dyn Store>>);

    impl Store for Able {
        required!();
        fn retire(&self, _: Namespace, _: Instant) -> Result<()> {
            Err(unanswered())
        }
        fn remove_damaged(&self, _: &Key, _: u64, _: Instant) -> Result<()> {
            Err(unanswered())
        }
        fn used_at(&self, last_use: u64) -> Option<SystemTime> {
            Some(SystemTime::UNIX_EPOCH + Duration::from_secs(last_use))
        }
        fn charge(&self, value_bytes: u64) -> u64 {
            value_bytes + 1
        }
        fn batch_bytes(&self) -> BatchBytes {
            BEST
        }
        fn tiers(&self) -> &[Arc<dyn Store>] {
            &self.0
        }
    }

    /// A layer that says nothing.
    struct Layer(Arc<dyn Store>);

    impl Store for Layer {
        required!();
        fn inner(&self) -> Option<&dyn Store> {
            Some(&*self.0)
        }
    }

    #[test]
    fn what_a_layer_says_nothing_of_its_store_answers() {
        let plain: Arc<dyn Store> = Arc::new(Layer(Arc::new(Able(Vec::new()))));
        let tiers = vec![Arc::clone(&plain), plain];
        let layer = Layer(Arc::new(Layer(Arc::new(Able(tiers)))));
        assert_eq!(layer.charge(7), 8);
        assert_eq!(layer.batch_bytes(), BEST);
        assert_eq!(layer.tiers().len(), 2);
        assert!(layer.memory().is_none());
        let key = Key {
            namespace: Namespace([7; 16]),
            chunk: [7; 32],
            span: Span::new(0..1, 0..1).unwrap(),
        };
        let deadline = Instant::now();
        assert!(layer.retire(key.namespace, deadline).is_err());
        assert!(layer.remove_damaged(&key, 7, deadline).is_err());
        let later = SystemTime::UNIX_EPOCH + Duration::from_secs(9);
        assert_eq!(layer.used_at(9), Some(later));
    }
}
