//! Detection: the engine's layout, reproduced from the tensors it registers.

use std::ops::Range;

use crate::LayoutErrorKind::{
    Differ, Empty, Misaligned, Missing, Outside, Overlap, Strides, TooLarge,
};
use crate::error::Result;
use crate::{Axis, Descriptor, Interior, KvLayout, LayerBase, LayoutError, Placement, Span};

/// One layer's KV cache as the engine's tensor library describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorView {
    /// Index of the layer in the model.
    pub layer: u16,
    /// Address of the first element.
    pub address: u64,
    /// Elements along blocks, heads, tokens and content.
    pub shape: [u64; 4],
    /// Stride of each axis, in elements.
    pub strides: [i64; 4],
    /// Bytes of an element.
    pub itemsize: u64,
    /// Address of the allocation that the view lies in.
    pub storage_address: u64,
    /// Bytes of the allocation.
    pub storage_bytes: u64,
}

/// The memory that a region stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionAddr {
    /// First byte.
    pub address: u64,
    /// Bytes of the memory.
    pub len: u64,
}

/// What the tensors turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detected {
    /// Where every byte lies.
    pub descriptor: Descriptor,
    /// The memory of each region of the descriptor, by its index.
    pub regions: Vec<RegionAddr>,
    /// The layout's name, if exactly one fits. Gaps, and layers that are part of something bigger,
    /// do not count against it. An axis with a single element has no place in memory. So a rank
    /// with one head or one layer often has no single name.
    pub layout: Option<KvLayout>,
}

/// Reproduces a layout from one tensor per layer, in any order. `first_head` is the index in the
/// model of the tensors' head 0.
///
/// `stage` has the layers of the whole pipeline stage. A group of a hybrid model has only some of
/// them: layers without a tensor are absent from the descriptor. Without `stage`, the tensors'
/// layers must be consecutive.
///
/// The descriptor gives exactly the tensors' addresses. If that is not possible, the reason is
/// returned instead; nothing is guessed. The descriptor's interior is that of the tensors. If there
/// is a single head or token, the interior is HNC; the caller may change it with
/// [`Descriptor::with_interior`].
pub fn detect(
    views: &[TensorView],
    first_head: u16,
    stage: Option<Range<u16>>,
) -> Result<Detected> {
    let mut views = views.to_vec();
    views.sort_by_key(|view| view.layer);
    let Some(first) = views.first() else {
        return Err(no_layers());
    };
    check_layers(&views, stage.as_ref())?;
    check_alike(&views)?;
    let [block_stride, head_stride, token_stride] = byte_strides(first)?;
    let [blocks, heads, tokens, content] = first.shape;
    let (share, absent) = share(&views, first_head, stage)?;

    let regions = storages(&views)?;
    let bases = views
        .iter()
        .map(|view| base(view, &regions))
        .collect::<Result<Vec<_>>>()?;
    let interior = if heads > 1 && tokens > 1 && token_stride > head_stride {
        Interior::Nhc
    } else {
        Interior::Hnc
    };
    let placement = Placement {
        share,
        absent,
        blocks,
        tokens,
        content_bytes: content
            .checked_mul(first.itemsize)
            .ok_or_else(|| overflow(first))?,
        interior,
        region_lens: regions.iter().map(|region| region.len).collect(),
        layers: bases,
        block_stride,
        head_stride,
        token_stride,
    };
    let layout = name(&placement);
    Ok(Detected {
        descriptor: Descriptor::new(placement)?,
        regions,
        layout,
    })
}

fn no_layers() -> LayoutError {
    LayoutError::new(Empty, "no layer has a KV cache tensor")
}

/// The part of the model that the tensors belong to, and its layers without a tensor. The tensors
/// are in order.
fn share(
    views: &[TensorView],
    first_head: u16,
    stage: Option<Range<u16>>,
) -> Result<(Span, Vec<u16>)> {
    let (Some(first), Some(last)) = (views.first(), views.last()) else {
        return Err(no_layers());
    };
    let heads = first.shape[1];
    let too_many = || {
        let message = format!(
            "layers {} to {} and {heads} heads from head {first_head} exceed the 65,535 that a \
             span can count",
            first.layer, last.layer
        );
        LayoutError::new(TooLarge, message)
    };
    let layers = match stage {
        Some(stage) => stage,
        None => first.layer..last.layer.checked_add(1).ok_or_else(too_many)?,
    };
    let has_tensor = |layer: &u16| views.binary_search_by_key(layer, |v| v.layer).is_ok();
    let absent = layers.clone().filter(|l| !has_tensor(l)).collect();
    let head_end = u16::try_from(heads)
        .ok()
        .and_then(|heads| first_head.checked_add(heads))
        .ok_or_else(too_many)?;
    Ok((Span::new(layers, first_head..head_end)?, absent))
}

fn check_layers(views: &[TensorView], stage: Option<&Range<u16>>) -> Result<()> {
    if let Some(stage) = stage
        && let Some(view) = views.iter().find(|view| !stage.contains(&view.layer))
    {
        let layer = view.layer;
        let message = format!("layer {layer} is not one of the stage's layers {stage:?}");
        return Err(LayoutError::new(Outside, message));
    }
    for pair in views.windows(2) {
        let (before, after) = (pair[0].layer, pair[1].layer);
        match after - before {
            0 => {
                let message = format!("layer {after} has two tensors");
                return Err(LayoutError::new(Overlap, message));
            }
            1 => {}
            _ if stage.is_some() => {}
            _ => {
                let message =
                    format!("layers must be consecutive: layer {after} follows layer {before}");
                return Err(LayoutError::new(Missing, message));
            }
        }
    }
    Ok(())
}

/// Checks that every layer has the first layer's shape, and its strides on the axes where strides
/// matter.
fn check_alike(views: &[TensorView]) -> Result<()> {
    let first = &views[0];
    for view in views {
        if view.shape != first.shape || view.itemsize != first.itemsize {
            let message = format!(
                "layer {} has shape {:?} of {}-byte elements, but layer {} has {:?} of {}",
                view.layer, view.shape, view.itemsize, first.layer, first.shape, first.itemsize
            );
            return Err(LayoutError::new(Differ, message));
        }
        if (0..4).any(|axis| view.shape[axis] > 1 && view.strides[axis] != first.strides[axis]) {
            let message = format!(
                "layer {} has strides {:?}, but layer {} has {:?} (elements)",
                view.layer, view.strides, first.layer, first.strides
            );
            return Err(LayoutError::new(Differ, message));
        }
    }
    Ok(())
}

fn overflow(view: &TensorView) -> LayoutError {
    let message = format!(
        "shape {:?}, strides {:?}, {}-byte elements: over 64 bits of bytes",
        view.shape, view.strides, view.itemsize
    );
    LayoutError::new(TooLarge, message)
}

/// Byte strides of blocks, heads and tokens. An axis with one element has stride zero, whatever the
/// tensor says about it.
fn byte_strides(view: &TensorView) -> Result<[u64; 3]> {
    if view.itemsize == 0 || view.shape.contains(&0) {
        let message = format!(
            "the tensors are empty: shape {:?} of {}-byte elements",
            view.shape, view.itemsize
        );
        return Err(LayoutError::new(Empty, message));
    }
    if view.shape[3] > 1 && view.strides[3] != 1 {
        let message = format!(
            "the content axis has {} elements and stride {}; it must be contiguous",
            view.shape[3], view.strides[3]
        );
        return Err(LayoutError::new(Strides, message));
    }
    let mut strides = [0; 3];
    for (i, axis) in [Axis::Block, Axis::Head, Axis::Token]
        .into_iter()
        .enumerate()
    {
        let (count, stride) = (view.shape[i], view.strides[i]);
        if count == 1 {
            continue;
        }
        if stride <= 0 {
            let message = format!(
                "axis {axis} has {count} elements and stride {stride}; strides must be positive"
            );
            return Err(LayoutError::new(Strides, message));
        }
        strides[i] = stride
            .unsigned_abs()
            .checked_mul(view.itemsize)
            .ok_or_else(|| overflow(view))?;
    }
    Ok(strides)
}

/// The distinct storages, by address, checked to be disjoint.
fn storages(views: &[TensorView]) -> Result<Vec<RegionAddr>> {
    let mut regions = Vec::with_capacity(views.len());
    for view in views {
        let (address, len) = (view.storage_address, view.storage_bytes);
        if address.checked_add(len).is_none() {
            let message = format!(
                "layer {}: storage of {len} bytes at {address:#x} exceeds the address space",
                view.layer
            );
            return Err(LayoutError::new(TooLarge, message));
        }
        regions.push(RegionAddr { address, len });
    }
    regions.sort_by_key(|region| (region.address, region.len));
    regions.dedup();
    for pair in regions.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if first.address + first.len > second.address {
            let message = format!(
                "storage of {} bytes at {:#x} overlaps storage of {} bytes at {:#x}",
                first.len, first.address, second.len, second.address
            );
            return Err(LayoutError::new(Overlap, message));
        }
    }
    Ok(regions)
}

fn base(view: &TensorView, regions: &[RegionAddr]) -> Result<LayerBase> {
    let TensorView {
        layer,
        address,
        itemsize,
        storage_address: storage,
        ..
    } = *view;
    if !address.is_multiple_of(itemsize) {
        let message = format!(
            "layer {layer} begins at address {address:#x}, not aligned to its {itemsize}-byte \
             elements"
        );
        return Err(LayoutError::new(Misaligned, message));
    }
    let Some(offset) = address.checked_sub(storage) else {
        let message = format!(
            "layer {layer} begins at address {address:#x}, before its storage at {storage:#x}"
        );
        return Err(LayoutError::new(Outside, message));
    };
    // There are at most as many regions as layers, and they are sorted by addresses that differ.
    let region = regions.partition_point(|region| region.address < storage) as u32;
    Ok(LayerBase { region, offset })
}

/// The layout whose order the strides follow, if there is only one. Each axis must lie outside all
/// that its neighbour spans.
fn name(p: &Placement) -> Option<KvLayout> {
    let mut axes = vec![
        (Axis::Block, p.blocks, p.block_stride),
        (Axis::Head, p.share.head_count() as u64, p.head_stride),
        (Axis::Token, p.tokens, p.token_stride),
    ];
    let layers = p.layers.len() as u64;
    let own_regions = p.region_lens.len() == p.layers.len();
    if p.region_lens.len() == 1 && layers > 1 {
        let stride = p.layers[1].offset.checked_sub(p.layers[0].offset)?;
        let even = |pair: &[LayerBase]| pair[0].offset.checked_add(stride) == Some(pair[1].offset);
        if !p.layers.windows(2).all(even) {
            return None;
        }
        axes.push((Axis::Layer, layers, stride));
    } else if !own_regions {
        return None;
    }
    axes.retain(|&(_, count, _)| count > 1);
    axes.sort_by_key(|&(_, _, stride)| stride);
    let mut extent = p.content_bytes;
    for &(_, count, stride) in &axes {
        if stride < extent {
            return None;
        }
        extent = (count - 1).checked_mul(stride)?.checked_add(extent)?;
    }
    let mut order: Vec<Axis> = axes.iter().rev().map(|&(axis, _, _)| axis).collect();
    if layers > 1 && own_regions {
        order.insert(0, Axis::Layer);
    }
    let follows = |layout: &KvLayout| {
        layout
            .order()
            .into_iter()
            .filter(|axis| order.contains(axis))
            .eq(order.iter().copied())
    };
    let mut named = KvLayout::ALL.into_iter().filter(follows);
    match (named.next(), named.next()) {
        (Some(layout), None) => Some(layout),
        _ => None,
    }
}
