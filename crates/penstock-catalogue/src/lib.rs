//! What a scheduler knows about KV blocks: which are in the pool, which are in host memory, which
//! are on their way, and how far a request can be loaded.
//!
//! A [`Catalogue`] gets the hashes of a request's blocks once, as they come. From then on each
//! block is a number. A question about a prompt is a walk over these numbers: it makes no names,
//! computes no hashes and allocates nothing but the answer. The catalogue has no I/O, no clock and
//! no threads.

mod catalogue;
mod error;
mod free;
mod groups;
mod hints;
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
pub use groups::{Group, Groups, Reads};
pub use hints::Place;
pub use loads::Moved;
pub use lookups::{Asker, Query, State as LookupState};
pub use steps::{Scheduled, Step};
pub use stores::Begun;
