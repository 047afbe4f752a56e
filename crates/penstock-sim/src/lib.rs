//! Replays traces of requests over nodes, tiers and routers, with the policies that stores use.
//!
//! A hit is a block found in a row from the first of its prompt: behind a block that is missing,
//! nothing helps an engine. Time is estimated, request by request, from the speeds given; there
//! is no queue in it.

pub mod bounds;
mod cache;
mod error;
mod reader;
mod replay;
mod route;
mod trace;

pub use cache::PolicyKind;
pub use error::{Error, Result};
pub use reader::{ReadOptions, Reading, parse, read};
pub use replay::{Fleet, Outcome, Speed, Sums, hits};
pub use route::Routing;
pub use trace::{Request, Trace};
