//! A list of numbers in the order of their use, the oldest first.

const NONE: u32 = u32::MAX;

/// A list of numbers below a bound that grows. Each number is in the list at most once. Every call
/// takes constant time.
#[derive(Default)]
pub(crate) struct Remembered {
    links: Vec<Link>,
    ends: Option<(u32, u32)>,
    len: usize,
}

#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
    is_in: bool,
}

const OUT: Link = Link {
    before: NONE,
    after: NONE,
    is_in: false,
};

impl Remembered {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Reserves room for so many more numbers.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.links.reserve(more);
    }

    /// Makes room for the numbers below `bound`.
    pub(crate) fn grow(&mut self, bound: usize) {
        self.links.resize(bound, OUT);
    }

    /// Adds a number as the newest. It must not be in the list yet.
    pub(crate) fn push(&mut self, number: u32) {
        let last = self.ends.map_or(NONE, |(_, last)| last);
        self.links[number as usize] = Link {
            before: last,
            after: NONE,
            is_in: true,
        };
        match &mut self.ends {
            Some((_, newest)) => {
                self.links[*newest as usize].after = number;
                *newest = number;
            }
            None => self.ends = Some((number, number)),
        }
        self.len += 1;
    }

    /// Takes a number out, if it is in.
    pub(crate) fn remove(&mut self, number: u32) {
        let Link {
            before,
            after,
            is_in,
        } = self.links[number as usize];
        if !is_in {
            return;
        }
        self.links[number as usize] = OUT;
        self.len -= 1;
        let Some((first, last)) = self.ends else {
            return;
        };
        if let Some(link) = self.links.get_mut(before as usize) {
            link.after = after;
        }
        if let Some(link) = self.links.get_mut(after as usize) {
            link.before = before;
        }
        self.ends = match (before, after) {
            (NONE, NONE) => None,
            (NONE, after) => Some((after, last)),
            (before, NONE) => Some((first, before)),
            _ => Some((first, last)),
        };
    }

    /// Takes the oldest out.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let (first, _) = self.ends?;
        self.remove(first);
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_queue_from_which_anything_can_be_taken(calls in prop::collection::vec((0_u8..3, 0_u32..6), 0..60)) {
            let (mut list, mut model) = (Remembered::default(), VecDeque::new());
            list.grow(6);
            for (call, number) in calls {
                match call {
                    0 if !model.contains(&number) => {
                        list.push(number);
                        model.push_back(number);
                    }
                    1 => {
                        list.remove(number);
                        model.retain(|n| *n != number);
                    }
                    2 => prop_assert_eq!(list.pop(), model.pop_front()),
                    _ => {}
                }
                prop_assert_eq!(list.len(), model.len());
            }
        }
    }
}
