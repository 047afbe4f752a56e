//! Layers: stores made of another store and one more behaviour.

mod breaker;
mod faulty;

pub use breaker::{Breaker, BreakerCounters, BreakerSettings};
pub use faulty::{FaultCounters, Faults, Faulty};
