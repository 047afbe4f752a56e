//! What the use of a block changes: its class, its place in its conversation, and which caches hold
//! it.

use std::hash::{BuildHasher, Hash};

use super::Prefix;
use super::node::Node;
use super::worth::{cell, class};

/// What the blocks of a chain have in common.
#[derive(Clone, Copy)]
pub(super) struct Use {
    pub(super) chain: u64,
    pub(super) share: f32,
    /// The uses and the wait that unknown blocks start with. The uses are 0 until there is such a
    /// block.
    pub(super) uses: u32,
    pub(super) wait: Option<u8>,
}

impl<K: Hash + Eq + Clone, S: BuildHasher> Prefix<K, S> {
    /// Notes the use of one block of a chain: it is held from now on. `known` is its node, if there
    /// is one.
    pub(super) fn use_one(
        &mut self,
        known: Option<u32>,
        (key, weight): (&K, u64),
        above: Option<u32>,
        at: Use,
    ) -> u32 {
        let node = match known {
            Some(node) => {
                if self.nodes.get(node).chain == at.chain {
                    self.set_weight(node, weight);
                    return node;
                }
                let wait = self.leave_chain(node);
                self.adopt(node, above);
                self.set_weight(node, weight);
                let entry = self.nodes.get_mut(node);
                entry.wait = Some(wait);
                entry.uses = entry.uses.saturating_add(1);
                node
            }
            None => self.meet((key, weight), above, at),
        };
        let parent = self.parent(node);
        let entry = self.nodes.get_mut(node);
        let (held, worthy, recent) = (entry.held, entry.worthy, entry.recent);
        (entry.held, entry.worthy, entry.recent) = (true, true, true);
        (entry.demoted, entry.overdue) = (false, false);
        entry.chain = at.chain;
        let class = class(entry.uses, entry.wait);
        self.chains.join(at.chain, class);
        self.counts.reached(cell(class, 0), at.share, 1);
        if !recent {
            self.recent_weight += weight;
        }
        if !held {
            self.held += 1;
            self.weight += weight;
            if let Some(parent) = parent {
                self.nodes.get_mut(parent).held_children += 1;
                self.unstray(parent);
            }
        }
        if !worthy {
            self.worthy_weight += weight;
            if let Some(parent) = parent {
                self.nodes.get_mut(parent).worthy_children += 1;
                self.leave(parent);
            }
        }
        self.used.push(node);
        node
    }

    /// Takes in a block that is not known.
    fn meet(&mut self, (key, weight): (&K, u64), above: Option<u32>, at: Use) -> u32 {
        self.serial += 1;
        let node = self.nodes.alloc(Node {
            key: key.clone(),
            weight,
            serial: self.serial,
            parent: above.map(|above| self.above(above)),
            depth: above.map_or(0, |above| self.nodes.get(above).depth.saturating_add(1)),
            children: 0,
            held_children: 0,
            worthy_children: 0,
            uses: at.uses,
            wait: at.wait,
            chain: 0,
            held: false,
            worthy: false,
            recent: false,
            demoted: false,
            overdue: false,
            candidate: None,
            stray: None,
        });
        self.index.insert(key.clone(), node);
        if let Some(above) = above {
            self.nodes.get_mut(above).children += 1;
        }
        node
    }

    /// Takes a known node out of its chain, since a new chain uses it. Returns the age bucket that
    /// it had reached.
    fn leave_chain(&mut self, node: u32) -> u8 {
        let entry = self.nodes.get(node);
        let class = class(entry.uses, entry.wait);
        let chain = self.chains.get(entry.chain);
        let bucket = chain.bucket;
        self.counts.used(cell(class, bucket), chain.share);
        self.chains.part(entry.chain, class);
        self.leave(node);
        self.unstray(node);
        self.unqueue(node);
        bucket as u8
    }

    fn set_weight(&mut self, node: u32, weight: u64) {
        let entry = self.nodes.get_mut(node);
        let before = std::mem::replace(&mut entry.weight, weight);
        for (is_in, sum) in [
            (entry.held, &mut self.weight),
            (entry.worthy, &mut self.worthy_weight),
            (entry.recent, &mut self.recent_weight),
        ] {
            if is_in {
                *sum = *sum - before + weight;
            }
        }
    }

    /// Hangs a known node under the block that came before it now, if that is another block: the
    /// old one was forgotten and came back, or the caller left it out.
    fn adopt(&mut self, node: u32, above: Option<u32>) {
        let Some(above) = above else { return };
        let found = self.above(above);
        let entry = self.nodes.get(node);
        let is_deeper = entry.depth > self.nodes.get(above).depth;
        if entry.parent == Some(found) || !is_deeper {
            return;
        }
        let (held, worthy) = (entry.held, entry.worthy);
        if let Some(parent) = self.parent(node) {
            let entry = self.nodes.get_mut(parent);
            entry.children -= 1;
            entry.held_children -= u32::from(held);
            entry.worthy_children -= u32::from(worthy);
            if held {
                self.stray(parent);
            }
            let entry = self.nodes.get(parent);
            if worthy && entry.worthy && entry.worthy_children == 0 {
                self.enter(parent, true);
            }
        }
        self.nodes.get_mut(node).parent = Some(found);
        let entry = self.nodes.get_mut(above);
        entry.children += 1;
        entry.held_children += u32::from(held);
        entry.worthy_children += u32::from(worthy);
        if held {
            self.unstray(above);
        }
        if worthy {
            self.leave(above);
        }
    }
}
