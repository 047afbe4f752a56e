//! What all that stores and loads blocks agrees on: the contract that every store fulfils, keys,
//! blocks, errors, and the small things that every store does in the same way (deadlines, counters,
//! values in slices).
//!
//! With the feature `testing`, `testing` proves that a store fulfils the contract.

mod block;
mod contract;
mod counters;
pub mod deadline;
mod error;
mod host_change;
mod key;
pub mod memory;
mod requests;
pub mod slices;
mod tenant;
#[cfg(feature = "testing")]
pub mod testing;

pub use block::{Block, NotBlocks, Parent};
pub use contract::{BatchBytes, Capabilities, Listed, Store, StoreStats, unanswered};
pub use counters::Counters;
pub use error::{Error, ErrorKind, Result};
pub use host_change::{HostChange, NotHostChanges};
pub use key::{
    CHUNK_BYTES, Chunk, HashTooLong, KEY_BYTES, KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace,
    NotAKey, pad_hash,
};
pub use penstock_layout::Span;
pub use requests::{GetOutcome, GetRequest, PutOutcome, PutRequest};
pub use tenant::{TENANT_BYTES, Tenancy, Tenant};
