//! How far prompts reach in a real store, with an index that forgets.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use penstock_catalogue::{Group, Groups, Reads};
use penstock_contract::testing::{LONG, eventually, soon};
use penstock_contract::{ErrorKind, Key, Namespace, PutRequest, Store};
use penstock_layout::Span;
use penstock_lookup::{Algorithm, Belief, Extra, Finder, Hasher, Part, Prefix, Variant};
use penstock_store::{OpenOptions, open};
use proptest::prelude::*;

const BLOCK: usize = 4;

fn store() -> Arc<dyn Store> {
    open("memory://?size=64MiB", &OpenOptions::default()).unwrap()
}

fn prefix(tokens: usize) -> Prefix {
    let hasher = Hasher::new(Algorithm::Sha256, &[7; 32], BLOCK).unwrap();
    let tokens: Vec<u32> = (0..tokens as u32).collect();
    hasher.prefix(&tokens, Extra::default()).unwrap()
}

fn part(number: u8, spans: u16) -> Part {
    Part {
        namespace: Namespace([number; 16]),
        spans: (0..spans)
            .map(|layer| Span::new(layer..layer + 1, 0..1).unwrap())
            .collect(),
    }
}

fn uniform(spans: u16) -> Variant {
    let group = Group {
        block_tokens: BLOCK as u64,
        reads: Reads::All,
    };
    let groups = Groups::new(vec![group], BLOCK as u64).unwrap();
    Variant::new(groups, vec![part(1, spans)]).unwrap()
}

fn put(store: &dyn Store, part: &Part, chunk: [u8; 32], spans: usize) {
    for &span in &part.spans[..spans] {
        let value = [IoSlice::new(b"KV")];
        let key = Key {
            namespace: part.namespace,
            chunk,
            span,
        };
        let mut batch = [PutRequest::new(key, &value)];
        store.put_many(&mut batch, soon());
        batch[0].outcome.take().unwrap().unwrap();
    }
}

fn lasting() -> Belief {
    Belief {
        there: 60 * LONG,
        missing: 60 * LONG,
    }
}

fn forgetful() -> Belief {
    Belief {
        there: Duration::ZERO,
        missing: Duration::ZERO,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The longest run of whole blocks, of which every span is there, before the last token.
    #[test]
    fn the_longest_whole_prefix(
        tokens in 0_usize..1000,
        damaged in prop::collection::btree_set((0_usize..250, 0_usize..3), 0..4),
        stored in 0_usize..260,
    ) {
        let (store, variant, prefix) = (store(), uniform(3), prefix(tokens));
        let expected = (0..(tokens.saturating_sub(1)) / BLOCK)
            .take_while(|&block| block < stored && !damaged.iter().any(|&(at, _)| at == block))
            .count();
        for (block, &chunk) in prefix.hashes.iter().enumerate().take(stored) {
            let spans = damaged.iter().find(|&&(at, _)| at == block).map_or(3, |&(_, some)| some);
            put(&*store, &part(1, 3), chunk, spans);
        }
        for belief in [lasting(), forgetful()] {
            let finder = Finder::new(Arc::clone(&store), 1000, belief);
            let found = finder.find(&variant, &prefix, 0, soon()).unwrap();
            prop_assert_eq!(found, (expected * BLOCK) as u64);
            if belief == lasting() {
                prop_assert_eq!(finder.known(&variant, &prefix, 0), Some(found));
                let asked = finder.asked();
                prop_assert_eq!(finder.find(&variant, &prefix, 0, soon()).unwrap(), found);
                prop_assert_eq!(finder.asked(), asked);
            } else if tokens > BLOCK {
                prop_assert_eq!(finder.known(&variant, &prefix, 0), None);
            }
        }
    }
}

#[test]
fn a_pool_without_the_prompt_is_asked_for_little() {
    let finder = Finder::new(store(), 100_000, lasting());
    assert_eq!(
        finder
            .find(&uniform(1), &prefix(100_000), 0, soon())
            .unwrap(),
        0
    );
    assert_eq!(finder.asked(), 16);
    assert_eq!(finder.indexed(), 16);
}

#[test]
fn what_was_missing_is_asked_for_again_in_time() {
    let (store, variant, prefix) = (store(), uniform(1), prefix(3 * BLOCK));
    let belief = Belief {
        missing: Duration::from_millis(40),
        ..lasting()
    };
    let [finder, slow] =
        [belief, lasting()].map(|belief| Finder::new(Arc::clone(&store), 1000, belief));
    for finder in [&finder, &slow] {
        assert_eq!(finder.find(&variant, &prefix, 0, soon()).unwrap(), 0);
    }
    put(&*store, &part(1, 1), prefix.hashes[0], 1);
    eventually("it is no longer believed", || {
        finder.known(&variant, &prefix, 0).is_none()
    });
    assert_eq!(slow.known(&variant, &prefix, 0), Some(0));
    assert_eq!(
        finder.find(&variant, &prefix, 0, soon()).unwrap(),
        BLOCK as u64
    );
}

#[test]
fn a_window_needs_the_last_blocks_only() {
    let full = Group {
        block_tokens: BLOCK as u64,
        reads: Reads::All,
    };
    let windowed = Group {
        block_tokens: 2 * BLOCK as u64,
        reads: Reads::Window(8),
    };
    let groups = Groups::new(vec![full, windowed], BLOCK as u64).unwrap();
    let variant = Variant::new(groups, vec![part(1, 1), part(2, 1)]).unwrap();
    let (store, prefix) = (store(), prefix(8 * BLOCK + 1));
    for &chunk in &prefix.hashes {
        put(&*store, &part(1, 1), chunk, 1);
    }
    let finder = Finder::new(Arc::clone(&store), 1000, forgetful());
    let found = || finder.find(&variant, &prefix, 0, soon()).unwrap();
    assert_eq!(found(), 0);
    // A block of two hashes is named by the second.
    put(&*store, &part(2, 1), prefix.hashes[7], 1);
    assert_eq!(found(), 8 * BLOCK as u64);
}

#[test]
fn a_pool_that_fails_is_an_error_at_once() {
    let reads = [Reads::All, Reads::Window(8), Reads::State];
    let groups = reads.map(|reads| Group {
        block_tokens: BLOCK as u64,
        reads,
    });
    let groups = Groups::new(groups.to_vec(), BLOCK as u64).unwrap();
    let variant = Variant::new(groups, vec![part(1, 1), part(2, 1), part(3, 1)]).unwrap();
    let store = open("unix:///nowhere/absent.sock", &OpenOptions::default()).unwrap();
    let finder = Finder::new(store, 1000, forgetful());
    let failure = finder.find(&variant, &prefix(100 * BLOCK), 0, soon());
    assert_eq!(failure.unwrap_err().kind(), ErrorKind::Unreachable);
}

#[test]
fn threads_agree() {
    let (store, variant, prefix) = (store(), uniform(2), prefix(200 * BLOCK));
    let stored: BTreeSet<usize> = (0..150).collect();
    for &block in &stored {
        put(&*store, &part(1, 2), prefix.hashes[block], 2);
    }
    let finder = Finder::new(store, 64, lasting());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let found = finder.find(&variant, &prefix, 0, soon()).unwrap();
                    assert_eq!(found, 150 * BLOCK as u64);
                }
            });
        }
    });
    // No more than the index has room for.
    assert!(finder.indexed() <= 96);
}

#[test]
fn every_group_has_spans() {
    let group = Group {
        block_tokens: 4,
        reads: Reads::All,
    };
    let groups = Groups::new(vec![group], 4).unwrap();
    assert!(Variant::new(groups.clone(), vec![]).is_err());
    assert!(Variant::new(groups, vec![part(1, 0)]).is_err());
}
