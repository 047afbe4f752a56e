//! Chooses while serving between least recently used, S3-FIFO and the policy for prefixes.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::choice::Choice;
use crate::queue::{Queue, Slab};
use crate::{Policy, Prefix, S3Fifo};

/// The ways to evict, as `Choice` numbers them.
const LRU: usize = 0;
const S3FIFO: usize = 1;
const PREFIX: usize = 2;
const WAYS: usize = 3;

struct Resident<K> {
    key: K,
    weight: u64,
    /// The block's place among the strays, if it is one.
    stray: Option<u32>,
}

/// Follows whichever of three policies would have found the most blocks.
///
/// It keeps account of three caches of the same weight. Each goes by one of the policies alone and
/// hears of every use. What is held follows one of them: the victims are the blocks that this one
/// does not hold. So a change of the policy gives up nothing at once, and blocks that both hold
/// stay. It begins with `Prefix`, and leaves a policy only on evidence (`choice.rs`).
///
/// The accounts are of whole caches, not of samples. The account of [`Prefix`] is that policy with
/// the names that it remembers. S3-FIFO and what is held add up to three names for each entry held.
/// A change of the policy looks at every entry once.
pub struct Chooser<K, S = RandomState> {
    index: HashMap<K, u32, S>,
    residents: Slab<Resident<K>>,
    /// What is held by last use, the latest last.
    by_use: Queue,
    weight: u64,
    /// What is held, but not by the account that is followed. Empty while least recently used is
    /// followed: `by_use` is its order.
    strays: Queue,
    stray_residents: Slab<u32>,
    s3fifo: S3Fifo<K, S>,
    /// Has the account of least recently used, too.
    prefix: Prefix<K, S>,
    choice: Choice<WAYS>,
}

impl<K> Chooser<K> {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty policy whose account of `Prefix` remembers up to so many names for each entry.
    pub fn remembering(names: usize) -> Self {
        Self {
            prefix: Prefix::remembering(names),
            ..Self::default()
        }
    }
}

impl<K, S: Default> Default for Chooser<K, S> {
    fn default() -> Self {
        Self {
            index: HashMap::default(),
            residents: Slab::new(),
            by_use: Queue::new(),
            weight: 0,
            strays: Queue::new(),
            stray_residents: Slab::new(),
            s3fifo: S3Fifo::default(),
            prefix: Prefix::default(),
            choice: Choice::new(PREFIX),
        }
    }
}

impl<K: Hash + Eq + Clone + Send, S: BuildHasher + Send> Chooser<K, S> {
    /// Takes in a block or notes its use; returns its weight before, if it was held.
    fn use_one(&mut self, key: &K, weight: u64) -> Option<u64> {
        self.weight += weight;
        if let Some(&node) = self.index.get(key) {
            self.unstray(node);
            self.by_use.unlink(&mut self.residents, node);
            self.by_use.push_back(&mut self.residents, node);
            let before = std::mem::replace(&mut self.residents.get_mut(node).weight, weight);
            self.weight -= before;
            return Some(before);
        }
        let node = self.residents.alloc(Resident {
            key: key.clone(),
            weight,
            stray: None,
        });
        self.by_use.push_back(&mut self.residents, node);
        self.index.insert(key.clone(), node);
        None
    }

    fn release(&mut self, node: u32) -> (K, u64) {
        self.unstray(node);
        self.by_use.unlink(&mut self.residents, node);
        let Resident { key, weight, .. } = self.residents.free(node);
        self.index.remove(&key);
        self.weight -= weight;
        (key, weight)
    }

    /// Notes what is held and has just left the account that is followed.
    fn stray(&mut self, node: u32) {
        let resident = self.residents.get_mut(node);
        if resident.stray.is_none() {
            let place = self.stray_residents.alloc(node);
            resident.stray = Some(place);
            self.strays.push_back(&mut self.stray_residents, place);
        }
    }

    fn unstray(&mut self, node: u32) {
        if let Some(place) = self.residents.get_mut(node).stray.take() {
            self.strays.unlink(&mut self.stray_residents, place);
            self.stray_residents.free(place);
        }
    }

    /// Finds the strays anew, after a change of the account that is followed.
    fn change(&mut self) {
        while let Some(place) = self.strays.front() {
            self.unstray(*self.stray_residents.get(place));
        }
        let mut next = self.by_use.front();
        while let Some(node) = next {
            next = Queue::next(&self.residents, node);
            let key = &self.residents.get(node).key;
            let is_followed = match self.choice.followed() {
                LRU => return,
                S3FIFO => self.s3fifo.contains(key),
                _ => self.prefix.contains(key),
            };
            if !is_followed {
                self.stray(node);
            }
        }
    }

    /// The account that is followed gives up a block: what then is held beyond it is a stray.
    /// Returns whether there was a block to give up.
    fn evict_followed(&mut self) -> bool {
        let victim = match self.choice.followed() {
            S3FIFO => self.s3fifo.evict(),
            _ => self.prefix.evict(),
        };
        let Some((key, _)) = victim else { return false };
        if let Some(&node) = self.index.get(&key) {
            self.stray(node);
        }
        true
    }

    /// Keeps the accounts within the weight that is held.
    fn trim_accounts(&mut self) {
        let followed = self.choice.followed();
        while self.s3fifo.weight() > self.weight {
            if followed == S3FIFO {
                self.evict_followed();
            } else {
                self.s3fifo.evict();
            }
        }
        while self.prefix.weight() > self.weight {
            if followed == PREFIX {
                self.evict_followed();
            } else {
                self.prefix.evict();
            }
        }
    }
}

impl<K, S> Policy<K> for Chooser<K, S>
where
    K: Hash + Eq + Clone + Send,
    S: BuildHasher + Send,
{
    fn use_chain(&mut self, parent: Option<&K>, chain: &[(K, u64)]) {
        self.trim_accounts();
        let len = chain.len() as u32;
        let (mut held, mut by_s3fifo) = (len, len);
        for (at, (key, weight)) in (0..len).zip(chain).rev() {
            if self.use_one(key, *weight).is_none() {
                held = at;
            }
            if self.s3fifo.insert(key.clone(), *weight).is_none() {
                by_s3fifo = at;
            }
        }
        self.prefix.use_chain(parent, chain);
        let [by_prefix, by_age] = self.prefix.last_found();
        if self.choice.found(held, [by_age, by_s3fifo, by_prefix]) {
            self.change();
        }
    }

    fn insert(&mut self, key: K, weight: u64) -> Option<u64> {
        let held = self.index.get(&key);
        let before = held.map(|&node| self.residents.get(node).weight);
        self.use_chain(None, &[(key, weight)]);
        before
    }

    fn touch(&mut self, key: &K) -> bool {
        let held = self.index.get(key);
        let Some(weight) = held.map(|&node| self.residents.get(node).weight) else {
            return false;
        };
        self.use_chain(None, &[(key.clone(), weight)]);
        true
    }

    /// No account holds it any more, so it is a stray whichever is followed.
    fn demote(&mut self, key: &K) -> bool {
        let Some(&node) = self.index.get(key) else {
            return false;
        };
        self.s3fifo.remove(key);
        self.prefix.remove(key);
        self.by_use.unlink(&mut self.residents, node);
        self.by_use.push_front(&mut self.residents, node);
        if self.choice.followed() != LRU {
            self.unstray(node);
            let place = self.stray_residents.alloc(node);
            self.residents.get_mut(node).stray = Some(place);
            self.strays.push_front(&mut self.stray_residents, place);
        }
        true
    }

    fn remove(&mut self, key: &K) -> Option<u64> {
        self.s3fifo.remove(key);
        self.prefix.remove(key);
        let node = *self.index.get(key)?;
        Some(self.release(node).1)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        if self.choice.followed() == LRU {
            let node = self.by_use.front()?;
            return Some(self.release(node));
        }
        loop {
            if let Some(place) = self.strays.front() {
                let node = *self.stray_residents.get(place);
                return Some(self.release(node));
            }
            if !self.evict_followed() {
                return None;
            }
        }
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
