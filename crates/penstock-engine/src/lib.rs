//! Jobs: arena, lanes, completion queue and copies.
//!
//! An [`Engine`] moves KV blocks between registered memory and a store. It never makes its caller
//! wait. A store job gathers blocks into slots of a bounded arena, frees the blocks, and puts the
//! slots. A load job gets values into slots, verifies them, and writes them into blocks. A
//! [`Lookup`] asks a store which chunks it has. The caller polls both for their answers. A
//! [`Keeper`] touches blocks that will be asked for again.

mod arena;
mod completion;
mod config;
mod copy;
mod direct;
mod engine;
mod error;
mod fence;
mod gauge;
mod group;
mod held;
mod host_tier;
mod job;
mod keeper;
mod lane;
mod load_job;
mod lookup;
#[cfg(all(test, loom))]
mod loom_models;
mod outcome;
mod owner;
mod queue;
mod region;
mod registration;
mod signal;
mod stats;
mod store_job;
mod sync;
mod table;

pub use arena::slot_stride;
pub use completion::{Completion, Event};
pub use config::EngineConfig;
pub use copy::Device;
pub use copy::cuda::{Calibration, CudaError, Direction, Timing};
pub use direct::DirectCopy;
pub use engine::Engine;
pub use error::{EngineError, Fault};
pub use fence::Fence;
pub use group::{KvGroup, Replica};
pub use job::Deadline;
pub use keeper::{Keeper, KeeperConfig, KeeperStats, KeptGroup};
pub use lookup::{Answer, Lookup, LookupConfig, look_up_now};
pub use outcome::{Outcome, Outcomes, Tally};
pub use owner::Owner;
pub use region::Region;
pub use stats::EngineStats;

pub(crate) use stats::Counters;
