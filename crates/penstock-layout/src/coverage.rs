//! Coverage: the shares of all ranks together make up the model, each layer and head once.

use std::ops::Range;

use crate::LayoutErrorKind::{Missing, Outside, Overlap};
use crate::error::Result;
use crate::{Geometry, LayoutError, Span};

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

impl Coverage {
    /// Checks that the shares cover a model of `layers` layers and `heads` KV heads. Ranks may hold
    /// equal shares; unequal shares must be disjoint. A rank without layers is left out of
    /// `shares`.
    pub fn new(geometry: &Geometry, layers: u16, heads: u16, shares: &[Span]) -> Result<Self> {
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
                let message = format!(
                    "rank {rank} holds {share}, but the model has {layers} layers and {heads} KV \
                     heads"
                );
                return Err(LayoutError::new(Outside, message));
            }
            for &(other, other_rank) in &distinct {
                if meet(&share.layers(), &other.layers()) && meet(&share.heads(), &other.heads()) {
                    let message = format!(
                        "rank {other_rank} holds {other} and rank {rank} {share}: only in part \
                         the same"
                    );
                    return Err(LayoutError::new(Overlap, message));
                }
            }
            distinct.push((share, rank));
            objects.extend(geometry.objects(&share).map_err(|error| {
                LayoutError::new(error.kind(), format!("rank {rank}: {error}"))
            })?);
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
fn check_no_gap(layers: u16, heads: u16, shares: &[(Span, usize)]) -> Result<()> {
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
                let message = format!(
                    "no rank holds heads {:?} of layers {strip:?}; the model has {layers} layers \
                     and {heads} KV heads",
                    next..range.start
                );
                return Err(LayoutError::new(Missing, message));
            }
            next = range.end;
        }
    }
    Ok(())
}
