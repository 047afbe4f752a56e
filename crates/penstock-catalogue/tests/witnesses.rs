//! Witnesses: which blocks that the pool has are compared with what the engine has computed.

use std::collections::HashMap;

use penstock_catalogue::{Begun, Catalogue, Group, Groups, Holding, Reads, Scheduled};
use penstock_contract::{Chunk, Tenant};
use proptest::prelude::*;

const TOKENS: u64 = 16;

fn chunks(numbers: std::ops::Range<u8>) -> Vec<Chunk> {
    numbers.map(|n| [n; 32]).collect()
}

fn catalogue(reads: &[Reads]) -> Catalogue {
    let group = |&reads| Group {
        block_tokens: TOKENS,
        reads,
    };
    let groups = Groups::new(reads.iter().map(group).collect(), TOKENS).unwrap();
    let mut catalogue = Catalogue::new(groups, 100);
    let holding = Holding {
        ranks: 1,
        bytes: 1000,
        objects: 1,
    };
    catalogue.set_holdings(vec![holding; reads.len()]).unwrap();
    catalogue
}

/// A request of so many blocks comes, all of which the pool has.
fn found(catalogue: &mut Catalogue, id: &str, blocks: u8) {
    catalogue
        .add(id, u64::from(blocks) * TOKENS + 1, None)
        .unwrap();
    catalogue.extend(id, &chunks(1..blocks + 1)).unwrap();
    for query in catalogue.ask(id).unwrap() {
        catalogue.answer(query.number, Some(&vec![true; blocks.into()]));
    }
}

/// A step that computes the tokens of these blocks.
fn step(catalogue: &mut Catalogue, id: &str, from: u64, to: u64) {
    let scheduled = Scheduled {
        id,
        computed: from * TOKENS,
        tokens: (to - from) * TOKENS,
    };
    catalogue.step([scheduled].into_iter(), true);
}

/// What the store after such a step takes.
fn begun(catalogue: &mut Catalogue, id: &str, job: u64, to: u64, most: usize) -> Option<Begun> {
    let table = |group: usize, index: usize| Some((100 * group + index) as u64);
    catalogue
        .begin_store(id, job, to * TOKENS, u64::MAX, most, table)
        .unwrap()
}

/// The witnesses among it, by group and by index.
fn witnesses(begun: Option<Begun>) -> Vec<u64> {
    let Some(begun) = begun else {
        return Vec::new();
    };
    let from = begun.blocks.len() - begun.witnesses;
    begun.blocks[from..].iter().map(|block| block.id).collect()
}

/// Computes such blocks, and compares up to `most`.
fn compared(catalogue: &mut Catalogue, id: &str, job: u64, to: u64, most: usize) -> Vec<u64> {
    let begun = begun(catalogue, id, job, to, most);
    if begun.is_some() {
        catalogue.end_store(job, &[], &[]).unwrap();
    }
    witnesses(begun)
}

fn load(catalogue: &mut Catalogue, id: &str, job: u64, from: u64, to: u64) {
    let table = |_: usize, index: usize| Some(index as u64);
    catalogue
        .begin_load(id, job, from * TOKENS, to * TOKENS, table)
        .unwrap();
    catalogue.end(job).unwrap();
}

#[test]
fn witnesses_are_spread_and_each_block_is_one_before_any_is_again() {
    let mut catalogue = catalogue(&[Reads::All]);
    for (job, expected) in [
        (1, [1, 4, 7]),
        (2, [2, 5, 8]),
        (3, [0, 3, 6]),
        (4, [1, 4, 7]),
    ] {
        found(&mut catalogue, "a", 9);
        step(&mut catalogue, "a", 0, 9);
        assert_eq!(compared(&mut catalogue, "a", job, 9, 3), expected, "{job}");
        catalogue.remove("a").unwrap();
    }
    found(&mut catalogue, "a", 9);
    step(&mut catalogue, "a", 0, 9);
    assert_eq!(begun(&mut catalogue, "a", 5, 9, 0), None);
}

#[test]
fn what_is_stored_goes_before_the_witnesses_and_alone_counts_as_stored() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "other", 2);
    catalogue.add("a", 65, None).unwrap();
    catalogue.extend("a", &chunks(1..5)).unwrap();
    catalogue.set_miss("a").unwrap();
    step(&mut catalogue, "a", 0, 4);
    let store = begun(&mut catalogue, "a", 1, 4, 8).unwrap();
    let ids: Vec<u64> = store.blocks.iter().map(|block| block.id).collect();
    assert_eq!(
        (ids, store.witnesses, store.is_own),
        (vec![2, 3, 0, 1], 2, true)
    );
    // The second witness was not compared, which says nothing.
    assert_eq!(catalogue.end_store(1, &[1, 3], &[]), Ok(1));
    found(&mut catalogue, "b", 3);
    catalogue.pause("a").unwrap();
    step(&mut catalogue, "a", 0, 4);
    let store = begun(&mut catalogue, "a", 2, 4, 0).unwrap();
    assert_eq!(store.blocks[0].id, 3);
    assert_eq!(store.blocks.len(), 1);
}

#[test]
fn what_disagreed_is_stored_by_whoever_computes_it_next_and_then_compared_anew() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "a", 3);
    step(&mut catalogue, "a", 0, 3);
    assert_eq!(witnesses(begun(&mut catalogue, "a", 1, 3, 3)), [0, 1, 2]);
    assert_eq!(catalogue.end_store(1, &[1], &[1]), Ok(0));
    catalogue.pause("a").unwrap();
    step(&mut catalogue, "a", 0, 3);
    let store = begun(&mut catalogue, "a", 2, 3, 0).unwrap();
    assert_eq!(store.blocks[0].id, 1);
    assert_eq!((store.blocks.len(), store.is_own), (1, true));
    assert_eq!(catalogue.end_store(2, &[], &[]), Ok(1));
    catalogue.pause("a").unwrap();
    step(&mut catalogue, "a", 0, 3);
    assert_eq!(compared(&mut catalogue, "a", 3, 3, 1), [1]);
}

#[test]
fn what_is_on_its_way_or_cannot_be_decrypted_is_not_compared() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "a", 4);
    found(&mut catalogue, "b", 4);
    let table = |_: usize, index: usize| Some(index as u64);
    catalogue.begin_load("b", 1, 0, TOKENS, table).unwrap();
    catalogue.set_foreign(1, &[0]).unwrap();
    catalogue.end(1).unwrap();
    step(&mut catalogue, "a", 0, 4);
    assert_eq!(witnesses(begun(&mut catalogue, "a", 2, 4, 1)), [2]);
    step(&mut catalogue, "b", 0, 4);
    assert_eq!(witnesses(begun(&mut catalogue, "b", 3, 4, 9)), [1, 3]);
}

#[test]
fn what_was_computed_behind_loaded_blocks_is_not_compared() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "a", 4);
    load(&mut catalogue, "a", 1, 0, 2);
    step(&mut catalogue, "a", 2, 4);
    assert_eq!(compared(&mut catalogue, "a", 2, 4, 9), [0; 0]);
    // Nor by a request that has these blocks from the engine's cache.
    found(&mut catalogue, "b", 6);
    assert_eq!(catalogue.is_own("b", 4 * TOKENS), Ok(false));
    step(&mut catalogue, "b", 4, 6);
    assert_eq!(compared(&mut catalogue, "b", 3, 6, 9), [0; 0]);
    // Who computes all of it may accuse, but is no ground for others: the loaded blocks may still
    // be in the engine's cache.
    catalogue.pause("a").unwrap();
    step(&mut catalogue, "a", 0, 4);
    assert_eq!(compared(&mut catalogue, "a", 4, 4, 9), [0, 1, 2, 3]);
    found(&mut catalogue, "c", 6);
    assert_eq!(catalogue.is_own("c", 2 * TOKENS), Ok(false));
    assert_eq!(catalogue.is_own("c", 0), Ok(true));
}

#[test]
fn what_was_computed_on_the_engines_own_blocks_is_compared() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "a", 2);
    step(&mut catalogue, "a", 0, 2);
    assert_eq!(begun(&mut catalogue, "a", 1, 2, 0), None);
    found(&mut catalogue, "b", 4);
    step(&mut catalogue, "b", 2, 4);
    // What it has from the cache was another's to compare.
    assert_eq!(compared(&mut catalogue, "b", 2, 4, 9), [2, 3]);
    // A load of one of them, for anybody, ends it.
    found(&mut catalogue, "c", 4);
    assert_eq!(catalogue.is_own("c", 4 * TOKENS), Ok(true));
    found(&mut catalogue, "d", 4);
    load(&mut catalogue, "d", 3, 3, 4);
    assert_eq!(catalogue.is_own("c", 3 * TOKENS), Ok(true));
    assert_eq!(catalogue.is_own("c", 4 * TOKENS), Ok(false));
}

#[test]
fn weights_that_change_end_what_the_engine_has_computed() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "a", 4);
    step(&mut catalogue, "a", 0, 2);
    begun(&mut catalogue, "a", 1, 2, 0);
    catalogue.forget_pool();
    found(&mut catalogue, "b", 4);
    assert_eq!(catalogue.is_own("b", 2 * TOKENS), Ok(false));
    step(&mut catalogue, "a", 2, 4);
    assert_eq!(compared(&mut catalogue, "a", 2, 4, 9), [0; 0], "it runs on");
    catalogue.pause("a").unwrap();
    step(&mut catalogue, "a", 0, 4);
    assert_eq!(compared(&mut catalogue, "a", 3, 4, 9), [0, 1, 2, 3]);
}

#[test]
fn states_are_compared_where_a_step_left_one() {
    let mut catalogue = catalogue(&[Reads::All, Reads::State]);
    found(&mut catalogue, "a", 4);
    step(&mut catalogue, "a", 0, 2);
    assert_eq!(compared(&mut catalogue, "a", 1, 2, 9), [0, 1, 101]);
    found(&mut catalogue, "b", 4);
    assert_eq!(catalogue.is_own("b", 2 * TOKENS), Ok(true));
    // The state after the first block was passed over: nobody has it.
    assert_eq!(catalogue.is_own("b", TOKENS), Ok(false));
    step(&mut catalogue, "b", 2, 4);
    assert_eq!(compared(&mut catalogue, "b", 2, 4, 9), [2, 3, 103]);
}

#[test]
fn blocks_that_left_a_window_need_not_be_there_but_must_not_have_been_loaded() {
    let reads = [Reads::Window(TOKENS + 1)];
    let mut catalogue = catalogue(&reads);
    found(&mut catalogue, "a", 4);
    step(&mut catalogue, "a", 0, 4);
    let table = |_: usize, index: usize| Some(if index < 2 { u64::MAX } else { index as u64 });
    let begun = catalogue.begin_store("a", 1, 4 * TOKENS, u64::MAX, 9, table);
    assert_eq!(witnesses(begun.unwrap()), [2, 3]);
    assert_eq!(catalogue.readers([3].into_iter()), [1]);
    catalogue.end_store(1, &[], &[]).unwrap();
    found(&mut catalogue, "b", 6);
    assert_eq!(catalogue.is_own("b", 4 * TOKENS), Ok(true));
    assert_eq!(catalogue.is_own("b", 2 * TOKENS), Ok(false));
    found(&mut catalogue, "c", 6);
    load(&mut catalogue, "c", 2, 0, 1);
    assert_eq!(catalogue.is_own("b", 4 * TOKENS), Ok(false));
}

#[test]
fn what_one_tenant_computed_says_nothing_of_anothers_blocks() {
    let mut catalogue = catalogue(&[Reads::All]);
    found(&mut catalogue, "a", 4);
    step(&mut catalogue, "a", 0, 4);
    begun(&mut catalogue, "a", 1, 4, 9);
    let tenant = Tenant::named("red").unwrap();
    catalogue.add("red", 65, Some(tenant)).unwrap();
    catalogue.extend("red", &chunks(1..5)).unwrap();
    assert_eq!(catalogue.is_own("a", 4 * TOKENS), Ok(true));
    assert_eq!(catalogue.is_own("red", 4 * TOKENS), Ok(false));
}

/// What happens to a prompt of an engine: its own cache has copies of blocks, by number, each of
/// which is the engine's own or not.
#[derive(Default)]
struct Engine {
    cache: HashMap<usize, Vec<bool>>,
}

proptest! {
    /// An engine's cache gives away any copy that it has of a block, and evicts from the end of a
    /// prompt. Whatever is compared then was computed on nothing but own copies.
    #[test]
    fn nothing_is_compared_that_some_loaded_block_may_have_spoilt(
        runs in prop::collection::vec((0_u64..6, 0_u64..6, prop::sample::select(vec![0_u64, 2, 4]), any::<bool>(), 0_usize..5), 1..30)
    ) {
        const BLOCKS: u64 = 6;
        let mut catalogue = catalogue(&[Reads::All]);
        let mut engine = Engine::default();
        for (job, (cached, loaded, evicted, is_first, witness_most)) in (1_u64..).zip(runs) {
            found(&mut catalogue, "r", BLOCKS as u8);
            // The request has what is in the cache, as far as it asks, whichever copies these are.
            let mut own = Vec::new();
            for block in 0..cached {
                let Some(copies) = engine.cache.get(&(block as usize)) else { break };
                own.push(if is_first { copies[0] } else { copies[copies.len() - 1] });
            }
            let first = own.len() as u64;
            let end = (first + loaded).min(BLOCKS - 1);
            if end > first {
                load(&mut catalogue, "r", 1000 + job, first, end);
                own.resize(end as usize, false);
            }
            let is_own = own.iter().all(|&own| own);
            own.resize(BLOCKS as usize, is_own);
            step(&mut catalogue, "r", end, BLOCKS);
            let compared = compared(&mut catalogue, "r", job, BLOCKS, witness_most);
            prop_assert!(is_own || compared.is_empty(), "{compared:?}");
            prop_assert!(compared.iter().all(|&block| block >= end));
            if end == 0 {
                prop_assert_eq!(compared.len(), witness_most.min(BLOCKS as usize));
            }
            for (block, own) in own.into_iter().enumerate().skip(first as usize) {
                engine.cache.entry(block).or_default().push(own);
            }
            for block in BLOCKS - evicted..BLOCKS {
                engine.cache.remove(&(block as usize));
            }
            catalogue.remove("r").unwrap();
        }
    }
}
