//! Eviction policies, used by bounded stores, the arena and the simulator alike.
//!
//! A policy holds names and weights, never values. All but [`Clock`] have no bound of their own:
//! the owner compares [`Policy::weight`] with a bound and calls [`Policy::evict`] until the weight
//! fits. Every policy is deterministic: the same calls give the same victims, so a simulation
//! predicts what a store does.

mod choice;
mod chooser;
mod clock;
mod lru;
mod policy;
mod prefix;
mod queue;
mod s3fifo;

pub use chooser::Chooser;
pub use clock::{Clock, DEMOTED, Progress, Round, Sweep, horizon};
pub use lru::Lru;
pub use policy::Policy;
pub use prefix::Prefix;
pub use s3fifo::S3Fifo;
