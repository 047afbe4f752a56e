//! What a scheduler knows of KV blocks: which are in the pool, which in host memory, which are on
//! their way, and how far a request can be loaded.
//!
//! A [`Catalogue`] is given the hashes of a request's blocks once, as they come. From then on a block is
//! a number here, and a question about a prompt is a walk over numbers: it makes no name, hashes
//! nothing and allocates nothing. No I/O, no clock, no threads.

mod catalogue;
mod error;
mod free;
mod groups;
mod index;
mod job;
mod jobs;
mod loads;
mod lookups;
mod remembered;
mod request;
mod steps;
mod stores;

pub use catalogue::{Catalogue, Holding};
pub use error::CatalogueError;
pub use groups::{Group, Groups};
pub use loads::Moved;
pub use lookups::{Query, State as LookupState};
pub use steps::{Scheduled, Step};
