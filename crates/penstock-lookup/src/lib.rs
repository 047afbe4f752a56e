//! How many tokens of a prompt an engine would find in a pool: vLLM's block hashes without vLLM,
//! and a bounded index of a pool's answers.

mod finder;
mod hashing;
mod index;
mod serial;

pub use finder::{Finder, Part, Variant};
pub use hashing::{Algorithm, Extra, HashError, Hasher, Prefix};
pub use index::{Belief, Index};
