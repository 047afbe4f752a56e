//! The blocks in an engine's own cache, as its events tell of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::finder::{Variant, reach};
use crate::hashing::Prefix;

/// A block as events name it: its group, and the last eight bytes of its hash.
type Name = (u32, u64);

/// The blocks that one engine has. Remembers no more blocks than it is made for.
pub struct OwnCache {
    /// How often the engine has the block: vLLM keeps equal blocks apart, and tells of each.
    blocks: HashMap<Name, u32>,
    /// Tokens of a group's blocks.
    sizes: HashMap<u32, u64>,
    most: usize,
    is_short: bool,
}

impl OwnCache {
    /// A view of an engine of which nothing is known, with room for so many blocks.
    pub fn new(most: usize) -> Self {
        Self {
            blocks: HashMap::new(),
            sizes: HashMap::new(),
            most,
            is_short: false,
        }
    }

    /// The engine has blocks of a group, each of so many tokens.
    pub fn stored(&mut self, group: u32, block_tokens: u64, hashes: &[u64]) {
        if self.sizes.len() < MOST_GROUPS || self.sizes.contains_key(&group) {
            self.sizes.insert(group, block_tokens);
        }
        for &hash in hashes {
            let has_room = self.blocks.len() < self.most;
            match self.blocks.entry((group, hash)) {
                Entry::Occupied(mut held) => *held.get_mut() = held.get().saturating_add(1),
                Entry::Vacant(place) if has_room => {
                    place.insert(1);
                }
                Entry::Vacant(_) => self.is_short = true,
            }
        }
    }

    /// The engine has blocks of a group no more.
    pub fn removed(&mut self, group: u32, hashes: &[u64]) {
        for &hash in hashes {
            if let Entry::Occupied(mut held) = self.blocks.entry((group, hash)) {
                match *held.get() {
                    1 => drop(held.remove()),
                    _ => *held.get_mut() -= 1,
                }
            }
        }
    }

    /// The engine has nothing, or nothing is known of it.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.is_short = false;
    }

    /// Blocks that are known.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether the engine told of more blocks than there is room for.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// The tokens that the engine finds in its own cache; None if its blocks are of other sizes than
    /// this variant's. `groups` has vLLM's number of each of the variant's groups.
    pub fn tokens(&self, variant: &Variant, groups: &[u32], prefix: &Prefix) -> Option<u64> {
        let is_its = |(group, number): (&penstock_catalogue::Group, &u32)| {
            let told = self.sizes.get(number);
            told.is_none_or(|&tokens| tokens == group.block_tokens)
        };
        if groups.len() != variant.groups().count()
            || !variant.groups().iter().zip(groups).all(is_its)
        {
            return None;
        }
        Some(reach(variant, prefix, 0, |position, chunks| {
            chunks.iter().position(|chunk| {
                let name = (groups[position], prefix.told(chunk));
                !self.blocks.contains_key(&name)
            })
        }))
    }
}

/// Groups of layers that a model may have here. vLLM's models have a handful.
const MOST_GROUPS: usize = 1024;
