//! Geometry: which spans make an object, and which blocks make a chunk.

use std::ops::Range;

use crate::LayoutErrorKind::{Empty, Misaligned, TooLarge};
use crate::error::Result;
use crate::{Axis, LayoutError, Span};

/// How chunks are cut into objects.
///
/// Borders are counted from layer 0 and head 0 of the model, so ranks with other shares cut at the
/// same places. The default, a rank's whole share, makes the fewest and biggest objects. Smaller
/// common divisors make objects readable under another topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    layers_per_object: Option<u16>,
    heads_per_object: Option<u16>,
    blocks_per_chunk: u32,
}

impl Geometry {
    /// Makes a geometry. `None` stands for a rank's whole share.
    pub fn new(
        layers_per_object: Option<u16>,
        heads_per_object: Option<u16>,
        blocks_per_chunk: u32,
    ) -> Result<Self> {
        for (what, zero) in [
            ("layers per object", layers_per_object == Some(0)),
            ("heads per object", heads_per_object == Some(0)),
            ("blocks per chunk", blocks_per_chunk == 0),
        ] {
            if zero {
                return Err(LayoutError::new(Empty, format!("{what} must not be zero")));
            }
        }
        Ok(Self {
            layers_per_object,
            heads_per_object,
            blocks_per_chunk,
        })
    }

    /// Layers in an object, or a rank's whole share.
    pub fn layers_per_object(&self) -> Option<u16> {
        self.layers_per_object
    }

    /// KV heads in an object, or a rank's whole share.
    pub fn heads_per_object(&self) -> Option<u16> {
        self.heads_per_object
    }

    /// Consecutive blocks in a chunk.
    pub fn blocks_per_chunk(&self) -> u32 {
        self.blocks_per_chunk
    }

    /// The spans of the objects that hold one chunk of a share, by layer, then head.
    pub fn objects(&self, share: &Span) -> Result<Vec<Span>> {
        let layers = cut(Axis::Layer, share.layers(), self.layers_per_object)?;
        let heads = cut(Axis::Head, share.heads(), self.heads_per_object)?;
        let mut objects = Vec::with_capacity(layers.len() * heads.len());
        for layers in &layers {
            for heads in &heads {
                objects.push(Span::new(layers.clone(), heads.clone())?);
            }
        }
        Ok(objects)
    }
}

/// Bytes of KV in an object. The object is a span of a chunk of `blocks` blocks. Each block has
/// `tokens` tokens, with `content_bytes` of key and value per token and head.
pub fn object_bytes(tokens: u64, content_bytes: u64, span: &Span, blocks: u32) -> Result<u64> {
    [
        span.layer_count() as u64,
        span.head_count() as u64,
        tokens,
        u64::from(blocks),
    ]
    .into_iter()
    .try_fold(content_bytes, u64::checked_mul)
    .ok_or_else(|| {
        let message = format!(
            "{blocks} blocks of {tokens} tokens of {content_bytes} bytes for span {span} do not \
             fit 64 bits"
        );
        LayoutError::new(TooLarge, message)
    })
}

fn cut(axis: Axis, range: Range<u16>, per_object: Option<u16>) -> Result<Vec<Range<u16>>> {
    let Some(per_object) = per_object else {
        return Ok(vec![range]);
    };
    if !range.start.is_multiple_of(per_object) || !range.end.is_multiple_of(per_object) {
        let works = gcd(range.start, range.end);
        let message = format!(
            "objects of {per_object} on axis {axis} do not fit a share of {range:?}: both ends \
             must be multiples; {works} or a divisor of it would work"
        );
        return Err(LayoutError::new(Misaligned, message));
    }
    Ok(range
        .step_by(usize::from(per_object))
        .map(|start| start..start + per_object)
        .collect())
}

fn gcd(a: u16, b: u16) -> u16 {
    if b == 0 { a } else { gcd(b, a % b) }
}
