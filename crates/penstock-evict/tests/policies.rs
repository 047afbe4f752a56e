//! Properties of the policies over random sequences of calls.

mod calls;

use std::collections::HashMap;

use calls::{Call, call};
use penstock_evict::{Lru, Policy, Prefix, S3Fifo};
use proptest::collection::vec;
use proptest::prelude::*;

/// The definition of LRU: a list in order of last use.
#[derive(Default)]
struct NaiveLru(Vec<(u8, u64)>);

impl NaiveLru {
    fn take(&mut self, key: u8) -> Option<(u8, u64)> {
        let at = self.0.iter().position(|entry| entry.0 == key)?;
        Some(self.0.remove(at))
    }
}

/// Runs the calls and checks after each that the policy holds exactly what it should, whichever
/// victims it chooses; then that evicting everything gives every entry back once.
fn holds_what_it_is_given(mut policy: impl Policy<u8>, calls: &[Call]) -> Vec<Option<u8>> {
    let mut held = HashMap::new();
    let mut victims = Vec::new();
    for &call in calls {
        match call {
            Call::Insert(key, weight) => {
                assert_eq!(policy.insert(key, weight), held.insert(key, weight));
            }
            Call::Touch(key) => assert_eq!(policy.touch(&key), held.contains_key(&key)),
            Call::Remove(key) => assert_eq!(policy.remove(&key), held.remove(&key)),
            Call::Evict => {
                let victim = policy.evict();
                victims.push(victim.map(|(key, _)| key));
                match victim {
                    Some((key, weight)) => assert_eq!(held.remove(&key), Some(weight)),
                    None => assert!(held.is_empty()),
                }
            }
        }
        assert_eq!(policy.len(), held.len());
        assert_eq!(policy.is_empty(), held.is_empty());
        assert_eq!(policy.weight(), held.values().sum::<u64>());
        assert!((0..40).all(|key| policy.contains(&key) == held.contains_key(&key)));
    }
    while let Some((key, weight)) = policy.evict() {
        victims.push(Some(key));
        assert_eq!(held.remove(&key), Some(weight));
    }
    assert!(held.is_empty());
    assert_eq!((policy.len(), policy.weight()), (0, 0));
    victims
}

proptest! {
    #[test]
    fn lru_agrees_with_its_definition(calls in vec(call(0..1000), 0..400)) {
        let (mut policy, mut naive) = (Lru::new(), NaiveLru::default());
        for call in calls {
            match call {
                Call::Insert(key, weight) => {
                    let before = naive.take(key).map(|entry| entry.1);
                    naive.0.push((key, weight));
                    prop_assert_eq!(policy.insert(key, weight), before);
                }
                Call::Touch(key) => {
                    let entry = naive.take(key);
                    naive.0.extend(entry);
                    prop_assert_eq!(policy.touch(&key), entry.is_some());
                }
                Call::Remove(key) => {
                    prop_assert_eq!(policy.remove(&key), naive.take(key).map(|entry| entry.1));
                }
                Call::Evict => {
                    let oldest = naive.0.first().map(|entry| entry.0);
                    prop_assert_eq!(policy.evict(), oldest.and_then(|key| naive.take(key)));
                }
            }
            let oldest_first = policy.oldest_first().map(|(&key, weight)| (key, weight));
            prop_assert!(oldest_first.eq(naive.0.iter().copied()));
        }
    }

    #[test]
    fn lru_neither_loses_nor_duplicates(calls in vec(call(0..1000), 0..400)) {
        holds_what_it_is_given(Lru::new(), &calls);
    }

    #[test]
    fn s3fifo_neither_loses_nor_duplicates(calls in vec(call(0..1000), 0..400)) {
        holds_what_it_is_given(S3Fifo::new(), &calls);
    }

    #[test]
    fn prefix_neither_loses_nor_duplicates(calls in vec(call(0..1000), 0..400)) {
        holds_what_it_is_given(Prefix::new(), &calls);
    }

    #[test]
    fn s3fifo_is_deterministic(calls in vec(call(0..1000), 0..400)) {
        prop_assert_eq!(
            holds_what_it_is_given(S3Fifo::new(), &calls),
            holds_what_it_is_given(S3Fifo::new(), &calls)
        );
    }
}

/// Puts `key` in, evicting to stay within `bound` entries of weight one.
fn insert_within(policy: &mut impl Policy<u64>, key: u64, bound: u64) {
    while policy.weight() >= bound {
        policy.evict().expect("something to evict");
    }
    policy.insert(key, 1);
}

/// Ten entries in use, then a scan of a thousand that are used once.
fn survivors_of_a_scan(policy: &mut impl Policy<u64>) -> usize {
    for key in 0..10 {
        policy.insert(key, 1);
    }
    for _ in 0..3 {
        assert!((0..10).all(|key| policy.touch(&key)));
    }
    for key in 1000..2000 {
        insert_within(policy, key, 100);
    }
    (0..10).filter(|key| policy.contains(key)).count()
}

#[test]
fn s3fifo_keeps_entries_in_use_through_a_scan_that_washes_out_lru() {
    assert_eq!(survivors_of_a_scan(&mut S3Fifo::new()), 10);
    assert_eq!(survivors_of_a_scan(&mut Lru::new()), 0);
}

#[test]
fn s3fifo_gives_an_entry_that_comes_back_a_place_in_the_main_queue() {
    let mut policy = S3Fifo::new();
    for key in 0..100 {
        insert_within(&mut policy, key, 50);
    }
    assert!(!policy.contains(&49), "evicted from the small queue");
    insert_within(&mut policy, 49, 50);
    for key in 1000..1040 {
        insert_within(&mut policy, key, 50);
    }
    assert!(
        policy.contains(&49),
        "remembered, so kept through forty newer entries"
    );
}

/// An entry that makes up nearly all of the weight is the victim if it is in the main queue, which
/// then is too large; in the small queue it is the last of them.
#[test]
fn s3fifo_remembers_a_name_until_younger_ones_push_it_out() {
    let mut policy = S3Fifo::new();
    for key in 0..20 {
        policy.insert(key, 1);
    }
    assert_eq!(policy.evict(), Some((0, 1)), "from the small queue");
    for _ in 0..3 {
        policy.insert(0, 1000);
        assert_eq!(policy.evict(), Some((0, 1000)), "from the main queue");
    }
    for key in 1..20 {
        policy.insert(19 + key, 1);
        assert_eq!(policy.evict(), Some((key, 1)), "from the small queue");
    }
    policy.insert(0, 1000);
    assert_eq!(policy.evict(), Some((20, 1)), "0 is new, behind it");
}

#[test]
fn s3fifo_forgets_the_name_of_what_its_owner_gave_up() {
    let mut policy = S3Fifo::new();
    for key in 0..20 {
        policy.insert(key, 1);
    }
    assert_eq!(policy.evict(), Some((0, 1)));
    policy.insert(0, 1000);
    assert_eq!(policy.remove(&0), Some(1000));
    policy.insert(0, 1000);
    assert_eq!(policy.evict(), Some((1, 1)), "0 is new, behind it");
}
