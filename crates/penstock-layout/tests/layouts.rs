//! Hand-computed addresses: 2 layers, 3 blocks, 2 heads, 4 tokens, 8 bytes of content.

use std::fmt::Debug;

use penstock_layout::LayoutErrorKind::{self, Empty, Missing, Outside, Overlap, Strides, TooLarge};
use penstock_layout::{Descriptor, KvLayout, LayerBase, LayoutError, Placement, Segment, Span};

#[track_caller]
fn assert_says<T: Debug>(result: Result<T, LayoutError>, kind: LayoutErrorKind, text: &str) {
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.to_string().as_str()), (kind, text));
}

fn span(layers: std::ops::Range<u16>, heads: std::ops::Range<u16>) -> Span {
    Span::new(layers, heads).unwrap()
}

/// `(offset, len)` of a block's segments. The share is layers 10 and 11, heads 4 and 5.
fn runs(layout: KvLayout, block: u64, part: Span) -> Vec<(u64, u64)> {
    let descriptor = Descriptor::packed(layout, span(10..12, 4..6), 3, 4, 8).unwrap();
    assert_eq!(descriptor.region_lens(), [384]);
    let mut out = Vec::new();
    descriptor.segments([block], &part, &mut out).unwrap();
    out.iter()
        .map(|segment| (segment.offset, segment.len))
        .collect()
}

#[test]
fn whole_share_of_block_1() {
    let whole = span(10..12, 4..6);
    let expected: [(KvLayout, &[(u64, u64)]); 6] = [
        // Pages of 64 bytes, three to a layer: block 1 is the second and the fifth.
        (KvLayout::LBHNC, &[(64, 64), (256, 64)]),
        (KvLayout::LBNHC, &[(64, 64), (256, 64)]),
        // Half pages of 32 bytes, three to a head: 1st, 4th, 7th and 10th after block 0's.
        (
            KvLayout::LHBNC,
            &[(32, 32), (128, 32), (224, 32), (320, 32)],
        ),
        // 128 bytes a block.
        (KvLayout::BLHNC, &[(128, 128)]),
        (KvLayout::BLNHC, &[(128, 128)]),
        // Block 1 at 128; inside it head 0 of layers 10 and 11, then head 1 of both.
        (
            KvLayout::BHLNC,
            &[(128, 32), (192, 32), (160, 32), (224, 32)],
        ),
    ];
    for (layout, runs_of_block) in expected {
        assert_eq!(runs(layout, 1, whole), runs_of_block, "{layout}");
    }
}

#[test]
fn second_layer_second_head_of_block_2() {
    let part = span(11..12, 5..6);
    let expected: [(KvLayout, &[(u64, u64)]); 6] = [
        // Layer 192, block 2 * 64, head 32.
        (KvLayout::LBHNC, &[(352, 32)]),
        // Layer 192, block 2 * 64, head 8, a token every 16.
        (KvLayout::LBNHC, &[(328, 8), (344, 8), (360, 8), (376, 8)]),
        // Layer 192, head 96, block 2 * 32.
        (KvLayout::LHBNC, &[(352, 32)]),
        // Block 2 * 128, layer 64, head 32.
        (KvLayout::BLHNC, &[(352, 32)]),
        // Block 2 * 128, layer 64, head 8.
        (KvLayout::BLNHC, &[(328, 8), (344, 8), (360, 8), (376, 8)]),
        // Block 2 * 128, head 64, layer 32.
        (KvLayout::BHLNC, &[(352, 32)]),
    ];
    for (layout, runs_of_block) in expected {
        assert_eq!(runs(layout, 2, part), runs_of_block, "{layout}");
    }
}

#[test]
fn neighbouring_blocks_merge_within_an_object_only() {
    let share = span(0..2, 0..2);
    let mut out = Vec::new();
    let descriptor = Descriptor::packed(KvLayout::BLHNC, share, 4, 4, 8).unwrap();
    let chunk = descriptor.segments([1, 2, 0], &share, &mut out).unwrap();
    let neighbour = descriptor.segments([1], &share, &mut out).unwrap();
    let segment = |offset, len| Segment {
        region: 0,
        offset,
        len,
    };
    assert_eq!(out[chunk], [segment(128, 256), segment(0, 128)]);
    assert_eq!(out[neighbour], [segment(128, 128)]);
    assert_eq!(descriptor.block_bytes(&share), 128);
    assert_eq!(descriptor.block_bytes(&span(0..1, 0..2)), 64);
}

#[test]
fn another_interior_gives_the_same_bytes_in_another_order() {
    let share = span(0..1, 0..2);
    let descriptor = Descriptor::packed(KvLayout::LBHNC, share, 1, 2, 8)
        .unwrap()
        .with_interior(penstock_layout::Interior::Nhc);
    let mut out = Vec::new();
    descriptor.segments([0], &share, &mut out).unwrap();
    let offsets: Vec<u64> = out.iter().map(|segment| segment.offset).collect();
    assert_eq!(offsets, [0, 16, 8, 24]);
}

#[test]
fn outside_block_or_share_is_refused_and_leaves_out_alone() {
    let share = span(2..4, 1..3);
    let descriptor = Descriptor::packed(KvLayout::LBHNC, share, 3, 4, 8).unwrap();
    let mut out = Vec::new();
    assert_says(
        descriptor.segments([3], &share, &mut out),
        Outside,
        "block 3 of 3",
    );
    for outside in [
        span(1..3, 1..3),
        span(2..5, 1..3),
        span(2..4, 0..3),
        span(2..4, 1..4),
    ] {
        assert_says(
            descriptor.segments([0], &outside, &mut out),
            Outside,
            &format!("span {outside} lies outside the share {share}"),
        );
    }
    assert!(out.is_empty());
}

/// Two layers of one head and token: a page is 8 bytes.
fn two_layers(bases: [u64; 2], blocks: u64, block_stride: u64, region: u64) -> Placement {
    Placement {
        share: span(0..2, 0..1),
        absent: vec![],
        blocks,
        tokens: 1,
        content_bytes: 8,
        interior: penstock_layout::Interior::Hnc,
        region_lens: vec![region],
        layers: bases.map(|offset| LayerBase { region: 0, offset }).to_vec(),
        block_stride,
        head_stride: 0,
        token_stride: 0,
    }
}

#[test]
fn interleaved_layers_are_told_from_overlapping_ones() {
    assert!(Descriptor::new(two_layers([0, 8], 3, 16, 48)).is_ok());
    assert!(Descriptor::new(two_layers([8, 0], 3, 16, 48)).is_ok());
    for (bases, region, text) in [
        (
            [0, 7],
            48,
            "layers 0 and 1 share bytes of region 0: one begins at byte 0, the other at 7",
        ),
        (
            [9, 0],
            64,
            "layers 1 and 0 share bytes of region 0: one begins at byte 0, the other at 9",
        ),
        (
            [0, 32],
            72,
            "layers 0 and 1 share bytes of region 0: one begins at byte 0, the other at 32",
        ),
    ] {
        let placement = two_layers(bases, 3, 16, region);
        assert_says(Descriptor::new(placement), Overlap, text);
    }
    assert!(Descriptor::new(two_layers([0, 40], 3, 16, 80)).is_ok());
}

#[test]
fn bad_placements_are_refused_with_their_numbers() {
    assert_says(
        Descriptor::new(two_layers([0, 8], 3, 16, 47)),
        Outside,
        "layer 1 begins at byte 8 of region 0 and takes 40 bytes, but the region has 47",
    );
    assert_says(
        Descriptor::new(two_layers([u64::MAX, 8], 3, 16, u64::MAX)),
        Outside,
        "layer 0 begins at byte 18446744073709551615 of region 0 and takes 40 bytes, but the region \
         has 18446744073709551615",
    );
    assert_says(
        Descriptor::new(two_layers([0, 8], u64::MAX, 1 << 40, u64::MAX)),
        TooLarge,
        "18446744073709551615 blocks 1099511627776 bytes apart, 1 heads 0 apart and 1 tokens 0 \
         apart do not fit 64-bit addresses",
    );
    assert_says(
        Descriptor::new(two_layers([0, 8], 3, 7, 48)),
        Strides,
        "neighbours on axis B are 7 bytes apart, but each spans 8 bytes",
    );
    assert_says(
        Descriptor::new(two_layers([0, 8], 0, 16, 48)),
        Empty,
        "the number of blocks must not be zero",
    );
    let mut placement = two_layers([0, 8], 3, 16, 48);
    placement.layers[1].region = 1;
    assert_says(
        Descriptor::new(placement),
        Outside,
        "layer 1 lies in region 1, but there are 1 regions",
    );
    let mut placement = two_layers([0, 8], 3, 16, 48);
    placement.layers.pop();
    assert_says(
        Descriptor::new(placement),
        Missing,
        "the share has 2 layers here, but 1 have a place",
    );
    assert_says(
        Descriptor::packed(KvLayout::BLHNC, span(0..1, 0..1), 1, 1 << 16, (1 << 16) + 1),
        TooLarge,
        "65536 tokens of 65537 bytes make over 4 GiB for one head of a block",
    );
    assert_says(
        Descriptor::packed(KvLayout::BLHNC, span(0..64, 0..64), u64::MAX, 16, 256),
        TooLarge,
        "18446744073709551615 blocks 16777216 bytes apart, 64 heads 4096 apart and 16 tokens 256 \
         apart do not fit 64-bit addresses",
    );
}

/// A hybrid model's stage of four layers, of which a group has two, packed `BLHNC` among its own.
#[test]
fn a_group_with_some_of_a_stages_layers() {
    let placement = |absent: Vec<u16>, layers: usize| Placement {
        share: span(4..8, 0..2),
        absent,
        blocks: 3,
        tokens: 1,
        content_bytes: 8,
        interior: penstock_layout::Interior::Hnc,
        region_lens: vec![96],
        layers: (0..layers as u64)
            .map(|i| LayerBase {
                region: 0,
                offset: 16 * i,
            })
            .collect(),
        block_stride: 32,
        head_stride: 8,
        token_stride: 0,
    };
    let group = Descriptor::new(placement(vec![4, 6], 2)).unwrap();
    assert_eq!(group.layers().collect::<Vec<_>>(), [5, 7]);
    let runs = |span: Span| {
        let mut runs = Vec::new();
        group.segments([1], &span, &mut runs).unwrap();
        assert_eq!(
            runs.iter().map(|run| run.len).sum::<u64>(),
            group.block_bytes(&span)
        );
        runs.iter()
            .map(|run| (run.offset, run.len))
            .collect::<Vec<_>>()
    };
    assert_eq!(runs(span(4..8, 0..2)), [(32, 32)]);
    assert_eq!(runs(span(4..6, 0..2)), [(32, 16)]);
    assert_eq!(runs(span(5..7, 1..2)), [(40, 8)]);
    assert_eq!(runs(span(6..8, 0..1)), [(48, 8)]);
    assert_eq!(runs(span(6..7, 0..2)), []);
    for (absent, layers, culprit) in [
        (vec![4, 4], 2, 4),
        (vec![6, 4], 2, 4),
        (vec![3], 3, 3),
        (vec![8], 3, 8),
    ] {
        assert_says(
            Descriptor::new(placement(absent, layers)),
            Outside,
            &format!(
                "layer {culprit} is said to be absent from l4-8.h0-2, which does not hold it that \
                 often"
            ),
        );
    }
    assert_says(
        Descriptor::new(placement(vec![4, 5, 6, 7], 0)),
        Empty,
        "the number of layers must not be zero",
    );
    assert_says(
        Descriptor::new(placement(vec![4], 2)),
        Missing,
        "the share has 3 layers here, but 2 have a place",
    );
}

#[test]
fn contiguity_is_that_of_the_canonical_order() {
    use penstock_layout::Contiguity::{Block, Page, Scattered};
    let of = |layout, layers, heads| {
        Descriptor::packed(layout, span(0..layers, 0..heads), 3, 4, 8)
            .unwrap()
            .contiguity()
    };
    for (layout, expected) in [
        (KvLayout::LBHNC, Page),
        (KvLayout::LBNHC, Page),
        (KvLayout::LHBNC, Scattered),
        (KvLayout::BLHNC, Block),
        (KvLayout::BLNHC, Block),
        (KvLayout::BHLNC, Scattered),
    ] {
        assert_eq!(of(layout, 2, 2), expected, "{layout}");
    }
    // With one head, all of a block is in order; one layer's block is a page.
    assert_eq!(of(KvLayout::BHLNC, 2, 1), Block);
    assert_eq!(of(KvLayout::BLHNC, 1, 2), Page);
}
