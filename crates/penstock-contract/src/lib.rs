//! What the author of a store needs: the contract that every store fulfils, keys, errors, and the
//! small things that every store does in the same way (deadlines, counters, values in slices).
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
pub mod slices;
mod tenant;
#[cfg(feature = "testing")]
pub mod testing;

pub use block::{Block, Chunk, NotBlocks, Parent};
pub use contract::{
    BatchBytes, Capabilities, GetOutcome, GetRequest, Listed, PutOutcome, PutRequest, Store,
    StoreStats, unanswered,
};
pub use counters::Counters;
pub use error::{Error, ErrorKind, Result};
pub use host_change::{HostChange, NotHostChanges};
pub use key::{CHUNK_BYTES, KEY_BYTES, KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace, NotAKey};
pub use penstock_layout::Span;
pub use tenant::{TENANT_BYTES, Tenancy, Tenant};
