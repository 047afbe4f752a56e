//! Stores for KV-cache objects, layers over them, and what opens the store that a URL names.

mod file;
#[cfg(test)]
mod fuzz;
pub mod layers;
mod memory;
mod object;
mod open;
mod options;
mod parameters;
mod readiness;
mod recency;
mod registered;
mod resp;
mod shm;

pub use file::{FileStore, Hosts, Trust};
pub use open::{open, schemes, unknown_schemes};
pub use options::{OpenOptions, Place, Registered};
pub use shm::ShmStore;
