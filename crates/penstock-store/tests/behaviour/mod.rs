//! The behaviour suite of all stores, and what the tests of this crate share besides.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "shared by test binaries, of which not all use all"
)]

pub mod batches;
pub mod directory;
pub mod prompt;
pub mod sealed;
pub mod slots;

pub use penstock_contract::testing::*;
