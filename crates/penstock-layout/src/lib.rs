//! Where the bytes of a KV block lie: axes, descriptors, segments, spans and geometry.
//!
//! This is pure address arithmetic: no I/O and no `unsafe`. Everything is checked when it is built.
//! After that, every address that it gives is valid.

mod axes;
mod coverage;
mod descriptor;
mod detect;
mod geometry;
mod span;

pub use axes::{Axis, Interior, KvLayout, UnknownLayout};
pub use coverage::{Coverage, CoverageError, Turn};
pub use descriptor::{
    Contiguity, Descriptor, DescriptorError, LayerBase, Placement, Segment, SegmentError,
};
pub use detect::{Detected, DetectionError, RegionAddr, TensorView, detect};
pub use geometry::{Geometry, GeometryError, object_bytes};
pub use span::{EmptySpan, Span};
