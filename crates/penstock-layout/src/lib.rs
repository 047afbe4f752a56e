//! Where the bytes of a KV block lie: axes, descriptors, segments, spans and geometry.
//!
//! Pure address arithmetic: no I/O and no `unsafe`. Everything is checked when it is built
//! and infallible after.

mod span;

pub use span::{EmptySpan, Span};
