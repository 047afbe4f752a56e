//! Layers: stores made of another store and one more behaviour.

mod breaker;
pub(crate) mod circuit;
mod faulty;
mod promoter;
mod second_look;
mod tiered;

pub use breaker::Breaker;
pub use circuit::{BreakerCounters, BreakerSettings};
pub use faulty::{FaultCounters, Faults, Faulty};
pub use second_look::{Look, look_again};
pub use tiered::Tiered;
