//! Threads that serve: what panics in them is caught, counted by place and told once, and the thread
//! goes on.
//!
//! A panic is a fault of this program. It costs the work that it happened in. Threads that panic again
//! and again rest for a while, and what comes to them then is dropped.
//! [`panics`] says how many there were, where, and what the last one was.
//!
//! With [`STRICT`] set to `abort`, a panic ends the process: what tests want. Those that panic with
//! [`ON_PURPOSE`] in their message do not.

mod contain;
mod lane;

pub use contain::{ON_PURPOSE, Panics, STRICT, contain, panics, serve};
pub use lane::{Lane, Ran};
