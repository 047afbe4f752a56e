//! Block numbers that are free.

/// A set of numbers, one bit each. The lowest free number is given first. Blocks that come together
/// then lie together in memory, whatever the order in which earlier blocks went.
#[derive(Default)]
pub(crate) struct Free {
    words: Vec<u64>,
    /// No word before this one has a free number.
    lowest: usize,
    len: usize,
}

const BITS: usize = u64::BITS as usize;

impl Free {
    /// A set of all numbers below `bound`.
    pub(crate) fn below(bound: usize) -> Self {
        let mut words = vec![u64::MAX; bound.div_ceil(BITS)];
        if let Some(last) = words.last_mut()
            && !bound.is_multiple_of(BITS)
        {
            *last = (1 << (bound % BITS)) - 1;
        }
        Self {
            words,
            lowest: 0,
            len: bound,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Frees a number that is not free.
    pub(crate) fn push(&mut self, number: u32) {
        let (word, bit) = (number as usize / BITS, number as usize % BITS);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << bit;
        self.lowest = self.lowest.min(word);
        self.len += 1;
    }

    /// Takes the lowest free number.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        while self.words[self.lowest] == 0 {
            self.lowest += 1;
        }
        let word = &mut self.words[self.lowest];
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        self.len -= 1;
        Some((self.lowest * BITS) as u32 + bit)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with an ordered set.
        #[test]
        fn the_lowest_is_given_first(bound in 0_usize..200, steps in prop::collection::vec(prop::option::of(0_u32..400), 0..300)) {
            let mut free = Free::below(bound);
            let mut expected: BTreeSet<u32> = (0..bound as u32).collect();
            for step in steps {
                match step {
                    Some(number) if expected.insert(number) => free.push(number),
                    _ => prop_assert_eq!(free.pop(), expected.pop_first()),
                }
                prop_assert_eq!(free.len(), expected.len());
            }
        }
    }
}
