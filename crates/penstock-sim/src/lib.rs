//! Replays traces of requests over nodes, tiers and routers, with the policies that stores use.

pub mod bounds;
mod error;
pub mod reader;
mod trace;

pub use error::{Error, Result};
pub use reader::{ReadOptions, Reading, read};
pub use trace::{Request, Trace};
