//! Stores: the contract, the form of values, and the places where objects live.

mod contract;
mod counters;
mod deadline;
mod error;
mod file;
#[cfg(test)]
mod fuzz;
mod key;
pub mod layers;
mod memory;
mod open;
mod resp;
mod size;
mod slices;
pub mod value;

pub use contract::{
    Capabilities, GetOutcome, GetRequest, Listed, PutOutcome, PutRequest, Store, StoreStats,
};
pub use error::{Error, ErrorKind, Result};
pub use file::FileStore;
pub use key::{CHUNK_BYTES, KEY_BYTES, KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace, NotAKey};
pub use memory::MemoryStore;
pub use open::{OpenOptions, open};
pub use size::parse_size;
