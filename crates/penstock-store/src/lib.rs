//! Stores for KV-cache objects: the contract that every store fulfils, the format of values, the
//! stores themselves, and [`SealedStore`], the layer that seals and verifies what stores hold.

mod coded;
pub mod compress;
mod contract;
mod counters;
mod deadline;
mod encryption;
mod error;
mod file;
#[cfg(test)]
mod fuzz;
pub mod interrupt;
mod key;
mod keyring;
pub mod layers;
mod memory;
#[cfg(not(loom))]
mod object;
mod open;
mod options;
mod recency;
mod resp;
pub mod sealed;
mod shm;
mod size;
mod slices;
mod tenant;
pub mod value;

pub use contract::{
    BatchBytes, Capabilities, Claim, GetOutcome, GetRequest, Listed, PutOutcome, PutRequest, Store,
    StoreStats,
};
pub use encryption::MAX_ENCRYPTED_PAYLOAD;
pub use error::{Error, ErrorKind, Result};
pub use file::{FileStore, Hosts};
pub use key::{CHUNK_BYTES, KEY_BYTES, KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace, NotAKey};
pub use keyring::{KEYS_VARIABLE, Keyring};
pub use memory::MemoryStore;
pub use open::open;
pub use options::OpenOptions;
pub use sealed::SealedStore;
pub use shm::ShmStore;
pub use size::parse_size;
pub use tenant::{TENANT_BYTES, Tenant};
