//! Detection: the engine's layout, reproduced from the tensors it registers.

use std::ops::Range;

use crate::{
    Axis, Descriptor, DescriptorError, EmptySpan, Interior, KvLayout, LayerBase, Placement, Span,
};

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

/// Why the tensors' layout cannot be reproduced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DetectionError {
    /// There are no tensors.
    #[error("no layer has a KV cache tensor")]
    NoLayers,
    /// A layer is given twice.
    #[error("layer {layer} has two tensors")]
    DuplicateLayer {
        /// Index of the layer in the model.
        layer: u16,
    },
    /// A layer between others is missing.
    #[error("layers must be consecutive: layer {after} follows layer {before}")]
    MissingLayer {
        /// Index of a layer in the model.
        before: u16,
        /// Index of the next one given.
        after: u16,
    },
    /// A layer is not one of the stage's.
    #[error("layer {layer} is not one of the stage's layers {stage:?}")]
    OutsideStage {
        /// Index of the layer in the model.
        layer: u16,
        /// The stage.
        stage: Range<u16>,
    },
    /// Layers or heads do not fit a span.
    #[error(
        "layers {first_layer} to {last_layer} and {heads} heads from head {first_head} exceed \
         the 65,535 that a span can count"
    )]
    TooMany {
        /// Lowest layer.
        first_layer: u16,
        /// Highest layer.
        last_layer: u16,
        /// Index of the share's first head in the model.
        first_head: u16,
        /// Heads in the tensors.
        heads: u64,
    },
    /// A layer's tensor has another shape than the first one's.
    #[error(
        "layer {layer} has shape {shape:?} of {itemsize}-byte elements, but layer {first} has \
         {first_shape:?} of {first_itemsize}"
    )]
    ShapesDiffer {
        /// Index of the layer in the model.
        layer: u16,
        /// The layer's shape.
        shape: [u64; 4],
        /// The layer's element size in bytes.
        itemsize: u64,
        /// Index of the lowest layer.
        first: u16,
        /// The lowest layer's shape.
        first_shape: [u64; 4],
        /// The lowest layer's element size in bytes.
        first_itemsize: u64,
    },
    /// A layer's tensor has other strides than the first one's.
    #[error(
        "layer {layer} has strides {strides:?}, but layer {first} has {first_strides:?} (elements)"
    )]
    StridesDiffer {
        /// Index of the layer in the model.
        layer: u16,
        /// The layer's strides.
        strides: [i64; 4],
        /// Index of the lowest layer.
        first: u16,
        /// The lowest layer's strides.
        first_strides: [i64; 4],
    },
    /// A tensor has no elements.
    #[error("the tensors are empty: shape {shape:?} of {itemsize}-byte elements")]
    Empty {
        /// The tensors' shape.
        shape: [u64; 4],
        /// The tensors' element size in bytes.
        itemsize: u64,
    },
    /// An axis runs backwards or stands still.
    #[error("axis {axis} has {count} elements and stride {stride}; strides must be positive")]
    BadStride {
        /// The axis.
        axis: Axis,
        /// Elements along the axis.
        count: u64,
        /// Stride of the axis, in elements.
        stride: i64,
    },
    /// Key and value of a token and head do not lie side by side.
    #[error("the content axis has {count} elements and stride {stride}; it must be contiguous")]
    ContentNotContiguous {
        /// Elements along it.
        count: u64,
        /// Stride of the content axis, in elements.
        stride: i64,
    },
    /// Sizes in bytes do not fit 64 bits.
    #[error(
        "shape {shape:?}, strides {strides:?}, {itemsize}-byte elements: over 64 bits of bytes"
    )]
    Overflow {
        /// The tensors' shape.
        shape: [u64; 4],
        /// The tensors' strides.
        strides: [i64; 4],
        /// The tensors' element size in bytes.
        itemsize: u64,
    },
    /// An element's address is no multiple of its size.
    #[error(
        "layer {layer} begins at address {address:#x}, not aligned to its {itemsize}-byte elements"
    )]
    Misaligned {
        /// Index of the layer in the model.
        layer: u16,
        /// Address of its first element.
        address: u64,
        /// Bytes of an element.
        itemsize: u64,
    },
    /// A view begins before its storage.
    #[error("layer {layer} begins at address {address:#x}, before its storage at {storage:#x}")]
    BeforeStorage {
        /// Index of the layer in the model.
        layer: u16,
        /// Address of its first element.
        address: u64,
        /// Address of the storage.
        storage: u64,
    },
    /// A storage wraps around the end of the address space.
    #[error("layer {layer}: storage of {len} bytes at {address:#x} exceeds the address space")]
    StorageTooLarge {
        /// Index of the layer in the model.
        layer: u16,
        /// Address of the storage.
        address: u64,
        /// Bytes of the storage.
        len: u64,
    },
    /// Two storages have bytes in common.
    #[error(
        "storage of {first_len} bytes at {first:#x} overlaps storage of {second_len} bytes at \
         {second:#x}"
    )]
    StoragesOverlap {
        /// Address of one storage.
        first: u64,
        /// Bytes of the first storage.
        first_len: u64,
        /// Address of the other storage.
        second: u64,
        /// Bytes of the other storage.
        second_len: u64,
    },
    /// The views leave their storage or share bytes.
    #[error(transparent)]
    Placement(#[from] DescriptorError),
    /// No layers or no heads.
    #[error(transparent)]
    EmptySpan(#[from] EmptySpan),
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
) -> Result<Detected, DetectionError> {
    let mut views = views.to_vec();
    views.sort_by_key(|view| view.layer);
    let Some(first) = views.first() else {
        return Err(DetectionError::NoLayers);
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
        .collect::<Result<Vec<_>, _>>()?;
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

/// The part of the model that the tensors belong to, and its layers without a tensor. The tensors
/// are in order.
fn share(
    views: &[TensorView],
    first_head: u16,
    stage: Option<Range<u16>>,
) -> Result<(Span, Vec<u16>), DetectionError> {
    let (Some(first), Some(last)) = (views.first(), views.last()) else {
        return Err(DetectionError::NoLayers);
    };
    let heads = first.shape[1];
    let too_many = || DetectionError::TooMany {
        first_layer: first.layer,
        last_layer: last.layer,
        first_head,
        heads,
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

fn check_layers(views: &[TensorView], stage: Option<&Range<u16>>) -> Result<(), DetectionError> {
    if let Some(stage) = stage
        && let Some(view) = views.iter().find(|view| !stage.contains(&view.layer))
    {
        return Err(DetectionError::OutsideStage {
            layer: view.layer,
            stage: stage.clone(),
        });
    }
    for pair in views.windows(2) {
        let (before, after) = (pair[0].layer, pair[1].layer);
        match after - before {
            0 => return Err(DetectionError::DuplicateLayer { layer: after }),
            1 => {}
            _ if stage.is_some() => {}
            _ => return Err(DetectionError::MissingLayer { before, after }),
        }
    }
    Ok(())
}

/// Checks that every layer has the first layer's shape, and its strides on the axes where strides
/// matter.
fn check_alike(views: &[TensorView]) -> Result<(), DetectionError> {
    let first = &views[0];
    for view in views {
        if view.shape != first.shape || view.itemsize != first.itemsize {
            return Err(DetectionError::ShapesDiffer {
                layer: view.layer,
                shape: view.shape,
                itemsize: view.itemsize,
                first: first.layer,
                first_shape: first.shape,
                first_itemsize: first.itemsize,
            });
        }
        if (0..4).any(|axis| view.shape[axis] > 1 && view.strides[axis] != first.strides[axis]) {
            return Err(DetectionError::StridesDiffer {
                layer: view.layer,
                strides: view.strides,
                first: first.layer,
                first_strides: first.strides,
            });
        }
    }
    Ok(())
}

fn overflow(view: &TensorView) -> DetectionError {
    DetectionError::Overflow {
        shape: view.shape,
        strides: view.strides,
        itemsize: view.itemsize,
    }
}

/// Byte strides of blocks, heads and tokens. An axis with one element has stride zero, whatever the
/// tensor says about it.
fn byte_strides(view: &TensorView) -> Result<[u64; 3], DetectionError> {
    if view.itemsize == 0 || view.shape.contains(&0) {
        return Err(DetectionError::Empty {
            shape: view.shape,
            itemsize: view.itemsize,
        });
    }
    if view.shape[3] > 1 && view.strides[3] != 1 {
        return Err(DetectionError::ContentNotContiguous {
            count: view.shape[3],
            stride: view.strides[3],
        });
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
            return Err(DetectionError::BadStride {
                axis,
                count,
                stride,
            });
        }
        strides[i] = stride
            .unsigned_abs()
            .checked_mul(view.itemsize)
            .ok_or_else(|| overflow(view))?;
    }
    Ok(strides)
}

/// The distinct storages, by address, checked to be disjoint.
fn storages(views: &[TensorView]) -> Result<Vec<RegionAddr>, DetectionError> {
    let mut regions = Vec::with_capacity(views.len());
    for view in views {
        let (address, len) = (view.storage_address, view.storage_bytes);
        if address.checked_add(len).is_none() {
            return Err(DetectionError::StorageTooLarge {
                layer: view.layer,
                address,
                len,
            });
        }
        regions.push(RegionAddr { address, len });
    }
    regions.sort_by_key(|region| (region.address, region.len));
    regions.dedup();
    for pair in regions.windows(2) {
        if pair[0].address + pair[0].len > pair[1].address {
            return Err(DetectionError::StoragesOverlap {
                first: pair[0].address,
                first_len: pair[0].len,
                second: pair[1].address,
                second_len: pair[1].len,
            });
        }
    }
    Ok(regions)
}

fn base(view: &TensorView, regions: &[RegionAddr]) -> Result<LayerBase, DetectionError> {
    if !view.address.is_multiple_of(view.itemsize) {
        return Err(DetectionError::Misaligned {
            layer: view.layer,
            address: view.address,
            itemsize: view.itemsize,
        });
    }
    let offset =
        view.address
            .checked_sub(view.storage_address)
            .ok_or(DetectionError::BeforeStorage {
                layer: view.layer,
                address: view.address,
                storage: view.storage_address,
            })?;
    // There are at most as many regions as layers, and they are sorted by addresses that differ.
    let region = regions.partition_point(|region| region.address < view.storage_address) as u32;
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
