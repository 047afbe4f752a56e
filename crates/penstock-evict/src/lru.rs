//! Least recently used.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::Policy;
use crate::queue::{Queue, Slab};

/// Evicts the entry whose last use is longest ago.
pub struct Lru<K, S = RandomState> {
    index: HashMap<K, u32, S>,
    slab: Slab<(K, u64)>,
    queue: Queue,
    weight: u64,
}

impl<K> Lru<K> {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<K, S: Default> Default for Lru<K, S> {
    fn default() -> Self {
        Self {
            index: HashMap::default(),
            slab: Slab::new(),
            queue: Queue::new(),
            weight: 0,
        }
    }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Lru<K, S> {
    fn make_youngest(&mut self, node: u32) {
        self.queue.unlink(&mut self.slab, node);
        self.queue.push_back(&mut self.slab, node);
    }

    /// The weight of an entry, if it is held. Asking is not a use.
    pub fn weight_of(&self, key: &K) -> Option<u64> {
        let node = self.index.get(key)?;
        Some(self.slab.get(*node).1)
    }

    /// The entries with their weights, the next victim first. Looking is not a use.
    pub fn oldest_first(&self) -> impl Iterator<Item = (&K, u64)> {
        std::iter::successors(self.queue.front(), |&node| Queue::next(&self.slab, node)).map(
            |node| {
                let (key, weight) = self.slab.get(node);
                (key, *weight)
            },
        )
    }

    /// Evicts until the weight is no more than `capacity`. Of the last entry to go, only as much
    /// goes as has to; the rest stays the next to go.
    ///
    /// This is for entries that stand for several things of weight one. What is left of an entry is
    /// then what would be left if each of them had an entry.
    pub fn shrink_to(&mut self, capacity: u64) {
        while let Some(node) = self.queue.front().filter(|_| self.weight > capacity) {
            let excess = self.weight - capacity;
            let (_, weight) = self.slab.get_mut(node);
            if *weight > excess {
                *weight -= excess;
                self.weight -= excess;
                return;
            }
            let (key, _) = self.release(node);
            self.index.remove(&key);
        }
    }

    fn release(&mut self, node: u32) -> (K, u64) {
        self.queue.unlink(&mut self.slab, node);
        let (key, weight) = self.slab.free(node);
        self.weight -= weight;
        (key, weight)
    }
}

impl<K: Hash + Eq + Clone + Send, S: BuildHasher + Send> Policy<K> for Lru<K, S> {
    fn insert(&mut self, key: K, weight: u64) -> Option<u64> {
        self.weight += weight;
        if let Some(&node) = self.index.get(&key) {
            self.make_youngest(node);
            let before = std::mem::replace(&mut self.slab.get_mut(node).1, weight);
            self.weight -= before;
            return Some(before);
        }
        let node = self.slab.alloc((key.clone(), weight));
        self.queue.push_back(&mut self.slab, node);
        self.index.insert(key, node);
        None
    }

    fn touch(&mut self, key: &K) -> bool {
        let node = self.index.get(key).copied();
        if let Some(node) = node {
            self.make_youngest(node);
        }
        node.is_some()
    }

    fn demote(&mut self, key: &K) -> bool {
        let node = self.index.get(key).copied();
        if let Some(node) = node {
            self.queue.unlink(&mut self.slab, node);
            self.queue.push_front(&mut self.slab, node);
        }
        node.is_some()
    }

    fn remove(&mut self, key: &K) -> Option<u64> {
        let node = self.index.remove(key)?;
        Some(self.release(node).1)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        let node = self.queue.front()?;
        let (key, weight) = self.release(node);
        self.index.remove(&key);
        Some((key, weight))
    }

    fn contains(&self, key: &K) -> bool {
        self.index.contains_key(key)
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    fn weight(&self) -> u64 {
        self.weight
    }
}
