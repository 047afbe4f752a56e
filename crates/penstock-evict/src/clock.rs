//! A hand goes round the places, and what was used longest ago goes when it comes by.
//!
//! No order of use has to be kept, only the time of each, so memory that several processes share without
//! a lock can be managed like this. How long ago is long enough is decided once a turn: [`horizon`] is
//! the time of use up to which a sixteenth of the places goes. So what goes is always of the sixteenth that
//! least recently used would give up next. (WSClock has such a hand, and a fixed age: Carr and Hennessy,
//! "WSClock - a simple and effective algorithm for virtual memory management", SOSP 1981.)
//!
//! The rules are in [`Sweep`]; the places, and what they hold, are whoever's it is: the shared memory
//! pool's pages, or [`Clock`]'s.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::Policy;
use crate::queue::Slab;

/// Free places are searched for, past entries that could be given up, while they are at least one in
/// so many: with fewer the search would cost more than the entries are worth. Those that the hand
/// meets are taken in any case.
const WORTH_A_SEARCH: u64 = 16;

/// With a turn of the hand one of so many places goes: fewer, and it goes far for each; more, and it
/// matters less which were used first.
const A_TURN: u64 = 16;

/// Turns of the hand, after which what is in use goes too.
const EVICTING_TURNS: u32 = 3;
/// Turns before the search is in vain.
const TURNS: u32 = 5;

/// How the hand deals with entries that it meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// There is free room: only that is taken.
    Sparing,
    /// Entries go that were not used since the horizon, judged at their first place.
    Evicting,
    /// Everything goes: it was all in use again whenever the hand came by.
    Clearing,
}

impl Round {
    /// Whether the entry goes that the hand meets, at its first place or at another. `used_at` tells
    /// when it was used last.
    pub fn gives_up(self, is_first: bool, horizon: u64, used_at: impl FnOnce() -> u64) -> bool {
        match self {
            Self::Sparing => false,
            Self::Evicting => is_first && used_at() <= horizon,
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

/// The time of use up to which entries go: those used last at the given times, each with its weight, so
/// that they weigh at least `room` together.
pub fn horizon(uses: &mut [(u64, u64)], room: u64) -> u64 {
    uses.sort_unstable();
    let mut sum = 0;
    let enough = uses.iter().find(|&&(_, weight)| {
        sum += weight;
        sum >= room
    });
    enough.or(uses.last()).map_or(0, |&(used_at, _)| used_at)
}

/// One search for places, from wherever the hand is.
#[derive(Debug)]
pub struct Sweep {
    places: u64,
    room: u64,
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
            room: count.max(places / A_TURN),
            round,
            passed: 0,
            turns: 0,
        }
    }

    /// What the horizon has to be drawn for, if it is time to: the hand has passed so many places since
    /// it last was.
    pub fn wants_horizon(&self, passed: u64) -> Option<u64> {
        (self.round != Round::Sparing && passed >= self.places).then_some(self.room)
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
    used_at: u64,
}

/// A place that belongs to no entry; no place.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Place {
    entry: u32,
    /// The entry's next one.
    next: u32,
}

/// Least recently used over a ring of places, as nearly as the shared memory pool has it. Time is the
/// number of uses.
///
/// Unlike other policies it is bounded, since the places are its order: an entry that is taken in
/// gets the places of those that go. One that needs more than there are is not taken in.
pub struct Clock<K, S = RandomState> {
    places: u64,
    /// Those that the hand has come by; it has not been round before they are all of them.
    ring: Vec<Place>,
    hand: usize,
    /// Places that it passed since the horizon was drawn.
    passed: u64,
    horizon: u64,
    now: u64,
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
            passed: 0,
            horizon: 0,
            now: 0,
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
        self.passed += 1;
        place
    }

    /// Gives an entry up if the hand, which meets it at this place, does so.
    fn meet(&mut self, place: usize, round: Round) -> Option<(K, u64)> {
        let number = self.ring[place].entry;
        if number == NONE {
            return None;
        }
        let entry = self.slab.get(number);
        let is_first = entry.first as usize == place;
        round
            .gives_up(is_first, self.horizon, || entry.used_at)
            .then(|| self.release(number))
    }

    fn draw_horizon(&mut self, room: u64) {
        let entries = self.index.values().map(|&number| self.slab.get(number));
        let mut uses: Vec<_> = entries.map(|e| (e.used_at, e.weight.max(1))).collect();
        (self.horizon, self.passed) = (horizon(&mut uses, room), 0);
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
            if left > 0
                && let Some(room) = sweep.wants_horizon(self.passed)
            {
                self.draw_horizon(room);
            }
            let progress = sweep.pass(stretch);
            debug_assert_ne!(progress, Progress::InVain, "nobody else fills places");
        }
    }
}

impl<K: Hash + Eq + Clone + Send, S: BuildHasher + Send> Policy<K> for Clock<K, S> {
    fn insert(&mut self, key: K, weight: u64) -> Option<u64> {
        let before = match self.index.get(&key).copied() {
            Some(number) => {
                if self.slab.get(number).weight == weight {
                    self.touch(&key);
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
        self.now += 1;
        let number = self.slab.alloc(Entry {
            key: key.clone(),
            weight,
            first: NONE,
            used_at: self.now,
        });
        self.take_places(number, count);
        self.index.insert(key, number);
        self.weight += weight;
        before
    }

    /// Takes them in from the first to the last, as they are put, but the last counts as used first.
    fn use_chain(&mut self, _parent: Option<&K>, chain: &[(K, u64)]) {
        let end = self.now + chain.len() as u64;
        for ((key, weight), before) in chain.iter().zip(0..) {
            self.now = end - before - 1;
            self.insert(key.clone(), *weight);
        }
        self.now = end;
    }

    fn touch(&mut self, key: &K) -> bool {
        self.now += 1;
        let number = self.index.get(key).copied();
        if let Some(number) = number {
            self.slab.get_mut(number).used_at = self.now;
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
            if self.passed >= self.places {
                self.draw_horizon(1);
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
