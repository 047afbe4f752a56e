//! Values: how they are sealed and verified, encrypted, coded and copied, and a store of them in
//! this process's memory. [`SealedStore`] does it over any store.

mod coded;
pub mod compare;
pub mod compress;
pub mod copies;
mod encryption;
#[cfg(test)]
mod fuzz;
pub mod header;
pub mod interrupt;
mod keyring;
mod memory;
pub mod sealed;
mod size;

pub use encryption::MAX_ENCRYPTED_PAYLOAD;
pub use keyring::{KEYS_VARIABLE, Keyring};
pub use memory::MemoryStore;
pub use sealed::{Accused, Mark, ROLL, SealedStore, Trust};
pub use size::parse_size;
