//! What the author of a store needs: the contract that every store fulfils, keys, errors, and the
//! small things that every store does in the same way (deadlines, counters, values in slices).
//!
//! `penstock-store-testing` proves that a store fulfils the contract. `penstock-store-plugin` makes
//! a library of it that Penstock loads.

mod contract;
mod counters;
pub mod deadline;
mod error;
mod key;
pub mod slices;

pub use contract::{
    BatchBytes, Capabilities, GetOutcome, GetRequest, Listed, PutOutcome, PutRequest, Store,
    StoreStats, unanswered,
};
pub use counters::Counters;
pub use error::{Error, ErrorKind, Result};
pub use key::{CHUNK_BYTES, KEY_BYTES, KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace, NotAKey};
pub use penstock_layout::Span;
