//! Stores: the contract, the form of values, and the places where objects live.

mod contract;
mod error;
mod key;
mod resp;

pub use contract::{
    Capabilities, GetOutcome, GetRequest, Listed, PutOutcome, PutRequest, Store, StoreStats,
};
pub use error::{Error, ErrorKind, Result};
pub use key::{CHUNK_BYTES, KEY_BYTES, KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace, NotAKey};
pub use resp::open_resp;
