//! What an engine finds in its own cache, and what a pool adds.

use std::io::IoSlice;

use penstock_catalogue::{Group, Groups, Reads};
use penstock_contract::testing::{LONG, soon};
use penstock_contract::{Key, Namespace, PutRequest};
use penstock_layout::Span;
use penstock_lookup::{
    Algorithm, Belief, Extra, Finder, Hasher, OwnCache, Part, Prefix, Variant, told,
};
use penstock_store::{OpenOptions, open};
use proptest::prelude::*;

const BLOCK: u64 = 4;

fn prefix(algorithm: Algorithm, tokens: u32) -> Prefix {
    let seed = vec![7; algorithm.hash_bytes()];
    let hasher = Hasher::new(algorithm, &seed, BLOCK as usize).unwrap();
    let tokens: Vec<u32> = (0..tokens).collect();
    hasher.prefix(&tokens, Extra::default()).unwrap()
}

fn variant(reads: &[Reads]) -> Variant {
    let groups = reads.iter().map(|&reads| Group {
        block_tokens: BLOCK,
        reads,
    });
    let part = |number: usize| Part {
        namespace: Namespace([number as u8; 16]),
        spans: vec![Span::new(0..1, 0..1).unwrap()],
    };
    let parts = (0..reads.len()).map(part).collect();
    Variant::new(Groups::new(groups.collect(), BLOCK).unwrap(), parts).unwrap()
}

proptest! {
    /// Blocks come, some twice, and go: the longest run of those that are left, with either form of
    /// hash. A pool then adds the blocks behind it, whatever it lacks before.
    #[test]
    fn the_longest_run_of_what_is_left(
        tokens in 0_u32..120,
        stored in prop::collection::vec(0_usize..30, 0..60),
        removed in prop::collection::vec(0_usize..30, 0..30),
        in_pool in prop::collection::btree_set(0_usize..30, 0..30),
        is_short in any::<bool>(),
    ) {
        let algorithm = if is_short { Algorithm::Xxhash } else { Algorithm::Sha256 };
        let (variant, prefix) = (variant(&[Reads::All]), prefix(algorithm, tokens));
        let name = |block: usize| {
            let hash = prefix.hashes.get(block);
            hash.map_or(block as u64, |hash| told(&hash[..prefix.hash_bytes]))
        };
        let mut cache = OwnCache::new(1000);
        let mut counts = [0_u32; 30];
        for &block in &stored {
            cache.stored(0, BLOCK, &[name(block)]);
            counts[block] += 1;
        }
        for &block in &removed {
            cache.removed(0, &[name(block)]);
            counts[block] = counts[block].saturating_sub(1);
        }
        let limit = tokens.saturating_sub(1) as usize / BLOCK as usize;
        let own = (0..limit).take_while(|&block| counts[block] > 0).count();
        prop_assert_eq!(cache.tokens(&variant, &[0], &prefix), Some(own as u64 * BLOCK));
        prop_assert_eq!(cache.len(), counts.iter().filter(|&&count| count > 0).count());

        let store = open("memory://?size=64MiB", &OpenOptions::default()).unwrap();
        for &block in in_pool.iter().filter(|&&block| block < prefix.hashes.len()) {
            let key = Key {
                namespace: Namespace([0; 16]),
                chunk: prefix.hashes[block],
                span: Span::new(0..1, 0..1).unwrap(),
            };
            let value = [IoSlice::new(b"KV")];
            store.put_many(&mut [PutRequest::new(key, &value)], soon());
        }
        let whole = (own..limit).take_while(|block| in_pool.contains(block)).count() + own;
        let belief = Belief { there: LONG, missing: LONG };
        let finder = Finder::new(store, 1000, belief);
        let found = finder.find(&variant, &prefix, own as u64 * BLOCK, soon()).unwrap();
        prop_assert_eq!(found, whole as u64 * BLOCK);
    }
}

#[test]
fn a_window_needs_the_blocks_at_its_end() {
    let (variant, prefix) = (
        variant(&[Reads::All, Reads::Window(2 * BLOCK)]),
        prefix(Algorithm::Sha256, 41),
    );
    let names: Vec<u64> = prefix.hashes.iter().map(|hash| prefix.told(hash)).collect();
    let mut cache = OwnCache::new(1000);
    cache.stored(3, BLOCK, &names);
    assert_eq!(cache.tokens(&variant, &[3, 5], &prefix), Some(0));
    cache.stored(5, BLOCK, &names[6..8]);
    assert_eq!(cache.tokens(&variant, &[3, 5], &prefix), Some(8 * BLOCK));
}

#[test]
fn blocks_of_another_size_are_of_another_engine() {
    let (variant, prefix) = (variant(&[Reads::All]), prefix(Algorithm::Sha256, 41));
    let mut cache = OwnCache::new(1000);
    assert_eq!(cache.tokens(&variant, &[0], &prefix), Some(0));
    cache.stored(0, 2 * BLOCK, &[1]);
    assert_eq!(cache.tokens(&variant, &[0], &prefix), None);
    assert_eq!(cache.tokens(&variant, &[1], &prefix), Some(0));
    assert_eq!(cache.tokens(&variant, &[], &prefix), None);
}

#[test]
fn memory_is_bounded() {
    let mut cache = OwnCache::new(2);
    cache.stored(0, BLOCK, &[1, 2]);
    assert!(!cache.is_short());
    cache.stored(0, BLOCK, &[3, 1]);
    assert_eq!((cache.len(), cache.is_short()), (2, true));
    cache.clear();
    assert_eq!((cache.is_empty(), cache.is_short()), (true, false));
}
