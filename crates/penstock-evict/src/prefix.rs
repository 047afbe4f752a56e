//! research version
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use crate::Policy;
use crate::queue::{Queue, Slab};

const BUCKETS: usize = 56;
/// research
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Tuning {
    pub ghosts: usize,
    pub heats: usize,
    pub lengths: usize,
    pub gaps: usize,
    pub fanout: u32,
    pub shrink: f64,
    pub decay: f64,
    pub every: u64,
    pub prior: f64,
    pub young: bool,
    pub horizon: f64,
    pub strength: f64,
    pub smooth: f64,
    pub per_chain: f64,
}
impl Default for Tuning {
    fn default() -> Self {
        Self { ghosts: 16, heats: 8, lengths: 1, gaps: 1, fanout: 4, shrink: 50.0, decay: 0.99, every: 4096, prior: 0.02, young: true, horizon: 1e30, strength: 4.0, smooth: 0.0, per_chain: 0.0 }
    }
}

struct Node<K> {
    key: K,
    weight: u64,
    parent: u32,
    parent_gen: u32,
    generation: u32,
    held_children: u32,
    children: u32,
    heat: u32,
    last: u64,
    gap: u8,
    class: u16,
    bucket: u8,
    held: bool,
    leaf: u32,
    w: f32,
}
const NIL: u32 = u32::MAX;

/// research
pub struct Prefix<K, S = RandomState> {
    t: Tuning,
    index: HashMap<K, u32, S>,
    nodes: Slab<Node<K>>,
    ages: [Vec<Queue>; 2],
    leaves: Slab<u32>,
    cells: Vec<Queue>,
    rank: Vec<f64>,
    order: Vec<u32>,
    place: Vec<u32>,
    full: Vec<u64>,
    hits: Vec<f64>,
    reached: Vec<f64>,
    clock: u64,
    next_rank: u64,
    generation: u32,
    weight: u64,
    held: usize,
    ghosts: usize,
}

fn bucket(age: u64) -> usize {
    if age < 64 { return 0; }
    let l = 63 - age.leading_zeros() as usize;
    let half = (age >> (l - 1)) & 1;
    ((l - 6) * 2 + half as usize + 1).min(BUCKETS - 1)
}
fn bound(b: usize) -> u64 {
    // lower age bound of bucket b
    if b == 0 { return 0; }
    let l = (b - 1) / 2 + 6;
    let half = ((b - 1) % 2) as u64;
    (1u64 << l) + half * (1u64 << (l - 1))
}

impl<K, S: Default> Prefix<K, S> {
    /// research
    pub fn with(t: Tuning) -> Self {
        let classes = t.heats * t.lengths * t.gaps;
        let cells = classes * BUCKETS;
        let mut s = Self {
            t, index: HashMap::default(), nodes: Slab::new(),
            ages: [(0..BUCKETS).map(|_| Queue::new()).collect(), (0..BUCKETS).map(|_| Queue::new()).collect()],
            leaves: Slab::new(), cells: (0..cells).map(|_| Queue::new()).collect(),
            rank: vec![0.0; cells], order: vec![], place: vec![0; cells], full: vec![0; cells.div_ceil(64)],
            hits: vec![0.0; cells], reached: vec![0.0; cells], clock: 0, next_rank: 64, generation: 0, weight: 0, held: 0, ghosts: 0,
        };
        s.rerank();
        s
    }
    fn rerank(&mut self) {
        let classes = self.t.heats * self.t.lengths * self.t.gaps;
        let mut pooled = [0.0f64; BUCKETS];
        for b in 0..BUCKETS {
            let (mut h, mut r) = (0.0, 0.0);
            for c in 0..classes { h += self.hits[c * BUCKETS + b]; r += self.reached[c * BUCKETS + b]; }
            pooled[b] = (h + self.t.prior * self.t.strength) / (r + self.t.strength);
        }
        for c in 0..classes {
            let mut hz = [0.0f64; BUCKETS];
            for b in 0..BUCKETS {
                let i = c * BUCKETS + b;
                hz[b] = ((self.hits[i] + self.t.shrink * pooled[b]) / (self.reached[i] + self.t.shrink)).min(1.0);
            }
            if self.t.smooth > 0.0 { let o = hz; for b in 0..BUCKETS { let l = o[b.saturating_sub(1)]; let r = o[(b + 1).min(BUCKETS - 1)]; hz[b] = (o[b] + self.t.smooth * (l + r)) / (1.0 + 2.0 * self.t.smooth); } }
            for b in 0..BUCKETS {
                let (mut alive, mut gain, mut time, mut best) = (1.0, 0.0, 0.0, 0.0f64);
                for j in b..BUCKETS {
                    if j > b && bound(j) as f64 - bound(b) as f64 > self.t.horizon * (bound(b) as f64 + 64.0) { break; }
                    let width = if j + 1 < BUCKETS { (bound(j + 1) - bound(j)) as f64 } else { 1e15 };
                    gain += alive * hz[j];
                    time += alive * width * (1.0 - hz[j] / 2.0);
                    alive *= 1.0 - hz[j];
                    best = best.max(gain / time);
                }
                self.rank[c * BUCKETS + b] = best;
            }
        }
        let cells = self.cells.len();
        self.order = (0..cells as u32).collect();
        let rank = &self.rank;
        self.order.sort_by(|&a, &b| rank[a as usize].total_cmp(&rank[b as usize]).then(b.cmp(&a)));
        self.full.fill(0);
        for (p, &c) in self.order.iter().enumerate() {
            self.place[c as usize] = p as u32;
            if self.cells[c as usize].len() > 0 { self.full[p / 64] |= 1 << (p % 64); }
        }
        for v in &mut self.hits { *v *= self.t.decay; }
        for v in &mut self.reached { *v *= self.t.decay; }
    }
}
impl<K, S: Default> Default for Prefix<K, S> {
    fn default() -> Self { Self::with(Tuning::default()) }
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Prefix<K, S> where S: Default {
    fn cell(&self, n: u32) -> usize { let x = self.nodes.get(n); x.class as usize * BUCKETS + x.bucket as usize }
    fn queue_leaf(&mut self, n: u32, front: bool) {
        let cell = self.cell(n);
        let leaf = self.leaves.alloc(n);
        self.nodes.get_mut(n).leaf = leaf;
        if front { self.cells[cell].push_front(&mut self.leaves, leaf) } else { self.cells[cell].push_back(&mut self.leaves, leaf) }
        let p = self.place[cell] as usize;
        self.full[p / 64] |= 1 << (p % 64);
    }
    fn unqueue_leaf(&mut self, n: u32) {
        let leaf = std::mem::replace(&mut self.nodes.get_mut(n).leaf, NIL);
        if leaf == NIL { return; }
        let cell = self.cell(n);
        self.cells[cell].unlink(&mut self.leaves, leaf);
        self.leaves.free(leaf);
        if self.cells[cell].len() == 0 { let p = self.place[cell] as usize; self.full[p / 64] &= !(1 << (p % 64)); }
    }
    fn parent(&self, n: u32) -> Option<u32> {
        let x = self.nodes.get(n);
        (x.parent != NIL && self.nodes.is_live(x.parent) && self.nodes.get(x.parent).generation == x.parent_gen).then_some(x.parent)
    }
    fn advance(&mut self) {
        for g in 0..2 { for b in (0..BUCKETS - 1).rev() {
            while let Some(n) = self.ages[g][b].front() {
                if self.clock - self.nodes.get(n).last < bound(b + 1) { break; }
                self.ages[g][b].unlink(&mut self.nodes, n);
                let leaf = self.nodes.get(n).leaf != NIL;
                if leaf { self.unqueue_leaf(n); }
                let x = self.nodes.get_mut(n);
                x.bucket = (b + 1) as u8;
                self.reached[x.class as usize * BUCKETS + b + 1] += f64::from(x.w);
                self.ages[g][b + 1].push_back(&mut self.nodes, n);
                if leaf { self.queue_leaf(n, false); }
            }
        } }
        if self.clock >= self.next_rank {
            self.next_rank = self.clock + self.t.every.min(self.clock / 4 + 64);
            self.rerank();
        }
    }
    fn trim(&mut self) {
        while self.ghosts > (self.held * self.t.ghosts).max(1024) {
            let Some(n) = self.ages[1].iter().rev().find_map(|q| q.front()) else { return };
            self.drop_node(n);
        }
    }
    fn drop_node(&mut self, n: u32) {
        let b = self.nodes.get(n).bucket as usize;
        let held = self.nodes.get(n).held;
        self.ages[usize::from(!held)][b].unlink(&mut self.nodes, n);
        if let Some(p) = self.parent(n) { self.nodes.get_mut(p).children -= 1; }
        let x = self.nodes.free(n);
        self.index.remove(&x.key);
        if !held { self.ghosts -= 1; }
    }
    fn let_go(&mut self, n: u32, front: bool) -> u64 {
        // held -> ghost
        self.unqueue_leaf(n);
        let x = self.nodes.get_mut(n);
        x.held = false;
        let (b, w) = (x.bucket as usize, x.weight);
        self.ages[0][b].unlink(&mut self.nodes, n);
        self.ages[1][b].push_back(&mut self.nodes, n);
        self.weight -= w; self.held -= 1; self.ghosts += 1;
        if let Some(p) = self.parent(n) {
            let x = self.nodes.get_mut(p);
            x.held_children -= 1;
            if x.held && x.held_children == 0 { self.queue_leaf(p, front); }
        }
        w
    }
    fn class(&self, heat: u32, length: usize, gap: u8) -> u16 {
        let h = match heat { 0 | 1 => 0, 2 => 1, 3 => 2, 4 => 3, 5 | 6 => 4, 7..=9 => 5, 10..=16 => 6, _ => 7 }.min(self.t.heats - 1);
        let l = ((usize::BITS - length.leading_zeros()) as usize).saturating_sub(2).min(self.t.lengths - 1);
        let g = (gap as usize).min(self.t.gaps - 1);
        ((h * self.t.lengths + l) * self.t.gaps + g) as u16
    }
}

impl<K: Hash + Eq + Clone + Send, S: BuildHasher + Send + Default> Policy<K> for Prefix<K, S> {
    fn use_chain(&mut self, parent: Option<&K>, chain: &[(K, u64)]) {
        self.advance();
        let now = self.clock;
        self.clock += chain.len() as u64;
        let mut above = parent.and_then(|k| self.index.get(k).copied());
        let mut fresh_heat = None;
        for (key, weight) in chain {
            let n = match self.index.get(key).copied() {
                Some(n) => {
                    let x = self.nodes.get(n);
                    let (b, held) = (x.bucket as usize, x.held);
                    let leaf = x.leaf != NIL;
                    let c = self.cell(n);
                    self.hits[c] += f64::from(self.nodes.get(n).w);
                    if leaf { self.unqueue_leaf(n); }
                    self.ages[usize::from(!held)][b].unlink(&mut self.nodes, n);
                    let x = self.nodes.get_mut(n);
                    x.heat += 1;
                    x.gap = 1 + (b as u8) / 4;
                    if !held { self.ghosts -= 1; self.held += 1; self.weight += *weight; x.held = true; x.weight = *weight;
                        let p = self.parent(n);
                        if let Some(p) = p { self.nodes.get_mut(p).held_children += 1; let _ = self.unq(p); }
                    }
                    n
                }
                None => {
                    let heat = *fresh_heat.get_or_insert_with(|| above.map_or(1, |p| { let p = self.nodes.get(p); if p.children < self.t.fanout { p.heat } else { 1 } }));
                    self.generation = self.generation.wrapping_add(1);
                    let gap = above.map_or(0, |p| if heat > 1 { self.nodes.get(p).gap } else { 0 });
                    let n = self.nodes.alloc(Node { key: key.clone(), weight: *weight, parent: above.unwrap_or(NIL), parent_gen: above.map_or(0, |p| self.nodes.get(p).generation),
                        generation: self.generation, held_children: 0, children: 0, heat, last: now, gap, class: 0, bucket: 0, held: true, leaf: NIL, w: 0.0 });
                    self.index.insert(key.clone(), n);
                    self.weight += *weight; self.held += 1;
                    if let Some(p) = above { let x = self.nodes.get_mut(p); x.children += 1; x.held_children += 1; let _ = self.unq(p); }
                    n
                }
            };
            let x = self.nodes.get(n);
            let class = self.class(x.heat, chain.len(), x.gap);
            let x = self.nodes.get_mut(n);
            x.class = class; x.last = now; x.bucket = 0; let w = (1.0 / (chain.len() as f64)).powf(self.t.per_chain) as f32; x.w = w;
            let leaf = x.held_children == 0;
            self.reached[class as usize * BUCKETS] += f64::from(w);
            self.ages[0][0].push_back(&mut self.nodes, n);
            if leaf { self.queue_leaf(n, false); }
            above = Some(n);
        }
        self.trim();
    }
    fn insert(&mut self, key: K, weight: u64) -> Option<u64> { let b = self.index.get(&key).map(|&n| self.nodes.get(n).weight); self.use_chain(None, &[(key, weight)]); b }
    fn touch(&mut self, key: &K) -> bool { let _ = key; false }
    fn remove(&mut self, key: &K) -> Option<u64> { let _ = key; None }
    fn evict(&mut self) -> Option<(K, u64)> {
        let (w, bits) = self.full.iter().enumerate().find(|(_, bits)| **bits != 0)?;
        let p = w * 64 + bits.trailing_zeros() as usize;
        let cell = self.order[p] as usize;
        let b = cell % BUCKETS;
        let young = self.t.young && b + 1 < BUCKETS && self.rank[cell + 1] > self.rank[cell];
        let leaf = if young { self.cells[cell].back() } else { self.cells[cell].front() }.expect("full");
        let n = *self.leaves.get(leaf);
        let key = self.nodes.get(n).key.clone();
        let w = self.let_go(n, !young);
        self.trim();
        Some((key, w))
    }
    fn contains(&self, key: &K) -> bool { self.index.get(key).is_some_and(|&n| self.nodes.get(n).held) }
    fn len(&self) -> usize { self.held }
    fn weight(&self) -> u64 { self.weight }
}
impl<K: Hash + Eq + Clone, S: BuildHasher + Default> Prefix<K, S> {
    fn unq(&mut self, n: u32) -> bool { if self.nodes.get(n).leaf != NIL { self.unqueue_leaf(n); true } else { false } }
}
