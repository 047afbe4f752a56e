//! Proves that a store does what every store must do. Each function panics if it does not.
//!
//! ```
//! # use std::sync::Arc;
//! # use penstock_contract::Store;
//! # fn tests(open: impl Fn() -> Arc<dyn Store>) {
//! penstock_contract::testing::run_all(open);
//! # }
//! ```

mod bounded;
mod changes;
mod faulty;
mod suite;
mod values;

pub use bounded::*;
pub use changes::{Change, changed};
pub use faulty::{FaultCounters, Faults, Faulty};
pub use suite::*;
pub use values::*;
