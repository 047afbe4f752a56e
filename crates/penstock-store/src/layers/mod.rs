//! Layers: stores made of another store and one more behaviour.

mod breaker;
pub(crate) mod circuit;
mod promoter;
mod quota;
mod tiered;

pub use breaker::Breaker;
pub use circuit::{BreakerCounters, BreakerSettings};
pub use quota::{Account, Quota, Quotas};
pub use tiered::Tiered;
