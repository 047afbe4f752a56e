//! Detection of layouts from tensors, as vLLM makes them.

use penstock_layout::LayoutErrorKind::{
    self, Differ, Empty, Misaligned, Missing, Outside, Overlap, Strides, TooLarge,
};
use penstock_layout::{
    Axis, Descriptor, Interior, KvLayout, LayerBase, LayoutError, Placement, RegionAddr, Segment,
    Span, TensorView, detect,
};
use proptest::prelude::*;

const STORAGE: u64 = 0x7000_0000;

#[track_caller]
fn assert_says(error: LayoutError, kind: LayoutErrorKind, text: &str) {
    assert_eq!((error.kind(), error.to_string().as_str()), (kind, text));
}

/// vLLM's `compute_layout_strides`: strides of L, B, H and N in elements, the page optionally
/// padded.
fn vllm_strides(layout: KvLayout, [l, b, h, n, c]: [u64; 5], padding: u64) -> [u64; 4] {
    let page_axes = [Axis::Layer, Axis::Block];
    let mut strides = [0; 4];
    let mut stride = 1;
    let mut padded = padding == 0;
    for axis in layout.order().into_iter().rev() {
        if !padded && page_axes.contains(&axis) {
            stride += padding;
            padded = true;
        }
        let count = match axis {
            Axis::Layer => l,
            Axis::Block => b,
            Axis::Head => h,
            Axis::Token => n,
            Axis::Content => c,
        };
        match axis {
            Axis::Layer => strides[0] = stride,
            Axis::Block => strides[1] = stride,
            Axis::Head => strides[2] = stride,
            Axis::Token => strides[3] = stride,
            Axis::Content => {}
        }
        stride *= count;
    }
    strides
}

/// The tensors of layers `keep` of a buffer with `sizes`, as `create_kv_cache_views` makes them.
fn views(
    layout: KvLayout,
    sizes: [u64; 5],
    padding: u64,
    itemsize: u64,
    keep: std::ops::Range<u64>,
) -> Vec<TensorView> {
    let [l, b, h, n, c] = sizes;
    let strides = vllm_strides(layout, sizes, padding);
    let elements = l * b * (h * n * c + padding);
    keep.map(|layer| TensorView {
        layer: layer as u16,
        address: STORAGE + layer * strides[0] * itemsize,
        shape: [b, h, n, c],
        strides: [strides[1] as i64, strides[2] as i64, strides[3] as i64, 1],
        itemsize,
        storage_address: STORAGE,
        storage_bytes: elements * itemsize,
    })
    .collect()
}

fn simple() -> Vec<TensorView> {
    views(KvLayout::LBHNC, [3, 4, 2, 8, 16], 0, 2, 0..3)
}

/// What vLLM 0.32's `create_kv_cache_views` makes of 3 layers, 4 blocks, 2 heads, 8 tokens
/// and head size 8 in bfloat16: bytes between layers, strides of blocks, heads and tokens.
#[test]
fn vllms_layouts_are_recognised() {
    let made: [(KvLayout, u64, [i64; 4]); 6] = [
        (KvLayout::LBHNC, 2048, [256, 128, 16, 1]),
        (KvLayout::LBNHC, 2048, [256, 16, 32, 1]),
        (KvLayout::LHBNC, 2048, [128, 512, 16, 1]),
        (KvLayout::BLHNC, 512, [768, 128, 16, 1]),
        (KvLayout::BLNHC, 512, [768, 16, 32, 1]),
        (KvLayout::BHLNC, 256, [768, 384, 16, 1]),
    ];
    for (layout, layer_bytes, strides) in made {
        let views = [0, 1, 2].map(|layer| TensorView {
            layer,
            address: STORAGE + u64::from(layer) * layer_bytes,
            shape: [4, 2, 8, 16],
            strides,
            itemsize: 2,
            storage_address: STORAGE,
            storage_bytes: 6144,
        });
        let found = detect(&views, 6, None).unwrap();
        let share = Span::new(0..3, 6..8).unwrap();
        assert_eq!(
            found.descriptor,
            Descriptor::packed(layout, share, 4, 8, 32).unwrap()
        );
        assert_eq!(found.layout, Some(layout));
        assert_eq!(
            found.regions,
            [RegionAddr {
                address: STORAGE,
                len: 6144
            }]
        );
    }
}

#[test]
fn blocks_of_layers_that_mesh_like_teeth_have_no_name() {
    let mut views = simple();
    views.pop();
    for view in &mut views {
        // Layer 0 in pages 0, 2, 4, 6 and layer 1 in pages 3, 5, 7, 9.
        view.address = STORAGE + u64::from(view.layer) * 3 * 512;
        view.strides[0] = 2 * 256;
    }
    let found = detect(&views, 0, None).unwrap();
    assert_eq!(found.layout, None);
    let mut out = Vec::new();
    found
        .descriptor
        .segments([1], &found.descriptor.share(), &mut out)
        .unwrap();
    let page = |n: u64| Segment {
        region: 0,
        offset: n * 512,
        len: 512,
    };
    assert_eq!(out, [page(2), page(5)]);
}

#[test]
fn a_storage_for_each_layer() {
    let mut views = simple();
    for (view, storage) in views
        .iter_mut()
        .zip([0x9000_0000, 0x2000_0000, 0x5000_0000])
    {
        (view.address, view.storage_address) = (storage + 64, storage);
    }
    views.reverse();
    let found = detect(&views, 0, None).unwrap();
    assert_eq!(found.layout, Some(KvLayout::LBHNC));
    let addresses: Vec<u64> = found.regions.iter().map(|region| region.address).collect();
    assert_eq!(addresses, [0x2000_0000, 0x5000_0000, 0x9000_0000]);
    let mut out = Vec::new();
    found
        .descriptor
        .segments([1], &found.descriptor.share(), &mut out)
        .unwrap();
    let page = |region| Segment {
        region,
        offset: 64 + 512,
        len: 512,
    };
    assert_eq!(out, [page(2), page(0), page(1)]);
}

#[test]
fn single_axes_have_no_place_and_their_strides_are_ignored() {
    let mut views = views(KvLayout::BLNHC, [3, 4, 1, 8, 16], 0, 2, 0..3);
    for (view, odd) in views.iter_mut().zip([0, -7, 3]) {
        view.strides[1] = odd;
    }
    let found = detect(&views, 2, None).unwrap();
    // BLHNC, BLNHC and BHLNC are the same with one head.
    assert_eq!(found.layout, None);
    assert_eq!(found.descriptor.interior(), Interior::Hnc);
    let mut out = Vec::new();
    found
        .descriptor
        .segments([2], &Span::new(0..3, 2..3).unwrap(), &mut out)
        .unwrap();
    assert_eq!(
        out,
        [Segment {
            region: 0,
            offset: 2 * 768,
            len: 768
        }]
    );
}

#[test]
fn a_group_has_some_of_its_stages_layers() {
    let all = views(KvLayout::BLHNC, [6, 4, 2, 8, 16], 0, 2, 0..6);
    let group: Vec<TensorView> = [5, 1, 3].map(|layer| all[layer]).to_vec();
    let found = detect(&group, 0, Some(0..6)).unwrap().descriptor;
    let whole = detect(&all, 0, None).unwrap().descriptor;
    assert_eq!(found.share(), whole.share());
    assert_eq!(found.layers().collect::<Vec<_>>(), [1, 3, 5]);
    for layer in 0..6 {
        let span = Span::new(layer..layer + 1, 0..2).unwrap();
        let (mut own, mut expected) = (Vec::new(), Vec::new());
        found.segments([2], &span, &mut own).unwrap();
        whole.segments([2], &span, &mut expected).unwrap();
        assert_eq!(own, if layer % 2 == 1 { expected } else { vec![] });
    }
    assert_says(
        detect(&group, 0, Some(1..5)).unwrap_err(),
        Outside,
        "layer 5 is not one of the stage's layers 1..5",
    );
    assert_says(
        detect(&group, 0, None).unwrap_err(),
        Missing,
        "layers must be consecutive: layer 3 follows layer 1",
    );
}

#[test]
fn unevenly_placed_layers_are_described_without_a_name() {
    let mut views = simple();
    views[2].address += 32;
    for view in &mut views {
        view.storage_bytes += 32;
    }
    let found = detect(&views, 0, None).unwrap();
    assert_eq!(found.layout, None);
    let mut out = Vec::new();
    found
        .descriptor
        .segments([0], &Span::new(2..3, 0..2).unwrap(), &mut out)
        .unwrap();
    assert_eq!(
        out,
        [Segment {
            region: 0,
            offset: 2 * 2048 + 32,
            len: 512
        }]
    );
}

#[test]
fn tensors_it_cannot_reproduce_are_refused() {
    let refused = |change: &dyn Fn(&mut Vec<TensorView>)| {
        let mut views = simple();
        change(&mut views);
        detect(&views, 0, None).unwrap_err()
    };
    let all = |change: &dyn Fn(&mut TensorView)| refused(&|v| v.iter_mut().for_each(change));
    for (error, kind, text) in [
        (
            refused(&|v| v.clear()),
            Empty,
            "no layer has a KV cache tensor",
        ),
        (
            refused(&|v| v[2].layer = 1),
            Overlap,
            "layer 1 has two tensors",
        ),
        (
            refused(&|v| v[2].layer = 3),
            Missing,
            "layers must be consecutive: layer 3 follows layer 1",
        ),
        (
            refused(&|v| v[1].shape[2] = 4),
            Differ,
            "layer 1 has shape [4, 2, 4, 16] of 2-byte elements, but layer 0 has [4, 2, 8, 16] of 2",
        ),
        (
            refused(&|v| v[1].itemsize = 1),
            Differ,
            "layer 1 has shape [4, 2, 8, 16] of 1-byte elements, but layer 0 has [4, 2, 8, 16] of 2",
        ),
        (
            refused(&|v| v[2].strides[0] = 512),
            Differ,
            "layer 2 has strides [512, 128, 16, 1], but layer 0 has [256, 128, 16, 1] (elements)",
        ),
        (
            all(&|v| v.shape[0] = 0),
            Empty,
            "the tensors are empty: shape [0, 2, 8, 16] of 2-byte elements",
        ),
        (
            all(&|v| v.itemsize = 0),
            Empty,
            "the tensors are empty: shape [4, 2, 8, 16] of 0-byte elements",
        ),
        (
            all(&|v| v.strides[1] = 0),
            Strides,
            "axis H has 2 elements and stride 0; strides must be positive",
        ),
        (
            all(&|v| v.strides[0] = -256),
            Strides,
            "axis B has 4 elements and stride -256; strides must be positive",
        ),
        // Key and value apart: [2, B, …] seen as [B, H, N, 2, C].
        (
            all(&|v| v.strides[3] = 2),
            Strides,
            "the content axis has 16 elements and stride 2; it must be contiguous",
        ),
        (
            all(&|v| (v.strides[0], v.itemsize) = (i64::MAX, 4)),
            TooLarge,
            "shape [4, 2, 8, 16], strides [9223372036854775807, 128, 16, 1], 4-byte elements: over \
             64 bits of bytes",
        ),
        (
            refused(&|v| v[1].address += 1),
            Misaligned,
            "layer 1 begins at address 0x70000801, not aligned to its 2-byte elements",
        ),
        (
            refused(&|v| v[0].address -= 2),
            Outside,
            "layer 0 begins at address 0x6ffffffe, before its storage at 0x70000000",
        ),
        (
            refused(&|v| v[2].address += 2),
            Outside,
            "layer 2 begins at byte 4098 of region 0 and takes 2048 bytes, but the region has 6144",
        ),
        (
            refused(&|v| v[2].address = v[1].address + 512),
            Overlap,
            "layers 1 and 2 share bytes of region 0: one begins at byte 2048, the other at 2560",
        ),
        (
            all(&|v| v.strides[0] = 255),
            Strides,
            "neighbours on axis B are 510 bytes apart, but each spans 512 bytes",
        ),
        (
            refused(&|v| v[0].storage_bytes -= 2),
            Overlap,
            "storage of 6142 bytes at 0x70000000 overlaps storage of 6144 bytes at 0x70000000",
        ),
        (
            refused(&|v| v[0].storage_address -= 2),
            Overlap,
            "storage of 6144 bytes at 0x6ffffffe overlaps storage of 6144 bytes at 0x70000000",
        ),
        (
            refused(&|v| v[0].storage_bytes = u64::MAX),
            TooLarge,
            "layer 0: storage of 18446744073709551615 bytes at 0x70000000 exceeds the address space",
        ),
        (
            detect(&simple(), u16::MAX - 1, None).unwrap_err(),
            TooLarge,
            "layers 0 to 2 and 2 heads from head 65534 exceed the 65,535 that a span can count",
        ),
    ] {
        assert_says(error, kind, text);
    }
}

fn every_run(descriptor: &Descriptor) -> Vec<Segment> {
    let mut out = Vec::new();
    for block in 0..descriptor.blocks() {
        for layer in descriptor.share().layers() {
            let layer = Span::new(layer..layer + 1, descriptor.share().heads()).unwrap();
            descriptor.segments([block], &layer, &mut out).unwrap();
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// vLLM's own buffers: any layout and sizes, padded pages, a range of the layers.
    #[test]
    fn what_vllm_allocates_is_found(
        layout in proptest::sample::select(&KvLayout::ALL),
        sizes in [1u64..6, 1u64..5, 1u64..4, 1u64..5, 1u64..5],
        padding in prop_oneof![Just(0u64), 1u64..9],
        itemsize in proptest::sample::select(&[1u64, 2, 4]),
        (skip, take) in (0u64..6, 1u64..6),
        first_head in 0u16..9,
        order in any::<u64>(),
    ) {
        let [l, b, h, n, c] = sizes;
        let pages_whole = !layout.order()[..2].contains(&Axis::Head);
        let padding = if pages_whole { padding } else { 0 };
        let start = skip.min(l - 1);
        let keep = start..(start + take).min(l);
        let mut views = views(layout, sizes, padding, itemsize, keep.clone());
        let len = views.len();
        views.rotate_left(order as usize % len);
        let found = detect(&views, first_head, None).unwrap();

        let strides = vllm_strides(layout, sizes, padding);
        let share = Span::new(
            keep.start as u16..keep.end as u16,
            first_head..first_head + h as u16,
        )
        .unwrap();
        let truth = Placement {
            share,
            absent: vec![],
            blocks: b,
            tokens: n,
            content_bytes: c * itemsize,
            interior: layout.interior(),
            region_lens: vec![views[0].storage_bytes],
            layers: keep
                .clone()
                .map(|layer| LayerBase { region: 0, offset: layer * strides[0] * itemsize })
                .collect(),
            block_stride: strides[1] * itemsize,
            head_stride: strides[2] * itemsize,
            token_stride: strides[3] * itemsize,
        };
        let truth = Descriptor::new(truth).unwrap();
        prop_assert_eq!(every_run(&found.descriptor), every_run(&truth));
        prop_assert_eq!(found.descriptor.share(), truth.share());
        if h > 1 && n > 1 {
            prop_assert_eq!(found.descriptor.interior(), layout.interior());
        }
        if found.layout.is_some() || (keep.end - keep.start > 1 && b > 1 && h > 1 && n > 1) {
            prop_assert_eq!(found.layout, Some(layout));
        }
    }

    /// Any numbers at all: the bytes it describes are those the tensors address, or it refuses.
    #[test]
    fn arbitrary_tensors_are_reproduced_or_refused(
        shape in [1u64..4, 1u64..4, 1u64..4, 1u64..4],
        strides in [-3i64..40, -3i64..40, -3i64..40, 1i64..3],
        places in proptest::collection::vec(
            (0u64..200, proptest::sample::select(&[0u64, 4096])),
            1..4,
        ),
        storage_bytes in 0u64..600,
        itemsize in proptest::sample::select(&[1u64, 2]),
    ) {
        let views: Vec<TensorView> = (0..).zip(&places)
            .map(|(layer, &(offset, storage))| TensorView {
                layer,
                address: 0x1000 + storage + offset * itemsize,
                shape,
                strides,
                itemsize,
                storage_address: 0x1000 + storage,
                storage_bytes,
            })
            .collect();
        let Ok(found) = detect(&views, 0, None) else { return Ok(()) };
        let mut addressed = Vec::new();
        for view in &views {
            for b in 0..shape[0] as i64 {
                for h in 0..shape[1] as i64 {
                    for n in 0..shape[2] as i64 {
                        for c in 0..shape[3] as i64 {
                            let steps = [b, h, n, c].into_iter().zip(strides);
                            let at: i64 = steps.map(|(step, stride)| step * stride).sum();
                            let element = view.address + at as u64 * itemsize;
                            addressed.extend(element..element + itemsize);
                        }
                    }
                }
            }
        }
        let ranges = found.regions.iter().map(|region| region.address..region.address + region.len);
        let inside = addressed.iter().all(|byte| ranges.clone().any(|range| range.contains(byte)));
        prop_assert!(inside, "{:?} leave {:?}", views, found.regions);
        let mut described = Vec::new();
        for block in 0..shape[0] {
            let mut segments = Vec::new();
            let share = found.descriptor.share();
            found.descriptor.segments([block], &share, &mut segments).unwrap();
            for segment in segments {
                let address = found.regions[segment.region as usize].address + segment.offset;
                described.extend(address..address + segment.len);
            }
        }
        let bytes = addressed.len();
        addressed.sort_unstable();
        addressed.dedup();
        prop_assert_eq!(addressed.len(), bytes, "overlapping views accepted");
        described.sort_unstable();
        prop_assert_eq!(described, addressed);
    }
}
