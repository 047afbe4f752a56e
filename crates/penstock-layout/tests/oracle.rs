//! Segments and the checks of placements, against oracles that walk every element.

use std::collections::HashSet;

use penstock_layout::{
    Axis, Descriptor, Interior, KvLayout, LayerBase, LayoutErrorKind, Placement, Segment, Span,
};
use proptest::prelude::*;

/// Address of the first content byte of each token and head of a block, in canonical order.
fn elements(p: &Placement, block: u64, part: &Span) -> Vec<(u32, u64)> {
    let mut out = Vec::new();
    for layer in part.layers() {
        let base = p.layers[usize::from(layer - p.share.layers().start)];
        let heads = part
            .heads()
            .map(|head| u64::from(head - p.share.heads().start));
        let mut cells: Vec<(u64, u64)> = heads
            .flat_map(|head| (0..p.tokens).map(move |token| (head, token)))
            .collect();
        if p.interior == Interior::Nhc {
            cells.sort_by_key(|&(head, token)| (token, head));
        }
        out.extend(cells.into_iter().map(|(head, token)| {
            let inside = block * p.block_stride + head * p.head_stride + token * p.token_stride;
            (base.region, base.offset + inside)
        }));
    }
    out
}

fn bytes(runs: impl IntoIterator<Item = (u32, u64, u64)>) -> Vec<(u32, u64)> {
    runs.into_iter()
        .flat_map(|(region, offset, len)| (offset..offset + len).map(move |byte| (region, byte)))
        .collect()
}

fn flatten(segments: &[Segment]) -> Vec<(u32, u64)> {
    bytes(segments.iter().map(|s| (s.region, s.offset, s.len)))
}

/// The placement of a layout, each axis's stride widened by a gap, layers in one region or
/// each in its own, the region beginning and ending with unused bytes.
fn placement(
    layout: KvLayout,
    share: Span,
    [blocks, tokens, content_bytes]: [u64; 3],
    gaps: [u64; 4],
    own_regions: bool,
    lead: u64,
) -> Placement {
    let layers = share.layer_count() as u64;
    let mut strides = [0; 4];
    let mut extent = content_bytes;
    for axis in layout.order().into_iter().rev() {
        let (slot, count) = match axis {
            Axis::Layer if own_regions => continue,
            Axis::Layer => (0, layers),
            Axis::Block => (1, blocks),
            Axis::Head => (2, share.head_count() as u64),
            Axis::Token => (3, tokens),
            Axis::Content => continue,
        };
        strides[slot] = extent + gaps[slot];
        extent += (count - 1) * strides[slot];
    }
    let base = |layer| match own_regions {
        true => LayerBase {
            region: layer as u32,
            offset: lead,
        },
        false => LayerBase {
            region: 0,
            offset: lead + layer * strides[0],
        },
    };
    Placement {
        share,
        absent: vec![],
        blocks,
        tokens,
        content_bytes,
        interior: layout.interior(),
        region_lens: vec![lead + extent; if own_regions { layers as usize } else { 1 }],
        layers: (0..layers).map(base).collect(),
        block_stride: strides[1],
        head_stride: strides[2],
        token_stride: strides[3],
    }
}

prop_compose! {
    fn any_span()(l in 0u16..9, ln in 1u16..5, h in 0u16..9, hn in 1u16..4) -> Span {
        Span::new(l..l + ln, h..h + hn).unwrap()
    }
}

prop_compose! {
    fn part_of(share: Span)(
        layers in (0..share.layer_count() as u16, 1..=share.layer_count() as u16),
        heads in (0..share.head_count() as u16, 1..=share.head_count() as u16),
    ) -> Span {
        let cut = |range: std::ops::Range<u16>, (skip, take): (u16, u16)| {
            let start = range.start + skip;
            start..(start + take).min(range.end)
        };
        Span::new(cut(share.layers(), layers), cut(share.heads(), heads)).unwrap()
    }
}

fn any_placement() -> impl Strategy<Value = Placement> {
    let gap = || prop_oneof![2 => Just(0u64), 1 => 1u64..9];
    (
        proptest::sample::select(&KvLayout::ALL),
        any_span(),
        [1u64..4, 1u64..5, 1u64..6],
        [gap(), gap(), gap(), gap()],
        any::<bool>(),
        0u64..7,
        proptest::sample::select(&[None, Some(Interior::Hnc), Some(Interior::Nhc)]),
    )
        .prop_map(
            |(layout, share, sizes, gaps, own_regions, lead, interior)| {
                let mut p = placement(layout, share, sizes, gaps, own_regions, lead);
                p.interior = interior.unwrap_or(p.interior);
                p
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Several objects, one after the other into one `out`, as for a copy of them all: each has
    /// its own bytes in its own runs, whatever lies there already.
    #[test]
    fn segments_are_the_elements_in_canonical_order_in_the_fewest_runs(
        (p, parts) in any_placement().prop_flat_map(|p| {
            let parts = proptest::collection::vec(part_of(p.share), 1..65);
            (Just(p), parts)
        }),
        picks in proptest::collection::vec(
            proptest::collection::vec(any::<prop::sample::Index>(), 1..4), 64
        ),
        whole in any::<bool>(),
    ) {
        let descriptor = Descriptor::new(p.clone()).unwrap();
        let mut segments = Vec::new();
        for (part, picks) in parts.iter().zip(picks) {
            let part = if whole { &p.share } else { part };
            let blocks: Vec<u64> = (picks.iter())
                .map(|pick| pick.index(p.blocks as usize) as u64)
                .collect();
            let before = segments.clone();
            let own = descriptor.segments(blocks.iter().copied(), part, &mut segments).unwrap();
            prop_assert_eq!(own.clone(), before.len()..segments.len());
            prop_assert_eq!(&segments[..own.start], &before, "what was there is left alone");
            let own = &segments[own];
            let expected = blocks.iter().flat_map(|&block| elements(&p, block, part));
            let expected = bytes(expected.map(|(r, o)| (r, o, p.content_bytes)));
            prop_assert_eq!(flatten(own), expected);
            for pair in own.windows(2) {
                prop_assert!(
                    (pair[0].region, pair[0].offset + pair[0].len)
                        != (pair[1].region, pair[1].offset),
                    "{:?} could be one", pair
                );
            }
        }
    }

    #[test]
    fn on_an_error_nothing_is_appended(p in any_placement(), block in 0..4_u64, wide in any::<bool>()) {
        let descriptor = Descriptor::new(p.clone()).unwrap();
        let mut segments = Vec::new();
        let before = descriptor.segments([0], &p.share, &mut segments).unwrap();
        let (layers, heads) = (p.share.layers(), p.share.heads());
        let outside = Span::new(layers.start..layers.end + 1, heads).unwrap();
        let (blocks, span) = match wide {
            true => ([0, 0], &outside),
            false => ([0, p.blocks + block], &p.share),
        };
        prop_assert!(descriptor.segments(blocks, span, &mut segments).is_err());
        prop_assert_eq!(segments.len(), before.end);
    }

    #[test]
    fn packed_is_the_layout_without_gaps(
        layout in proptest::sample::select(&KvLayout::ALL),
        share in any_span(),
        sizes in [1u64..4, 1u64..5, 1u64..6],
    ) {
        let p = placement(layout, share, sizes, [0; 4], false, 0);
        let packed = Descriptor::packed(layout, share, sizes[0], sizes[1], sizes[2]).unwrap();
        prop_assert_eq!(Descriptor::new(p).unwrap(), packed);
    }

    /// Small numbers, so that about as many placements overlap as do not.
    #[test]
    fn a_placement_is_accepted_only_if_its_bytes_are_in_bounds_and_distinct(
        share in any_span(),
        sizes in [1u64..4, 1u64..4, 1u64..4],
        strides in [0u64..25, 0u64..25, 0u64..25],
        bases in proptest::collection::vec((0u32..2, 0u64..60), 4),
        region_lens in [20u64..150, 20u64..150],
    ) {
        let [blocks, tokens, content_bytes] = sizes;
        let p = Placement {
            share, absent: vec![], blocks, tokens, content_bytes,
            interior: Interior::Hnc,
            region_lens: region_lens.to_vec(),
            layers: bases[..share.layer_count()]
                .iter()
                .map(|&(region, offset)| LayerBase { region, offset })
                .collect(),
            block_stride: strides[0],
            head_stride: strides[1],
            token_stride: strides[2],
        };
        let mut used = Vec::new();
        for block in 0..blocks {
            let elements = elements(&p, block, &share);
            used.extend(bytes(elements.into_iter().map(|(r, o)| (r, o, content_bytes))));
        }
        let in_bounds = used.iter().all(|&(region, byte)| byte < region_lens[region as usize]);
        let distinct = used.iter().collect::<HashSet<_>>().len() == used.len();
        match Descriptor::new(p) {
            Ok(_) => prop_assert!(in_bounds && distinct),
            Err(error) => match error.kind() {
                LayoutErrorKind::Outside => prop_assert!(!in_bounds),
                LayoutErrorKind::Overlap => prop_assert!(!distinct),
                // Axes that do not nest may be disjoint by luck; refused all the same.
                LayoutErrorKind::Strides => {}
                _ => prop_assert!(false, "{error}"),
            },
        }
    }
}
