//! Second chance: a hand goes round the places, and what was used since it last came by is spared.
//!
//! No order of use has to be kept, only whether there was one, so memory that several processes share
//! without a lock can be managed like this. What decides is in [`Sweep`]; the places, and what they hold,
//! are whoever's it is: the shared memory pool's pages, or [`Clock`]'s.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::Policy;
use crate::queue::Slab;

/// Free places are searched for, past entries that could be given up, while they are at least one in
/// so many: with fewer the search would cost more than the entries are worth. Those that the hand
/// meets are taken in any case.
const WORTH_A_SEARCH: u64 = 16;

/// Turns of the hand, after which what is in use goes too.
const EVICTING_TURNS: u32 = 3;
/// Turns before the search is in vain.
const TURNS: u32 = 5;

/// How the hand deals with entries that it meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// There is free room: only that is taken.
    Sparing,
    /// Entries go that were not used lately, judged at their first place.
    Evicting,
    /// Everything goes: it was all in use again whenever the hand came by.
    Clearing,
}

impl Round {
    /// Whether the entry goes that the hand meets, at its first place or at another. `forget_use` tells
    /// whether it was used since this was last asked.
    pub fn gives_up(self, is_first: bool, forget_use: impl FnOnce() -> bool) -> bool {
        match self {
            Self::Sparing => false,
            Self::Evicting => is_first && !forget_use(),
            Self::Clearing => true,
        }
    }
}

/// How a search stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// The hand goes on.
    Searching,
    /// It goes on, and there was less room than was thought: the count of free places was wrong.
    Miscounted,
    /// Everything is being filled just now.
    InVain,
}

/// One search for places, from wherever the hand is.
#[derive(Debug)]
pub struct Sweep {
    places: u64,
    round: Round,
    passed: u64,
    turns: u32,
}

impl Sweep {
    /// Of `places`, about `free` are free and `count` are needed.
    pub fn new(places: u64, free: u64, count: u64) -> Self {
        let is_worth_it = free >= count.max(places / WORTH_A_SEARCH);
        let round = if is_worth_it {
            Round::Sparing
        } else {
            Round::Evicting
        };
        Self {
            places,
            round,
            passed: 0,
            turns: 0,
        }
    }

    /// How the hand deals with what it meets next.
    pub fn round(&self) -> Round {
        self.round
    }

    /// Notes that the hand has passed so many places.
    pub fn pass(&mut self, count: u64) -> Progress {
        self.passed += count;
        if self.passed < self.places {
            return Progress::Searching;
        }
        self.passed = 0;
        self.turns += 1;
        if self.round == Round::Sparing {
            self.round = Round::Evicting;
            return Progress::Miscounted;
        }
        if self.turns >= TURNS {
            return Progress::InVain;
        }
        if self.turns >= EVICTING_TURNS {
            self.round = Round::Clearing;
        }
        Progress::Searching
    }
}

/// An entry takes so many places as it weighs, and one at least.
struct Entry<K> {
    key: K,
    weight: u64,
    first: u32,
    is_used: bool,
}

/// A place that belongs to no entry; no place.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Place {
    entry: u32,
    /// The entry's next one.
    next: u32,
}

/// Second chance over a ring of places, as the shared memory pool has it.
///
/// Unlike other policies it is bounded, since the places are its order: an entry that is taken in
/// gets the places of those that go. One that needs more than there are is not taken in.
pub struct Clock<K, S = RandomState> {
    places: u64,
    /// Those that the hand has come by; it has not been round before they are all of them.
    ring: Vec<Place>,
    hand: usize,
    taken: u64,
    index: HashMap<K, u32, S>,
    slab: Slab<Entry<K>>,
    weight: u64,
}

impl<K, S: Default> Clock<K, S> {
    /// An empty ring of so many places, fewer than 2^32 - 1.
    pub fn new(places: u64) -> Self {
        Self {
            places: places.min(u64::from(NONE)),
            ring: Vec::new(),
            hand: 0,
            taken: 0,
            index: HashMap::default(),
            slab: Slab::new(),
            weight: 0,
        }
    }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Clock<K, S> {
    /// Moves the hand on; where it was.
    fn step(&mut self) -> usize {
        let place = self.hand;
        if place == self.ring.len() {
            let (entry, next) = (NONE, NONE);
            self.ring.push(Place { entry, next });
        }
        self.hand = (place + 1) % self.places as usize;
        place
    }

    /// Gives an entry up if the hand, which meets it at this place, does so.
    fn meet(&mut self, place: usize, round: Round) -> Option<(K, u64)> {
        let number = self.ring[place].entry;
        if number == NONE {
            return None;
        }
        let entry = self.slab.get_mut(number);
        let is_first = entry.first as usize == place;
        let forget_use = || std::mem::replace(&mut entry.is_used, false);
        round
            .gives_up(is_first, forget_use)
            .then(|| self.release(number))
    }

    fn release(&mut self, number: u32) -> (K, u64) {
        let entry = self.slab.free(number);
        let mut place = entry.first;
        while place != NONE {
            let free = &mut self.ring[place as usize];
            free.entry = NONE;
            place = std::mem::replace(&mut free.next, NONE);
            self.taken -= 1;
        }
        self.index.remove(&entry.key);
        self.weight -= entry.weight;
        (entry.key, entry.weight)
    }

    /// Gives an entry so many places, in the order in which the hand meets them.
    fn take_places(&mut self, number: u32, count: u64) {
        let mut sweep = Sweep::new(self.places, self.places - self.taken, count);
        let (mut left, mut last) = (count, None);
        while left > 0 {
            let stretch = left;
            for _ in 0..stretch {
                let place = self.step();
                if self.ring[place].entry != number {
                    self.meet(place, sweep.round());
                }
                if self.ring[place].entry == NONE {
                    self.ring[place].entry = number;
                    match last.replace(place) {
                        None => self.slab.get_mut(number).first = place as u32,
                        Some(last) => self.ring[last].next = place as u32,
                    }
                    left -= 1;
                    self.taken += 1;
                }
            }
            let progress = sweep.pass(stretch);
            debug_assert_ne!(progress, Progress::InVain, "nobody else fills places");
        }
    }
}

impl<K: Hash + Eq + Clone + Send, S: BuildHasher + Send> Policy<K> for Clock<K, S> {
    fn insert(&mut self, key: K, weight: u64) -> Option<u64> {
        let before = match self.index.get(&key) {
            Some(&number) => {
                let entry = self.slab.get_mut(number);
                if entry.weight == weight {
                    entry.is_used = true;
                    return Some(weight);
                }
                Some(self.release(number).1)
            }
            None => None,
        };
        let count = weight.max(1);
        if count > self.places {
            return before;
        }
        let number = self.slab.alloc(Entry {
            key: key.clone(),
            weight,
            first: NONE,
            is_used: false,
        });
        self.take_places(number, count);
        self.index.insert(key, number);
        self.weight += weight;
        before
    }

    fn touch(&mut self, key: &K) -> bool {
        let number = self.index.get(key).copied();
        if let Some(number) = number {
            self.slab.get_mut(number).is_used = true;
        }
        number.is_some()
    }

    fn remove(&mut self, key: &K) -> Option<u64> {
        let number = self.index.get(key).copied()?;
        Some(self.release(number).1)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        while !self.index.is_empty() {
            let place = self.step();
            if let Some(victim) = self.meet(place, Round::Evicting) {
                return Some(victim);
            }
        }
        None
    }

    fn contains(&self, key: &K) -> bool {
        self.index.contains_key(key)
    }

    fn len(&self) -> usize {
        self.index.len()
    }

    fn weight(&self) -> u64 {
        self.weight
    }
}
