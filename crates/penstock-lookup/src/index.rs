//! What a pool said about blocks, and when. The memory it takes is fixed.

use std::time::{Duration, Instant};

use penstock_contract::{CHUNK_BYTES, NAMESPACE_BYTES, Namespace};

/// Entries that one place has. A block may lie in one place only.
const WAYS: usize = 8;
/// Room for each block that the index is made for, as a fraction: places do not fill evenly.
const ROOM: (usize, usize) = (3, 2);

/// The block's fingerprint, then when the pool spoke and what it said; all zeros if empty. As
/// integers, so that fresh memory is taken from the system only when it is used.
type Entry = [u64; 3];

/// How long the pool's answers are believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Belief {
    /// For blocks that were there. The pool may evict them meanwhile.
    pub there: Duration,
    /// For blocks that were not. Engines may store them meanwhile.
    pub missing: Duration,
}

/// Answers of a pool. Of eight entries that share a place, the oldest makes way.
pub struct Index {
    entries: Vec<Entry>,
    began: Instant,
    belief: Belief,
    len: usize,
}

impl Index {
    /// Bytes of memory for each block that an index is made for.
    pub const BYTES_PER_BLOCK: usize = size_of::<Entry>() * ROOM.0 / ROOM.1;

    /// An index for so many blocks.
    pub fn new(blocks: usize, belief: Belief) -> Self {
        let places = (blocks * ROOM.0 / ROOM.1).div_ceil(WAYS).max(1);
        Self {
            entries: vec![[0; 3]; places * WAYS],
            began: Instant::now(),
            belief,
            len: 0,
        }
    }

    /// Blocks that it has an answer for, young or old.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no answer at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the pool has the block; None if that is not known, or was asked too long ago.
    pub fn get(
        &self,
        namespace: Namespace,
        chunk: &[u8; CHUNK_BYTES],
        now: Instant,
    ) -> Option<bool> {
        let (place, name) = self.place(namespace, chunk);
        let found = self.entries[place..place + WAYS]
            .iter()
            .find(|entry| entry[2] != 0 && entry[..2] == name)?;
        let is_there = found[2] & 1 == 1;
        let age = Duration::from_micros(self.micros(now).saturating_sub(found[2] >> 1));
        let longest = if is_there {
            self.belief.there
        } else {
            self.belief.missing
        };
        (age < longest).then_some(is_there)
    }

    /// Notes what the pool said.
    pub fn set(
        &mut self,
        namespace: Namespace,
        chunk: &[u8; CHUNK_BYTES],
        is_there: bool,
        now: Instant,
    ) {
        let (place, name) = self.place(namespace, chunk);
        let seen = (self.micros(now) << 1) | u64::from(is_there);
        let entries = &mut self.entries[place..place + WAYS];
        let same = entries
            .iter()
            .position(|entry| entry[2] != 0 && entry[..2] == name);
        // An empty entry is older than all others.
        let oldest = || (0..WAYS).min_by_key(|&way| entries[way][2]);
        if let Some(way) = same.or_else(oldest) {
            self.len += usize::from(entries[way][2] == 0);
            entries[way] = [name[0], name[1], seen];
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.entries.fill([0; 3]);
        self.len = 0;
    }

    /// Microseconds since the beginning, from 1 on.
    fn micros(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.began).as_micros() as u64 + 1
    }

    /// Where the block's entry lies, and its fingerprint. Hashes are as good as random, so their
    /// first 16 bytes tell blocks apart, and some of these tell the place.
    fn place(&self, namespace: Namespace, chunk: &[u8; CHUNK_BYTES]) -> (usize, [u64; 2]) {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[..8]);
            u64::from_le_bytes(word)
        };
        const { assert!(NAMESPACE_BYTES == 16) };
        let name = [
            word(chunk) ^ word(&namespace.0),
            word(&chunk[8..]) ^ word(&namespace.0[8..]),
        ];
        let places = (self.entries.len() / WAYS) as u128;
        let place = ((u128::from(name[1]) * places) >> 64) as usize;
        (place * WAYS, name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const SPACE: Namespace = Namespace([3; 16]);

    fn chunk(number: u64) -> [u8; CHUNK_BYTES] {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut chunk = [0; CHUNK_BYTES];
        chunk[..8].copy_from_slice(&number.to_le_bytes());
        chunk[8..16].copy_from_slice(&mixed.to_le_bytes());
        chunk
    }

    fn belief() -> Belief {
        Belief {
            there: Duration::from_millis(1000),
            missing: Duration::from_millis(100),
        }
    }

    proptest! {
        /// Compares with a map: what is known was said, and was said lately enough.
        #[test]
        fn tells_what_was_said_lately(steps in prop::collection::vec((0_u64..40, any::<bool>(), 0_u64..60), 0..200)) {
            let mut index = Index::new(8, belief());
            let mut said: HashMap<u64, (bool, u64)> = HashMap::new();
            let (began, mut now) = (index.began, 0);
            for (number, is_there, later) in steps {
                now += later;
                index.set(SPACE, &chunk(number), is_there, began + Duration::from_millis(now));
                said.insert(number, (is_there, now));
                for (number, (is_there, at)) in &said {
                    let longest = if *is_there { 1000 } else { 100 };
                    let found = index.get(SPACE, &chunk(*number), began + Duration::from_millis(now));
                    if now - at >= longest {
                        prop_assert_eq!(found, None);
                    } else {
                        prop_assert!(found.is_none_or(|found| found == *is_there));
                    }
                }
                prop_assert!(index.len() <= 16);
            }
        }
    }

    #[test]
    fn has_nearly_all_blocks_that_it_is_made_for() {
        let now = Instant::now();
        let mut index = Index::new(100_000, belief());
        for number in 0..100_000 {
            index.set(SPACE, &chunk(number), true, now);
        }
        let known = |number: &u64| index.get(SPACE, &chunk(*number), now) == Some(true);
        let found = (0..100_000).filter(known).count();
        assert!(found > 97_000, "{found}");
        assert!(index.len() >= found);
        assert_eq!(index.get(Namespace([4; 16]), &chunk(1), now), None);
        index.clear();
        assert!(index.is_empty());
    }
}
