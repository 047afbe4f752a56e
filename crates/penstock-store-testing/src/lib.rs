//! Proves that a store does what every store must do. Each function panics if it does not.
//!
//! ```
//! # use std::sync::Arc;
//! # use penstock_contract::Store;
//! # fn tests(open: impl Fn() -> Arc<dyn Store>) {
//! penstock_store_testing::run_all(open);
//! # }
//! ```

mod suite;
mod troubled;
mod values;

pub use suite::*;
pub use troubled::{Trouble, Troubled};
pub use values::*;
