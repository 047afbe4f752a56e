//! For blocks of prompts: blocks that are likely to be used again soon stay, and starts of prompts
//! stay longer than their ends.

mod age;
mod candidates;
mod chains;
mod lead;
mod node;
mod using;
mod worth;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use self::age::BUCKETS;
use self::candidates::Candidates;
use self::chains::Chains;
use self::lead::{Found, Lead};
use self::node::{Above, Node};
use self::using::Use;
use self::worth::{Counts, cell, class};
use crate::Policy;
use crate::queue::{Queue, Slab};

/// Names remembered for each entry held, if nothing else is asked for.
const GHOSTS: usize = 64;
/// Names remembered at least: a tiny cache has much to learn.
const MIN_GHOSTS: usize = 4096;
/// A block that is followed by so many different blocks is a shared start. What follows it does not
/// continue a conversation.
const FORKS: u32 = 2;
/// Blocks used between two estimates, once enough blocks have been used.
const ESTIMATE_EVERY: u64 = 4096;

/// Gives up the blocks that promise the fewest uses for the room and time that they take. No block
/// goes before the blocks that follow it.
///
/// The policy learns while it works what a block promises: it counts how long after a use the next
/// one came, by class. The class says how many turns the block's conversation has had, and how long
/// the wait for the last turn was. See `worth.rs` for the index, and decision 15 for what was
/// tried.
///
/// It keeps account of two caches of the same weight: one goes by worth, the other is least
/// recently used. It follows the cache that has found more, and gives up what that cache does not
/// hold. It begins with least recently used, and leaves it on evidence only.
///
/// For each entry that it holds, it remembers up to 64 names that it no longer holds, with some two
/// hundred bytes each. That is little beside a block of KV, but too much for small values: for
/// these, let it [`remember`](Self::remembering) fewer.
pub struct Prefix<K, S = RandomState> {
    index: HashMap<K, u32, S>,
    nodes: Slab<Node<K>>,
    /// All nodes by last use, the latest last. Among the nodes of one prompt, the start is last.
    by_use: Queue,
    chains: Chains,
    counts: Counts,
    clock: u64,
    estimate_at: u64,
    serial: u64,

    ghosts: usize,
    held: usize,
    weight: u64,
    /// The strays: nodes that are held, are not in the cache that is followed, and have no held
    /// node after them.
    strays: Queue,
    stray_nodes: Slab<u32>,
    lead: Lead,

    /// The cache that goes by worth.
    candidates: Candidates,
    worthy_weight: u64,
    /// The cache that is least recently used: all nodes of `by_use` from this one on, but for those
    /// that were demoted.
    recent_from: Option<u32>,
    recent_weight: u64,

    /// Nodes of `by_use` before this one are remembered only while they are held.
    forget_from: Option<u32>,
    /// The nodes of a chain while it is used. Kept to reuse the memory.
    known: Vec<Option<u32>>,
    used: Vec<u32>,
    /// How much of the last chain was found.
    found: Found,
}

impl<K> Prefix<K> {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty policy that remembers up to so many names for each entry that it holds. With fewer
    /// names, it learns less about long waits.
    pub fn remembering(names: usize) -> Self {
        Self {
            ghosts: names,
            ..Self::default()
        }
    }
}

impl<K, S: Default> Default for Prefix<K, S> {
    fn default() -> Self {
        let mut policy = Self {
            index: HashMap::default(),
            nodes: Slab::new(),
            by_use: Queue::new(),
            chains: Chains::new(),
            counts: Counts::new(),
            clock: 0,
            estimate_at: 0,
            serial: 0,
            ghosts: GHOSTS,
            held: 0,
            weight: 0,
            strays: Queue::new(),
            stray_nodes: Slab::new(),
            lead: Lead::new(),
            candidates: Candidates::new(),
            worthy_weight: 0,
            recent_from: None,
            recent_weight: 0,
            forget_from: None,
            known: Vec::new(),
            used: Vec::new(),
            found: Found::default(),
        };
        policy.candidates.rank(&policy.counts.estimate());
        policy
    }
}

impl<K, S> Prefix<K, S> {
    /// How many blocks of the last chain were held in a row from its start, and how many a cache
    /// would have held that is always least recently used.
    pub(crate) fn last_found(&self) -> [u32; 2] {
        [self.found.held, self.found.by_age]
    }

    /// Makes a worthy node a candidate, if no node after it is worthy.
    fn enter(&mut self, node: u32, as_oldest: bool) {
        let entry = self.nodes.get_mut(node);
        let chain = self.chains.get_mut(entry.chain);
        let place = (class(entry.uses, entry.wait), chain.bucket);
        let mates = &mut chain.candidates;
        entry.candidate = Some(self.candidates.enter(node, place, mates, as_oldest));
    }

    fn leave(&mut self, node: u32) {
        let entry = self.nodes.get_mut(node);
        if let Some(candidate) = entry.candidate.take() {
            let chain = self.chains.get_mut(entry.chain);
            let mates = &mut chain.candidates;
            self.candidates.leave(candidate, chain.bucket, mates);
        }
    }

    /// Notes a node that is held as a stray, if it is one.
    fn stray(&mut self, node: u32) {
        let entry = self.nodes.get_mut(node);
        let is_followed = if self.lead.is_by_worth() {
            entry.worthy
        } else {
            entry.recent
        };
        if entry.held && !is_followed && entry.held_children == 0 && entry.stray.is_none() {
            let place = self.stray_nodes.alloc(node);
            entry.stray = Some(place);
            if entry.demoted {
                self.strays.push_front(&mut self.stray_nodes, place);
            } else {
                self.strays.push_back(&mut self.stray_nodes, place);
            }
        }
    }

    fn unstray(&mut self, node: u32) {
        if let Some(place) = self.nodes.get_mut(node).stray.take() {
            self.strays.unlink(&mut self.stray_nodes, place);
            self.stray_nodes.free(place);
        }
    }

    /// Finds the strays anew, after a change of the cache that is followed.
    fn change_lead(&mut self) {
        while let Some(place) = self.strays.front() {
            self.unstray(*self.stray_nodes.get(place));
        }
        let mut next = self.by_use.front();
        while let Some(node) = next {
            next = Queue::next(&self.nodes, node);
            self.stray(node);
        }
    }

    /// The block before a node, if it is known.
    fn parent(&self, node: u32) -> Option<u32> {
        let above = self.nodes.get(node).parent?;
        let known = self.nodes.find(above.node)?;
        (known.serial == above.serial).then_some(above.node)
    }

    fn above(&self, node: u32) -> Above {
        let serial = self.nodes.get(node).serial;
        Above { node, serial }
    }

    /// Moves chains that have grown older to the buckets where they belong.
    fn advance(&mut self) {
        for bucket in (0..BUCKETS - 1).rev() {
            while let Some(number) = self.chains.grow_older(bucket, self.clock) {
                let chain = self.chains.get(number);
                for (class, &members) in chain.members.iter().enumerate() {
                    if members > 0 {
                        let cell = cell(class, bucket + 1);
                        self.counts.reached(cell, chain.share, members);
                    }
                }
                self.candidates.grow_older(&chain.candidates, bucket + 1);
            }
        }
        if self.clock >= self.estimate_at {
            self.estimate_at = self.clock + ESTIMATE_EVERY.min(self.clock / 4 + 64);
            self.candidates.rank(&self.counts.estimate());
        }
        if self.chains.is_sparse(self.by_use.len()) {
            self.squeeze();
        }
    }

    fn squeeze(&mut self) {
        let mut number = self.chains.squeeze();
        let mut next = self.by_use.front();
        let mut before = next.map_or(0, |node| self.nodes.get(node).chain);
        while let Some(node) = next {
            let chain = &mut self.nodes.get_mut(node).chain;
            number += u64::from(*chain != before);
            before = std::mem::replace(chain, number);
            next = Queue::next(&self.nodes, node);
        }
    }

    /// Takes a node out of the order of uses.
    fn unqueue(&mut self, node: u32) {
        for from in [&mut self.recent_from, &mut self.forget_from] {
            if *from == Some(node) {
                *from = Queue::next(&self.nodes, node);
            }
        }
        self.by_use.unlink(&mut self.nodes, node);
    }

    /// Lets go of a node that is held; returns its weight.
    fn let_go(&mut self, node: u32) -> u64 {
        self.unstray(node);
        let entry = self.nodes.get_mut(node);
        entry.held = false;
        let weight = entry.weight;
        self.weight -= weight;
        self.held -= 1;
        if let Some(parent) = self.parent(node) {
            let above = self.nodes.get_mut(parent);
            above.held_children -= 1;
            self.stray(parent);
        }
        weight
    }

    /// The cache that goes by worth gives up a node.
    fn evict_by_worth(&mut self) -> Option<u32> {
        let node = self.candidates.first()?;
        self.make_unworthy(node);
        Some(node)
    }

    /// Takes a node out of the cache that goes by worth.
    fn make_unworthy(&mut self, node: u32) {
        self.leave(node);
        let entry = self.nodes.get_mut(node);
        entry.worthy = false;
        self.worthy_weight -= entry.weight;
        if let Some(parent) = self.parent(node) {
            let above = self.nodes.get_mut(parent);
            above.worthy_children -= 1;
            if above.worthy && above.worthy_children == 0 {
                self.enter(parent, true);
            }
        }
    }

    /// The cache that is least recently used gives up a node.
    fn evict_by_age(&mut self) -> Option<u32> {
        let node = self.recent_from?;
        self.recent_from = Queue::next(&self.nodes, node);
        self.make_old(node);
        Some(node)
    }

    /// Takes a node out of the cache that is least recently used, if it is there.
    fn make_old(&mut self, node: u32) {
        let entry = self.nodes.get_mut(node);
        if std::mem::take(&mut entry.recent) {
            self.recent_weight -= entry.weight;
        }
    }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Prefix<K, S> {
    fn find(&self, key: &K) -> Option<u32> {
        self.index.get(key).copied()
    }

    /// Keeps both caches, of which there are only accounts, within the weight that is held.
    fn trim_accounts(&mut self) {
        while self.recent_weight > self.weight
            && let Some(node) = self.evict_by_age()
        {
            if !self.lead.is_by_worth() {
                self.stray(node);
            }
        }
        while self.worthy_weight > self.weight
            && let Some(node) = self.evict_by_worth()
        {
            if self.lead.is_by_worth() {
                self.stray(node);
            }
            self.forget_if_overdue(node);
        }
    }

    /// Forgets the oldest names, until only as many are left as are to be remembered.
    fn trim(&mut self) {
        let bound = self.held + (self.held * self.ghosts).max(MIN_GHOSTS);
        while self.by_use.len() > bound {
            let Some(node) = self.forget_from else { return };
            if self.nodes.get(node).recent {
                return;
            }
            self.forget_from = Queue::next(&self.nodes, node);
            self.nodes.get_mut(node).overdue = true;
            self.forget_if_overdue(node);
        }
    }

    fn forget_if_overdue(&mut self, node: u32) {
        let entry = self.nodes.get(node);
        if !entry.overdue || entry.held || entry.worthy {
            return;
        }
        self.chains.part(entry.chain, class(entry.uses, entry.wait));
        self.unqueue(node);
        if let Some(parent) = self.parent(node) {
            self.nodes.get_mut(parent).children -= 1;
        }
        let entry = self.nodes.free(node);
        self.index.remove(&entry.key);
    }

    /// Compares how much of a chain was found with how much the two other caches would have found.
    fn judge(&mut self) {
        let known = &self.known;
        let in_row = |is_in: &dyn Fn(&Node<K>) -> bool| {
            let is_in = |node: &&Option<u32>| node.is_some_and(|node| is_in(self.nodes.get(node)));
            known.iter().take_while(is_in).count() as u32
        };
        let found = Found {
            held: in_row(&|node| node.held),
            by_worth: in_row(&|node| node.worthy),
            by_age: in_row(&|node| node.recent),
        };
        if self.lead.found(&found) {
            self.change_lead();
        }
        self.found = found;
    }
}

impl<K, S> Policy<K> for Prefix<K, S>
where
    K: Hash + Eq + Clone + Send,
    S: BuildHasher + Send,
{
    fn use_chain(&mut self, parent: Option<&K>, chain: &[(K, u64)]) {
        if chain.is_empty() {
            return;
        }
        self.trim_accounts();
        self.advance();
        let mut known = std::mem::take(&mut self.known);
        known.clear();
        known.extend(chain.iter().map(|(key, _)| self.find(key)));
        self.known = known;
        self.judge();
        let known = std::mem::take(&mut self.known);
        let mut above = parent.and_then(|key| self.find(key));
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let share = 1.0 / chain.len() as f32;
        let mut at = Use {
            chain: self.chains.begin(self.clock, share),
            share,
            uses: 0,
            wait: None,
        };
        self.clock += chain.len() as u64;
        self.used.clear();
        for ((key, weight), &known) in chain.iter().zip(&known) {
            // A block that was not known may be known by now: a key may come twice.
            let known = known.or_else(|| self.find(key));
            if at.uses == 0 && known.is_none() {
                // A block that continues a conversation is as likely to be continued as the block
                // before it was.
                let branch = above.map(|above| self.nodes.get(above));
                let continued = branch.filter(|branch| branch.children < FORKS);
                at.uses = continued.map_or(1, |branch| branch.uses);
                at.wait = continued.and_then(|branch| branch.wait);
            }
            above = Some(self.use_one(known, (key, *weight), above, at));
        }
        self.known = known;
        let used = std::mem::take(&mut self.used);
        for &node in used.iter().rev() {
            self.by_use.push_back(&mut self.nodes, node);
            self.recent_from.get_or_insert(node);
            self.forget_from.get_or_insert(node);
            let entry = self.nodes.get(node);
            if entry.worthy_children == 0 && entry.candidate.is_none() {
                self.enter(node, false);
            }
        }
        self.used = used;
        self.trim();
    }

    fn insert(&mut self, key: K, weight: u64) -> Option<u64> {
        let held = self.find(&key).map(|node| self.nodes.get(node));
        let before = held.filter(|entry| entry.held).map(|entry| entry.weight);
        self.use_chain(None, &[(key, weight)]);
        before
    }

    fn touch(&mut self, key: &K) -> bool {
        let held = self.find(key).map(|node| self.nodes.get(node));
        let Some(weight) = held.filter(|entry| entry.held).map(|entry| entry.weight) else {
            return false;
        };
        self.use_chain(None, &[(key.clone(), weight)]);
        true
    }

    /// A block goes only after those that follow it, also if it is demoted and they are not.
    fn demote(&mut self, key: &K) -> bool {
        let node = self.find(key).filter(|&node| self.nodes.get(node).held);
        if let Some(node) = node {
            if self.nodes.get(node).worthy {
                self.make_unworthy(node);
            }
            self.make_old(node);
            self.nodes.get_mut(node).demoted = true;
            self.unstray(node);
            self.stray(node);
        }
        node.is_some()
    }

    fn remove(&mut self, key: &K) -> Option<u64> {
        let node = self.find(key)?;
        let is_held = self.nodes.get(node).held;
        let weight = is_held.then(|| self.let_go(node))?;
        self.forget_if_overdue(node);
        Some(weight)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        loop {
            if let Some(place) = self.strays.front() {
                let node = *self.stray_nodes.get(place);
                let key = self.nodes.get(node).key.clone();
                let weight = self.let_go(node);
                self.forget_if_overdue(node);
                return Some((key, weight));
            }
            let node = if self.lead.is_by_worth() {
                self.evict_by_worth()?
            } else {
                self.evict_by_age()?
            };
            self.stray(node);
            self.forget_if_overdue(node);
        }
    }

    fn contains(&self, key: &K) -> bool {
        self.find(key).is_some_and(|node| self.nodes.get(node).held)
    }

    fn len(&self) -> usize {
        self.held
    }

    fn weight(&self) -> u64 {
        self.weight
    }
}
