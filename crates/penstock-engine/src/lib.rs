//! Jobs: arena, lanes, completion queue and copies.
//!
//! An [`Engine`] moves KV blocks between registered memory and a store without ever making its
//! caller wait. A store job gathers blocks into slots of a bounded arena, frees the blocks, and
//! puts the slots; a load job gets values into slots, verifies them, and writes them into
//! blocks. A [`Lookup`] asks a store which chunks it has. Both answer by polling.

mod arena;
mod completion;
mod config;
mod copy;
mod direct;
mod engine;
mod error;
mod fence;
mod job;
mod kept;
mod lane;
mod load;
mod lookup;
#[cfg(all(test, loom))]
mod loom_models;
mod queue;
mod region;
mod signal;
mod stats;
mod store;
mod sync;

pub use config::EngineConfig;
pub use copy::Device;
pub use copy::cuda::{Calibration, CudaError, Direction, Timing};
pub use direct::DirectCopy;
pub use engine::Engine;
pub use error::{EngineError, Fault};
pub use fence::Fence;
pub use job::{Completion, Deadline, Event, Object, Outcome, Parent};
pub use lookup::{Answer, Lookup, LookupConfig};
pub use region::Region;
pub use stats::EngineStats;

pub(crate) use stats::Counters;
