//! The keeper: touches go on until their time is over, within bounds, and never for what was let
//! go.

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, Key, Namespace, Store, Tenant};
use penstock_engine::{Keeper, KeeperConfig, KeptGroup};
use penstock_layout::Span;
use penstock_value::MemoryStore;

use crate::support::*;

const NAMESPACE: Namespace = Namespace([3; 16]);
const BLOCK_BYTES: u64 = 1000;
/// A thousand such blocks, with their headers and what the memory store adds.
const CAPACITY: u64 = 1000 * (BLOCK_BYTES + 64 + 256);

fn config() -> KeeperConfig {
    KeeperConfig {
        share: 0.5,
        account_share: 0.1,
        assumed_bytes: 1 << 20,
        every: Duration::from_millis(20),
    }
}

fn groups() -> Vec<KeptGroup> {
    vec![KeptGroup {
        namespace: NAMESPACE,
        spans: vec![span()],
        block_bytes: BLOCK_BYTES,
    }]
}

fn span() -> Span {
    Span::new(0..LAYERS, 0..HEADS).unwrap()
}

fn blocks(numbers: std::ops::Range<u64>) -> Vec<(usize, [u8; 32], u64)> {
    let first = numbers.start;
    numbers
        .map(|n| (0, key(n).chunk, 16 * (n - first)))
        .collect()
}

fn key_at(n: u64) -> Key {
    Key {
        namespace: NAMESPACE,
        chunk: key(n).chunk,
        span: span(),
    }
}

fn keeper(store: &Arc<MemoryStore>) -> Keeper {
    Keeper::new(Arc::clone(store) as Arc<dyn Store>, groups(), config()).unwrap()
}

fn plant(store: &dyn Store, numbers: std::ops::Range<u64>) {
    for n in numbers {
        let value = vec![7; BLOCK_BYTES as usize + 64];
        let slices = [std::io::IoSlice::new(&value)];
        store.put(&key_at(n), &slices, soon()).unwrap();
    }
}

fn has(store: &dyn Store, numbers: std::ops::Range<u64>) -> usize {
    let keys: Vec<Key> = numbers.map(key_at).collect();
    let there = store.contains(&keys, soon()).unwrap();
    there.into_iter().filter(|&there| there).count()
}

#[test]
fn kept_blocks_outlive_others_until_their_time_is_over() {
    let store = Arc::new(MemoryStore::new(CAPACITY));
    let keeper = keeper(&store);
    plant(&*store, 0..100);
    // Those for long come last: once they alone are kept, the others were heard and are over.
    keeper
        .keep(b"", None, blocks(50..60), Duration::from_millis(100))
        .unwrap();
    keeper.keep(b"", None, blocks(0..50), LONG).unwrap();
    eventually("the time of some is over", || keeper.stats().kept == 50);
    for flood in 0..6 {
        // Less than there is room for, between one touch and the next of all blocks.
        let first = 1000 + 500 * flood;
        plant(&*store, first..first + 500);
        let touched = keeper.stats().touched;
        eventually("all are touched again", || {
            keeper.stats().touched >= touched + 100
        });
    }
    assert_eq!(has(&*store, 0..50), 50);
    assert_eq!(has(&*store, 50..100), 0);
    assert_eq!(keeper.stats().failed, 0);
}

#[test]
fn an_account_has_its_share_and_no_more() {
    let store = Arc::new(MemoryStore::new(CAPACITY));
    let keeper = keeper(&store);
    plant(&*store, 0..800);
    keeper.keep(b"red", None, blocks(0..800), LONG).unwrap();
    eventually("a tenth is kept", || keeper.stats().kept == 100);
    assert_eq!(keeper.stats().refused, 700);
    // It is the beginning of the prompt.
    for (account, first) in (0..8_u8).zip((100..).step_by(100)) {
        keeper
            .keep(&[account], None, blocks(first..first + 80), LONG)
            .unwrap();
    }
    // Half of the store for all of them together.
    // The last accounts are heard when the half is full already.
    let refused = 700 + 8 * 80 - 400;
    eventually("all are heard", || keeper.stats().refused == refused);
    eventually("half is kept", || keeper.stats().kept == 500);
}

#[test]
fn what_is_let_go_is_removed_and_not_kept() {
    let store = Arc::new(MemoryStore::new(CAPACITY));
    let keeper = keeper(&store);
    plant(&*store, 0..60);
    keeper.keep(b"", None, blocks(0..50), LONG).unwrap();
    keeper.let_go(None, blocks(20..55)).unwrap();
    eventually("they are removed", || keeper.stats().removed == 35);
    eventually("the others are kept", || keeper.stats().kept == 20);
    assert_eq!(has(&*store, 0..60), 25);
}

#[test]
fn a_store_that_fails_says_nothing_of_its_blocks() {
    let store = Probe::new();
    let keeper = Keeper::new(Arc::clone(&store) as Arc<dyn Store>, groups(), config()).unwrap();
    store.plant(&key_at(1), b"x");
    store.fail(Some(ErrorKind::Unreachable));
    keeper.keep(b"", None, blocks(1..3), LONG).unwrap();
    eventually("touches fail", || keeper.stats().failed >= 10);
    assert_eq!(keeper.stats().kept, 2);
    store.fail(None);
    // One block is there, the other never comes.
    eventually("one is given up", || keeper.stats().kept == 1);
    assert!(keeper.stats().touched >= 1);
    assert!(keeper.shutdown(LONG));
    keeper.keep(b"", None, blocks(1..3), LONG).unwrap();
    assert_eq!(keeper.stats().refused, 2, "nobody is there to keep them");
}

#[test]
fn a_tenants_blocks_are_its_own() {
    let store = Arc::new(MemoryStore::new(CAPACITY));
    let keeper = keeper(&store);
    let red = Tenant::named("red").unwrap();
    plant(&*store, 0..10);
    keeper.let_go(Some(red), blocks(0..10)).unwrap();
    eventually("they are removed", || keeper.stats().removed == 10);
    assert_eq!(has(&*store, 0..10), 10);
    keeper.keep(b"", Some(red), blocks(0..10), LONG).unwrap();
    keeper.keep(b"", None, blocks(0..5), LONG).unwrap();
    eventually("only the others are there", || keeper.stats().kept == 5);
    let nowhere = vec![(1, key(1).chunk, 0)];
    assert!(keeper.keep(b"", None, nowhere, LONG).is_err());
}

#[test]
fn the_end_of_a_prompt_counts_as_older_but_not_by_much() {
    let store = Probe::new();
    let keeper = Keeper::new(Arc::clone(&store) as Arc<dyn Store>, groups(), config()).unwrap();
    keeper.keep(b"", None, blocks(0..100), LONG).unwrap();
    store.until(|call| matches!(call, Call::Touch(_)));
    let calls = store.calls();
    let mut touched = calls.iter().find_map(|call| match call {
        Call::Touch(values) => Some(values.clone()),
        _ => None,
    });
    let touched = touched.as_mut().unwrap();
    touched.sort_by_key(|&(_, position)| position);
    assert_eq!(touched.len(), 100);
    assert_eq!((touched[0].1, touched[99].1), (0, 99 * 16 / 64));
    let last: Vec<Key> = (96..100).map(key_at).collect();
    assert!(touched[96..].iter().all(|(key, _)| last.contains(key)));
}

#[test]
fn shares_are_shares() {
    for (share, account_share) in [(1.5, 0.1), (0.5, -0.1), (f64::NAN, 0.1)] {
        let config = KeeperConfig {
            share,
            account_share,
            ..config()
        };
        assert!(Keeper::new(Probe::new() as Arc<dyn Store>, groups(), config).is_err());
    }
}
