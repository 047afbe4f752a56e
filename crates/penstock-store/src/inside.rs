//! What stores of this crate can do besides the contract, for the layers above them.

use std::any::Any;
use std::sync::Arc;

use crate::{Key, Store};

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

    /// Asks to be the one process that brings a value here from elsewhere. None while another
    /// process is bringing it. A store that no other process uses always agrees.
    fn claim(&self, _key: &Key) -> Option<Claim<'_>> {
        Some(Box::new(()))
    }
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
