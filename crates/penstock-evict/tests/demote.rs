//! What is demoted goes before everything else, unless it is used again.

mod calls;

use std::collections::{BTreeSet, HashSet};

use calls::{Call, call};
use penstock_evict::{Chooser, Clock, Lru, Policy, Prefix, S3Fifo};
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

/// How a demoted entry is used again.
#[derive(Clone, Copy, Debug)]
enum Again {
    Touched,
    PutAnew,
    InAChain,
}

fn again() -> impl Strategy<Value = (u8, Again)> {
    const HOW: [Again; 3] = [Again::Touched, Again::PutAnew, Again::InAChain];
    (0u8..40, prop::sample::select(&HOW[..]))
}

/// Makes the calls, demotes keys, uses some of them again, then evicts all: what was demoted and not
/// used again goes first.
fn demoted_first(
    mut policy: impl Policy<u8>,
    calls: &[Call],
    demoted: &BTreeSet<u8>,
    used: &[(u8, Again)],
) {
    for &call in calls {
        match call {
            Call::Insert(key, weight) => drop(policy.insert(key, weight)),
            Call::Touch(key) => drop(policy.touch(&key)),
            Call::Remove(key) => drop(policy.remove(&key)),
            Call::Evict => drop(policy.evict()),
        }
    }
    let (len, weight) = (policy.len(), policy.weight());
    for key in demoted {
        assert_eq!(policy.demote(key), policy.contains(key));
    }
    assert_eq!((policy.len(), policy.weight()), (len, weight));
    let mut due: HashSet<u8> = demoted.iter().copied().collect();
    for &(key, how) in used {
        if policy.contains(&key) {
            match how {
                Again::Touched => assert!(policy.touch(&key)),
                Again::PutAnew => drop(policy.insert(key, 1)),
                Again::InAChain => policy.use_chain(None, &[(key, 1)]),
            }
            due.remove(&key);
        }
    }
    due.retain(|key| policy.contains(key));
    while !due.is_empty() {
        let (victim, _) = policy.evict().expect("what is due");
        assert!(due.remove(&victim), "{victim} went before {due:?}");
    }
    let left: Vec<u8> = (0..40).filter(|key| policy.contains(key)).collect();
    let mut gone: Vec<u8> = std::iter::from_fn(|| policy.evict())
        .map(|(key, _)| key)
        .collect();
    gone.sort_unstable();
    assert_eq!(gone, left);
    assert_eq!((policy.len(), policy.weight()), (0, 0));
}

proptest! {
    #[test]
    fn whatever_the_policy(
        calls in vec(call(0..9), 0..300),
        demoted in btree_set(0u8..40, 0..30),
        used in vec(again(), 0..10),
    ) {
        demoted_first(Lru::new(), &calls, &demoted, &used);
        demoted_first(S3Fifo::new(), &calls, &demoted, &used);
        demoted_first(Prefix::new(), &calls, &demoted, &used);
        demoted_first(Chooser::new(), &calls, &demoted, &used);
        demoted_first(Clock::<u8>::new(400), &calls, &demoted, &used);
        demoted_first(Clock::<u8>::new(60), &calls, &demoted, &used);
    }

    /// A hand that needs room takes that of what is demoted, however little that is.
    #[test]
    fn a_hand_takes_the_places_of_what_is_demoted(
        places in 16u64..100,
        turns in 0u64..300,
        demoted in btree_set(0u64..100, 1..20),
    ) {
        let mut clock: Clock<u64> = Clock::new(places);
        for key in 0..places + turns {
            clock.insert(key, 1);
        }
        let held: Vec<u64> = (0..places + turns).filter(|key| clock.contains(key)).collect();
        let mut due: HashSet<u64> = demoted
            .into_iter()
            .filter_map(|at| held.get(at as usize).copied())
            .collect();
        due.iter().for_each(|key| assert!(clock.demote(key)));
        let staying: Vec<u64> = held.into_iter().filter(|key| !due.contains(key)).collect();
        for new in 0..due.len() as u64 {
            clock.insert(1000 + new, 1);
            due.retain(|key| clock.contains(key));
            prop_assert!(staying.iter().all(|key| clock.contains(key)), "{due:?} were due");
        }
        prop_assert!(due.is_empty());
    }

    /// Prompts that begin in one of three ways, of which one is demoted, as a namespace is.
    #[test]
    fn all_prompts_that_begin_in_one_way(
        prompts in vec(vec(0u8..3, 1..7), 1..200),
        bound in 5u64..60,
        used in vec(0u8..3, 0..5),
        by_chooser in any::<bool>(),
    ) {
        let policy: &mut dyn PrefixPolicy = if by_chooser {
            &mut Chooser::<Vec<u8>>::new()
        } else {
            &mut Prefix::<Vec<u8>>::new()
        };
        for prompt in &prompts {
            policy.use_prompt(prompt);
            while policy.weight() > bound {
                policy.evict();
            }
        }
        let blocks: BTreeSet<Vec<u8>> = prompts
            .iter()
            .flat_map(|prompt| (1..=prompt.len()).map(|end| prompt[..end].to_vec()))
            .collect();
        let demoted = blocks.iter().filter(|block| block[0] == 0);
        let mut due: HashSet<Vec<u8>> =
            demoted.filter(|block| policy.demote(block)).cloned().collect();
        // A prompt that is used again keeps its blocks, and it is the start of what stays.
        let again: Vec<u8> = [&[0], &used[..]].concat();
        if !used.is_empty() {
            policy.use_prompt(&again);
            due.retain(|block| !again.starts_with(block));
        }
        while !due.is_empty() {
            let (victim, _) = policy.evict().expect("what is due");
            prop_assert!(due.remove(&victim), "{victim:?} went before {due:?}");
        }
    }
}

/// A policy that is told of prompts.
trait PrefixPolicy: Policy<Vec<u8>> {
    fn use_prompt(&mut self, prompt: &[u8]);
}

fn chain(prompt: &[u8]) -> Vec<(Vec<u8>, u64)> {
    (1..=prompt.len())
        .map(|end| (prompt[..end].to_vec(), 1))
        .collect()
}

impl<P: Policy<Vec<u8>>> PrefixPolicy for P {
    fn use_prompt(&mut self, prompt: &[u8]) {
        self.use_chain(None, &chain(prompt));
    }
}

#[test]
fn a_block_that_is_demoted_alone_waits_for_those_that_follow_it() {
    let mut policy = Prefix::new();
    policy.insert("other", 1);
    policy.use_chain(None, &[("start", 1), ("middle", 1), ("end", 1)]);
    assert!(policy.demote(&"start"));
    let order: Vec<_> = std::iter::from_fn(|| policy.evict())
        .map(|(key, _)| key)
        .collect();
    assert_eq!(order, ["other", "end", "middle", "start"]);
}

#[test]
fn what_is_not_held_is_not_demoted() {
    let mut policy: Chooser<u8> = Chooser::new();
    assert!(!policy.demote(&1));
    assert!(policy.is_empty());
}
