//! Spans: which layers and heads of a chunk a piece of KV covers.

use std::fmt;
use std::ops::Range;

use crate::error::Result;
use crate::{LayoutError, LayoutErrorKind};

/// A range of layers and a range of KV heads, by their index in the whole model.
///
/// Ranges are half open and never empty. A rank's share of the KV cache is a span. The part of a
/// chunk that one object in a store holds is a span too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    layer_start: u16,
    layer_end: u16,
    head_start: u16,
    head_end: u16,
}

impl Span {
    /// Builds a span; refuses empty or reversed ranges.
    pub fn new(layers: Range<u16>, heads: Range<u16>) -> Result<Self> {
        if layers.is_empty() || heads.is_empty() {
            let message = format!(
                "a span needs at least one layer and one head, got layers {layers:?} and heads \
                 {heads:?}"
            );
            return Err(LayoutError::new(LayoutErrorKind::Empty, message));
        }
        Ok(Self {
            layer_start: layers.start,
            layer_end: layers.end,
            head_start: heads.start,
            head_end: heads.end,
        })
    }

    /// The layers covered.
    pub fn layers(&self) -> Range<u16> {
        self.layer_start..self.layer_end
    }

    /// The KV heads covered.
    pub fn heads(&self) -> Range<u16> {
        self.head_start..self.head_end
    }

    /// Number of layers covered.
    pub fn layer_count(&self) -> usize {
        usize::from(self.layer_end - self.layer_start)
    }

    /// Number of heads covered.
    pub fn head_count(&self) -> usize {
        usize::from(self.head_end - self.head_start)
    }

    /// Whether every layer and head of `other` is covered by `self`.
    pub fn contains(&self, other: &Span) -> bool {
        self.layer_start <= other.layer_start
            && other.layer_end <= self.layer_end
            && self.head_start <= other.head_start
            && other.head_end <= self.head_end
    }
}

/// `l0-8.h0-4`: the form used in keys.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "l{}-{}.h{}-{}",
            self.layer_start, self.layer_end, self.head_start, self.head_end
        )
    }
}
