//! What became of objects, of the blocks that they make up, and of all blocks of a job together.

use penstock_contract::ErrorKind;
use penstock_value::header::Rejection;

/// What became of one object, or of one block. A block's outcome is that of its worst object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The store took the value. Carries the payload bytes.
    Stored(u64),
    /// The store had the value already, or another engine that holds the same stores it.
    AlreadyPresent,
    /// Not stored or not fetched: no room in the arena or in a queue, too many jobs, the store is
    /// failing, or the engine is draining.
    Dropped,
    /// Verified and written into its block. Carries the payload bytes.
    Loaded(u64),
    /// Written into its block from the host tier. Carries the payload bytes.
    Kept(u64),
    /// The store does not have it.
    Miss,
    /// The store's value did not verify. Its block was not touched.
    Rejected(Rejection),
    /// The job's deadline passed first. Its block was not touched.
    TimedOut,
    /// The job was cancelled first, or the engine was shut down first.
    Cancelled,
    /// Not fetched, because an earlier object of a prefix job was not loaded.
    Skipped,
    /// The store failed.
    Failed(ErrorKind),
    /// The store had another value than the one that this engine computed, and both cannot be right.
    /// It was removed, and this engine's was not put in its place.
    Disagreed,
}

impl Outcome {
    /// Payload bytes moved.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Stored(bytes) | Self::Loaded(bytes) | Self::Kept(bytes) => *bytes,
            _ => 0,
        }
    }

    /// Whether the job reached its aim for this object or block.
    pub fn is_success(&self) -> bool {
        self.is_there() || matches!(self, Self::Stored(_) | Self::AlreadyPresent)
    }

    /// For a load: whether the object is where it was wanted.
    pub(crate) fn is_there(&self) -> bool {
        matches!(self, Self::Loaded(_) | Self::Kept(_))
    }

    /// For a load: whether the object did not come, and somebody still misses it.
    fn is_missed(&self) -> bool {
        !self.is_success() && *self != Self::Cancelled
    }

    /// Whether the value stays in the store, for engines that have the key.
    fn is_foreign(&self) -> bool {
        matches!(self, Self::Rejected(rejection) if rejection.is_foreign())
    }

    /// The order of outcomes within a block: the outcome that tells most has the lowest rank and
    /// decides.
    fn rank(&self) -> u8 {
        match self {
            Self::Cancelled => 0,
            Self::Rejected(rejection) if rejection.is_foreign() => 1,
            Self::Rejected(_) => 2,
            Self::Disagreed => 3,
            Self::Miss => 4,
            Self::Failed(_) => 5,
            Self::TimedOut => 6,
            Self::Dropped => 7,
            Self::Skipped => 8,
            Self::Stored(_) | Self::Loaded(_) => 9,
            Self::AlreadyPresent | Self::Kept(_) => 10,
        }
    }

    /// The outcome of a block that has objects with both outcomes. Bytes add up.
    fn and(self, other: Self) -> Self {
        let bytes = self.bytes() + other.bytes();
        match if other.rank() < self.rank() {
            other
        } else {
            self
        } {
            Self::Stored(_) => Self::Stored(bytes),
            Self::Loaded(_) => Self::Loaded(bytes),
            Self::Kept(_) => Self::Kept(bytes),
            worst => worst,
        }
    }
}

/// What became of a job's blocks, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Payload bytes that came from the store.
    pub loaded_bytes: u64,
    /// Payload bytes that came from the host tier.
    pub kept_bytes: u64,
    /// Payload bytes that the store took.
    pub stored_bytes: u64,
    /// Objects dropped.
    pub dropped_objects: u64,
    /// Objects that the store failed on.
    pub failed_objects: u64,
    /// Objects whose value did not verify, without the foreign ones.
    pub rejected_objects: u64,
    /// Objects encrypted with a key that this engine does not have.
    pub foreign_objects: u64,
    /// Payload bytes of the blocks of a load or prefetch that did not come. Cancelled ones do not
    /// count: nobody misses them any more.
    pub missing_bytes: u64,
}

impl Tally {
    fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Loaded(bytes) => self.loaded_bytes += bytes,
            Outcome::Kept(bytes) => self.kept_bytes += bytes,
            Outcome::Stored(bytes) => self.stored_bytes += bytes,
            Outcome::Dropped => self.dropped_objects += 1,
            Outcome::Failed(_) => self.failed_objects += 1,
            foreign if foreign.is_foreign() => self.foreign_objects += 1,
            Outcome::Rejected(_) => self.rejected_objects += 1,
            _ => {}
        }
    }
}

/// What became of a job's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// One for each block, in the order submitted.
    pub blocks: Vec<Outcome>,
    /// All blocks together.
    pub tally: Tally,
}

/// Which objects of a job make up a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The number of the job's objects up to the last one of this block.
    pub(crate) end: usize,
    /// Payload bytes of the block, whether or not this job has objects of it.
    pub(crate) bytes: u64,
}

impl Outcomes {
    /// The outcomes of a load or prefetch, from those of its objects.
    pub(crate) fn of_load(parts: &[Part], objects: &[Outcome]) -> Self {
        let mut found = Self::fold(parts, objects, Outcome::Kept(0));
        found.tally.missing_bytes = parts
            .iter()
            .zip(&found.blocks)
            .filter(|(_, outcome)| outcome.is_missed())
            .map(|(part, _)| part.bytes)
            .sum();
        found
    }

    /// The outcomes of a store, from those of its objects.
    pub(crate) fn of_store(parts: &[Part], objects: &[Outcome]) -> Self {
        Self::fold(parts, objects, Outcome::AlreadyPresent)
    }

    /// The outcomes of blocks, from those of their objects. A block without objects gets
    /// `elsewhere`.
    fn fold(parts: &[Part], objects: &[Outcome], elsewhere: Outcome) -> Self {
        let mut tally = Tally::default();
        let mut start = 0;
        let blocks = parts.iter().map(|part| {
            let own = &objects[std::mem::replace(&mut start, part.end)..part.end];
            own.iter().for_each(|outcome| tally.count(outcome));
            own.iter()
                .copied()
                .reduce(Outcome::and)
                .unwrap_or(elsewhere)
        });
        Self {
            blocks: blocks.collect(),
            tally,
        }
    }

    /// Positions of the blocks that are not where the job wanted them, cancelled or not.
    pub(crate) fn failed(&self) -> Vec<usize> {
        self.places(|outcome| !outcome.is_success())
    }

    /// Positions of the blocks that [`failed`](Self::failed) gives, without those that nobody
    /// misses any more.
    pub(crate) fn missed(&self) -> Vec<usize> {
        self.places(Outcome::is_missed)
    }

    /// Positions of the blocks that are not in the store, or not whole, whatever a look-up found.
    pub(crate) fn lost(&self) -> Vec<usize> {
        let is_lost =
            |o: &Outcome| matches!(o, Outcome::Miss | Outcome::Rejected(_) | Outcome::Disagreed);
        self.places(|outcome| is_lost(outcome) && !outcome.is_foreign())
    }

    /// Positions of the blocks that are encrypted with a key that this engine does not have.
    pub(crate) fn foreign(&self) -> Vec<usize> {
        self.places(Outcome::is_foreign)
    }

    fn places(&self, is_it: impl Fn(&Outcome) -> bool) -> Vec<usize> {
        let places = self.blocks.iter().enumerate();
        places
            .filter(|(_, outcome)| is_it(outcome))
            .map(|(place, _)| place)
            .collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every outcome, the worst first.
    const WORST_FIRST: [Outcome; 14] = [
        Outcome::Cancelled,
        Outcome::Rejected(Rejection::Encrypted),
        Outcome::Rejected(Rejection::PayloadChecksum),
        Outcome::Disagreed,
        Outcome::Miss,
        Outcome::Failed(ErrorKind::Io),
        Outcome::TimedOut,
        Outcome::Dropped,
        Outcome::Skipped,
        Outcome::Stored(3),
        Outcome::Loaded(3),
        Outcome::AlreadyPresent,
        Outcome::Kept(3),
        Outcome::Kept(0),
    ];

    fn of_two(first: Outcome, second: Outcome) -> Outcome {
        let parts = [Part { end: 2, bytes: 6 }];
        Outcomes::of_store(&parts, &[first, second]).blocks[0]
    }

    #[test]
    fn a_block_is_what_its_worst_object_is() {
        for (place, &worse) in WORST_FIRST[..9].iter().enumerate() {
            for &better in &WORST_FIRST[place..] {
                assert_eq!(of_two(worse, better), worse);
                assert_eq!(of_two(better, worse), worse);
            }
        }
    }

    #[test]
    fn of_good_objects_the_bytes_add_up() {
        for (first, second, both) in [
            (Outcome::Loaded(3), Outcome::Loaded(4), Outcome::Loaded(7)),
            (Outcome::Loaded(3), Outcome::Kept(4), Outcome::Loaded(7)),
            (Outcome::Kept(3), Outcome::Kept(4), Outcome::Kept(7)),
            (
                Outcome::Stored(3),
                Outcome::AlreadyPresent,
                Outcome::Stored(3),
            ),
        ] {
            assert_eq!(of_two(first, second), both);
            assert_eq!(of_two(second, first), both);
        }
    }

    #[test]
    fn of_a_load_it_is_told_what_is_missed_what_is_lost_and_what_is_foreign() {
        let bytes = 10;
        let parts: Vec<Part> = [2, 4, 5, 5, 7, 8].map(|end| Part { end, bytes }).to_vec();
        let objects = [
            Outcome::Loaded(5),
            Outcome::Kept(5),
            Outcome::Miss,
            Outcome::Rejected(Rejection::UnknownKey),
            Outcome::Cancelled,
            // Between them, a block without objects.
            Outcome::Rejected(Rejection::PayloadChecksum),
            Outcome::Dropped,
            Outcome::Failed(ErrorKind::Io),
        ];
        let found = Outcomes::of_load(&parts, &objects);
        assert_eq!(
            found.blocks,
            [
                Outcome::Loaded(10),
                Outcome::Rejected(Rejection::UnknownKey),
                Outcome::Cancelled,
                Outcome::Kept(0),
                Outcome::Rejected(Rejection::PayloadChecksum),
                Outcome::Failed(ErrorKind::Io),
            ]
        );
        let expected = Tally {
            loaded_bytes: 5,
            kept_bytes: 5,
            stored_bytes: 0,
            dropped_objects: 1,
            failed_objects: 1,
            rejected_objects: 1,
            foreign_objects: 1,
            missing_bytes: 30,
        };
        assert_eq!(found.tally, expected);
        assert_eq!(
            (found.missed(), found.failed()),
            (vec![1, 4, 5], vec![1, 2, 4, 5])
        );
        assert_eq!((found.lost(), found.foreign()), (vec![4], vec![1]));
    }
}
