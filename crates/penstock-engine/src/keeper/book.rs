//! Which blocks are kept, for whom, and until when.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use penstock_contract::{Chunk, Key, Namespace};
use penstock_layout::Span;

/// Touches in a row that may fail to find a block before the block is given up. A block that was
/// just computed is still on its way.
const MOST_MISSES: u8 = 5;

/// Positions are divided by this for touches. A kept prompt is wanted as a whole: its end counts as
/// older than its beginning, but only by a second if it has a hundred thousand tokens.
const SQUEEZE: u64 = 64;

/// A kept block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Name {
    pub(super) namespace: Namespace,
    pub(super) chunk: Chunk,
}

/// A block to keep.
pub(super) struct Candidate {
    pub(super) name: Name,
    pub(super) spans: Arc<[Span]>,
    /// Tokens before it in its prompt.
    pub(super) position: u64,
    /// What the block takes up of the store's bound, in bytes.
    pub(super) charge: u64,
}

impl Candidate {
    /// The objects that make up the block.
    pub(super) fn keys(&self) -> impl Iterator<Item = Key> {
        let Name { namespace, chunk } = self.name;
        self.spans.iter().map(move |&span| Key {
            namespace,
            chunk,
            span,
        })
    }
}

struct Entry {
    candidate: Candidate,
    account: Arc<[u8]>,
    until: Instant,
    misses: u8,
}

/// What may be kept, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) all: u64,
    pub(super) account: u64,
}

/// The kept blocks.
#[derive(Default)]
pub(super) struct Book {
    entries: HashMap<Name, Entry>,
    used: u64,
    accounts: HashMap<Arc<[u8]>, u64>,
}

impl Book {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Keeps blocks of one prompt, in its order, as far as there is room. Those that are kept
    /// already are kept longer, and stay on the account of whoever came first. Returns how many are
    /// refused: the end of the prompt, as it is of no use without the rest.
    pub(super) fn keep(
        &mut self,
        account: &[u8],
        blocks: Vec<Candidate>,
        until: Instant,
        bounds: Bounds,
    ) -> usize {
        let known = self.accounts.get_key_value(account);
        let account = known.map_or_else(|| Arc::from(account), |(known, _)| Arc::clone(known));
        let count = blocks.len();
        for (n, candidate) in blocks.into_iter().enumerate() {
            if let Some(entry) = self.entries.get_mut(&candidate.name) {
                entry.until = entry.until.max(until);
                entry.misses = 0;
                continue;
            }
            let own = self.accounts.get(&account).copied().unwrap_or(0);
            let charge = candidate.charge;
            if self.used + charge > bounds.all || own + charge > bounds.account {
                return count - n;
            }
            self.used += charge;
            self.accounts.insert(Arc::clone(&account), own + charge);
            let entry = Entry {
                account: Arc::clone(&account),
                until,
                misses: 0,
                candidate,
            };
            self.entries.insert(entry.candidate.name, entry);
        }
        0
    }

    /// Keeps a block no more.
    pub(super) fn forget(&mut self, name: &Name) {
        let Some(entry) = self.entries.remove(name) else {
            return;
        };
        let charge = entry.candidate.charge;
        self.used -= charge;
        if let Some(own) = self.accounts.get_mut(&entry.account) {
            *own -= charge;
            if *own == 0 {
                self.accounts.remove(&entry.account);
            }
        }
    }

    /// Forgets the blocks whose time is over. Returns the others.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Name> {
        let is_over = |entry: &Entry| entry.until <= now;
        let over = self.entries.iter().filter(|(_, entry)| is_over(entry));
        let over: Vec<Name> = over.map(|(&name, _)| name).collect();
        for name in &over {
            self.forget(name);
        }
        self.entries.keys().copied().collect()
    }

    /// The values that make up a block, to be touched; empty if it is not kept any more.
    pub(super) fn values(&self, name: &Name) -> impl Iterator<Item = (Key, u64)> {
        let entry = self.entries.get(name);
        entry.into_iter().flat_map(|entry| {
            let position = entry.candidate.position / SQUEEZE;
            entry.candidate.keys().map(move |key| (key, position))
        })
    }

    /// Notes whether a touch found all of a block.
    pub(super) fn note(&mut self, name: &Name, is_there: bool) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        entry.misses = if is_there { 0 } else { entry.misses + 1 };
        if entry.misses == MOST_MISSES {
            self.forget(name);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        all: 100,
        account: 60,
    };

    fn name(n: u8) -> Name {
        Name {
            namespace: Namespace([1; 16]),
            chunk: [n; 32],
        }
    }

    fn prompt(blocks: std::ops::Range<u8>) -> Vec<Candidate> {
        let spans: Arc<[Span]> = vec![Span::new(0..2, 0..1).unwrap()].into();
        let candidate = |n| Candidate {
            name: name(n),
            spans: Arc::clone(&spans),
            position: 16 * u64::from(n),
            charge: 10,
        };
        blocks.map(candidate).collect()
    }

    #[test]
    fn who_comes_first_is_served_and_nobody_has_more_than_its_share() {
        let (mut book, now) = (Book::default(), Instant::now());
        let later = now + Duration::from_secs(10);
        // The beginning of the prompt is kept.
        assert_eq!(book.keep(b"red", prompt(0..8), later, BOUNDS), 2);
        assert_eq!(book.values(&name(5)).count(), 1);
        assert_eq!(book.values(&name(6)).count(), 0);
        assert_eq!(book.keep(b"red", prompt(20..21), later, BOUNDS), 1);
        assert_eq!(book.keep(b"blue", prompt(30..36), later, BOUNDS), 2);
        // What red keeps already costs blue nothing.
        assert_eq!(book.keep(b"blue", prompt(0..6), later, BOUNDS), 0);
        book.forget(&name(0));
        assert_eq!(book.keep(b"red", prompt(20..21), later, BOUNDS), 0);
        assert_eq!(book.expire(later).len(), 0);
        assert_eq!(book.keep(b"blue", prompt(30..36), later, BOUNDS), 0);
    }

    #[test]
    fn what_is_asked_for_again_is_kept_longer() {
        let (mut book, now) = (Book::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        book.keep(b"", prompt(0..3), at(10), BOUNDS);
        book.keep(b"", prompt(0..1), at(20), BOUNDS);
        book.keep(b"", prompt(0..1), at(5), BOUNDS);
        assert_eq!(book.expire(at(10)), [name(0)]);
        assert_eq!(book.expire(at(20)), []);
    }

    #[test]
    fn what_is_not_there_for_long_is_given_up() {
        let mut book = Book::default();
        let later = Instant::now() + Duration::from_secs(10);
        book.keep(b"", prompt(0..1), later, BOUNDS);
        for is_there in [false, false, false, false, true, false, false, false, false] {
            book.note(&name(0), is_there);
            assert_eq!(book.len(), 1);
        }
        book.note(&name(0), false);
        assert_eq!(book.len(), 0);
        assert_eq!((book.used, book.accounts.len()), (0, 0));
    }

    proptest! {
        /// Whatever comes and goes: nobody is ever above a bound, and the sums are right.
        #[test]
        fn bounds_hold(steps in prop::collection::vec((0_u8..4, 0_u8..40, 1_u8..12, 0_u64..20), 1..60)) {
            let (mut book, now) = (Book::default(), Instant::now());
            for (clock, (kind, first, count, seconds)) in (0_u64..).zip(steps) {
                let now = now + Duration::from_secs(clock);
                match kind {
                    0 => { book.expire(now); }
                    1 => book.forget(&name(first)),
                    account => {
                        let until = now + Duration::from_secs(seconds);
                        book.keep(&[account], prompt(first..first + count), until, BOUNDS);
                    }
                }
                prop_assert_eq!(book.used, 10 * book.len() as u64);
                prop_assert_eq!(book.used, book.accounts.values().sum::<u64>());
                prop_assert!(book.used <= BOUNDS.all);
                prop_assert!(book.accounts.values().all(|&own| 0 < own && own <= BOUNDS.account));
            }
        }
    }
}
