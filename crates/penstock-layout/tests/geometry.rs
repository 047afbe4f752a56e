//! Cutting shares into objects, and covering a model with the shares of all ranks.

use std::fmt::Debug;
use std::ops::Range;

use penstock_layout::LayoutErrorKind::{
    self, Empty, Misaligned, Missing, Outside, Overlap, TooLarge,
};
use penstock_layout::{Coverage, Geometry, LayoutError, Span, Turn, object_bytes};
use proptest::prelude::*;

#[track_caller]
fn assert_says<T: Debug>(result: Result<T, LayoutError>, kind: LayoutErrorKind, text: &str) {
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.to_string().as_str()), (kind, text));
}

fn span(layers: Range<u16>, heads: Range<u16>) -> Span {
    Span::new(layers, heads).unwrap()
}

fn geometry(layers: impl Into<Option<u16>>, heads: impl Into<Option<u16>>) -> Geometry {
    Geometry::new(layers.into(), heads.into(), 1).unwrap()
}

fn alone(replicas: usize) -> Vec<Turn> {
    vec![
        Turn {
            replica: 0,
            replicas: 1
        };
        replicas
    ]
}

#[test]
fn a_whole_share_is_one_object() {
    let share = span(6..8, 2..4);
    assert_eq!(geometry(None, None).objects(&share), Ok(vec![share]));
}

#[test]
fn objects_begin_at_multiples_counted_in_the_model() {
    assert_eq!(
        geometry(2, 1).objects(&span(4..8, 2..4)),
        Ok(vec![
            span(4..6, 2..3),
            span(4..6, 3..4),
            span(6..8, 2..3),
            span(6..8, 3..4)
        ])
    );
}

#[test]
fn a_share_off_the_borders_is_refused_with_what_would_work() {
    assert_says(
        geometry(4, None).objects(&span(6..8, 0..4)),
        Misaligned,
        "objects of 4 on axis L do not fit a share of 6..8: both ends must be multiples; 2 or a \
         divisor of it would work",
    );
    assert_says(
        geometry(None, 8).objects(&span(0..8, 0..12)),
        Misaligned,
        "objects of 8 on axis H do not fit a share of 0..12: both ends must be multiples; 12 or a \
         divisor of it would work",
    );
}

#[test]
fn zero_sizes_are_refused() {
    for (geometry, what) in [
        (Geometry::new(Some(0), None, 1), "layers per object"),
        (Geometry::new(None, Some(0), 1), "heads per object"),
        (Geometry::new(None, None, 0), "blocks per chunk"),
    ] {
        assert_says(geometry, Empty, &format!("{what} must not be zero"));
    }
}

#[test]
fn bytes_of_an_object() {
    // 2 layers, 4 heads, 16 tokens, key and value of 64 two-byte numbers, 3 blocks.
    assert_eq!(object_bytes(16, 256, &span(6..8, 0..4), 3), Ok(98_304));
    assert_says(
        object_bytes(1 << 32, 1 << 30, &span(6..8, 0..4), 1),
        TooLarge,
        "1 blocks of 4294967296 tokens of 1073741824 bytes for span l6-8.h0-4 do not fit 64 bits",
    );
}

#[test]
fn pipeline_6_2_shares_objects_with_4_4_and_1() {
    let cut = |shares: &[Span]| Coverage::new(&geometry(2, None), 8, 4, shares).unwrap();
    let uneven = cut(&[span(0..6, 0..4), span(6..8, 0..4)]);
    assert_eq!(
        uneven.objects(),
        [
            span(0..2, 0..4),
            span(2..4, 0..4),
            span(4..6, 0..4),
            span(6..8, 0..4)
        ]
    );
    assert_eq!(uneven.turns(), alone(2));
    assert_eq!(
        cut(&[span(0..4, 0..4), span(4..8, 0..4)]).objects(),
        uneven.objects()
    );
    assert_eq!(cut(&[span(0..8, 0..4)]).objects(), uneven.objects());
}

#[test]
fn two_tensor_ranks_in_two_uneven_stages() {
    // By default an object is a rank's share; ranks come in any order.
    let shares = [
        span(6..8, 2..4),
        span(0..6, 0..2),
        span(0..6, 2..4),
        span(6..8, 0..2),
    ];
    let coverage = Coverage::new(&geometry(None, None), 8, 4, &shares).unwrap();
    assert_eq!(
        coverage.objects(),
        [
            span(0..6, 0..2),
            span(0..6, 2..4),
            span(6..8, 0..2),
            span(6..8, 2..4)
        ]
    );
    assert_eq!(coverage.turns(), alone(4));
}

#[test]
fn ranks_with_replicated_heads_take_turns() {
    // 2 KV heads on 4 tensor ranks.
    let shares = [
        span(0..8, 0..1),
        span(0..8, 0..1),
        span(0..8, 1..2),
        span(0..8, 1..2),
    ];
    let coverage = Coverage::new(&geometry(4, None), 8, 2, &shares).unwrap();
    assert_eq!(
        coverage.objects(),
        [
            span(0..4, 0..1),
            span(0..4, 1..2),
            span(4..8, 0..1),
            span(4..8, 1..2)
        ]
    );
    let turn = |replica| Turn {
        replica,
        replicas: 2,
    };
    assert_eq!(coverage.turns(), [turn(0), turn(1), turn(0), turn(1)]);
    for chunk in 0..5 {
        assert!(turn(0).writes(chunk) != turn(1).writes(chunk));
    }
}

#[test]
fn gaps_and_partial_overlaps_are_refused() {
    let refused = |shares: &[Span], kind, text: &str| {
        assert_says(
            Coverage::new(&geometry(None, None), 8, 4, shares),
            kind,
            text,
        );
    };
    let gap = |shares: &[Span], heads: Range<u16>, layers: Range<u16>| {
        let text = format!(
            "no rank holds heads {heads:?} of layers {layers:?}; the model has 8 layers and 4 KV \
             heads"
        );
        refused(shares, Missing, &text);
    };
    gap(&[], 0..4, 0..8);
    gap(&[span(0..6, 0..4)], 0..4, 6..8);
    gap(&[span(2..8, 0..4)], 0..4, 0..2);
    gap(
        &[span(0..6, 0..2), span(0..6, 3..4), span(6..8, 0..4)],
        2..3,
        0..6,
    );
    gap(&[span(0..6, 0..4), span(6..8, 0..3)], 3..4, 6..8);
    refused(
        &[span(4..8, 0..4), span(0..5, 0..4)],
        Overlap,
        "rank 1 holds l0-5.h0-4 and rank 0 l4-8.h0-4: only in part the same",
    );
    refused(
        &[span(0..8, 0..4), span(2..4, 1..2)],
        Overlap,
        "rank 0 holds l0-8.h0-4 and rank 1 l2-4.h1-2: only in part the same",
    );
    refused(
        &[span(0..8, 0..4), span(8..9, 0..4)],
        Outside,
        "rank 1 holds l8-9.h0-4, but the model has 8 layers and 4 KV heads",
    );
    assert_says(
        Coverage::new(
            &geometry(4, None),
            8,
            4,
            &[span(0..6, 0..4), span(6..8, 0..4)],
        ),
        Misaligned,
        "rank 0: objects of 4 on axis L do not fit a share of 0..6: both ends must be multiples; 6 \
         or a divisor of it would work",
    );
}

proptest! {
    /// Any ranks: accepted exactly if every layer and head is held by one share, and then the
    /// objects hold each once.
    #[test]
    fn coverage_agrees_with_counting_cells(
        cuts in proptest::collection::vec((0u16..4, 1u16..5, 0u16..3, 1u16..4), 0..5),
        split in any::<bool>(),
        heads_per_object in proptest::sample::select(&[None, Some(1)]),
    ) {
        let (layers, heads) = (4, 3);
        let shares: Vec<Span> = if split {
            // Likely to cover: the first cut's corner parts the model in two to four.
            let (l, _, h, _) = cuts.first().copied().unwrap_or_default();
            [(0..l, 0..h), (0..l, h..heads), (l..layers, 0..h), (l..layers, h..heads)]
                .into_iter()
                .filter_map(|(l, h)| Span::new(l, h).ok())
                .chain(cuts.get(1).and_then(|_| Span::new(0..l, 0..h).ok()))
                .collect()
        } else {
            cuts.iter()
                .map(|&(l, ln, h, hn)| span(l..(l + ln).min(layers), h..(h + hn).min(heads)))
                .collect()
        };
        let mut distinct = shares.clone();
        distinct.sort();
        distinct.dedup();
        let held = |spans: &[Span], l: u16, h: u16| {
            spans.iter().filter(|s| s.contains(&span(l..l + 1, h..h + 1))).count()
        };
        let cells = || (0..layers).flat_map(|l| (0..heads).map(move |h| (l, h)));
        let truth = cells().all(|(l, h)| held(&distinct, l, h) == 1);
        let result = Coverage::new(&geometry(None, heads_per_object), layers, heads, &shares);
        prop_assert_eq!(result.is_ok(), truth, "{:?}", result);
        if let Ok(coverage) = result {
            prop_assert!(cells().all(|(l, h)| held(coverage.objects(), l, h) == 1));
            prop_assert!(coverage.objects().is_sorted());
            for chunk in 0..6 {
                let writers: Vec<Span> = shares.iter().zip(coverage.turns())
                    .filter(|(_, turn)| turn.writes(chunk))
                    .map(|(share, _)| *share)
                    .collect();
                prop_assert!(cells().all(|(l, h)| held(&writers, l, h) == 1));
            }
        }
    }
}
