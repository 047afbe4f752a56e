//! vLLM's block hashes: each holds the tokens of its block and the hash of the block before.

use penstock_contract::CHUNK_BYTES;
use ring::digest::{SHA256, digest};
use twox_hash::XxHash3_128;

use crate::serial::{self, ExtraKey, MOST_EXTRA_BYTES, MOST_TOKENS};

/// How vLLM hashes a block: `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256 of a pickle, vLLM's default.
    Sha256,
    /// SHA-256 of CBOR.
    Sha256Cbor,
    /// XXH3 (128 bits) of a pickle.
    Xxhash,
    /// XXH3 (128 bits) of CBOR.
    XxhashCbor,
}

impl Algorithm {
    /// Every algorithm that is known, by vLLM's name.
    pub const ALL: [(&str, Self); 4] = [
        ("sha256", Self::Sha256),
        ("sha256_cbor", Self::Sha256Cbor),
        ("xxhash", Self::Xxhash),
        ("xxhash_cbor", Self::XxhashCbor),
    ];

    /// The algorithm that vLLM calls so.
    ///
    /// # Errors
    /// It is not known.
    pub fn named(name: &str) -> Result<Self, HashError> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found
            .map(|&(_, algorithm)| algorithm)
            .ok_or_else(|| HashError::Algorithm(name.to_owned()))
    }

    /// Bytes of a hash.
    pub fn hash_bytes(self) -> usize {
        match self {
            Self::Sha256 | Self::Sha256Cbor => 32,
            Self::Xxhash | Self::XxhashCbor => 16,
        }
    }
}

/// Why nothing was hashed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HashError {
    /// No such algorithm.
    #[error(
        "blocks are hashed with {0:?}, which is not known here: sha256, sha256_cbor, xxhash and \
         xxhash_cbor are"
    )]
    Algorithm(String),
    /// The hash that starts every chain has the wrong length.
    #[error("the hash that starts every chain has {0} bytes, not {1}")]
    Seed(usize, usize),
    /// A block is too long.
    #[error("a block hash is over 1 to {MOST_TOKENS} tokens, not {0}")]
    BlockTokens(usize),
    /// A token's number is too high.
    #[error("token {0} is not one: the highest is 2147483647")]
    Token(u32),
    /// Extra keys are too long.
    #[error("cache salt and LoRA names may have {MOST_EXTRA_BYTES} bytes together, not {0}")]
    Extra(usize),
}

/// What goes into hashes beside tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra<'a> {
    /// The LoRA adapter, in every block: its name, its path, and the digest of its content.
    pub lora: &'a [&'a str],
    /// The cache salt, in the first block.
    pub salt: Option<&'a str>,
}

/// A prompt's block hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The hash of each full block. A shorter hash is followed by zeros.
    pub hashes: Vec<[u8; CHUNK_BYTES]>,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Bytes of a hash.
    pub hash_bytes: usize,
}

impl Prefix {
    /// The number that stands for one of the hashes in vLLM's events: its last eight bytes.
    pub fn told(&self, hash: &[u8; CHUNK_BYTES]) -> u64 {
        told(&hash[..self.hash_bytes])
    }
}

/// The number that stands for a hash in vLLM's events: its last eight bytes, or all it has.
pub fn told(hash: &[u8]) -> u64 {
    let last = &hash[hash.len().saturating_sub(8)..];
    last.iter()
        .fold(0, |number, &byte| (number << 8) | u64::from(byte))
}

/// Hashes blocks as the engines of one model do.
#[derive(Clone, Debug)]
pub struct Hasher {
    algorithm: Algorithm,
    seed: Vec<u8>,
    block_tokens: usize,
}

impl Hasher {
    /// `seed` is the hash that starts every chain (vLLM's `NONE_HASH`); `block_tokens` is the
    /// number of tokens that each hash adds.
    ///
    /// # Errors
    /// The seed has another length than the algorithm's hashes, or the blocks are too long.
    pub fn new(algorithm: Algorithm, seed: &[u8], block_tokens: usize) -> Result<Self, HashError> {
        if seed.len() != algorithm.hash_bytes() {
            return Err(HashError::Seed(seed.len(), algorithm.hash_bytes()));
        }
        if !(1..=MOST_TOKENS).contains(&block_tokens) {
            return Err(HashError::BlockTokens(block_tokens));
        }
        Ok(Self {
            algorithm,
            seed: seed.to_vec(),
            block_tokens,
        })
    }

    /// The hashes of all full blocks of a prompt.
    ///
    /// # Errors
    /// A token is none, or the extra keys are too long.
    pub fn prefix(&self, tokens: &[u32], extra: Extra<'_>) -> Result<Prefix, HashError> {
        if let Some(&token) = tokens.iter().find(|&&token| token > i32::MAX as u32) {
            return Err(HashError::Token(token));
        }
        let mut keys: Vec<ExtraKey<'_>> = Vec::new();
        if !extra.lora.is_empty() {
            keys.push([&["lora"], extra.lora].concat());
        }
        if let Some(salt) = extra.salt.filter(|salt| !salt.is_empty()) {
            keys.push(vec!["cache_salt", salt]);
        }
        let bytes = keys.iter().flatten().map(|text| text.len()).sum();
        if bytes > MOST_EXTRA_BYTES {
            return Err(HashError::Extra(bytes));
        }
        let later = usize::from(!extra.lora.is_empty());
        let mut buffer = Vec::with_capacity(5 * self.block_tokens + 256);
        let mut hashes: Vec<[u8; CHUNK_BYTES]> =
            Vec::with_capacity(tokens.len() / self.block_tokens);
        for block in tokens.chunks_exact(self.block_tokens) {
            let bytes = self.algorithm.hash_bytes();
            let (parent, keys) = match hashes.last() {
                Some(parent) => (&parent[..bytes], &keys[..later]),
                None => (&self.seed[..], &keys[..]),
            };
            let hash = self.hash(parent, block, keys, &mut buffer);
            hashes.push(hash);
        }
        Ok(Prefix {
            hashes,
            tokens: tokens.len() as u64,
            hash_bytes: self.algorithm.hash_bytes(),
        })
    }

    fn hash(
        &self,
        parent: &[u8],
        tokens: &[u32],
        extra: &[ExtraKey<'_>],
        buffer: &mut Vec<u8>,
    ) -> [u8; CHUNK_BYTES] {
        match self.algorithm {
            Algorithm::Sha256 | Algorithm::Xxhash => serial::pickle(parent, tokens, extra, buffer),
            Algorithm::Sha256Cbor | Algorithm::XxhashCbor => {
                serial::cbor(parent, tokens, extra, buffer);
            }
        }
        let mut hash = [0; CHUNK_BYTES];
        match self.algorithm {
            Algorithm::Sha256 | Algorithm::Sha256Cbor => {
                hash.copy_from_slice(digest(&SHA256, buffer).as_ref());
            }
            Algorithm::Xxhash | Algorithm::XxhashCbor => {
                let short = XxHash3_128::oneshot(buffer).to_be_bytes();
                hash[..short.len()].copy_from_slice(&short);
            }
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_algorithm_is_refused_by_name() {
        let error = Algorithm::named("sha3").unwrap_err().to_string();
        assert!(error.contains("\"sha3\""), "{error}");
    }

    #[test]
    fn what_no_hash_is_made_of_is_refused() {
        let seed = [7; 32];
        assert_eq!(
            Hasher::new(Algorithm::Xxhash, &seed, 16).unwrap_err(),
            HashError::Seed(32, 16)
        );
        assert!(Hasher::new(Algorithm::Sha256, &seed, 0).is_err());
        assert!(Hasher::new(Algorithm::Sha256, &seed, MOST_TOKENS + 1).is_err());
        let hasher = Hasher::new(Algorithm::Sha256, &seed, 2).unwrap();
        assert!(hasher.prefix(&[1, 1 << 31], Extra::default()).is_err());
        let salt = "s".repeat(MOST_EXTRA_BYTES);
        let extra = Extra {
            salt: Some(&salt),
            ..Extra::default()
        };
        assert!(hasher.prefix(&[1], extra).is_err());
    }

    #[test]
    fn blocks_are_chained_and_partial_ones_have_no_hash() {
        let hasher = Hasher::new(Algorithm::Sha256, &[7; 32], 2).unwrap();
        let plain = |tokens: &[u32]| hasher.prefix(tokens, Extra::default()).unwrap().hashes;
        let long = plain(&[1, 2, 3, 4, 5]);
        assert_eq!(long.len(), 2);
        assert_eq!(long[0], plain(&[1, 2])[0]);
        assert_ne!(long[1], plain(&[3, 4])[0]);
        assert_ne!(long[1], plain(&[9, 2, 3, 4])[1]);
    }
}
