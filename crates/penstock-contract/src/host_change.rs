//! Changes of blocks in host memory, and their encoding in bytes, which goes from process to process.

use crate::{CHUNK_BYTES, Chunk, TENANT_BYTES, Tenant};

/// A change of a block in host memory: it came, whole, or it is no longer whole there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostChange {
    /// The group of layers, as registered.
    pub group: u16,
    /// The tenant whose block it is, if it is one's.
    pub tenant: Option<Tenant>,
    /// The content of the block.
    pub chunk: Chunk,
    /// Whether the block came. If not, it went.
    pub came: bool,
}

/// The bytes are no encoding of host changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an encoding of changes in host memory: {0} bytes")]
pub struct NotHostChanges(usize);

/// Bytes of one change: the group, marks, the tenant or zeros, the chunk.
const CHANGE_BYTES: usize = 2 + 1 + TENANT_BYTES + CHUNK_BYTES;
/// Set if the block came.
const CAME: u8 = 1;
/// Set if the block is a tenant's.
const OWNED: u8 = 2;

impl HostChange {
    /// The bytes from which [`decode`](Self::decode) makes the same changes. Two encodings, one
    /// behind the other, decode to the changes of both.
    pub fn encode(changes: &[Self]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(changes.len() * CHANGE_BYTES);
        for change in changes {
            bytes.extend_from_slice(&change.group.to_le_bytes());
            let owned = if change.tenant.is_some() { OWNED } else { 0 };
            bytes.push(owned | if change.came { CAME } else { 0 });
            bytes.extend(change.tenant.map_or([0; TENANT_BYTES], Tenant::to_bytes));
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
        let (&marks, rest) = rest.split_first()?;
        let (&tenant, chunk) = rest.split_first_chunk()?;
        let tenant = match marks & OWNED {
            0 if tenant == [0; TENANT_BYTES] => None,
            0 => return None,
            _ => Some(Tenant::from_bytes(tenant)),
        };
        (marks <= CAME | OWNED).then_some(Self {
            group: u16::from_le_bytes(*group),
            tenant,
            chunk: chunk.try_into().ok()?,
            came: marks & CAME != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change() -> impl Strategy<Value = HostChange> {
        let tenant = prop::option::of(any::<[u8; TENANT_BYTES]>().prop_map(Tenant::from_bytes));
        (any::<u16>(), tenant, any::<u8>(), any::<bool>()).prop_map(|(group, tenant, n, came)| {
            HostChange {
                group,
                tenant,
                chunk: [n; CHUNK_BYTES],
                came,
            }
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
        fn any_bytes_are_changes_or_an_error(bytes in prop::collection::vec(0..4_u8, 0..120)) {
            if let Ok(changes) = HostChange::decode(&bytes) {
                prop_assert_eq!(HostChange::encode(&changes), bytes);
            }
        }
    }
}
