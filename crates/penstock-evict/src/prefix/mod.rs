//! For blocks of prompts: what is likely to be used again soon stays, starts before their ends.

mod age;
mod shadow;
mod worth;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use self::age::BUCKETS;
use self::shadow::Shadow;
use self::worth::{CELLS, Counts, cell};
use crate::Policy;
use crate::queue::{Queue, Slab};

/// Names remembered for each entry held.
const GHOSTS: usize = 64;
/// Names remembered at least: a tiny cache has much to learn.
const MIN_GHOSTS: usize = 4096;
/// A block followed by so many different ones is a shared start; what follows it is no
/// conversation that goes on.
const FORKS: u32 = 2;
/// Blocks used between two estimates, once there have been enough of them.
const ESTIMATE_EVERY: u64 = 4096;

/// A block before another: where it is, and that it is still that block.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Above {
    node: u32,
    serial: u64,
}

struct Node<K> {
    key: K,
    weight: u64,
    /// Told apart from earlier users of the same place.
    serial: u64,
    parent: Option<Above>,
    /// Blocks before this one in its prompt; a parent's is lower, so there are no cycles.
    depth: u32,
    held_children: u32,
    /// Different blocks known to follow this one.
    children: u32,
    /// Uses, and those of the conversation that this block continued.
    uses: u32,
    /// The clock and the chain at the last use.
    used_at: u64,
    chain: u64,
    bucket: u8,
    /// Its share of a chain in the counts.
    share: f32,
    held: bool,
    /// Its place among the candidates, if it is held and no block after it is.
    leaf: Option<u32>,
}

impl<K> Node<K> {
    fn cell(&self) -> usize {
        cell(worth::class(self.uses), usize::from(self.bucket))
    }
}

/// Gives up blocks that promise the fewest uses for the room and time that they take, and none
/// before the blocks that follow it.
///
/// What a block promises is learned while it works, from how long after a use the next came, by
/// class: how many turns its conversation has had. See `worth.rs` for the index, and decision 15
/// for what was tried. Where least recently used would have found more, it does as that does, for a
/// while.
///
/// Remembers up to 64 names that it no longer holds for each that it does, with some hundred bytes
/// each: little beside a block of KV, too much for small values.
pub struct Prefix<K, S = RandomState> {
    index: HashMap<K, u32, S>,
    nodes: Slab<Node<K>>,
    /// All nodes by age, held and ghosts.
    ages: [Vec<Queue>; 2],
    leaves: Slab<u32>,
    cells: Vec<Queue>,
    /// Cells from the least worth; the place of each in that order; which have candidates.
    order: Vec<usize>,
    places: Vec<usize>,
    filled: Vec<u64>,
    by_age: bool,
    counts: Counts,
    shadow: Shadow,
    clock: u64,
    estimate_at: u64,
    serial: u64,
    weight: u64,
    held: usize,
    ghosts: usize,
    /// The nodes of a chain while it is used; kept for its room.
    known: Vec<Option<u32>>,
}

impl<K> Prefix<K> {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<K, S: Default> Default for Prefix<K, S> {
    fn default() -> Self {
        let queues = || (0..BUCKETS).map(|_| Queue::new()).collect();
        let mut policy = Self {
            index: HashMap::default(),
            nodes: Slab::new(),
            ages: [queues(), queues()],
            leaves: Slab::new(),
            cells: (0..CELLS).map(|_| Queue::new()).collect(),
            order: Vec::new(),
            places: vec![0; CELLS],
            filled: vec![0; CELLS.div_ceil(64)],
            by_age: false,
            counts: Counts::new(),
            shadow: Shadow::new(),
            clock: 0,
            estimate_at: 0,
            serial: 0,
            weight: 0,
            held: 0,
            ghosts: 0,
            known: Vec::new(),
        };
        policy.rank();
        policy
    }
}

impl<K, S> Prefix<K, S> {
    /// Orders the cells anew.
    fn rank(&mut self) {
        let estimated = self.counts.estimate();
        self.by_age = self.shadow.is_better();
        let worth = if self.by_age {
            worth::by_age()
        } else {
            estimated
        };
        self.order = (0..CELLS).collect();
        // Of cells that are worth the same the older goes first, then the class used less.
        self.order.sort_by(|&a, &b| {
            let older = (b % BUCKETS).cmp(&(a % BUCKETS));
            worth[a].total_cmp(&worth[b]).then(older).then(a.cmp(&b))
        });
        self.filled.fill(0);
        for (place, &cell) in self.order.iter().enumerate() {
            self.places[cell] = place;
            if self.cells[cell].len() > 0 {
                self.filled[place / 64] |= 1 << (place % 64);
            }
        }
    }

    /// Makes a held node without held blocks after it a candidate.
    fn enter(&mut self, node: u32, as_oldest: bool) {
        let cell = self.nodes.get(node).cell();
        let leaf = self.leaves.alloc(node);
        self.nodes.get_mut(node).leaf = Some(leaf);
        if as_oldest {
            self.cells[cell].push_front(&mut self.leaves, leaf);
        } else {
            self.cells[cell].push_back(&mut self.leaves, leaf);
        }
        let place = self.places[cell];
        self.filled[place / 64] |= 1 << (place % 64);
    }

    /// The opposite; returns whether it was a candidate.
    fn leave(&mut self, node: u32) -> bool {
        let Some(leaf) = self.nodes.get_mut(node).leaf.take() else {
            return false;
        };
        let cell = self.nodes.get(node).cell();
        self.cells[cell].unlink(&mut self.leaves, leaf);
        self.leaves.free(leaf);
        if self.cells[cell].len() == 0 {
            let place = self.places[cell];
            self.filled[place / 64] &= !(1 << (place % 64));
        }
        true
    }

    /// The block before a node, if it is known.
    fn parent(&self, node: u32) -> Option<u32> {
        let above = self.nodes.get(node).parent?;
        let known = self.nodes.find(above.node)?;
        (known.serial == above.serial).then_some(above.node)
    }

    /// Moves what has grown older to where it belongs.
    fn advance(&mut self) {
        for ghosts in [0, 1] {
            for bucket in (0..BUCKETS - 1).rev() {
                while let Some(node) = self.ages[ghosts][bucket].front() {
                    if self.clock - self.nodes.get(node).used_at < age::start(bucket + 1) {
                        break;
                    }
                    self.ages[ghosts][bucket].unlink(&mut self.nodes, node);
                    let is_leaf = self.leave(node);
                    let entry = self.nodes.get_mut(node);
                    entry.bucket += 1;
                    self.counts.reached(entry.cell(), entry.share);
                    self.ages[ghosts][bucket + 1].push_back(&mut self.nodes, node);
                    if is_leaf {
                        self.enter(node, false);
                    }
                }
            }
        }
        if self.clock >= self.estimate_at {
            self.estimate_at = self.clock + ESTIMATE_EVERY.min(self.clock / 4 + 64);
            self.rank();
        }
    }

    /// Takes a node out of its queue of ages.
    fn unqueue(&mut self, node: u32) {
        let entry = self.nodes.get(node);
        let (ghost, bucket) = (usize::from(!entry.held), usize::from(entry.bucket));
        self.ages[ghost][bucket].unlink(&mut self.nodes, node);
    }

    /// A held node becomes one that is only remembered; returns its weight.
    fn let_go(&mut self, node: u32) -> u64 {
        self.leave(node);
        self.unqueue(node);
        let entry = self.nodes.get_mut(node);
        entry.held = false;
        let (bucket, weight) = (usize::from(entry.bucket), entry.weight);
        self.ages[1][bucket].push_back(&mut self.nodes, node);
        self.weight -= weight;
        self.held -= 1;
        self.ghosts += 1;
        self.lose_child(node);
        weight
    }

    /// Tells a node's parent that it is no longer held; a candidate again, if it was the last.
    fn lose_child(&mut self, node: u32) {
        let Some(parent) = self.parent(node) else {
            return;
        };
        let above = self.nodes.get_mut(parent);
        above.held_children -= 1;
        if above.held && above.held_children == 0 {
            self.enter(parent, true);
        }
    }

    /// Tells a node's parent that it is held.
    fn gain_child(&mut self, node: u32) {
        if let Some(parent) = self.parent(node) {
            self.nodes.get_mut(parent).held_children += 1;
            self.leave(parent);
        }
    }

    fn above(&self, node: u32) -> Above {
        let serial = self.nodes.get(node).serial;
        Above { node, serial }
    }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Prefix<K, S> {
    fn find(&self, key: &K) -> Option<u32> {
        self.index.get(key).copied()
    }

    /// Forgets the oldest ghosts beyond what is to be remembered.
    fn trim(&mut self) {
        while self.ghosts > (self.held * GHOSTS).max(MIN_GHOSTS) {
            let oldest = self.ages[1].iter().rev().find_map(Queue::front);
            let Some(node) = oldest else { return };
            self.unqueue(node);
            if let Some(parent) = self.parent(node) {
                self.nodes.get_mut(parent).children -= 1;
            }
            let entry = self.nodes.free(node);
            self.index.remove(&entry.key);
            self.ghosts -= 1;
        }
    }

    /// One block of a chain is used: held from now on. `known` is its node, if there is one.
    fn use_one(
        &mut self,
        known: Option<u32>,
        (key, weight): (&K, u64),
        above: Option<u32>,
        at: Use,
    ) -> u32 {
        let node = known.unwrap_or_else(|| {
            self.serial += 1;
            let node = self.nodes.alloc(Node {
                key: key.clone(),
                weight,
                serial: self.serial,
                parent: above.map(|above| self.above(above)),
                depth: above.map_or(0, |above| self.nodes.get(above).depth.saturating_add(1)),
                held_children: 0,
                children: 0,
                uses: at.uses,
                used_at: 0,
                chain: 0,
                bucket: 0,
                share: 0.0,
                held: false,
                leaf: None,
            });
            self.index.insert(key.clone(), node);
            if let Some(above) = above {
                self.nodes.get_mut(above).children += 1;
            }
            node
        });
        if known.is_some() {
            let entry = self.nodes.get(node);
            self.counts.used(entry.cell(), entry.share);
            let before = (entry.chain, entry.weight);
            self.shadow.moved(Some(before), weight);
            self.leave(node);
            self.unqueue(node);
            self.ghosts -= usize::from(!self.nodes.get(node).held);
            self.adopt(node, above);
            let entry = self.nodes.get_mut(node);
            entry.uses = entry.uses.saturating_add(1);
        } else {
            self.shadow.moved(None, weight);
        }
        let entry = self.nodes.get_mut(node);
        if entry.held {
            self.weight -= entry.weight;
        } else {
            entry.held = true;
            self.held += 1;
            self.gain_child(node);
        }
        self.weight += weight;
        let entry = self.nodes.get_mut(node);
        entry.weight = weight;
        (entry.used_at, entry.chain) = (at.clock, at.chain);
        (entry.bucket, entry.share) = (0, at.share);
        let is_leaf = entry.held_children == 0;
        self.counts.reached(entry.cell(), entry.share);
        self.ages[0][0].push_back(&mut self.nodes, node);
        if is_leaf {
            self.enter(node, false);
        }
        node
    }

    /// Hangs a known node under the block that now came before it, if that is another one: the
    /// one it knew was forgotten and came back, or the caller left it out.
    fn adopt(&mut self, node: u32, above: Option<u32>) {
        let Some(above) = above else { return };
        let found = self.above(above);
        let (parent, is_deeper) = {
            let entry = self.nodes.get(node);
            (entry.parent, entry.depth > self.nodes.get(above).depth)
        };
        if parent == Some(found) || !is_deeper {
            return;
        }
        let held = self.nodes.get(node).held;
        if held {
            self.lose_child(node);
        }
        if let Some(parent) = self.parent(node) {
            self.nodes.get_mut(parent).children -= 1;
        }
        self.nodes.get_mut(node).parent = Some(found);
        self.nodes.get_mut(above).children += 1;
        if held {
            self.gain_child(node);
        }
    }
}

/// What the blocks of a chain have in common.
#[derive(Clone, Copy)]
struct Use {
    clock: u64,
    chain: u64,
    share: f32,
    /// What blocks not known before start with; 0 until there is one.
    uses: u32,
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
        self.shadow.trim(self.weight);
        self.advance();
        let mut known = std::mem::take(&mut self.known);
        known.clear();
        known.extend(chain.iter().map(|(key, _)| self.find(key)));
        let in_row = |is_held: &dyn Fn(&Node<K>) -> bool| {
            let held = |node: &Option<u32>| node.is_some_and(|node| is_held(self.nodes.get(node)));
            known.iter().take_while(|node| held(node)).count() as u64
        };
        let by_policy = in_row(&|node| node.held);
        let by_shadow = in_row(&|node| self.shadow.holds(node.chain));
        self.shadow.found(by_policy, by_shadow);
        let mut above = parent.and_then(|key| self.find(key));
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let mut at = Use {
            clock: self.clock,
            chain: self.shadow.begin(),
            share: 1.0 / chain.len() as f32,
            uses: 0,
        };
        self.clock += chain.len() as u64;
        for ((key, weight), &known) in chain.iter().zip(&known) {
            // What was not known may be by now: a key may come twice.
            let known = known.or_else(|| self.find(key));
            if at.uses == 0 && known.is_none() {
                // What continues a conversation is as likely to be continued as that was.
                let branch = above.map(|above| self.nodes.get(above));
                let continued = branch.filter(|branch| branch.children < FORKS);
                at.uses = continued.map_or(1, |branch| branch.uses);
            }
            above = Some(self.use_one(known, (key, *weight), above, at));
        }
        self.known = known;
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

    fn remove(&mut self, key: &K) -> Option<u64> {
        let node = self.find(key)?;
        let is_held = self.nodes.get(node).held;
        let weight = is_held.then(|| self.let_go(node))?;
        self.trim();
        Some(weight)
    }

    fn evict(&mut self) -> Option<(K, u64)> {
        let (word, bits) = (0..).zip(&self.filled).find(|(_, bits)| **bits != 0)?;
        let first = word * 64 + bits.trailing_zeros() as usize;
        let oldest = |place: usize| {
            let leaf = self.cells[self.order[place]].front()?;
            let node = *self.leaves.get(leaf);
            Some((self.nodes.get(node).used_at, place, node))
        };
        // By age, the classes' cells of one bucket follow one another in the order.
        let same_worth = if self.by_age { worth::CLASSES } else { 1 };
        let last = (first / same_worth + 1) * same_worth;
        let (_, _, node) = (first..last).filter_map(oldest).min()?;
        let key = self.nodes.get(node).key.clone();
        let weight = self.let_go(node);
        self.trim();
        Some((key, weight))
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
