//! What keeping an entry is worth: the most uses for the time that the entry takes up room.
//!
//! Entries are told apart by class (turns of the conversation, last wait) and age. For each class
//! and age, the policy counts the share of entries that is used again at that age. Entries that are
//! only remembered count too.
//!
//! From these hazards follows an index (Gittins, "Bandit processes and dynamic allocation indices",
//! 1979). It is the greatest ratio, over all ages until which one may wait, of the chance of a use
//! to the time waited. Least hit density (Beckmann et al., "LHD", NSDI 2018) is the same ratio with
//! an endless wait. An endless wait undervalues an entry whose use is due soon or never.

use std::array;
use std::ops::Range;

use super::age::{BUCKETS, width};

/// Number of classes by the uses of an entry, or of the conversation that it continues.
const TURNS: usize = 8;
/// Number of classes by the wait before the last of these uses; the first class is for no wait.
const WAITS: usize = 5;
/// Number of all classes.
pub(super) const CLASSES: usize = TURNS * WAITS;
/// Number of cells; a cell is a class and an age.
pub(super) const CELLS: usize = CLASSES * BUCKETS;

/// Beside a class's own counts, the counts of all classes with as many turns weigh as much as so
/// many chains.
const POOLED_WAITS: f64 = 40.0;
/// Beside the counts by turns, the counts of all classes together weigh as much as so many chains.
const POOLED_CHAINS: f64 = 5.0;
/// Beside the counts of all classes, the prior weighs as much as so many chains.
const PRIOR_CHAINS: f64 = 20.0;
/// The share used again in every bucket before anything is known. The same share in all half
/// octaves makes the index fall with age, which is least recently used.
const PRIOR_HAZARD: f64 = 0.1;
/// Share of a count that is left after one more estimate.
const DECAY: f64 = 0.99;

/// The class of an entry that was used so often. `wait` is its age bucket at the last use, if it
/// was used more than once.
pub(super) fn class(uses: u32, wait: Option<u8>) -> usize {
    let wait = wait.map_or(0, |bucket| 1 + (usize::from(bucket).clamp(11, 31) - 11) / 6);
    turns(uses) * WAITS + wait
}

fn turns(uses: u32) -> usize {
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

/// Counts by cell. The blocks of a prompt come and go together, so together they count as one.
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

    /// Notes that entries came into the cell.
    pub(super) fn reached(&mut self, cell: usize, share: f32, entries: u32) {
        self.reached[cell] += f64::from(share) * f64::from(entries);
    }

    /// Notes that an entry was used while in the cell.
    pub(super) fn used(&mut self, cell: usize, share: f32) {
        self.used[cell] += f64::from(share);
    }

    /// The index of every cell by the counts so far. Each call makes these counts weigh a little
    /// less.
    pub(super) fn estimate(&mut self) -> Vec<f64> {
        let pooled = self.hazards(0..CLASSES, PRIOR_CHAINS, &[PRIOR_HAZARD; BUCKETS]);
        let unseen = indices(&pooled);
        let mut worth = Vec::with_capacity(CELLS);
        for turns in 0..TURNS {
            let classes = turns * WAITS..(turns + 1) * WAITS;
            if classes.clone().all(|class| self.is_unseen(class)) {
                classes.for_each(|_| worth.extend(&unseen));
                continue;
            }
            let by_turns = self.hazards(classes.clone(), POOLED_CHAINS, &pooled);
            let unseen = indices(&by_turns);
            for class in classes {
                if self.is_unseen(class) {
                    worth.extend(&unseen);
                } else {
                    let hazards = self.hazards(class..class + 1, POOLED_WAITS, &by_turns);
                    worth.extend(indices(&hazards));
                }
            }
        }
        for count in self.reached.iter_mut().chain(&mut self.used) {
            *count *= DECAY;
        }
        worth
    }

    fn is_unseen(&self, class: usize) -> bool {
        let cells = cell(class, 0)..cell(class + 1, 0);
        self.reached[cells].iter().all(|&count| count == 0.0)
    }

    /// The share used again in each bucket, for these classes together. `prior` counts as much as
    /// `weight` chains.
    fn hazards(&self, classes: Range<usize>, weight: f64, prior: &Hazards) -> Hazards {
        let (mut used, mut reached) = (prior.map(|hazard| weight * hazard), [weight; BUCKETS]);
        for class in classes {
            for bucket in 0..BUCKETS {
                used[bucket] += self.used[cell(class, bucket)];
                reached[bucket] += self.reached[cell(class, bucket)];
            }
        }
        array::from_fn(|bucket| (used[bucket] / reached[bucket]).min(1.0))
    }
}

/// A share for every bucket of age.
type Hazards = [f64; BUCKETS];

/// The index of an entry that has just come into each bucket.
fn indices(hazards: &Hazards) -> [f64; BUCKETS] {
    array::from_fn(|bucket| index(hazards, bucket))
}

/// The index of an entry that has just come into `bucket`.
fn index(hazards: &Hazards, bucket: usize) -> f64 {
    let (mut waiting, mut uses, mut time) = (1.0, 0.0, 0.0);
    // The best ratio so far, as its two sides: a division in every step would be most of the work.
    let (mut best_uses, mut best_time) = (0.0, 1.0);
    for (bucket, &hazard) in hazards.iter().enumerate().skip(bucket) {
        let width = width(bucket);
        if best_uses * width > 2.0 * best_time {
            // Even a certain use would not raise the ratio, here or in any later bucket: buckets
            // get ever wider, except for the first, which comes before there is a ratio.
            break;
        }
        uses += waiting * hazard;
        // A use comes half way through the bucket, on average.
        time += waiting * width * (1.0 - hazard / 2.0);
        waiting *= 1.0 - hazard;
        if uses * best_time > best_uses * time {
            (best_uses, best_time) = (uses, time);
        }
    }
    best_uses / best_time
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
            counts.reached(cell(0, bucket), 1.0, 1000);
        }
        counts.used(cell(0, 20), 900.0);
        let worth = counts.estimate();
        assert!(worth[cell(0, 20)] > 3.0 * worth[cell(0, 1)]);
        assert!(worth[cell(0, 21)] < worth[cell(0, 20)]);
    }
}
