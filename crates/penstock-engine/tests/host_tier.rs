//! The host tier: what stays in slots, for whom, and until when.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{Block, Chunk, ErrorKind, HostChange, Namespace};
use penstock_engine::{Deadline, EngineConfig, Fence, Outcome, Owner};
use penstock_evict::{Chooser, Lru, Policy};
use penstock_layout::KvLayout;

use crate::support::*;

const BYTES: u64 = BLOCK_BYTES as u64;

fn keeping(slots: usize) -> EngineConfig {
    EngineConfig {
        keep: true,
        ..config(slots)
    }
}

fn store_block(rig: &Rig, kv: &Kv, job: u64, block: u64, n: u64) -> Outcome {
    kv.fill(block, n);
    rig.submit_store(job, vec![block_of(n, block)], Fence::NONE)
        .unwrap();
    outcomes(rig, job)[0]
}

/// Another engine has stored objects of these numbers, each from the block of its number.
fn store_before(store: &Arc<Probe>, kv: &Kv, numbers: Range<u64>) {
    let rig = engine(store, config(8), kv);
    for n in numbers {
        store_block(&rig, kv, n, n, n);
    }
}

fn load_block(rig: &Rig, job: u64, block: u64, n: u64) -> Outcome {
    rig.submit_load(job, vec![block_of(n, block)], soon(), true, Fence::NONE)
        .unwrap();
    outcomes(rig, job)[0]
}

fn prefetch(rig: &Rig, job: u64, names: &[u64]) -> Vec<Outcome> {
    let objects = names.iter().map(|&n| block_of(n, 0)).collect();
    rig.submit_prefetch(job, objects, soon()).unwrap();
    outcomes(rig, job)
}

/// What the changes reported so far add up to.
fn index(rig: &Rig, known: &mut HashMap<Chunk, bool>) -> Vec<u64> {
    let changes = rig.take_host_changes().into_iter();
    known.extend(changes.map(|change| (change.chunk, change.came)));
    let mut held: Vec<u64> = (0..100)
        .filter(|&n| known.get(&key(n).chunk) == Some(&true))
        .collect();
    held.sort_unstable();
    held
}

#[test]
fn what_was_stored_is_loaded_without_the_store() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(8), &kv);
    assert_eq!(store_block(&rig, &kv, 1, 0, 5), Outcome::Stored(BYTES));
    store.fail(Some(ErrorKind::Unreachable));
    assert_eq!(load_block(&rig, 2, 9, 5), Outcome::Kept(BYTES));
    assert_eq!(kv.read(9, share()), pattern(5));
    let stats = rig.stats();
    assert_eq!((stats.kept_objects, stats.kept_bytes), (1, BYTES));
    assert_eq!(
        (stats.get_calls, stats.slots_in_use, stats.slots_kept),
        (0, 0, 1)
    );
}

#[test]
fn what_was_loaded_is_loaded_again_without_the_store() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::BLHNC));
    {
        let rig = engine(&store, keeping(8), &kv);
        store_block(&rig, &kv, 1, 0, 5);
    }
    let rig = engine(&store, keeping(8), &kv);
    assert_eq!(load_block(&rig, 1, 3, 5), Outcome::Loaded(BYTES));
    assert_eq!(load_block(&rig, 2, 4, 5), Outcome::Kept(BYTES));
    assert_eq!(kv.read(4, share()), pattern(5));
}

#[test]
fn a_value_that_the_store_did_not_take_is_kept() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let config = EngineConfig {
        store_backoff: LONG,
        ..keeping(8)
    };
    let rig = engine(&store, config, &kv);
    store.fail(Some(ErrorKind::Unreachable));
    assert_eq!(
        store_block(&rig, &kv, 1, 0, 5),
        Outcome::Failed(ErrorKind::Unreachable)
    );
    // The next one is not even offered to the store, for a while.
    assert_eq!(store_block(&rig, &kv, 2, 1, 6), Outcome::Dropped);
    assert_eq!(load_block(&rig, 3, 8, 5), Outcome::Kept(BYTES));
    assert_eq!(load_block(&rig, 4, 9, 6), Outcome::Kept(BYTES));
    assert_eq!(kv.read(9, share()), pattern(6));
}

#[test]
fn room_comes_from_what_was_used_longest_ago() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(4), &kv);
    let mut known = HashMap::new();
    for n in 0..4 {
        store_block(&rig, &kv, n, n, n);
    }
    assert_eq!(index(&rig, &mut known), [0, 1, 2, 3]);
    assert_eq!(load_block(&rig, 10, 9, 0), Outcome::Kept(BYTES));
    store_block(&rig, &kv, 11, 4, 4);
    assert_eq!(index(&rig, &mut known), [0, 2, 3, 4]);
    // Of a prompt the end goes first.
    let prompt = [2, 3, 4, 0].map(|n| block_of(n, 10 + n));
    rig.submit_load(12, prompt.to_vec(), soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(outcomes(&rig, 12), [Outcome::Kept(BYTES); 4]);
    store_block(&rig, &kv, 13, 5, 5);
    assert_eq!(index(&rig, &mut known), [2, 3, 4, 5]);
    assert_eq!(load_block(&rig, 14, 20, 0), Outcome::Loaded(BYTES));
}

#[test]
fn of_a_prompt_the_beginning_stays_longest() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(6), &kv);
    let mut known = HashMap::new();
    rig.submit_store(1, chain(&[0, 1, 2, 3], None), Fence::NONE)
        .unwrap();
    outcomes(&rig, 1);
    // As decoding goes on, in another job.
    rig.submit_store(2, chain(&[4], Some(3)), Fence::NONE)
        .unwrap();
    outcomes(&rig, 2);
    for (n, held) in [
        (10, vec![0, 1, 2, 3, 4, 10]),
        (11, vec![0, 1, 2, 3, 10, 11]),
        (12, vec![0, 1, 2, 10, 11, 12]),
    ] {
        store_block(&rig, &kv, n, 0, n);
        assert_eq!(index(&rig, &mut known), held);
    }
}

/// Prompts of conversations that go on for a while among others that are asked once.
fn traffic(prompts: u64) -> Vec<Vec<u64>> {
    const OPEN: u64 = 6;
    (0..prompts)
        .map(|number| {
            // Every fifth is the next turn of the conversation whose turn it is.
            let (turn, name) = (number / 5 / OPEN, number / 5 % OPEN);
            let len = if number % 5 == 0 { 2 + turn % 8 } else { 6 };
            let first = match number % 5 {
                0 => 1_000_000 + (name * 1000 + turn / 8) * 100,
                _ => number * 100,
            };
            (first..first + len).collect()
        })
        .collect()
}

fn is_kept(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Kept(_))
}

/// Blocks found in a row from the start.
fn found_by(policy: &mut impl Policy<u64>, bound: u64, prompts: &[Vec<u64>]) -> usize {
    let mut found = 0;
    for prompt in prompts {
        found += prompt.iter().take_while(|n| policy.contains(n)).count();
        let used: Vec<_> = prompt.iter().map(|&n| (n, 1)).collect();
        policy.use_chain(None, &used);
        while policy.weight() > bound {
            policy.evict();
        }
    }
    found
}

#[test]
fn what_stays_is_what_the_policy_that_chooses_would_keep() {
    const SLOTS: u64 = 64;
    let prompts = traffic(3000);
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(SLOTS as usize), &kv);
    let (mut found, mut stored) = (0, HashSet::<u64>::new());
    for (prompt, job) in prompts.iter().zip(1..) {
        let there = prompt.iter().take_while(|n| stored.contains(*n)).count();
        let (old, new) = prompt.split_at(there);
        rig.submit_load(job, chain(old, None), soon(), true, Fence::NONE)
            .unwrap();
        let loaded = outcomes(&rig, job);
        found += loaded.iter().take_while(|o| is_kept(o)).count();
        let job = 1_000_000 + job;
        rig.submit_store(job, chain(new, old.last().copied()), Fence::NONE)
            .unwrap();
        outcomes(&rig, job);
        stored.extend(new);
    }
    let policy = found_by(&mut Chooser::<u64>::new(), SLOTS, &prompts);
    let least_recent = found_by(&mut Lru::<u64>::new(), SLOTS, &prompts);
    println!("{found} found; {policy} by the policy alone, {least_recent} if least recently used");
    assert!(policy > 2 * least_recent, "the traffic shows nothing");
    assert!(found * 10 >= policy * 9, "{found} of {policy}");
}

#[test]
fn what_came_and_went_unseen_is_no_change() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(2), &kv);
    assert_eq!(rig.take_host_changes(), []);
    store_block(&rig, &kv, 1, 0, 1);
    let change = |n, came| HostChange {
        group: 0,
        tenant: None,
        chunk: key(n).chunk,
        came,
    };
    assert_eq!(rig.take_host_changes(), [change(1, true)]);
    // With two slots 2 has to go for 4, and 1 for 3.
    for n in 2..=4 {
        store_block(&rig, &kv, n, 0, n);
    }
    let mut changes = rig.take_host_changes();
    changes.sort_unstable_by_key(|change| change.chunk);
    assert_eq!(
        changes,
        [change(1, false), change(3, true), change(4, true)]
    );
}

#[test]
fn under_another_name_nothing_is_kept_or_found_of_before() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(8), &kv);
    let mut known = HashMap::new();
    store_block(&rig, &kv, 1, 0, 1);
    store_block(&rig, &kv, 2, 0, 2);
    assert_eq!(index(&rig, &mut known), [1, 2]);
    store_block(&rig, &kv, 3, 0, 3);
    rig.name(0, Namespace([7; 16])).unwrap();
    // Whoever names it anew knows that nothing is there under the new name.
    assert_eq!(rig.take_host_changes(), []);
    for n in 1..=3 {
        assert_eq!(load_block(&rig, 10 + n, 9, n), Outcome::Miss);
    }
    // Other weights have computed another block of the same tokens.
    assert_eq!(store_block(&rig, &kv, 20, 0, 1), Outcome::Stored(BYTES));
    assert_eq!(index(&rig, &mut HashMap::new()), [1]);
    assert_eq!(load_block(&rig, 21, 9, 1), Outcome::Kept(BYTES));
    // And back: what the pool has is found, and host memory has nothing.
    rig.name(0, NAMESPACE).unwrap();
    assert_eq!(rig.take_host_changes(), []);
    assert_eq!(load_block(&rig, 22, 9, 1), Outcome::Loaded(BYTES));
}

#[test]
fn under_another_name_what_is_pinned_or_under_way_of_before_is_not_kept() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..2);
    let rig = engine(&store, keeping(8), &kv);
    assert_eq!(prefetch(&rig, 1, &[0]), [Outcome::Loaded(BYTES)]);
    store.hold_gets(true);
    rig.submit_load(2, vec![block_of(1, 9)], soon(), true, Fence::NONE)
        .unwrap();
    rig.name(0, Namespace([7; 16])).unwrap();
    store.hold_gets(false);
    assert_eq!(outcomes(&rig, 2), [Outcome::Loaded(BYTES)]);
    assert_eq!(rig.stats().slots_kept, 1);
    rig.release(1);
    assert_eq!(rig.stats().slots_kept, 0);
    assert_eq!(rig.take_host_changes(), []);
}

#[test]
fn a_load_takes_what_is_kept_and_fetches_the_rest() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..6);
    let rig = engine(&store, keeping(8), &kv);
    for n in [1, 4] {
        load_block(&rig, n, 20, n);
    }
    let objects: Vec<Block> = (0..6).map(|n| block_of(n, 10 + n)).collect();
    rig.submit_load(10, objects, soon(), true, Fence::NONE)
        .unwrap();
    let expected: Vec<_> = (0..6)
        .map(|n| match n {
            1 | 4 => Outcome::Kept(BYTES),
            _ => Outcome::Loaded(BYTES),
        })
        .collect();
    assert_eq!(outcomes(&rig, 10), expected);
    for n in 0..6 {
        assert_eq!(kv.read(10 + n, share()), pattern(n), "block {n}");
    }
}

#[test]
fn a_load_that_is_given_up_leaves_room_for_what_another_wants() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..1);
    let rig = engine(&store, keeping(8), &kv);
    store.hold_gets(true);
    let submit = |job, deadline| {
        rig.submit_load(job, vec![block_of(0, 10)], deadline, true, Fence::NONE)
            .unwrap();
    };
    submit(1, soon());
    submit(2, within(Duration::from_millis(20)));
    assert_eq!(outcomes(&rig, 2), [Outcome::TimedOut]);
    store.hold_gets(false);
    assert_eq!(outcomes(&rig, 1), [Outcome::Loaded(BYTES)]);
    assert_eq!(load_block(&rig, 3, 11, 0), Outcome::Kept(BYTES));
}

#[test]
fn a_load_that_keeps_pace_is_not_given_up() {
    given_time("what is in host memory comes in time", outlives_another);
}

/// Whether a load of which half is in host memory goes on when another is given up, of which
/// nothing came. A lane has so much time to bring that half.
fn outlives_another(time: Duration) -> bool {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..4);
    let rig = engine(&store, keeping(8), &kv);
    for n in 0..2 {
        load_block(&rig, n, 20, n);
    }
    let at = within(time);
    let submit = |job, names: &[u64]| {
        let objects = names.iter().map(|&n| block_of(n, 10 + n)).collect();
        let deadline = Deadline::paced(at, 60 * LONG);
        rig.submit_load(job, objects, deadline, true, Fence::NONE)
            .unwrap();
    };
    store.hold_gets(true);
    // Half of it gives it half an hour.
    submit(10, &[0, 2]);
    // Nothing of it comes.
    submit(11, &[3]);
    assert_eq!(outcomes(&rig, 11), [Outcome::TimedOut]);
    assert!(past() >= at);
    store.hold_gets(false);
    let outcomes = outcomes(&rig, 10);
    if outcomes.contains(&Outcome::TimedOut) {
        return false;
    }
    assert_eq!(outcomes, [Outcome::Kept(BYTES), Outcome::Loaded(BYTES)]);
    assert_eq!(kv.read(12, share()), pattern(2));
    true
}

#[test]
fn what_is_prefetched_stays_until_it_is_released() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..2);
    let rig = engine(&store, keeping(4), &kv);
    let mut known = HashMap::new();
    assert_eq!(prefetch(&rig, 1, &[0, 1]), [Outcome::Loaded(BYTES); 2]);
    // Another request wants the second too.
    assert_eq!(prefetch(&rig, 2, &[1]), [Outcome::Kept(BYTES)]);
    for n in 10..20 {
        store_block(&rig, &kv, n, 5, n);
    }
    let held = index(&rig, &mut known);
    assert!(held.starts_with(&[0, 1]), "{held:?}");
    rig.release(1);
    for n in 20..30 {
        store_block(&rig, &kv, n, 5, n);
    }
    let held = index(&rig, &mut known);
    assert!(held.starts_with(&[1]), "{held:?}");
    assert_eq!(load_block(&rig, 40, 9, 1), Outcome::Kept(BYTES));
    rig.release(2);
    for n in 50..60 {
        store_block(&rig, &kv, n, 5, n);
    }
    assert!(!index(&rig, &mut known).contains(&1));
}

#[test]
fn a_prefetch_without_room_is_dropped_and_loads_are_served() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..6);
    let rig = engine(&store, keeping(4), &kv);
    // However many lanes there are: what one of them is fetching has its room already.
    store.hold_gets(true);
    let objects = (0..4).map(|n| block_of(n, 0)).collect();
    rig.submit_prefetch(1, objects, soon()).unwrap();
    eventually("half are dropped", || rig.stats().dropped_objects == 2);
    store.hold_gets(false);
    assert_eq!(
        outcomes(&rig, 1),
        [
            Outcome::Loaded(BYTES),
            Outcome::Loaded(BYTES),
            Outcome::Dropped,
            Outcome::Dropped
        ]
    );
    assert_eq!(prefetch(&rig, 2, &[4]), [Outcome::Dropped]);
    for n in 0..6 {
        let outcome = load_block(&rig, 10 + n, 10 + n, n);
        assert!(matches!(outcome, Outcome::Kept(_) | Outcome::Loaded(_)));
        assert_eq!(kv.read(10 + n, share()), pattern(n));
    }
}

#[test]
fn what_nothing_is_kept_of_is_got_all_the_same() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, config(8), &kv);
    (0..3).for_each(|n| {
        store_block(&rig, &kv, n, n, n);
    });
    // So is a pool measured by an engine without a host tier.
    let all = [Outcome::Loaded(BYTES); 3];
    assert_eq!(prefetch(&rig, 10, &[0, 1, 2]), all);
    assert_eq!(prefetch(&rig, 11, &[0, 1, 2]), all);
    let stats = rig.stats();
    assert_eq!((stats.slots_in_use, stats.slots_kept), (0, 0));
}

#[test]
fn a_prefetch_that_is_released_early_ends_and_pins_nothing() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..1);
    let rig = engine(&store, keeping(4), &kv);
    store.hold_gets(true);
    rig.submit_prefetch(1, vec![block_of(0, 0)], soon())
        .unwrap();
    rig.release(1);
    assert_eq!(outcomes(&rig, 1), [Outcome::Cancelled]);
    store.hold_gets(false);
    for n in 10..20 {
        store_block(&rig, &kv, n, 5, n);
    }
    assert!(!index(&rig, &mut HashMap::new()).contains(&0));
}

#[test]
fn a_prefetch_that_is_late_is_over() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(4), &kv);
    store.hold_gets(true);
    let deadline = within(Duration::from_millis(20));
    rig.submit_prefetch(1, vec![block_of(0, 0)], deadline)
        .unwrap();
    assert_eq!(outcomes(&rig, 1), [Outcome::TimedOut]);
    store.hold_gets(false);
    rig.release(1);
}

#[test]
fn what_does_not_verify_is_not_kept() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    store_before(&store, &kv, 0..1);
    let mut value = store.value(&key(0));
    value[100] ^= 1;
    store.plant(&key(0), &value);
    let rig = engine(&store, keeping(4), &kv);
    let got = prefetch(&rig, 1, &[0]);
    assert!(matches!(got[..], [Outcome::Rejected(_)]), "{got:?}");
    assert_eq!(rig.take_host_changes(), []);
}

#[test]
fn with_another_salt_it_is_another_value() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(4), &kv);
    kv.fill(0, 0);
    rig.store_for(&salted("one"), 1, vec![block_of(0, 0)]);
    outcomes(&rig, 1);
    rig.load_for(&salted("other"), 2, vec![block_of(0, 0)]);
    // Without keys the salt means nothing to the store.
    assert_eq!(outcomes(&rig, 2), [Outcome::Loaded(BYTES)]);
    rig.load_for(&salted("one"), 3, vec![block_of(0, 0)]);
    assert_eq!(outcomes(&rig, 3), [Outcome::Kept(BYTES)]);
}

#[test]
fn a_tenants_values_are_its_own() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let rig = engine(&store, keeping(8), &kv);
    let (red, blue) = (tenant("red"), tenant("blue"));
    let change = |owner: &Owner, came| HostChange {
        group: 0,
        tenant: owner.tenant,
        chunk: key(5).chunk,
        came,
    };
    assert_eq!(rig.take_host_changes(), []);
    kv.fill(0, 5);
    rig.store_for(&red, 1, chain(&[5], Some(4)));
    assert_eq!(outcomes(&rig, 1), [Outcome::Stored(BYTES)]);
    assert!(store.has(&key_for(&red, 5)));
    assert!(!store.has(&key(5)));
    assert_eq!(rig.take_host_changes(), [change(&red, true)]);
    rig.load_for(&red, 2, vec![block_of(5, 1)]);
    assert_eq!(outcomes(&rig, 2), [Outcome::Kept(BYTES)]);
    // Neither the other tenant nor everybody else has it, in host memory or in the store.
    rig.load_for(&blue, 3, vec![block_of(5, 2)]);
    assert_eq!(outcomes(&rig, 3), [Outcome::Miss]);
    assert_eq!(load_block(&rig, 4, 3, 5), Outcome::Miss);

    rig.store_for(&blue, 5, vec![block_of(5, 0)]);
    assert_eq!(outcomes(&rig, 5), [Outcome::Stored(BYTES)]);
    assert_eq!(rig.take_host_changes(), [change(&blue, true)]);
    for n in 10..17 {
        store_block(&rig, &kv, n, 0, n);
    }
    let changes = rig.take_host_changes();
    assert!(changes.contains(&change(&red, false)), "{changes:?}");
    assert!(!changes.contains(&change(&blue, false)), "{changes:?}");
    rig.load_for(&blue, 20, vec![block_of(5, 1)]);
    assert_eq!(outcomes(&rig, 20), [Outcome::Kept(BYTES)]);
    rig.load_for(&red, 21, vec![block_of(5, 2)]);
    assert_eq!(outcomes(&rig, 21), [Outcome::Loaded(BYTES)]);
}

#[test]
fn a_prefetch_and_its_load_have_one_tenant() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let red = tenant("red");
    {
        let rig = engine(&store, keeping(8), &kv);
        kv.fill(0, 5);
        rig.store_for(&red, 1, vec![block_of(5, 0)]);
        assert_eq!(outcomes(&rig, 1), [Outcome::Stored(BYTES)]);
    }
    let rig = engine(&store, keeping(8), &kv);
    assert_eq!(prefetch(&rig, 1, &[5]), [Outcome::Miss]);
    rig.release(1);
    rig.prefetch_for(&red, 2, vec![block_of(5, 0)]);
    assert_eq!(outcomes(&rig, 2), [Outcome::Loaded(BYTES)]);
    let [change] = rig.take_host_changes()[..] else {
        panic!("not one change");
    };
    assert_eq!((change.tenant, change.came), (red.tenant, true));
    store.fail(Some(ErrorKind::Unreachable));
    rig.load_for(&red, 3, vec![block_of(5, 7)]);
    assert_eq!(outcomes(&rig, 3), [Outcome::Kept(BYTES)]);
    assert_eq!(kv.read(7, share()), pattern(5));
    rig.release(2);
}

#[test]
fn a_tenants_job_can_be_given_up() {
    let (store, kv) = (Probe::new(), Kv::new(KvLayout::LBHNC));
    let red = tenant("red");
    let rig = engine(&store, keeping(8), &kv);
    store.hold_gets(true);
    rig.load_for(&red, 1, vec![block_of(5, 0)]);
    rig.cancel(1);
    assert_eq!(outcomes(&rig, 1), [Outcome::Cancelled]);
    store.hold_gets(false);
    rig.store_for(&red, 2, vec![block_of(5, 0)]);
    assert_eq!(outcomes(&rig, 2), [Outcome::Stored(BYTES)]);
}
