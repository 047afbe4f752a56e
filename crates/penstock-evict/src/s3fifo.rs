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

#[derive(Clone, Copy)]
enum Place {
    Small,
    Main,
    /// Beside both queues, among those that are the next to go.
    Demoted,
}

/// A queue, and what its entries weigh.
struct Weighed {
    nodes: Queue,
    weight: u64,
}

impl Weighed {
    const EMPTY: Self = Self {
        nodes: Queue::new(),
        weight: 0,
    };
}

struct Queues {
    small: Weighed,
    main: Weighed,
    demoted: Weighed,
}

impl Queues {
    fn at(&mut self, place: Place) -> &mut Weighed {
        match place {
            Place::Small => &mut self.small,
            Place::Main => &mut self.main,
            Place::Demoted => &mut self.demoted,
        }
    }
}

struct Entry<K> {
    key: K,
    weight: u64,
    uses: u8,
    place: Place,
}

/// The names of entries that were evicted from the small queue, the earliest first.
struct Ghosts<K, S> {
    index: HashMap<K, u32, S>,
    slab: Slab<K>,
    queue: Queue,
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Ghosts<K, S> {
    fn contains(&self, key: &K) -> bool {
        self.index.contains_key(key)
    }

    /// Remembers a name that is not remembered yet.
    fn remember(&mut self, key: K) {
        let node = self.slab.alloc(key.clone());
        self.queue.push_back(&mut self.slab, node);
        let before = self.index.insert(key, node);
        debug_assert!(before.is_none(), "a name is remembered once");
    }

    fn forget(&mut self, key: &K) {
        if let Some(node) = self.index.remove(key) {
            self.queue.unlink(&mut self.slab, node);
            self.slab.free(node);
        }
    }

    /// Forgets the oldest names, until so many are left.
    fn trim(&mut self, most: usize) {
        while self.queue.len() > most
            && let Some(node) = self.queue.front()
        {
            self.queue.unlink(&mut self.slab, node);
            let key = self.slab.free(node);
            self.index.remove(&key);
        }
    }
}

/// Quickly evicts entries that are used only once, through a small queue. Keeps entries that come
/// back: a scan of new entries does not wash out the ones in use.
///
/// Unlike the paper's, the sizes of the queues follow the weight that is held rather than a fixed
/// capacity. This is the same if the owner evicts only at its bound.
///
/// As in the paper, the names of entries evicted from the small queue (ghosts) are remembered: as
/// many as the main queue has room for. A name stays until as many younger names have come, even if
/// the entry itself comes back, into the main queue. If the entry is evicted from there before its
/// name is forgotten, it can come back into the main queue once more.
pub struct S3Fifo<K, S = RandomState> {
    /// What is held.
    index: HashMap<K, u32, S>,
    slab: Slab<Entry<K>>,
    queues: Queues,
    /// Has no name of an entry that is in the small queue.
    ghosts: Ghosts<K, S>,
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
            queues: Queues {
                small: Weighed::EMPTY,
                main: Weighed::EMPTY,
                demoted: Weighed::EMPTY,
            },
            ghosts: Ghosts {
                index: HashMap::default(),
                slab: Slab::new(),
                queue: Queue::new(),
            },
        }
    }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> S3Fifo<K, S> {
    fn leave_queue(&mut self, node: u32) {
        let entry = self.slab.get(node);
        let (place, weight) = (entry.place, entry.weight);
        let queue = self.queues.at(place);
        queue.nodes.unlink(&mut self.slab, node);
        queue.weight -= weight;
    }

    fn enter_queue(&mut self, node: u32, place: Place) {
        let entry = self.slab.get_mut(node);
        entry.place = place;
        let weight = entry.weight;
        let queue = self.queues.at(place);
        queue.nodes.push_back(&mut self.slab, node);
        queue.weight += weight;
    }

    fn release(&mut self, node: u32) -> Entry<K> {
        self.leave_queue(node);
        let entry = self.slab.free(node);
        self.index.remove(&entry.key);
        entry
    }

    /// Forgets the oldest ghosts, until there are as many as the main queue has room for.
    fn trim_ghosts(&mut self) {
        let most = self.index.len() as u64 * (SMALL_SHARE - 1) / SMALL_SHARE;
        self.ghosts.trim(most as usize);
    }

    /// Takes one step on the small queue: its oldest entry moves up or is the victim.
    fn step_small(&mut self) -> Option<(K, u64)> {
        let node = self.queues.small.nodes.front()?;
        if self.slab.get(node).uses >= USES_TO_STAY {
            self.leave_queue(node);
            self.slab.get_mut(node).uses = 0;
            self.enter_queue(node, Place::Main);
            return None;
        }
        let entry = self.release(node);
        self.ghosts.remember(entry.key.clone());
        Some((entry.key, entry.weight))
    }

    /// Takes one step on the main queue: its oldest entry goes round again or is the victim.
    fn step_main(&mut self) -> Option<(K, u64)> {
        let node = self.queues.main.nodes.front()?;
        let entry = self.slab.get_mut(node);
        if entry.uses == 0 {
            let entry = self.release(node);
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
        if self.touch(&key) {
            let entry = self.slab.get_mut(self.index[&key]);
            let before = std::mem::replace(&mut entry.weight, weight);
            let place = entry.place;
            let queue = self.queues.at(place);
            queue.weight = queue.weight - before + weight;
            return Some(before);
        }
        let place = if self.ghosts.contains(&key) {
            Place::Main
        } else {
            Place::Small
        };
        let node = self.slab.alloc(Entry {
            key: key.clone(),
            weight,
            uses: 0,
            place,
        });
        self.index.insert(key, node);
        self.enter_queue(node, place);
        None
    }

    fn touch(&mut self, key: &K) -> bool {
        let node = self.index.get(key).copied();
        if let Some(node) = node {
            let entry = self.slab.get_mut(node);
            entry.uses = (entry.uses + 1).min(MAX_USES);
            if matches!(entry.place, Place::Demoted) {
                self.leave_queue(node);
                self.enter_queue(node, Place::Main);
            }
        }
        node.is_some()
    }

    /// What is used again after this comes back into the main queue.
    fn demote(&mut self, key: &K) -> bool {
        let node = self.index.get(key).copied();
        if let Some(node) = node {
            self.slab.get_mut(node).uses = 0;
            self.leave_queue(node);
            self.enter_queue(node, Place::Demoted);
        }
        node.is_some()
    }

    fn remove(&mut self, key: &K) -> Option<u64> {
        let node = *self.index.get(key)?;
        let weight = self.release(node).weight;
        // It was not evicted. If it comes again, it comes as new.
        self.ghosts.forget(key);
        self.trim_ghosts();
        Some(weight)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        // The loop ends: every step on the small queue shortens it, and every step on the main
        // queue takes a use from an entry that has at most three.
        if let Some(node) = self.queues.demoted.nodes.front() {
            let entry = self.release(node);
            self.trim_ghosts();
            return Some((entry.key, entry.weight));
        }
        while !self.index.is_empty() {
            let (small, main) = (&self.queues.small, &self.queues.main);
            let small_is_large = small.weight * SMALL_SHARE >= self.weight();
            let victim = if main.nodes.len() == 0 || (small_is_large && small.nodes.len() > 0) {
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
        self.index.contains_key(key)
    }

    fn len(&self) -> usize {
        self.index.len()
    }

    fn weight(&self) -> u64 {
        self.queues.small.weight + self.queues.main.weight + self.queues.demoted.weight
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_are_remembered_once_and_within_their_bound(
            calls in vec((0u8..4, 0u8..40, 0u64..20), 0..400),
        ) {
            let mut policy = S3Fifo::<u8>::new();
            for (call, key, weight) in calls {
                match call {
                    0 | 1 => drop(policy.insert(key, weight)),
                    2 => drop(policy.evict()),
                    _ => drop(policy.remove(&key)),
                }
                let ghosts = &policy.ghosts;
                prop_assert_eq!(ghosts.index.len(), ghosts.queue.len());
                prop_assert!(ghosts.queue.len() * 10 <= policy.len() * 9);
                for (key, &node) in &policy.index {
                    let is_small = matches!(policy.slab.get(node).place, Place::Small);
                    prop_assert!(!is_small || !ghosts.contains(key));
                }
            }
        }
    }
}
