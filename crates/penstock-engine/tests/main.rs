//! The engine: its jobs, its look-ups and its memory, over real and over troubled stores.

mod compression;
mod cuda;
mod encryption;
mod file;
mod host_tier;
mod keeper;
mod loads;
mod lookup;
mod model;
mod node_kills;
mod node_memory;
mod shared_memory;
mod stores;
mod support;
mod witness;
