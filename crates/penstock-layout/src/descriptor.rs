//! Descriptors: where every byte of a rank's KV lies.

use std::ops::Range;

use crate::LayoutErrorKind::{Empty, Missing, Outside, Overlap, Strides, TooLarge};
use crate::error::Result;
use crate::{Axis, Interior, KvLayout, LayoutError, Span};

/// A run of contiguous bytes in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Index of the region.
    pub region: u32,
    /// First byte, counted from the start of the region.
    pub offset: u64,
    /// Bytes of the segment.
    pub len: u64,
}

impl Segment {
    /// Whether this begins where `before` ends.
    fn continues(&self, before: &Self) -> bool {
        before.region == self.region && before.offset + before.len == self.offset
    }
}

/// Where a layer's KV begins: block 0, head 0 of the share, token 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerBase {
    /// Index of the region.
    pub region: u32,
    /// Bytes from the start of the region.
    pub offset: u64,
}

/// What a [`Descriptor`] is built from. Every size and stride is in bytes, except counts.
///
/// Token `n` of head `h` (counted from the share's first head) in block `b` of layer `l`
/// lies at `layers[l].offset + b * block_stride + h * head_stride + n * token_stride`.
/// The stride of an axis with one element is never used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Layers and heads that lie here, by their index in the model.
    pub share: Span,
    /// Layers of the share that lie elsewhere because they belong to another group, ascending;
    /// none in a uniform model.
    pub absent: Vec<u16>,
    /// Number of blocks.
    pub blocks: u64,
    /// Tokens in a block.
    pub tokens: u64,
    /// Bytes of key and value of one token and head, contiguous.
    pub content_bytes: u64,
    /// Order of heads and tokens in which segments are given.
    pub interior: Interior,
    /// Length of each region.
    pub region_lens: Vec<u64>,
    /// Where each of the share's layers begins, without the absent layers.
    pub layers: Vec<LayerBase>,
    /// Bytes from a block to the next.
    pub block_stride: u64,
    /// Bytes from a head to the next.
    pub head_stride: u64,
    /// Bytes from a token to the next.
    pub token_stride: u64,
}

/// How the bytes of a block lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contiguity {
    /// All layers of a block are one piece.
    Block,
    /// Each layer's page, at least, is one piece.
    Page,
    /// A page is in several pieces.
    Scattered,
}

impl Contiguity {
    /// Stable lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Page => "page",
            Self::Scattered => "scattered",
        }
    }
}

/// Says where every byte of a rank's KV lies.
///
/// Once built, every address it gives lies inside its region, and no two elements share a
/// byte.
///
/// An example: two layers of one head, and blocks of 16 tokens with 256 bytes each. If each layer
/// has a tensor, a block is one run in each tensor. If all layers of a block lie side by side, it
/// is one run in all:
///
/// ```
/// use penstock_layout::{Descriptor, KvLayout, Segment, Span};
///
/// let share = Span::new(0..2, 0..1)?;
/// let runs = |layout| {
///     let descriptor = Descriptor::packed(layout, share, 100, 16, 256).unwrap();
///     let mut runs = Vec::new();
///     descriptor.segments([3], &share, &mut runs).unwrap();
///     runs
/// };
/// let run = |offset, len| Segment { region: 0, offset, len };
/// assert_eq!(
///     runs(KvLayout::LBHNC),
///     [run(3 * 4096, 4096), run((100 + 3) * 4096, 4096)]
/// );
/// assert_eq!(runs(KvLayout::BLHNC), [run(3 * 8192, 8192)]);
/// # Ok::<(), penstock_layout::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    placement: Placement,
}

/// An axis of a single layer: the number of elements, and the bytes from one to the next.
#[derive(Clone, Copy)]
struct Strided {
    axis: Axis,
    count: u64,
    stride: u64,
    /// Bytes spanned by one element, including gaps between the things inside it.
    inner: u64,
}

impl Descriptor {
    /// Checks a placement.
    ///
    /// The axes of a layer must nest: neighbours on an axis lie at least as far apart as the bytes
    /// that one of them spans. Placements that do not nest are refused even if they happen not to
    /// overlap. Layers may interleave in any way that shares no byte. That check is exact. Its time
    /// grows with the square of the number of layers in a region.
    pub fn new(placement: Placement) -> Result<Self> {
        check_sizes(&placement)?;
        check_count(&placement)?;
        let (axes, extent) = nested_axes(&placement)?;
        check_inside(&placement, extent)?;
        check_layers_apart(&placement, &axes, extent)?;
        Ok(Self { placement })
    }

    /// The descriptor of one freshly packed region. It has no gaps. Layer, block and head 0 of the
    /// share are at offset 0.
    pub fn packed(
        layout: KvLayout,
        share: Span,
        blocks: u64,
        tokens: u64,
        content_bytes: u64,
    ) -> Result<Self> {
        let (layers, heads) = (share.layer_count() as u64, share.head_count() as u64);
        let (mut layer_stride, mut block_stride, mut head_stride, mut token_stride) = (0, 0, 0, 0);
        let mut stride: Option<u64> = Some(1);
        for axis in layout.order().into_iter().rev() {
            let (slot, count) = match axis {
                Axis::Layer => (&mut layer_stride, layers),
                Axis::Block => (&mut block_stride, blocks),
                Axis::Head => (&mut head_stride, heads),
                Axis::Token => (&mut token_stride, tokens),
                Axis::Content => (&mut 0, content_bytes),
            };
            *slot = stride.unwrap_or(u64::MAX);
            stride = stride.and_then(|stride| stride.checked_mul(count));
        }
        let total = stride.ok_or_else(|| {
            let strides = [block_stride, head_stride, token_stride];
            overflow([blocks, heads, tokens], strides)
        })?;
        Self::new(Placement {
            share,
            absent: Vec::new(),
            blocks,
            tokens,
            content_bytes,
            interior: layout.interior(),
            region_lens: vec![total],
            // These are products of factors of `total`, so they do not overflow.
            layers: (0..layers)
                .map(|layer| LayerBase {
                    region: 0,
                    offset: layer * layer_stride,
                })
                .collect(),
            block_stride,
            head_stride,
            token_stride,
        })
    }

    /// Gives the segments in another order of heads and tokens. The bytes stay the same.
    ///
    /// For a share of one head, or blocks of one token, the order makes no difference.
    #[must_use]
    pub fn with_interior(mut self, interior: Interior) -> Self {
        self.placement.interior = interior;
        self
    }

    /// Layers and heads that lie here.
    pub fn share(&self) -> Span {
        self.placement.share
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.placement.blocks
    }

    /// Tokens in a block.
    pub fn tokens(&self) -> u64 {
        self.placement.tokens
    }

    /// Bytes of key and value of one token and head.
    pub fn content_bytes(&self) -> u64 {
        self.placement.content_bytes
    }

    /// Order of heads and tokens in which segments are given.
    pub fn interior(&self) -> Interior {
        self.placement.interior
    }

    /// Where each of [`layers`](Self::layers) begins.
    pub fn bases(&self) -> &[LayerBase] {
        &self.placement.layers
    }

    /// Bytes from a block, a head and a token to the next. A stride has no meaning if there is only
    /// one element.
    pub fn strides(&self) -> [u64; 3] {
        let p = &self.placement;
        [p.block_stride, p.head_stride, p.token_stride]
    }

    /// How a block lies in memory, read in canonical order.
    pub fn contiguity(&self) -> Contiguity {
        let mut runs = Vec::new();
        let found = self.segments([0], &self.share(), &mut runs);
        debug_assert!(
            found.is_ok(),
            "there is a block, and the share is part of itself"
        );
        let page = self.block_bytes(&self.share()) / self.placement.layers.len() as u64;
        match runs.len() {
            1 if self.placement.layers.len() > 1 => Contiguity::Block,
            _ if runs.iter().all(|run| run.len % page == 0) => Contiguity::Page,
            _ => Contiguity::Scattered,
        }
    }

    /// Bytes in each region.
    pub fn region_lens(&self) -> &[u64] {
        &self.placement.region_lens
    }

    /// Layers that lie here, by their index in the model, ascending.
    pub fn layers(&self) -> impl Iterator<Item = u16> {
        self.placement.present_layers()
    }

    /// Bytes of KV that one block holds for a span of the share; zero if all its layers are
    /// absent.
    pub fn block_bytes(&self, span: &Span) -> u64 {
        let p = &self.placement;
        p.present(span).len() as u64 * span.head_count() as u64 * (p.tokens * p.content_bytes)
    }

    /// Checks that all of a span is in the share.
    pub fn check_span(&self, span: &Span) -> Result<()> {
        let share = self.share();
        if share.contains(span) {
            return Ok(());
        }
        let message = format!("span {span} lies outside the share {share}");
        Err(LayoutError::new(Outside, message))
    }

    /// Checks that there is such a block.
    pub fn check_block(&self, block: u64) -> Result<()> {
        let blocks = self.blocks();
        if block < blocks {
            return Ok(());
        }
        Err(LayoutError::new(
            Outside,
            format!("block {block} of {blocks}"),
        ))
    }

    /// Appends the fewest runs that hold a span's bytes of blocks: block by block, and inside each
    /// in canonical order: layer by layer, and inside a layer in [`interior`](Self::interior)
    /// order. Returns which of `out` they are.
    ///
    /// Blocks that are neighbours in memory merge. What `out` held before changes nothing, and is
    /// left as it was. On an error, nothing is appended.
    pub fn segments(
        &self,
        blocks: impl IntoIterator<Item = u64>,
        span: &Span,
        out: &mut Vec<Segment>,
    ) -> Result<Range<usize>> {
        self.check_span(span)?;
        let first = out.len();
        for block in blocks {
            if let Err(error) = self.check_block(block) {
                out.truncate(first);
                return Err(error);
            }
            self.append(block, span, first, out);
        }
        Ok(first..out.len())
    }

    /// Appends the runs of a block, which is one of ours. A run extends the last one only if that
    /// is `first` or comes after it.
    fn append(&self, block: u64, span: &Span, first: usize, out: &mut Vec<Segment>) {
        let p = &self.placement;
        // Nothing below overflows: each sum is the offset of an element that was checked to
        // lie inside its region.
        let first_head = u64::from(span.heads().start - p.share.heads().start);
        let start = block * p.block_stride + first_head * p.head_stride;
        let heads = (span.head_count() as u64, p.head_stride);
        let tokens = (p.tokens, p.token_stride);
        let ((mut outer, outer_stride), (mut inner, inner_stride)) = match p.interior {
            Interior::Hnc => (heads, tokens),
            Interior::Nhc => (tokens, heads),
        };
        let mut run = p.content_bytes;
        if inner_stride == run {
            run *= inner;
            inner = 1;
        }
        if inner == 1 && outer_stride == run {
            run *= outer;
            outer = 1;
        }
        for base in &p.layers[p.present(span)] {
            for i in 0..outer {
                for j in 0..inner {
                    let next = Segment {
                        region: base.region,
                        offset: base.offset + start + i * outer_stride + j * inner_stride,
                        len: run,
                    };
                    match out[first..].last_mut() {
                        Some(last) if next.continues(last) => last.len += next.len,
                        _ => out.push(next),
                    }
                }
            }
        }
    }
}

impl Placement {
    /// The indices in `layers` of the layers of a span of the share.
    fn present(&self, span: &Span) -> Range<usize> {
        let index = |layer: u16| {
            let absent = self.absent.partition_point(|&absent| absent < layer);
            usize::from(layer - self.share.layers().start) - absent
        };
        index(span.layers().start)..index(span.layers().end)
    }

    fn present_layers(&self) -> impl Iterator<Item = u16> {
        self.share
            .layers()
            .filter(|layer| self.absent.binary_search(layer).is_err())
    }
}

fn zero(what: &str) -> LayoutError {
    LayoutError::new(Empty, format!("the number of {what} must not be zero"))
}

/// The error for sizes that do not fit 64-bit arithmetic: so many blocks, heads and tokens, so many
/// bytes apart.
fn overflow([blocks, heads, tokens]: [u64; 3], strides: [u64; 3]) -> LayoutError {
    let [block_stride, head_stride, token_stride] = strides;
    let message = format!(
        "{blocks} blocks {block_stride} bytes apart, {heads} heads {head_stride} apart and \
         {tokens} tokens {token_stride} apart do not fit 64-bit addresses"
    );
    LayoutError::new(TooLarge, message)
}

/// Checks that no size is zero, and that none is too large to count.
fn check_sizes(p: &Placement) -> Result<()> {
    for (what, size) in [
        ("blocks", p.blocks),
        ("tokens", p.tokens),
        ("content bytes", p.content_bytes),
    ] {
        if size == 0 {
            return Err(zero(what));
        }
    }
    // Keeps `block_bytes` within 64 bits for any span: there are under 2^16 layers and
    // under 2^16 heads.
    if p.tokens
        .checked_mul(p.content_bytes)
        .is_none_or(|bytes| bytes > 1 << 32)
    {
        let message = format!(
            "{} tokens of {} bytes make over 4 GiB for one head of a block",
            p.tokens, p.content_bytes
        );
        return Err(LayoutError::new(TooLarge, message));
    }
    Ok(())
}

/// Checks that there are as many layers with a base as the share has here.
fn check_count(p: &Placement) -> Result<()> {
    let mut unseen = p.share.layers();
    if let Some(&layer) = p.absent.iter().find(|layer| !unseen.any(|l| l == **layer)) {
        let message = format!(
            "layer {layer} is said to be absent from {}, which does not hold it that often",
            p.share
        );
        return Err(LayoutError::new(Outside, message));
    }
    let present = p.present(&p.share).len();
    if present == 0 {
        return Err(zero("layers"));
    }
    if p.layers.len() != present {
        let message = format!(
            "the share has {present} layers here, but {} have a place",
            p.layers.len()
        );
        return Err(LayoutError::new(Missing, message));
    }
    Ok(())
}

/// Checks that each layer lies inside its region. A layer spans `extent` bytes.
fn check_inside(p: &Placement, extent: u64) -> Result<()> {
    for (layer, &LayerBase { region, offset }) in p.present_layers().zip(&p.layers) {
        let Some(&region_len) = p.region_lens.get(region as usize) else {
            let message = format!(
                "layer {layer} lies in region {region}, but there are {} regions",
                p.region_lens.len()
            );
            return Err(LayoutError::new(Outside, message));
        };
        if offset
            .checked_add(extent)
            .is_none_or(|end| end > region_len)
        {
            let message = format!(
                "layer {layer} begins at byte {offset} of region {region} and takes {extent} \
                 bytes, but the region has {region_len}"
            );
            return Err(LayoutError::new(Outside, message));
        }
    }
    Ok(())
}

/// A layer's axes with more than one element, outermost first, checked to nest. Also returns the
/// bytes that a layer spans.
fn nested_axes(p: &Placement) -> Result<(Vec<Strided>, u64)> {
    let heads = p.share.head_count() as u64;
    let mut axes: Vec<Strided> = [
        (Axis::Block, p.blocks, p.block_stride),
        (Axis::Head, heads, p.head_stride),
        (Axis::Token, p.tokens, p.token_stride),
    ]
    .into_iter()
    .filter(|&(_, count, _)| count > 1)
    .map(|(axis, count, stride)| Strided {
        axis,
        count,
        stride,
        inner: 0,
    })
    .collect();
    axes.sort_by_key(|axis| axis.stride);
    let mut extent = p.content_bytes;
    for axis in &mut axes {
        if axis.stride < extent {
            let message = format!(
                "neighbours on axis {} are {} bytes apart, but each spans {extent} bytes",
                axis.axis, axis.stride
            );
            return Err(LayoutError::new(Strides, message));
        }
        axis.inner = extent;
        extent = (axis.count - 1)
            .checked_mul(axis.stride)
            .and_then(|bytes| bytes.checked_add(extent))
            .ok_or_else(|| {
                let strides = [p.block_stride, p.head_stride, p.token_stride];
                overflow([p.blocks, heads, p.tokens], strides)
            })?;
    }
    axes.reverse();
    Ok((axes, extent))
}

fn check_layers_apart(p: &Placement, axes: &[Strided], extent: u64) -> Result<()> {
    let mut placed: Vec<(LayerBase, u16)> =
        p.layers.iter().copied().zip(p.present_layers()).collect();
    placed.sort_by_key(|(base, layer)| (base.region, base.offset, *layer));
    for (i, &(first, first_layer)) in placed.iter().enumerate() {
        for &(second, second_layer) in &placed[i + 1..] {
            if second.region != first.region || second.offset - first.offset >= extent {
                break;
            }
            let apart = i128::from(second.offset - first.offset);
            if copies_meet(apart, axes, p.content_bytes) {
                let message = format!(
                    "layers {first_layer} and {second_layer} share bytes of region {}: one begins \
                     at byte {}, the other at {}",
                    first.region, first.offset, second.offset
                );
                return Err(LayoutError::new(Overlap, message));
            }
        }
    }
    Ok(())
}

/// Whether two copies of a layer's elements, `apart` bytes from each other, share a byte.
///
/// They do if, for some step `k` along the outermost axis, the copies of what lies inside share a
/// byte. For that, these copies must be nearer than the `inner` bytes that they span. Since axes
/// nest, `inner` is at most the stride. So only the two steps around `apart / stride` can do it,
/// and trying both is exact.
fn copies_meet(apart: i128, axes: &[Strided], content_bytes: u64) -> bool {
    let Some((outermost, rest)) = axes.split_first() else {
        return apart.unsigned_abs() < u128::from(content_bytes);
    };
    let stride = i128::from(outermost.stride);
    let below = apart.div_euclid(stride);
    [below, below + 1].into_iter().any(|step| {
        let left = apart - step * stride;
        step.unsigned_abs() < u128::from(outermost.count)
            && left.unsigned_abs() < u128::from(outermost.inner)
            && copies_meet(left, rest, content_bytes)
    })
}
