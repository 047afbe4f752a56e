//! What keeping an entry is worth: the most uses for the time that it takes up room.
//!
//! Entries are told apart by class and age. For each, the share that is used again at that age is
//! counted, of entries held and of those that are only remembered. From these hazards follows an
//! index (Gittins, "Bandit processes and dynamic allocation indices", 1979): the greatest ratio,
//! over all ages until which one may wait, of the chance of a use to the time waited. Least hit
//! density (Beckmann et al., "LHD", NSDI 2018) is the same ratio with a wait without end, which
//! undervalues an entry whose use is due soon or never.

use super::age::{BUCKETS, start, width};

/// Classes: how often an entry, or the conversation that it continues, was used.
pub(super) const CLASSES: usize = 8;
/// Class and age.
pub(super) const CELLS: usize = CLASSES * BUCKETS;

/// Chains that a class's own counts weigh against all classes' together.
const POOLED_CHAINS: f64 = 5.0;
/// Chains that all classes' counts weigh against the prior.
const PRIOR_CHAINS: f64 = 20.0;
/// The share used again in every bucket before anything is known. The same in all half octaves
/// makes the index fall with age: least recently used.
const PRIOR_HAZARD: f64 = 0.1;
/// What is left of a count after one more estimate.
const DECAY: f64 = 0.99;

/// The class of an entry used so often.
pub(super) fn class(uses: u32) -> usize {
    match uses {
        0 | 1 => 0,
        2..=4 => uses as usize - 1,
        5 | 6 => 4,
        7..=9 => 5,
        10..=16 => 6,
        _ => 7,
    }
}

/// The cell of a class and an age bucket.
pub(super) const fn cell(class: usize, bucket: usize) -> usize {
    class * BUCKETS + bucket
}

/// Counts by cell. The blocks of a prompt come and go together, so all of them together count as
/// one.
pub(super) struct Counts {
    reached: Vec<f64>,
    used: Vec<f64>,
}

impl Counts {
    pub(super) fn new() -> Self {
        Self {
            reached: vec![0.0; CELLS],
            used: vec![0.0; CELLS],
        }
    }

    /// An entry came into the cell.
    pub(super) fn reached(&mut self, cell: usize, share: f32) {
        self.reached[cell] += f64::from(share);
    }

    /// An entry was used while in the cell.
    pub(super) fn used(&mut self, cell: usize, share: f32) {
        self.used[cell] += f64::from(share);
    }

    /// The index of every cell by what was counted so far, which from now on counts a little less.
    pub(super) fn estimate(&mut self) -> Vec<f64> {
        let sum = |counts: &[f64], bucket| -> f64 {
            (0..CLASSES).map(|class| counts[cell(class, bucket)]).sum()
        };
        let pooled: Vec<f64> = (0..BUCKETS)
            .map(|bucket| {
                (sum(&self.used, bucket) + PRIOR_HAZARD * PRIOR_CHAINS)
                    / (sum(&self.reached, bucket) + PRIOR_CHAINS)
            })
            .collect();
        let mut worth = Vec::with_capacity(CELLS);
        for class in 0..CLASSES {
            let hazards: Vec<f64> = (0..BUCKETS)
                .map(|bucket| {
                    let cell = cell(class, bucket);
                    let hazard = (self.used[cell] + POOLED_CHAINS * pooled[bucket])
                        / (self.reached[cell] + POOLED_CHAINS);
                    hazard.min(1.0)
                })
                .collect();
            worth.extend((0..BUCKETS).map(|bucket| index(&hazards[bucket..], bucket)));
        }
        for count in self.reached.iter_mut().chain(&mut self.used) {
            *count *= DECAY;
        }
        worth
    }
}

/// The index of an entry that has just come into `bucket`, by the hazards from there on.
fn index(hazards: &[f64], bucket: usize) -> f64 {
    let (mut waiting, mut uses, mut time, mut best) = (1.0, 0.0, 0.0, 0.0f64);
    for (later, &hazard) in hazards.iter().enumerate() {
        uses += waiting * hazard;
        // A use comes half way through the bucket, on average.
        time += waiting * width(bucket + later) * (1.0 - hazard / 2.0);
        waiting *= 1.0 - hazard;
        best = best.max(uses / time);
    }
    best
}

/// Worth of an entry by its age alone, the same for all classes: least recently used.
#[expect(clippy::cast_precision_loss, reason = "only the order matters")]
pub(super) fn by_age() -> Vec<f64> {
    (0..CELLS)
        .map(|cell| -(start(cell % BUCKETS) as f64))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_evidence_an_octave_younger_is_worth_more() {
        let worth = Counts::new().estimate();
        for class in 0..CLASSES {
            for bucket in 3..BUCKETS {
                assert!(worth[cell(class, bucket)] < worth[cell(class, bucket - 2)]);
            }
        }
    }

    #[test]
    fn what_is_about_to_be_used_is_worth_more_than_what_is_fresh() {
        let mut counts = Counts::new();
        for bucket in 0..=20 {
            counts.reached(cell(0, bucket), 1000.0);
        }
        counts.used(cell(0, 20), 900.0);
        let worth = counts.estimate();
        assert!(worth[cell(0, 20)] > 3.0 * worth[cell(0, 1)]);
        assert!(worth[cell(0, 21)] < worth[cell(0, 20)]);
    }
}
