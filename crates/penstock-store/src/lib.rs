//! Stores for KV-cache objects: the contract that every store fulfils, the format of values, the
//! stores themselves, and [`SealedStore`], the layer that seals and verifies what stores hold.

mod coded;
pub mod compress;
pub mod copies;
mod encryption;
mod file;
#[cfg(test)]
mod fuzz;
mod inside;
pub mod interrupt;
mod keyring;
pub mod layers;
mod memory;
mod object;
mod open;
mod options;
mod readiness;
mod recency;
mod registered;
mod resp;
pub mod sealed;
mod shm;
mod size;
mod tenant;
pub mod value;

pub use encryption::MAX_ENCRYPTED_PAYLOAD;
pub use file::{FileStore, Hosts, Trust};
pub use inside::Claim;
pub use keyring::{KEYS_VARIABLE, Keyring};
pub use memory::MemoryStore;
pub use open::{open, unknown_schemes};
pub use options::{OpenOptions, Place, Registered};
pub use penstock_contract::{
    BatchBytes, CHUNK_BYTES, Capabilities, Error, ErrorKind, GetOutcome, GetRequest, KEY_BYTES,
    KEY_PREFIX, Key, Listed, NAMESPACE_BYTES, Namespace, NotAKey, PutOutcome, PutRequest, Result,
    Store, StoreStats,
};
use penstock_contract::{Counters, deadline, slices, unanswered};
pub use sealed::SealedStore;
pub use shm::ShmStore;
pub use size::parse_size;
pub use tenant::{TENANT_BYTES, Tenancy, Tenant};
