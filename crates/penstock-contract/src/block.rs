//! Blocks: what jobs carry about each block, and its encoding in bytes, which goes from process to
//! process.

use crate::key::{CHUNK_BYTES, Chunk};

/// A block of a prompt, and where the serving engine has it or wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The group of layers, as registered.
    pub group: u16,
    /// The serving engine's block id. It means nothing for a prefetch.
    pub id: u64,
    /// The content of the block.
    pub chunk: Chunk,
    /// What comes before the block in its prompt. None for the first block of a prompt, or if that
    /// is not known. The host tier, and the stores that can, keep the beginnings of prompts longer
    /// than what follows.
    pub parent: Option<Parent>,
}

/// What comes before a block in its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The chunk that ends where the block begins.
    pub chunk: Chunk,
    /// Tokens of the prompt up to there.
    pub tokens: u64,
}

/// The bytes are no encoding of blocks, or only a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an encoding of blocks: {what} at byte {at}")]
pub struct NotBlocks {
    what: &'static str,
    at: usize,
}

/// How a block's parent is written: in the lowest bits of the block's first byte.
const PARENT: u8 = 0b11;
const NO_PARENT: u8 = 0;
/// The parent's chunk and its tokens follow.
const OWN_PARENT: u8 = 1;
/// The block before this one is the parent: only the tokens follow.
const FOLLOWS: u8 = 2;
/// Set if the group is not that of the block before.
const OTHER_GROUP: u8 = 0b100;

/// The fewest bytes that a block takes: the first byte, its id, its chunk.
const LEAST_BYTES: usize = 2 + CHUNK_BYTES;

impl Block {
    /// The bytes from which [`decode`](Self::decode) makes the same blocks. They are some 36 for
    /// each block if the blocks follow one another.
    pub fn encode(blocks: &[Self]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(blocks.len() * (LEAST_BYTES + 4));
        let mut before = Before::default();
        for block in blocks {
            let (parent, tokens) = match block.parent {
                None => (NO_PARENT, None),
                Some(Parent { chunk, tokens }) if before.chunk == Some(chunk) => {
                    (FOLLOWS, Some(tokens))
                }
                Some(Parent { tokens, .. }) => (OWN_PARENT, Some(tokens)),
            };
            let is_other = block.group != before.group;
            bytes.push(parent | if is_other { OTHER_GROUP } else { 0 });
            if is_other {
                bytes.extend_from_slice(&block.group.to_le_bytes());
            }
            write_step(&mut bytes, before.id, block.id);
            bytes.extend_from_slice(&block.chunk);
            if parent == OWN_PARENT {
                bytes.extend(block.parent.iter().flat_map(|parent| parent.chunk));
            }
            if let Some(tokens) = tokens {
                write_step(&mut bytes, before.tokens, tokens);
            }
            before = Before::from(block);
        }
        bytes
    }

    /// The blocks that were encoded. For any bytes, this ends, with blocks or with the error.
    pub fn decode(bytes: &[u8]) -> Result<Vec<Self>, NotBlocks> {
        let mut blocks = Vec::with_capacity(bytes.len() / LEAST_BYTES);
        let mut reader = Reader { bytes, at: 0 };
        let mut before = Before::default();
        while reader.at < bytes.len() {
            let [first] = reader.take()?;
            if first & !(PARENT | OTHER_GROUP) != 0 {
                return Err(reader.refuse("an unknown mark"));
            }
            let group = match first & OTHER_GROUP {
                0 => before.group,
                _ => u16::from_le_bytes(reader.take()?),
            };
            let id = reader.step(before.id)?;
            let chunk = reader.take()?;
            let parent = match first & PARENT {
                NO_PARENT => None,
                OWN_PARENT => Some(reader.take()?),
                FOLLOWS => match before.chunk {
                    Some(chunk) => Some(chunk),
                    None => return Err(reader.refuse("a block that follows none")),
                },
                _ => return Err(reader.refuse("an unknown parent")),
            };
            let parent = match parent {
                Some(chunk) => Some(Parent {
                    chunk,
                    tokens: reader.step(before.tokens)?,
                }),
                None => None,
            };
            let block = Self {
                group,
                id,
                chunk,
                parent,
            };
            before = Before::from(&block);
            blocks.push(block);
        }
        Ok(blocks)
    }
}

/// The values of the block before, against which the next block is written.
#[derive(Default)]
struct Before {
    group: u16,
    id: u64,
    chunk: Option<Chunk>,
    tokens: u64,
}

impl From<&Block> for Before {
    fn from(block: &Block) -> Self {
        Self {
            group: block.group,
            id: block.id,
            chunk: Some(block.chunk),
            tokens: block.parent.map_or(0, |parent| parent.tokens),
        }
    }
}

/// Writes how much a number differs from the one before, so that small steps take one byte: seven
/// bits in each byte, the lowest first, with the sign in the lowest bit.
fn write_step(bytes: &mut Vec<u8>, from: u64, to: u64) {
    let step = to.wrapping_sub(from) as i64;
    let mut left = (step.wrapping_shl(1) ^ (step >> 63)) as u64;
    while left >= 0x80 {
        bytes.push(left as u8 | 0x80);
        left >>= 7;
    }
    bytes.push(left as u8);
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn refuse(&self, what: &'static str) -> NotBlocks {
        NotBlocks { what, at: self.at }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], NotBlocks> {
        let rest = &self.bytes[self.at..];
        let Some(&taken) = rest.first_chunk() else {
            return Err(self.refuse("the end"));
        };
        self.at += N;
        Ok(taken)
    }

    fn step(&mut self, from: u64) -> Result<u64, NotBlocks> {
        let mut folded = 0_u64;
        for shift in (0..).step_by(7) {
            let [byte] = self.take()?;
            let bits = u64::from(byte & 0x7f);
            if shift > 63 || bits << shift >> shift != bits {
                return Err(self.refuse("a number beyond 64 bits"));
            }
            folded |= bits << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let step = (folded >> 1) ^ (folded & 1).wrapping_neg();
        Ok(from.wrapping_add(step))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Only a few chunks, so that some blocks follow others.
    fn chunk() -> impl Strategy<Value = Chunk> {
        (0..4_u8).prop_map(|n| [n; CHUNK_BYTES])
    }

    fn parent() -> impl Strategy<Value = Parent> {
        (chunk(), any::<u64>()).prop_map(|(chunk, tokens)| Parent { chunk, tokens })
    }

    fn block() -> impl Strategy<Value = Block> {
        let ids = prop_oneof![0..100_u64, any::<u64>()];
        let group = prop_oneof![0..2_u16, any::<u16>()];
        (group, ids, chunk(), prop::option::of(parent())).prop_map(|(group, id, chunk, parent)| {
            Block {
                group,
                id,
                chunk,
                parent,
            }
        })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(blocks in prop::collection::vec(block(), 0..20)) {
            prop_assert_eq!(Block::decode(&Block::encode(&blocks)), Ok(blocks));
        }

        #[test]
        fn of_a_part_the_whole_blocks_are_decoded_or_none(
            blocks in prop::collection::vec(block(), 1..6), cut in any::<prop::sample::Index>()
        ) {
            let bytes = Block::encode(&blocks);
            if let Ok(found) = Block::decode(&bytes[..cut.index(bytes.len())]) {
                prop_assert!(found.len() < blocks.len());
                prop_assert_eq!(&found[..], &blocks[..found.len()]);
            }
        }

        #[test]
        fn any_bytes_are_blocks_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(blocks) = Block::decode(&bytes) {
                prop_assert_eq!(Block::decode(&Block::encode(&blocks)), Ok(blocks));
            }
        }

        #[test]
        fn damage_is_other_blocks_or_an_error(
            blocks in prop::collection::vec(block(), 1..6),
            at in any::<prop::sample::Index>(),
            bit in 0..8_u8,
        ) {
            let mut bytes = Block::encode(&blocks);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_ne!(Block::decode(&bytes), Ok(blocks));
        }
    }

    #[test]
    fn blocks_of_a_prompt_take_little_more_than_their_hashes() {
        let chunk = |n: u64| {
            let mut chunk = [0xab; CHUNK_BYTES];
            chunk[..8].copy_from_slice(&n.to_le_bytes());
            chunk
        };
        let blocks: Vec<Block> = (0..8192)
            .map(|n| Block {
                group: 3,
                id: 40_000 + n,
                chunk: chunk(n),
                parent: n.checked_sub(1).map(|before| Parent {
                    chunk: chunk(before),
                    tokens: 16 * n,
                }),
            })
            .collect();
        let bytes = Block::encode(&blocks);
        assert!(bytes.len() < 8192 * 36, "{} bytes", bytes.len());
    }
}
