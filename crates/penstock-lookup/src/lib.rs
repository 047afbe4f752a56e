//! How many tokens of a prompt an engine would find in a pool: vLLM's block hashes without vLLM,
//! and a bounded index of a pool's answers.

mod body;
mod finder;
mod hashing;
mod index;
mod own;
mod serial;

pub use body::{Adapter, AdapterContent, Body, BodyError, Prompt};
pub use finder::{Finder, Part, Variant};
pub use hashing::{Algorithm, Extra, HashError, Hasher, Prefix, told};
pub use index::{Belief, Index};
pub use own::OwnCache;
