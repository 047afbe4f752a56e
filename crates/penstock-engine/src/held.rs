//! Which blocks host memory has: the blocks with all the objects that this engine keeps of them.

use std::collections::HashMap;

use penstock_contract::{Chunk, HostChange, Tenant};

/// Counts the objects in host memory of each block that has any there.
#[derive(Default)]
pub(crate) struct HeldBlocks {
    objects: HashMap<(u16, Option<Tenant>, Chunk), usize>,
}

impl HeldBlocks {
    /// Forgets all blocks of a group: they have other names now.
    pub(crate) fn forget(&mut self, group: u16) {
        self.objects.retain(|&(other, ..), _| other != group);
    }

    /// Notes that an object of a block came or went. `whole` is the number of the block's objects.
    /// Returns the change if it is one of the whole block.
    pub(crate) fn note(&mut self, change: HostChange, whole: usize) -> Option<HostChange> {
        let HostChange {
            group,
            tenant,
            chunk,
            came,
        } = change;
        let place = (group, tenant, chunk);
        let before = self.objects.get(&place).copied().unwrap_or(0);
        let after = if came {
            before + 1
        } else {
            before.saturating_sub(1)
        };
        if after == 0 {
            self.objects.remove(&place);
        } else {
            self.objects.insert(place, after);
        }
        ((before == whole) != (after == whole)).then_some(change)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use penstock_contract::{CHUNK_BYTES, TENANT_BYTES};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_block_is_there_while_all_its_objects_are(
            whole in 1..5_usize, picks in prop::collection::vec((0..4_u8, 0..5_usize), 0..200)
        ) {
            let mut held = HeldBlocks::default();
            let mut objects = std::collections::HashSet::new();
            let mut there = std::collections::HashSet::new();
            for (block, object) in picks {
                let object = (block, object % whole);
                let came = objects.insert(object) || !objects.remove(&object);
                // Of four blocks, two are of the same content, for two tenants.
                let change = HostChange {
                    group: 7,
                    tenant: (block > 0).then_some(Tenant::from_bytes([block; TENANT_BYTES])),
                    chunk: [block.min(2); CHUNK_BYTES],
                    came,
                };
                if let Some(noted) = held.note(change, whole) {
                    prop_assert_eq!(noted, change);
                    let is_news = if came {
                        there.insert(block)
                    } else {
                        there.remove(&block)
                    };
                    prop_assert!(is_news);
                }
                let all = |block: &u8| objects.iter().filter(|(b, _)| b == block).count() == whole;
                prop_assert!((0..4).all(|block| there.contains(&block) == all(&block)));
            }
        }
    }
}
