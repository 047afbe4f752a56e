//! Properties of the policy for prefixes, over random trees of prompts.

use std::collections::HashMap;

use penstock_evict::{Lru, Policy, Prefix};
use proptest::collection::vec;
use proptest::prelude::*;

/// A block is named by the path that leads to it, as a chained hash does.
type Block = Vec<u8>;

/// The blocks of a prompt, each of its own weight.
fn chain(prompt: &[u8]) -> Vec<(Block, u64)> {
    (1..=prompt.len())
        .map(|end| (prompt[..end].to_vec(), 1 + u64::from(prompt[end - 1])))
        .collect()
}

#[derive(Clone, Debug)]
enum Call {
    /// A prompt, and how much of it the owner leaves to be named as the parent.
    Use(Vec<u8>, usize),
    Touch(Vec<u8>),
    Remove(Vec<u8>),
    Evict,
}

fn prompt() -> impl Strategy<Value = Vec<u8>> {
    vec(0u8..3, 1..8)
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => (prompt(), 0usize..8).prop_map(|(prompt, named)| Call::Use(prompt, named)),
        1 => prompt().prop_map(Call::Touch),
        1 => prompt().prop_map(Call::Remove),
        6 => Just(Call::Evict),
    ]
}

/// Runs the calls and checks what is held after each; returns the victims.
fn run(calls: &[Call]) -> Vec<Block> {
    let mut policy = Prefix::new();
    let mut held = HashMap::<Block, u64>::new();
    let mut victims = Vec::new();
    for call in calls {
        match call {
            Call::Use(prompt, named) => {
                let blocks = chain(prompt);
                let named = (*named).min(blocks.len() - 1);
                let is_known = blocks[..named]
                    .iter()
                    .all(|(key, _)| held.contains_key(key));
                let from = if is_known { named } else { 0 };
                let parent = from.checked_sub(1).map(|last| &blocks[last].0);
                policy.use_chain(parent, &blocks[from..]);
                held.extend(blocks[from..].iter().cloned());
            }
            Call::Touch(key) => assert_eq!(policy.touch(key), held.contains_key(key)),
            Call::Remove(key) => assert_eq!(policy.remove(key), held.remove(key)),
            Call::Evict => match policy.evict() {
                None => assert!(held.is_empty()),
                Some((victim, weight)) => {
                    assert_eq!(held.remove(&victim), Some(weight));
                    let follows =
                        |key: &&Block| key.len() == victim.len() + 1 && key.starts_with(&victim);
                    assert_eq!(held.keys().find(follows), None, "after {victim:?}");
                    victims.push(victim);
                }
            },
        }
        assert_eq!(policy.len(), held.len());
        assert_eq!(policy.weight(), held.values().sum::<u64>());
        assert!(held.keys().all(|key| policy.contains(key)));
    }
    while let Some((victim, weight)) = policy.evict() {
        assert_eq!(held.remove(&victim), Some(weight));
        victims.push(victim);
    }
    assert!(held.is_empty());
    assert_eq!((policy.len(), policy.weight()), (0, 0));
    victims
}

proptest! {
    #[test]
    fn prefix_never_gives_up_a_block_before_those_that_follow_it(calls in vec(call(), 0..300)) {
        run(&calls);
    }

    #[test]
    fn prefix_is_deterministic(calls in vec(call(), 0..300)) {
        prop_assert_eq!(run(&calls), run(&calls));
    }

    #[test]
    fn blocks_in_any_order_do_no_harm(
        chains in vec((prop::option::of(0u8..12), vec(0u8..12, 0..6)), 0..200),
        bound in 1u64..12,
    ) {
        let mut policy = Prefix::new();
        for (parent, chain) in chains {
            let chain: Vec<_> = chain.into_iter().map(|block| (block, 1)).collect();
            policy.use_chain(parent.as_ref(), &chain);
            while policy.weight() > bound {
                prop_assert!(policy.evict().is_some());
            }
            prop_assert!(policy.len() as u64 == policy.weight() && policy.weight() <= bound);
        }
    }
}

/// Blocks found in a row from the first, of all that were asked for after the first half.
fn late_hits(policy: &mut impl Policy<u64>, prompts: &[Vec<u64>], bound: u64) -> f64 {
    let (mut hits, mut asked) = (0, 0);
    for (number, prompt) in prompts.iter().enumerate() {
        if number >= prompts.len() / 2 {
            hits += prompt.iter().take_while(|key| policy.contains(key)).count();
            asked += prompt.len();
        }
        let chain: Vec<_> = prompt.iter().map(|&key| (key, 1)).collect();
        policy.use_chain(None, &chain);
        while policy.weight() > bound {
            policy.evict().expect("something to evict");
        }
    }
    hits as f64 / asked as f64
}

/// Conversations of five turns among nine times as many prompts that never come back.
fn conversations_among_one_offs() -> Vec<Vec<u64>> {
    let mut prompts = Vec::new();
    for round in 0..3000u64 {
        let (group, turn) = (round / 50, round % 50 / 10);
        let conversation = group * 10 + round % 10;
        prompts.push(
            (0..4 + turn * 2)
                .map(|n| (1 << 40) + conversation * 100 + n)
                .collect(),
        );
        prompts.extend((0..9).map(|one| (0..5).map(|n| (round * 9 + one) * 100 + n).collect()));
    }
    prompts
}

#[test]
fn prefix_learns_which_prompts_come_back() {
    let prompts = conversations_among_one_offs();
    let ours = late_hits(&mut Prefix::new(), &prompts, 250);
    let lru = late_hits(&mut Lru::new(), &prompts, 250);
    assert!(ours > 2.0 * lru && ours > 0.08, "ours {ours}, LRU {lru}");
}

/// A working set that changes all the time, where the last used is the best guess.
#[test]
fn prefix_does_as_lru_does_where_that_is_best() {
    let prompts: Vec<Vec<u64>> = (0..6000u64)
        .map(|round| {
            (0..8)
                .map(|n| (round / 20) * 1000 + (round % 3) * 100 + n)
                .collect()
        })
        .collect();
    let ours = late_hits(&mut Prefix::new(), &prompts, 30);
    let lru = late_hits(&mut Lru::new(), &prompts, 30);
    assert!(ours >= lru - 0.01, "ours {ours}, LRU {lru}");
}
