//! Replays traces of requests over nodes, tiers and routers, with the policies that stores use.
//!
//! A hit is a block found in a row from the first of its prompt: behind a block that is missing,
//! nothing helps an engine. Each node's advisor (`penstock-advisor`) decides what is loaded, from
//! the times that steps and loads took before. These times are estimated from the speeds given. A
//! node serves one request after the other. The time that a request waits for other requests is not
//! counted.

pub mod bounds;
mod cache;
mod error;
mod fleet;
mod flow;
mod node;
mod reader;
mod replay;
mod route;
mod scale;
mod spread;
mod trace;

pub use cache::PolicyKind;
pub use error::{Error, Result};
pub use fleet::{Fleet, Outcome, Sums, Tiers};
pub use node::{EngineSettings, Speed};
pub use reader::{ReadOptions, Reading, parse, read};
pub use replay::hits;
pub use route::Routing;
pub use scale::Scale;
pub use trace::{Request, Trace};
