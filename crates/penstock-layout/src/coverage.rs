//! Coverage: the shares of all ranks together make up the model, each layer and head once.

use std::ops::Range;

use crate::{Geometry, GeometryError, Span};

/// Whose turn it is to write, among the ranks that hold the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Turn {
    /// This rank's place among the ranks that hold the same bytes, from 0.
    pub replica: u32,
    /// How many ranks hold this share.
    pub replicas: u32,
}

impl Turn {
    /// Whether this rank writes the objects of chunk `n`. Exactly one of the ranks with the same
    /// share does. All of them must number (or hash) chunks alike.
    pub fn writes(&self, n: u64) -> bool {
        n % u64::from(self.replicas) == u64::from(self.replica)
    }
}

/// How the shares of all ranks cover the model, and the objects of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    objects: Vec<Span>,
    turns: Vec<Turn>,
}

/// Why the ranks' shares do not make up the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoverageError {
    /// A rank reported layers or heads that the model does not have.
    #[error("rank {rank} holds {share}, but the model has {layers} layers and {heads} KV heads")]
    OutsideModel {
        /// Index of the rank among those given.
        rank: usize,
        /// The rank's share.
        share: Span,
        /// Layers in the model.
        layers: u16,
        /// KV heads in the model.
        heads: u16,
    },
    /// Two shares overlap without being equal.
    #[error(
        "rank {first} holds {first_share} and rank {second} {second_share}: only in part the same"
    )]
    PartialOverlap {
        /// Index of a rank among those given.
        first: usize,
        /// The first rank's share.
        first_share: Span,
        /// Index of the other rank.
        second: usize,
        /// The other rank's share.
        second_share: Span,
    },
    /// No rank holds these.
    #[error(
        "no rank holds heads {heads:?} of layers {layers:?}; the model has {model_layers} layers \
         and {model_heads} KV heads"
    )]
    Gap {
        /// The first layers that lack some heads.
        layers: Range<u16>,
        /// The first heads that these layers lack.
        heads: Range<u16>,
        /// Layers in the model.
        model_layers: u16,
        /// KV heads in the model.
        model_heads: u16,
    },
    /// A share cannot be cut into objects.
    #[error("rank {rank}: {source}")]
    Geometry {
        /// Index of the rank among those given.
        rank: usize,
        /// Why the share cannot be cut.
        source: GeometryError,
    },
}

impl Coverage {
    /// Checks that the shares cover a model of `layers` layers and `heads` KV heads. Ranks may hold
    /// equal shares; unequal shares must be disjoint. A rank without layers is left out of
    /// `shares`.
    pub fn new(
        geometry: &Geometry,
        layers: u16,
        heads: u16,
        shares: &[Span],
    ) -> Result<Self, CoverageError> {
        let mut by_share: Vec<(Span, usize)> = shares
            .iter()
            .copied()
            .enumerate()
            .map(|(rank, share)| (share, rank))
            .collect();
        by_share.sort();
        let mut turns = vec![
            Turn {
                replica: 0,
                replicas: 0
            };
            shares.len()
        ];
        let mut distinct: Vec<(Span, usize)> = Vec::new();
        let mut objects = Vec::new();
        for replicas in by_share.chunk_by(|a, b| a.0 == b.0) {
            let (share, rank) = replicas[0];
            if share.layers().end > layers || share.heads().end > heads {
                return Err(CoverageError::OutsideModel {
                    rank,
                    share,
                    layers,
                    heads,
                });
            }
            for &(other, other_rank) in &distinct {
                if meet(&share.layers(), &other.layers()) && meet(&share.heads(), &other.heads()) {
                    return Err(CoverageError::PartialOverlap {
                        first: other_rank,
                        first_share: other,
                        second: rank,
                        second_share: share,
                    });
                }
            }
            distinct.push((share, rank));
            objects.extend(
                geometry
                    .objects(&share)
                    .map_err(|source| CoverageError::Geometry { rank, source })?,
            );
            for (replica, &(_, rank)) in (0..).zip(replicas) {
                turns[rank] = Turn {
                    replica,
                    replicas: replicas.len() as u32,
                };
            }
        }
        check_no_gap(layers, heads, &distinct)?;
        objects.sort();
        Ok(Self { objects, turns })
    }

    /// The spans of the objects that make up a chunk, sorted. The chunk is in a store only if all
    /// of them are.
    pub fn objects(&self) -> &[Span] {
        &self.objects
    }

    /// Each rank's turn, in the order in which shares were given.
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }
}

fn meet(a: &Range<u16>, b: &Range<u16>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Checks that no layer lacks heads. Between two neighbouring layer borders of any share, every
/// layer is held alike. So one pass over the heads tells whether some are missing.
fn check_no_gap(layers: u16, heads: u16, shares: &[(Span, usize)]) -> Result<(), CoverageError> {
    let mut borders: Vec<u16> = [0, layers]
        .into_iter()
        .chain(
            shares
                .iter()
                .flat_map(|(share, _)| [share.layers().start, share.layers().end]),
        )
        .collect();
    borders.sort_unstable();
    borders.dedup();
    for strip in borders.windows(2).map(|pair| pair[0]..pair[1]) {
        let mut held: Vec<Range<u16>> = shares
            .iter()
            .filter(|(share, _)| meet(&share.layers(), &strip))
            .map(|(share, _)| share.heads())
            .collect();
        held.sort_unstable_by_key(|range| range.start);
        held.push(heads..heads);
        let mut next = 0;
        for range in held {
            if range.start > next {
                return Err(CoverageError::Gap {
                    layers: strip,
                    heads: next..range.start,
                    model_layers: layers,
                    model_heads: heads,
                });
            }
            next = range.end;
        }
    }
    Ok(())
}
