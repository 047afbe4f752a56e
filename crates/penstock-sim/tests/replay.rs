//! Replays against definitions written out.

use std::path::Path;

use penstock_advisor::LoadPolicy;
use penstock_sim::{
    EngineSettings, Fleet, PolicyKind, ReadOptions, Routing, Scale, Speed, Tiers, Trace, bounds,
    hits, parse,
};
use proptest::collection::vec;
use proptest::prelude::*;

const BLOCK: u32 = 512;

fn scale(populations: u32) -> Scale {
    Scale {
        populations,
        ..Scale::default()
    }
}

/// A trace of Mooncake's format, a request each second.
fn trace(prompts: &[Vec<u32>]) -> Trace {
    let lines: Vec<String> = prompts
        .iter()
        .enumerate()
        .map(|(second, ids)| {
            let tokens = ids.len() as u32 * BLOCK;
            format!(
                r#"{{"timestamp": {}, "input_length": {tokens}, "hash_ids": {ids:?}}}"#,
                second * 1000
            )
        })
        .collect();
    let options = ReadOptions::default();
    let text = lines.join("\n");
    parse(text.as_bytes(), Path::new("made.jsonl"), &options)
        .unwrap()
        .trace
}

/// Prompts as paths through a tree: a block's name tells all blocks before it.
fn prompts() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let path = vec(0u32..3, 1..6).prop_map(|path| {
        let mut name = 0;
        let name_of = |step: u32| {
            name = name * 3 + step + 1;
            name
        };
        path.into_iter().map(name_of).collect()
    });
    vec(path, 1..25)
}

fn in_row(held: &[u32], blocks: &[u32]) -> u64 {
    blocks
        .iter()
        .take_while(|block| held.contains(block))
        .count() as u64
}

/// LRU as it is defined: a list by last use, the start of a prompt used after its end.
fn naive_lru(prompts: &[Vec<u32>], capacity: usize) -> u64 {
    let (mut held, mut found) = (Vec::new(), 0);
    for blocks in prompts {
        found += in_row(&held, blocks);
        for block in blocks.iter().rev() {
            held.retain(|other| other != block);
            held.push(*block);
        }
        let excess = held.len().saturating_sub(capacity);
        held.drain(..excess);
    }
    found
}

/// The most that any choice of what to hold after each request can find: all of them tried.
fn best_of_all(prompts: &[Vec<u32>], capacity: usize) -> u64 {
    let mut states = vec![(Vec::<u32>::new(), 0u64)];
    for blocks in prompts {
        let mut next: Vec<(Vec<u32>, u64)> = Vec::new();
        for (held, found) in states {
            let found = found + in_row(&held, blocks);
            let mut all = held;
            all.extend(blocks);
            all.sort_unstable();
            all.dedup();
            for choice in 0u32..1 << all.len() {
                if choice.count_ones() as usize > capacity {
                    continue;
                }
                let kept = (0..all.len()).filter(|n| choice & (1 << n) != 0);
                let kept: Vec<u32> = kept.map(|n| all[n]).collect();
                match next.iter_mut().find(|(other, _)| *other == kept) {
                    Some((_, best)) => *best = found.max(*best),
                    None => next.push((kept, found)),
                }
            }
        }
        states = next;
    }
    states
        .into_iter()
        .map(|(_, found)| found)
        .max()
        .unwrap_or(0)
}

proptest! {
    #[test]
    fn lru_is_what_its_definition_says(prompts in prompts(), capacity in 1usize..12) {
        let found = hits(&trace(&prompts), PolicyKind::Lru, capacity as u64);
        prop_assert_eq!(found, naive_lru(&prompts, capacity));
    }

    #[test]
    fn nothing_beats_the_bounds(prompts in prompts(), capacity in 1u64..12) {
        let trace = trace(&prompts);
        let belady = bounds::belady(&trace, capacity).unwrap();
        prop_assert!(belady <= bounds::infinite(&trace));
        for policy in PolicyKind::ALL {
            prop_assert!(hits(&trace, policy, capacity) <= belady, "{}", policy.name());
        }
    }

    #[test]
    fn a_cache_for_everything_finds_what_no_bound_does(prompts in prompts()) {
        let trace = trace(&prompts);
        let all = u64::from(trace.unique_blocks());
        prop_assert_eq!(bounds::belady(&trace, all).unwrap(), bounds::infinite(&trace));
        for policy in PolicyKind::ALL {
            prop_assert_eq!(hits(&trace, policy, all), bounds::infinite(&trace));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn belady_is_the_best_of_all_choices(
        prompts in vec(vec(0u32..2, 1..4), 1..7),
        capacity in 1usize..4,
    ) {
        let tree: Vec<Vec<u32>> = prompts
            .iter()
            .map(|path| (1..=path.len()).map(|end| path[..end].iter().fold(1, |n, s| n * 2 + s)).collect())
            .collect();
        prop_assert_eq!(bounds::belady(&trace(&tree), capacity as u64).unwrap(), best_of_all(&tree, capacity));
    }
}

/// A fleet that computes slowly and loads in no time, with room for so many blocks.
fn fleet(nodes: u32, host: u64, pool: u64) -> Fleet {
    let fast = Speed {
        bandwidth: 1e15,
        latency: 0.0,
    };
    Fleet {
        nodes,
        host_bytes: host * u64::from(BLOCK),
        pool_bytes: pool * u64::from(BLOCK),
        bytes_per_token: 1,
        policy: PolicyKind::Prefix,
        pool_policy: PolicyKind::Lru,
        routing: Routing::Random,
        prefill_speed: 1000.0,
        engine: EngineSettings {
            load_policy: LoadPolicy::Auto,
            tokens_per_step: 8192,
            get_lanes: 2,
            lookup_timeout: 0.25,
            load_timeout: 0.5,
            load_floor: 64.0 * 1024.0 * 1024.0,
        },
        host: fast,
        pool: fast,
        windows: 4,
    }
}

#[test]
fn what_one_node_computed_another_finds_in_the_pool_only() {
    let trace = trace(&vec![vec![1, 2, 3]; 40]);
    let alone = fleet(8, 10, 0).replay(&trace, |_| true).unwrap().unwrap();
    assert_eq!(alone.total.host_blocks, (40 - 8) * 3);
    let shared = fleet(8, 0, 10).replay(&trace, |_| true).unwrap().unwrap();
    assert_eq!(
        (shared.total.host_blocks, shared.total.pool_blocks),
        (0, 39 * 3)
    );
    assert_eq!(shared.total.written_bytes, 3 * u64::from(BLOCK));
    let both = fleet(8, 10, 10).replay(&trace, |_| true).unwrap().unwrap();
    assert_eq!(
        (both.total.host_blocks, both.total.pool_blocks),
        (32 * 3, 7 * 3)
    );
    assert_eq!(both.windows.len(), 4);
    assert_eq!(both.windows.iter().map(|w| w.blocks).sum::<u64>(), 120);
    // The last token of a prompt is computed even if its block is found.
    assert_eq!(both.total.computed_tokens, 3 * 512 + 39);
}

#[test]
fn what_loads_slower_than_it_computes_is_computed() {
    let trace = trace(&vec![vec![1, 2, 3]; 10]);
    let mut slow = fleet(1, 0, 10);
    slow.pool.latency = 10.0;
    let outcome = slow.replay(&trace, |_| true).unwrap().unwrap();
    assert_eq!(
        (outcome.total.pool_blocks, outcome.total.read_bytes),
        (0, 0)
    );
    assert_eq!(outcome.total.computed_tokens, outcome.total.input_tokens);
}

#[test]
fn routers_send_what_belongs_together_to_one_node() {
    let conversation = |c: u32, turn: u32| (0..2 + turn).map(|n| c * 100 + n).collect();
    let prompts: Vec<Vec<u32>> = (0..6)
        .flat_map(|turn| (1..20).map(move |c| conversation(c, turn)))
        .collect();
    let trace = trace(&prompts);
    let found = |routing| {
        let fleet = Fleet {
            routing,
            ..fleet(4, 1000, 0)
        };
        fleet
            .replay(&trace, |_| true)
            .unwrap()
            .unwrap()
            .total
            .host_blocks
    };
    let all = bounds::infinite(&trace);
    assert_eq!(found(Routing::Sticky), all);
    assert!(found(Routing::PrefixAware) * 10 > all * 8);
    assert!(found(Routing::Random) * 10 < all * 7);
}

#[test]
fn a_replay_stops_when_it_is_told_to_and_refuses_what_makes_no_sense() {
    let trace = trace(&vec![vec![1]; 1000]);
    assert!(
        fleet(1, 1, 0)
            .replay(&trace, |done| done < 500)
            .unwrap()
            .is_none()
    );
    let mut odd = fleet(1, 1, 0);
    odd.host_bytes = 3;
    let error = odd.replay(&trace, |_| true).unwrap_err().to_string();
    assert!(
        error.contains("host tier of 3 bytes holds no block of 512"),
        "{error}"
    );
    odd = Fleet {
        prefill_speed: f64::NAN,
        ..fleet(1, 1, 0)
    };
    assert!(odd.replay(&trace, |_| true).is_err());
}

#[test]
fn tiers_compared_at_once_give_what_each_gives_alone() {
    let prompts: Vec<Vec<u32>> = (0..3000)
        .map(|n: u32| {
            let conversation = n * 7919 % 300;
            (0..2 + n / 600)
                .map(|block| conversation * 100 + block)
                .collect()
        })
        .collect();
    let trace = trace(&prompts).scaled(&scale(4)).unwrap();
    let fleet = |host, pool| Fleet {
        pool_policy: PolicyKind::S3Fifo,
        ..fleet(7, host, pool)
    };
    let bytes = |blocks| blocks * u64::from(BLOCK);
    let tiers = [
        (true, 0),
        (false, 900),
        (true, 900),
        (true, 300),
        (false, 0),
    ]
    .map(|(host, blocks)| Tiers {
        host,
        pool_bytes: bytes(blocks),
    });
    let mut told = Vec::new();
    let tell = |done| {
        told.push(done);
        true
    };
    let outcomes = fleet(40, 0).compare(&trace, &tiers, tell).unwrap().unwrap();
    assert_eq!(told.last(), Some(&12_000));
    assert!(told.is_sorted() && told.len() > 2);
    for (tiers, together) in tiers.iter().zip(outcomes) {
        let host = if tiers.host { 40 } else { 0 };
        let alone = fleet(host, tiers.pool_bytes / u64::from(BLOCK));
        let alone = alone.replay(&trace, |_| true).unwrap().unwrap();
        assert_eq!(together.total, alone.total, "{tiers:?}");
        assert_eq!(together.windows, alone.windows, "{tiers:?}");
        assert_eq!(together.ttft, alone.ttft, "{tiers:?}");
    }
}
