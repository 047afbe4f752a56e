//! Weighs loading against recomputing, by the times that an engine's own steps and loads took.
//!
//! An [`Advisor`] is told when steps and transfers begin and end. It answers how far to load the
//! next prompt, how long to wait for the load, and whether to measure the pool beside the
//! computation. It has no clock and does nothing itself: engines follow it, and the simulator
//! replays it.
//!
//! Times are in seconds, from any moment that the caller chooses. Tokens of a prompt are counted
//! from its first.

mod advisor;
mod checks;
mod choice;
mod fit;
mod policy;
mod prefill;
mod probes;
mod tier;

pub use advisor::{Advisor, Reach, Transfer};
pub use choice::{Choice, choose, patience};
pub use fit::Fit;
pub use policy::LoadPolicy;
pub use prefill::{Prefill, attended};
pub use tier::Tier;
