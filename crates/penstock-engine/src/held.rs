//! Which blocks host memory has: the blocks with all the objects that this engine keeps of them.

use std::collections::HashMap;

use penstock_store::{CHUNK_BYTES, Key, Namespace};

use crate::Chunk;

/// A change of a block in host memory: it came, whole, or it is no longer whole there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostChange {
    /// The group of layers, as registered.
    pub group: u16,
    /// The content of the block.
    pub chunk: Chunk,
    /// Whether the block came. If not, it went.
    pub came: bool,
}

/// The bytes are no encoding of host changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an encoding of changes in host memory: {0} bytes")]
pub struct NotHostChanges(usize);

/// Bytes of one change: the group, whether the block came, the chunk.
const CHANGE_BYTES: usize = 2 + 1 + CHUNK_BYTES;

impl HostChange {
    /// The bytes from which [`decode`](Self::decode) makes the same changes. Two encodings, one
    /// behind the other, decode to the changes of both.
    pub fn encode(changes: &[Self]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(changes.len() * CHANGE_BYTES);
        for change in changes {
            bytes.extend_from_slice(&change.group.to_le_bytes());
            bytes.push(change.came.into());
            bytes.extend_from_slice(&change.chunk);
        }
        bytes
    }

    /// The changes that were encoded, in order.
    pub fn decode(bytes: &[u8]) -> Result<Vec<Self>, NotHostChanges> {
        let (changes, rest) = bytes.as_chunks::<CHANGE_BYTES>();
        let changes: Option<Vec<Self>> = changes.iter().map(Self::decode_one).collect();
        changes
            .filter(|_| rest.is_empty())
            .ok_or(NotHostChanges(bytes.len()))
    }

    fn decode_one(bytes: &[u8; CHANGE_BYTES]) -> Option<Self> {
        let (group, rest) = bytes.split_first_chunk()?;
        let (&came, chunk) = rest.split_first()?;
        Some(Self {
            group: u16::from_le_bytes(*group),
            chunk: chunk.try_into().ok()?,
            came: match came {
                0 => false,
                1 => true,
                _ => return None,
            },
        })
    }
}

/// Counts what host memory has of each block.
///
/// A block may be there more than once, in namespaces of several tenants: if they gave their
/// requests the same salt. It counts as there while it is whole in one of them.
#[derive(Default)]
pub(crate) struct HeldBlocks {
    /// The objects of each block that is there in part.
    parts: HashMap<(Namespace, Chunk), usize>,
    /// The namespaces in which a block is whole.
    whole: HashMap<(u16, Chunk), usize>,
}

impl HeldBlocks {
    /// Notes that an object of a group's block came or went. `whole` is the number of the block's
    /// objects. Returns the change that this makes for the block, if any.
    pub(crate) fn note(
        &mut self,
        group: u16,
        object: &Key,
        came: bool,
        whole: usize,
    ) -> Option<HostChange> {
        let chunk = object.chunk;
        let part = (object.namespace, chunk);
        let times = self.whole.get(&(group, chunk)).copied().unwrap_or(0);
        let before = match self.parts.remove(&part) {
            Some(objects) => objects,
            None if came || times == 0 => 0,
            None => whole,
        };
        let after = if came {
            before + 1
        } else {
            before.saturating_sub(1)
        };
        if (1..whole).contains(&after) {
            self.parts.insert(part, after);
        }
        if (before == whole) == (after == whole) {
            return None;
        }
        let times_after = if came {
            times + 1
        } else {
            times.saturating_sub(1)
        };
        if times_after == 0 {
            self.whole.remove(&(group, chunk));
        } else {
            self.whole.insert((group, chunk), times_after);
        }
        let is_change = (times == 0) != (times_after == 0);
        is_change.then_some(HostChange { group, chunk, came })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use penstock_layout::Span;
    use proptest::prelude::*;

    use super::*;

    fn change() -> impl Strategy<Value = HostChange> {
        (any::<u16>(), any::<u8>(), any::<bool>()).prop_map(|(group, n, came)| HostChange {
            group,
            chunk: [n; CHUNK_BYTES],
            came,
        })
    }

    proptest! {
        #[test]
        fn two_encodings_in_a_row_are_the_encoding_of_both(
            first in prop::collection::vec(change(), 0..9),
            second in prop::collection::vec(change(), 0..9),
        ) {
            let both = [&first[..], &second].concat();
            let bytes = [HostChange::encode(&first), HostChange::encode(&second)].concat();
            prop_assert_eq!(&bytes, &HostChange::encode(&both));
            prop_assert_eq!(HostChange::decode(&bytes), Ok(both));
        }

        #[test]
        fn any_bytes_are_changes_or_an_error(bytes in prop::collection::vec(0..3_u8, 0..120)) {
            if let Ok(changes) = HostChange::decode(&bytes) {
                prop_assert_eq!(HostChange::encode(&changes), bytes);
            }
        }

        #[test]
        fn a_block_is_there_while_one_owner_has_all_its_objects(
            whole in 1..5_usize,
            picks in prop::collection::vec((0..3_u8, 0..2_u8, 0..5_usize), 0..200),
        ) {
            let mut held = HeldBlocks::default();
            let mut objects = std::collections::HashSet::new();
            let mut there = std::collections::HashSet::new();
            for (block, owner, object) in picks {
                let object = (block, owner, object % whole);
                let came = objects.insert(object) || !objects.remove(&object);
                let key = Key {
                    namespace: Namespace([owner; 16]),
                    chunk: [block; CHUNK_BYTES],
                    span: Span::new(0..1, 0..1).unwrap(),
                };
                if let Some(change) = held.note(7, &key, came, whole) {
                    prop_assert_eq!((change.group, change.came), (7, came));
                    let is_news = if came {
                        there.insert(block)
                    } else {
                        there.remove(&block)
                    };
                    prop_assert!(is_news);
                }
                let has_all = |block, owner| {
                    let own = |object: &&(u8, u8, usize)| (object.0, object.1) == (block, owner);
                    objects.iter().filter(own).count() == whole
                };
                let is_there = |block| (0..2).any(|owner| has_all(block, owner));
                prop_assert!((0..3).all(|block| there.contains(&block) == is_there(block)));
            }
        }
    }
}
