//! The blocks that may go, by their worth.

use super::age::BUCKETS;
use super::worth::{CELLS, cell};
use crate::queue::{Queue, Slab};

struct Candidate {
    node: u32,
    class: usize,
    /// The candidate's place among the candidates of its chain.
    mate: u32,
}

/// Candidates by class and age. The cells are in the order of their worth.
pub(super) struct Candidates {
    all: Slab<Candidate>,
    mates: Slab<u32>,
    cells: Vec<Queue>,
    /// The cells from the least worth; the place of each cell in that order; which places have
    /// candidates.
    order: Vec<usize>,
    places: Vec<usize>,
    filled: Vec<u64>,
}

impl Candidates {
    pub(super) fn new() -> Self {
        Self {
            all: Slab::new(),
            mates: Slab::new(),
            cells: (0..CELLS).map(|_| Queue::new()).collect(),
            order: (0..CELLS).collect(),
            places: (0..CELLS).collect(),
            filled: vec![0; CELLS.div_ceil(64)],
        }
    }

    /// Orders the cells by what they are worth now.
    pub(super) fn rank(&mut self, worth: &[f64]) {
        // Among cells of the same worth, the older one goes first, then the class with fewer uses.
        // As bits, worths (never below 0) are in the order of their values.
        let keys = worth.iter().enumerate();
        let mut keys: Vec<(u64, usize, usize)> = keys
            .map(|(cell, worth)| (worth.to_bits(), BUCKETS - cell % BUCKETS, cell))
            .collect();
        keys.sort_unstable();
        self.order.clear();
        self.order.extend(keys.iter().map(|&(_, _, cell)| cell));
        self.filled.fill(0);
        for (place, &cell) in self.order.iter().enumerate() {
            self.places[cell] = place;
            if self.cells[cell].len() > 0 {
                self.filled[place / 64] |= 1 << (place % 64);
            }
        }
    }

    fn push(&mut self, candidate: u32, cell: usize, as_oldest: bool) {
        if as_oldest {
            self.cells[cell].push_front(&mut self.all, candidate);
        } else {
            self.cells[cell].push_back(&mut self.all, candidate);
        }
        let place = self.places[cell];
        self.filled[place / 64] |= 1 << (place % 64);
    }

    fn pull(&mut self, candidate: u32, cell: usize) {
        self.cells[cell].unlink(&mut self.all, candidate);
        if self.cells[cell].len() == 0 {
            let place = self.places[cell];
            self.filled[place / 64] &= !(1 << (place % 64));
        }
    }

    /// Takes in a block of a chain. `mates` are the candidates of that chain. Returns the block's
    /// place.
    pub(super) fn enter(
        &mut self,
        node: u32,
        (class, bucket): (usize, usize),
        mates: &mut Queue,
        as_oldest: bool,
    ) -> u32 {
        let candidate = self.all.alloc(Candidate {
            node,
            class,
            mate: 0,
        });
        let mate = self.mates.alloc(candidate);
        mates.push_back(&mut self.mates, mate);
        self.all.get_mut(candidate).mate = mate;
        self.push(candidate, cell(class, bucket), as_oldest);
        candidate
    }

    /// Takes out the block at a place.
    pub(super) fn leave(&mut self, candidate: u32, bucket: usize, mates: &mut Queue) {
        let class = self.all.get(candidate).class;
        self.pull(candidate, cell(class, bucket));
        let mate = self.all.free(candidate).mate;
        mates.unlink(&mut self.mates, mate);
        self.mates.free(mate);
    }

    /// Moves a chain's candidates from the bucket before into this one.
    pub(super) fn grow_older(&mut self, mates: &Queue, bucket: usize) {
        let mut next = mates.front();
        while let Some(mate) = next {
            next = Queue::next(&self.mates, mate);
            let candidate = *self.mates.get(mate);
            let class = self.all.get(candidate).class;
            self.pull(candidate, cell(class, bucket - 1));
            self.push(candidate, cell(class, bucket), false);
        }
    }

    /// The block that is worth least.
    pub(super) fn first(&self) -> Option<u32> {
        let (word, bits) = (0..).zip(&self.filled).find(|(_, bits)| **bits != 0)?;
        let place = word * 64 + bits.trailing_zeros() as usize;
        let candidate = self.cells[self.order[place]].front()?;
        Some(self.all.get(candidate).node)
    }
}
