//! The engine over a pool in shared memory: blocks come from there in place.

use std::sync::Arc;

use penstock_contract::Store;
use penstock_engine::{Fence, Outcome};
use penstock_layout::KvLayout;
use penstock_store::layers::{Breaker, BreakerSettings, Tiered};
use penstock_value::MemoryStore;

use crate::support::segment::Pool;
use crate::support::*;

const LOADED: Outcome = Outcome::Loaded(BLOCK_BYTES as u64);

fn numbered(first: u64) -> Vec<penstock_contract::Block> {
    (0..BLOCKS).map(|n| block_of(first + n, n)).collect()
}

fn filled(layout: KvLayout, first: u64) -> Kv {
    let kv = Kv::new(layout);
    (0..BLOCKS).for_each(|block| kv.fill(block, first + block));
    kv
}

fn store(rig: &Rig, first: u64) -> Vec<Outcome> {
    rig.submit_store(1, numbered(first), Fence::NONE).unwrap();
    outcomes(rig, 1)
}

/// A bounded arena may drop some: tries until all are in.
fn store_all(rig: &Rig, first: u64) {
    eventually("everything is stored", || {
        store(rig, first)
            .iter()
            .all(|outcome| *outcome == Outcome::AlreadyPresent)
    });
}

fn load(rig: &Rig, first: u64, prefix: bool) -> Vec<Outcome> {
    rig.submit_load(2, numbered(first), soon(), prefix, Fence::NONE)
        .unwrap();
    outcomes(rig, 2)
}

#[test]
fn blocks_of_every_layout_go_and_come() {
    for layout in [KvLayout::LBNHC, KvLayout::BHLNC, KvLayout::BLHNC] {
        let pool = Pool::new();
        let source = filled(KvLayout::LBHNC, 0);
        let writer = engine(&pool.open(8 << 20), config(2), &source);
        store_all(&writer, 0);

        let target = Kv::new(layout);
        let reader = engine(&pool.open(8 << 20), config(2), &target);
        assert_eq!(load(&reader, 0, true), [LOADED; BLOCKS as usize]);
        for block in 0..BLOCKS {
            assert_eq!(target.read(block, share()), pattern(block), "{layout:?}");
        }
        assert_eq!(reader.stats().get_calls, 0, "no value went through a slot");
    }
}

#[test]
fn a_damaged_value_is_reported_and_removed() {
    let pool = Pool::new();
    let source = filled(KvLayout::LBNHC, 0);
    let shm = pool.open(8 << 20);
    let rig = engine(&shm, config(4), &source);
    store_all(&rig, 0);
    assert_eq!(pool.damage(&pattern(3)[..32]), 1);

    let got = load(&rig, 0, false);
    for (block, outcome) in (0..).zip(&got) {
        match block {
            3 => assert!(matches!(outcome, Outcome::Rejected(_)), "{outcome:?}"),
            _ => assert_eq!(*outcome, LOADED),
        }
    }
    assert_eq!(load(&rig, 0, false)[3], Outcome::Miss);
    (0..BLOCKS).for_each(|block| source.fill(block, block));
    store_all(&rig, 0);
    assert_eq!(load(&rig, 0, true), [LOADED; BLOCKS as usize]);
}

#[test]
fn a_value_that_is_damaged_near_comes_from_afar() {
    let pool = Pool::new();
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new(8 << 20));
    let near: Arc<dyn Store> =
        Arc::new(Breaker::new(pool.open(8 << 20), BreakerSettings::default()));
    let tiers = Arc::new(Tiered::new(vec![near, far]));
    let source = filled(KvLayout::LBNHC, 0);
    let rig = engine(&tiers, config(8), &source);
    store_all(&rig, 0);
    let calls = rig.stats().get_calls;
    assert_eq!(load(&rig, 0, true), [LOADED; BLOCKS as usize]);
    assert_eq!(rig.stats().get_calls, calls, "all were near");

    assert_eq!(pool.damage(&pattern(3)[..32]), 1);
    (0..BLOCKS).for_each(|block| source.fill(block, 99));
    assert_eq!(load(&rig, 0, true), [LOADED; BLOCKS as usize]);
    for block in 0..BLOCKS {
        assert_eq!(source.read(block, share()), pattern(block));
    }
}

/// Two engines store in turn, in a pool that holds a part: whatever is loaded is right.
#[test]
fn what_is_evicted_meanwhile_is_never_loaded_wrong() {
    let pool = Pool::new();
    std::thread::scope(|scope| {
        for own in 0..2_u64 {
            let pool = &pool;
            scope.spawn(move || {
                let source = Kv::new(KvLayout::LBNHC);
                let target = Kv::new(KvLayout::BLHNC);
                let writer = engine(&pool.open(1 << 20), config(4), &source);
                let reader = engine(&pool.open(1 << 20), config(4), &target);
                let mut loaded = 0;
                for round in 0..60 {
                    let first = (round * 7 + own * 11) % 40 * BLOCKS;
                    (0..BLOCKS).for_each(|block| source.fill(block, first + block));
                    store(&writer, first);
                    let first = (round * 7 + own * 11 + round % 3) % 40 * BLOCKS;
                    for (block, outcome) in (0..).zip(load(&reader, first, false)) {
                        if outcome == LOADED {
                            loaded += 1;
                            assert_eq!(target.read(block, share()), pattern(first + block));
                        }
                    }
                }
                assert!(loaded > 100, "{loaded}");
            });
        }
    });
}
