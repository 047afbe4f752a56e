//! What stores of this crate can do besides the contract, for the layers above them.

use std::any::Any;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use crate::copies::Run;
use crate::value::HEADER_BYTES;
use crate::{Error, ErrorKind, Key, PutOutcome, Result, Store};

/// The right to bring a value into a store. It ends when this is dropped, or with the process.
pub type Claim<'a> = Box<dyn Send + 'a>;

/// What a store of this crate can do besides the contract.
pub(crate) trait Inside {
    /// The stores that this one is made of, the nearest first; empty if it is not made of several.
    /// If a value does not verify, [`crate::SealedStore::mend`] looks at each of them.
    fn tiers(&self) -> &[Arc<dyn Store>] {
        &[]
    }

    /// Whether a get is a copy within this machine's memory, done when the call returns.
    fn is_in_memory(&self) -> bool {
        false
    }

    /// Does now what this process would otherwise do when it first touches a value's memory, until
    /// `stop` says so. To be called from a thread that nobody waits for.
    fn warm_up(&self, _stop: &dyn Fn() -> bool) {}

    /// The memory that values lie in, for whoever can make it reachable for a device.
    fn memory(&self) -> Option<Run> {
        None
    }

    /// A value where it lies. None if it is not there.
    fn lend(&self, _key: &Key, _position: u64, _deadline: Instant) -> Option<Box<dyn Lent + '_>> {
        None
    }

    /// Room for a value, to be filled by the caller. None if it is there already.
    fn reserve(
        &self,
        _key: &Key,
        _payload_bytes: u64,
        _position: u64,
        _deadline: Instant,
    ) -> Result<Option<Box<dyn Reserved + '_>>> {
        let problem = "values cannot be put in place here";
        Err(Error::new(ErrorKind::Unsupported, problem))
    }

    /// Asks to be the one process that brings a value here from elsewhere. None while another
    /// process is bringing it. A store that no other process uses always agrees.
    fn claim(&self, _key: &Key) -> Option<Claim<'_>> {
        Some(Box::new(()))
    }
}

/// A value in this machine's memory, which others may give up at any time.
pub(crate) trait Lent {
    /// Its header, as it was found.
    fn header(&self) -> &[u8; HEADER_BYTES];
    /// Bytes of the value, header included.
    fn bytes(&self) -> u64;
    /// Where its payload lies.
    fn runs(&self) -> Vec<Run>;
    /// The checksum of what lies there.
    fn sum(&self) -> u64;
    /// Whether it is, and always was, what was found.
    fn is_still(&self) -> bool;
}

/// Room in this machine's memory for a value that nobody sees yet. If it is dropped, it is free
/// again.
pub(crate) trait Reserved {
    /// Where its payload goes.
    fn runs(&self) -> Vec<Run>;
    /// Copies the payload there, and returns its checksum. There must be room for it.
    fn fill(&mut self, payload: &mut dyn Iterator<Item = IoSlice<'_>>) -> u64;
    /// The checksum of what lies there.
    fn sum(&self) -> u64;
    /// Shows the value.
    fn publish(self: Box<Self>, header: &[u8; HEADER_BYTES]) -> Result<PutOutcome>;
}

/// The way from a store to its inside. Only this crate can name it, so [`Store::inside`] is of no
/// use to anybody else.
pub(crate) struct Way(fn(&dyn Store) -> Option<&dyn Inside>);

impl Way {
    /// The way into a store of this type.
    pub(crate) const fn into<S: Store + Inside>() -> Self {
        Self(|store| {
            let store: &dyn Any = store;
            store.downcast_ref::<S>().map(|store| store as &dyn Inside)
        })
    }
}

/// A store without an inside has what [`Inside`] says by itself.
impl Inside for () {}

/// The inside of a store.
pub(crate) fn inside(store: &dyn Store) -> &dyn Inside {
    let way = store.inside().downcast_ref::<Way>();
    way.and_then(|Way(way)| way(store)).unwrap_or(&())
}
