//! A hand goes round the places, and gives up the entries that were used longest ago.
//!
//! No order of use is kept, only the time of each use. So memory that several processes share
//! without a lock can be managed like this. Once a turn, the policy decides how long ago is long
//! enough: [`horizon`] is the time of use up to which a sixteenth of the places goes. So a victim
//! is always in the sixteenth that least recently used would give up next. (WSClock has such a
//! hand, and a fixed age: Carr and Hennessy, "WSClock - a simple and effective algorithm for
//! virtual memory management", SOSP 1981.)
//!
//! The rules are in [`Sweep`]. The places and their content belong to its user: the shared memory
//! pool has pages, and [`Clock`] has its ring.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::Policy;
use crate::queue::Slab;

/// While at least one in so many places is free, the hand searches for free places and passes over
/// entries that could be given up. With fewer free places, the search would cost more than the
/// entries are worth. Free places that the hand meets are taken in any case.
const WORTH_A_SEARCH: u64 = 16;

/// With a turn of the hand, one of so many places goes. If fewer went, the hand would go far for
/// each. If more went, the order of their uses would matter less.
const A_TURN: u64 = 16;

/// Turns of the hand, after which entries in use go too.
const EVICTING_TURNS: u32 = 3;
/// Turns of the hand, after which the search is in vain.
const TURNS: u32 = 5;

/// How the hand deals with entries that it meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// There is free room, and only that is taken.
    Sparing,
    /// Entries that were not used since the horizon go. They are judged at their first place.
    Evicting,
    /// Every entry goes: all were in use again whenever the hand came by.
    Clearing,
}

impl Round {
    /// Whether the entry that the hand meets goes. `is_first` tells whether it is met at its first
    /// place, `used_at` when it was used last.
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
    /// The hand goes on, and there was less room than expected: the count of free places was wrong.
    Miscounted,
    /// The search found nothing: everything is being filled just now.
    InVain,
}

/// The last use of an entry that was demoted. No use is at this time.
pub const DEMOTED: u64 = 0;

/// The time of use up to which entries go. `uses` has the last use and the weight of each entry;
/// those that go weigh at least `room` together. While entries are [`DEMOTED`], only they go.
pub fn horizon(uses: &mut [(u64, u64)], room: u64) -> u64 {
    uses.sort_unstable();
    if uses.first().is_some_and(|&(used_at, _)| used_at == DEMOTED) {
        return DEMOTED;
    }
    let mut sum = 0;
    let enough = uses.iter().find(|&&(_, weight)| {
        sum += weight;
        sum >= room
    });
    enough.or(uses.last()).map_or(0, |&(used_at, _)| used_at)
}

/// One search for places, starting wherever the hand is.
#[derive(Debug)]
pub struct Sweep {
    places: u64,
    room: u64,
    round: Round,
    passed: u64,
    turns: u32,
}

impl Sweep {
    /// A search for `count` of `places` places, of which about `free` are free.
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

    /// The room for which the horizon has to be drawn now; none if it is not time to. The hand has
    /// passed so many places since the horizon was drawn last.
    pub fn wants_horizon(&self, passed: u64) -> Option<u64> {
        (self.round != Round::Sparing && passed >= self.places).then_some(self.room)
    }

    /// How the hand deals with the next entry that it meets.
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

/// An entry takes as many places as it weighs, and at least one.
struct Entry<K> {
    key: K,
    weight: u64,
    first: u32,
    used_at: u64,
}

/// Marks a place without an entry, and the end of an entry's places.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Place {
    entry: u32,
    /// The entry's next place.
    next: u32,
}

/// Least recently used over a ring of places, approximated as in the shared memory pool. Time is
/// the number of uses.
///
/// Unlike other policies it is bounded, since the places are its order. An entry that is taken in
/// gets the places of those that go. An entry that needs more places than there are is not taken
/// in.
pub struct Clock<K, S = RandomState> {
    places: u64,
    /// The places that the hand has come by. Until its first turn is over, these are not all
    /// places.
    ring: Vec<Place>,
    hand: usize,
    /// Places that the hand has passed since the horizon was drawn.
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
    /// Moves the hand on; returns where it was.
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

    /// Gives up the entry at this place, if the hand in this round does so.
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

    /// Takes in the blocks from the first to the last, as they are put. The last counts as used
    /// first.
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

    /// From here on the hand goes round once for what is demoted alone.
    fn demote(&mut self, key: &K) -> bool {
        let number = self.index.get(key).copied();
        if let Some(number) = number {
            self.slab.get_mut(number).used_at = DEMOTED;
            (self.horizon, self.passed) = (DEMOTED, 0);
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
