//! Where the bytes of a KV block lie: axes, descriptors, segments, spans and geometry.
//!
//! This is pure address arithmetic: no I/O and no `unsafe`. Everything is checked when it is built.
//! After that, every address that it gives is valid.

mod axes;
mod coverage;
mod descriptor;
mod detect;
mod error;
mod geometry;
mod span;

pub use axes::{Axis, Interior, KvLayout, UnknownLayout};
pub use coverage::{Coverage, Turn};
pub use descriptor::{Contiguity, Descriptor, LayerBase, Placement, Segment};
pub use detect::{Detected, RegionAddr, TensorView, detect};
pub use error::{LayoutError, LayoutErrorKind};
pub use geometry::{Geometry, object_bytes};
pub use span::Span;
