//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::Policy;
use crate::queue::{Queue, Slab};

/// The small queue's share of the weight: one in this many.
const SMALL_SHARE: u64 = 10;
/// Uses beyond this are not counted.
const MAX_USES: u8 = 3;
/// Uses while in the small queue that earn a place in the main one.
const USES_TO_STAY: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Small,
    Main,
    /// The name of an entry evicted from the small queue: not held, only remembered.
    Ghost,
}

struct Entry<K> {
    key: K,
    weight: u64,
    uses: u8,
    place: Place,
}

/// Evicts entries that are used once quickly, through a small queue, and keeps those that come
/// back: a scan of new entries does not wash out the ones in use.
///
/// Unlike the paper's, the queues' sizes follow the weight that is held rather than a fixed
/// capacity, which is the same thing when the owner evicts only at its bound. As many ghosts are
/// remembered as the main queue has room for.
pub struct S3Fifo<K, S = RandomState> {
    index: HashMap<K, u32, S>,
    slab: Slab<Entry<K>>,
    small: Queue,
    main: Queue,
    ghosts: Queue,
    small_weight: u64,
    main_weight: u64,
}

impl<K> S3Fifo<K> {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<K, S: Default> Default for S3Fifo<K, S> {
    fn default() -> Self {
        Self {
            index: HashMap::default(),
            slab: Slab::new(),
            small: Queue::new(),
            main: Queue::new(),
            ghosts: Queue::new(),
            small_weight: 0,
            main_weight: 0,
        }
    }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> S3Fifo<K, S> {
    fn held(&self, key: &K) -> Option<u32> {
        let node = *self.index.get(key)?;
        (self.slab.get(node).place != Place::Ghost).then_some(node)
    }

    fn leave_queue(&mut self, node: u32) {
        let entry = self.slab.get(node);
        let (place, weight) = (entry.place, entry.weight);
        match place {
            Place::Small => {
                self.small.unlink(&mut self.slab, node);
                self.small_weight -= weight;
            }
            Place::Main => {
                self.main.unlink(&mut self.slab, node);
                self.main_weight -= weight;
            }
            Place::Ghost => self.ghosts.unlink(&mut self.slab, node),
        }
    }

    fn enter_queue(&mut self, node: u32, place: Place) {
        let entry = self.slab.get_mut(node);
        entry.place = place;
        let weight = entry.weight;
        match place {
            Place::Small => {
                self.small.push_back(&mut self.slab, node);
                self.small_weight += weight;
            }
            Place::Main => {
                self.main.push_back(&mut self.slab, node);
                self.main_weight += weight;
            }
            Place::Ghost => self.ghosts.push_back(&mut self.slab, node),
        }
    }

    fn forget(&mut self, node: u32) -> Entry<K> {
        self.leave_queue(node);
        let entry = self.slab.free(node);
        self.index.remove(&entry.key);
        entry
    }

    /// Forgets the oldest ghosts beyond as many as the main queue has room for.
    fn trim_ghosts(&mut self) {
        while self.ghosts.len() as u64 * SMALL_SHARE > self.len_held() as u64 * (SMALL_SHARE - 1) {
            let Some(node) = self.ghosts.front() else {
                return;
            };
            self.forget(node);
        }
    }

    fn len_held(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Takes one step on the small queue: its oldest entry moves up or is the victim.
    fn step_small(&mut self) -> Option<(K, u64)> {
        let node = self.small.front()?;
        self.leave_queue(node);
        let entry = self.slab.get_mut(node);
        if entry.uses >= USES_TO_STAY {
            entry.uses = 0;
            self.enter_queue(node, Place::Main);
            return None;
        }
        let victim = (entry.key.clone(), entry.weight);
        self.enter_queue(node, Place::Ghost);
        Some(victim)
    }

    /// Takes one step on the main queue: its oldest entry goes round again or is the victim.
    fn step_main(&mut self) -> Option<(K, u64)> {
        let node = self.main.front()?;
        let entry = self.slab.get_mut(node);
        if entry.uses == 0 {
            let entry = self.forget(node);
            return Some((entry.key, entry.weight));
        }
        entry.uses -= 1;
        self.leave_queue(node);
        self.enter_queue(node, Place::Main);
        None
    }
}

impl<K: Hash + Eq + Clone + Send, S: BuildHasher + Send> Policy<K> for S3Fifo<K, S> {
    fn insert(&mut self, key: K, weight: u64) -> Option<u64> {
        let known = self.index.get(&key).copied();
        let Some(node) = known else {
            let entry = Entry {
                key: key.clone(),
                weight,
                uses: 0,
                place: Place::Small,
            };
            let node = self.slab.alloc(entry);
            self.index.insert(key, node);
            self.enter_queue(node, Place::Small);
            return None;
        };
        if self.slab.get(node).place == Place::Ghost {
            self.leave_queue(node);
            let entry = self.slab.get_mut(node);
            (entry.weight, entry.uses) = (weight, 0);
            self.enter_queue(node, Place::Main);
            return None;
        }
        self.touch(&key);
        let entry = self.slab.get_mut(node);
        let before = std::mem::replace(&mut entry.weight, weight);
        let sum = match entry.place {
            Place::Small => &mut self.small_weight,
            Place::Main | Place::Ghost => &mut self.main_weight,
        };
        *sum = *sum - before + weight;
        Some(before)
    }

    fn touch(&mut self, key: &K) -> bool {
        let node = self.held(key);
        if let Some(node) = node {
            let entry = self.slab.get_mut(node);
            entry.uses = (entry.uses + 1).min(MAX_USES);
        }
        node.is_some()
    }

    fn remove(&mut self, key: &K) -> Option<u64> {
        let node = self.held(key)?;
        let weight = self.forget(node).weight;
        self.trim_ghosts();
        Some(weight)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        // Ends: every step on the small queue shortens it, every step on the main queue takes a
        // use from an entry that has at most three.
        while self.len_held() > 0 {
            let small_is_large = self.small_weight * SMALL_SHARE >= self.weight();
            let victim = if self.main.len() == 0 || (small_is_large && self.small.len() > 0) {
                self.step_small()
            } else {
                self.step_main()
            };
            if victim.is_some() {
                self.trim_ghosts();
                return victim;
            }
        }
        None
    }

    fn contains(&self, key: &K) -> bool {
        self.held(key).is_some()
    }

    fn len(&self) -> usize {
        self.len_held()
    }

    fn weight(&self) -> u64 {
        self.small_weight + self.main_weight
    }
}
