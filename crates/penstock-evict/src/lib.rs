//! Eviction policies, used by bounded stores, the arena and the simulator alike.
//!
//! A policy holds names and weights, never values. It has no bound of its own: its owner compares
//! [`Policy::weight`] with a bound and calls [`Policy::evict`] until it is satisfied. Every policy
//! is deterministic: the same calls give the same victims, so that a simulation predicts what a
//! store does.

mod lru;
mod policy;
mod prefix;
mod queue;
mod s3fifo;

pub use lru::Lru;
pub use policy::Policy;
pub use prefix::Prefix;
pub use s3fifo::S3Fifo;
