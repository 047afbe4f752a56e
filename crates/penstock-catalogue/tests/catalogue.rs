//! Requests, look-ups, loads and stores against one catalogue.

use penstock_advisor::Reach;
use penstock_catalogue::{
    Catalogue, CatalogueError, Group, Groups, Holding, LookupState, Place, Reads, Scheduled,
};
use penstock_contract::{Chunk, HostChange, Parent, Tenant};

const TOKENS: u64 = 16;
const BYTES: u64 = 1000;

fn chunk(n: u8) -> Chunk {
    [n; 32]
}

fn change(n: u8, came: bool) -> HostChange {
    HostChange {
        group: 0,
        tenant: None,
        chunk: chunk(n),
        came,
    }
}

fn chunks(numbers: std::ops::Range<u8>) -> Vec<Chunk> {
    numbers.map(chunk).collect()
}

fn catalogue(reads: &[Reads], ranks: u32) -> Catalogue {
    let group = |&reads| Group {
        block_tokens: TOKENS,
        reads,
    };
    let groups = Groups::new(reads.iter().map(group).collect(), TOKENS).unwrap();
    let mut catalogue = Catalogue::new(groups, 100);
    let holding = Holding {
        ranks,
        bytes: BYTES,
        objects: 1,
    };
    catalogue.set_holdings(vec![holding; reads.len()]).unwrap();
    catalogue
}

/// A request of four blocks, one of whose groups' look-ups finds these.
fn looked_up(catalogue: &mut Catalogue, id: &str, present: &[bool]) {
    catalogue.add(id, 4 * TOKENS + 1, None).unwrap();
    catalogue.extend(id, &chunks(1..5)).unwrap();
    for query in catalogue.ask(id).unwrap() {
        catalogue.answer(query.number, Some(present));
    }
}

fn ends(catalogue: &Catalogue, id: &str) -> Vec<(u64, u64, u64)> {
    let reaches = catalogue.reaches(id, 0, 4 * TOKENS).unwrap();
    let tuple = |reach: &Reach| (reach.end / TOKENS, reach.host_bytes, reach.pool_bytes);
    reaches.iter().map(tuple).collect()
}

#[test]
fn a_block_is_held_when_every_rank_has_it() {
    let mut catalogue = catalogue(&[Reads::All], 2);
    looked_up(&mut catalogue, "a", &[true, true, true, false]);
    assert_eq!(ends(&catalogue, "a"), [(3, 0, 3 * BYTES)]);
    catalogue
        .begin_load("a", 1, 0, 3 * TOKENS, |_, i| Some(i as u64))
        .unwrap();
    catalogue.change_host(&change(1, true)).unwrap();
    assert_eq!(ends(&catalogue, "a"), [(3, 0, 3 * BYTES)]);
    catalogue.change_host(&change(1, true)).unwrap();
    assert_eq!(
        ends(&catalogue, "a"),
        [(1, BYTES, 0), (3, BYTES, 2 * BYTES)]
    );
    catalogue.change_host(&change(1, false)).unwrap();
    assert_eq!(ends(&catalogue, "a"), [(3, 0, 3 * BYTES)]);
}

#[test]
fn what_a_job_did_not_find_is_not_there_and_what_cannot_be_decrypted_is_not_loaded() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "a", &[true; 4]);
    catalogue
        .begin_load("a", 1, 0, 4 * TOKENS, |_, i| Some(i as u64))
        .unwrap();
    catalogue.lose(1, &[3]).unwrap();
    assert_eq!(ends(&catalogue, "a"), [(3, 0, 3 * BYTES)]);
    catalogue.set_foreign(1, &[1]).unwrap();
    assert_eq!(ends(&catalogue, "a"), [(1, 0, BYTES)]);
    let beyond = CatalogueError::NoPosition {
        job: 1,
        position: 4,
    };
    assert_eq!(catalogue.lose(1, &[4]), Err(beyond));
    catalogue.end(1).unwrap();
    assert_eq!(catalogue.lose(1, &[0]), Ok(()));
    // Foreign blocks need not be stored as long as they are there; lost ones do.
    let stored = catalogue.begin_store("a", 2, 4 * TOKENS, 0, 0, |_, i| Some(i as u64 + 1));
    let stored: Vec<u64> = stored
        .unwrap()
        .unwrap()
        .blocks
        .iter()
        .map(|b| b.id)
        .collect();
    assert_eq!(stored, [4]);
    // It went, and came back under another key.
    looked_up(&mut catalogue, "b", &[true, false, true, true]);
    looked_up(&mut catalogue, "c", &[true; 4]);
    assert_eq!(ends(&catalogue, "c"), [(4, 0, 4 * BYTES)]);
}

#[test]
fn a_look_up_is_over_once_all_its_groups_have_answered() {
    let mut catalogue = catalogue(&[Reads::All, Reads::Window(2 * TOKENS)], 1);
    catalogue.add("a", 65, None).unwrap();
    catalogue.extend("a", &chunks(1..5)).unwrap();
    assert_eq!(catalogue.lookup("a"), Ok(LookupState::None));
    let queries = catalogue.ask("a").unwrap();
    assert_eq!(queries.len(), 2);
    assert_eq!(catalogue.answer(queries[0].number, Some(&[true; 4])), 4);
    assert_eq!(catalogue.lookup("a"), Ok(LookupState::Asked));
    // What the pool has does not count before that.
    assert_eq!(ends(&catalogue, "a"), []);
    assert_eq!(
        catalogue.answer(queries[1].number, Some(&[false, false, true, true])),
        2
    );
    assert_eq!(catalogue.lookup("a"), Ok(LookupState::Over));
    assert_eq!(ends(&catalogue, "a"), [(4, 0, 6 * BYTES)]);
    // Nobody waits for it twice.
    assert_eq!(catalogue.answer(queries[1].number, Some(&[true; 4])), 0);
}

#[test]
fn of_a_look_up_that_failed_nothing_is_loaded() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "a", &[true; 4]);
    catalogue.add("b", 65, None).unwrap();
    catalogue.extend("b", &chunks(1..5)).unwrap();
    let queries = catalogue.ask("b").unwrap();
    catalogue.answer(queries[0].number, None);
    assert_eq!(ends(&catalogue, "b"), []);
    catalogue.set_miss("a").unwrap();
    assert_eq!(ends(&catalogue, "a"), []);
    // A short prompt has nothing to ask for.
    catalogue.add("c", 5, None).unwrap();
    assert_eq!(catalogue.ask("c"), Ok(vec![]));
    assert_eq!(catalogue.lookup("c"), Ok(LookupState::Over));
}

#[test]
fn a_preempted_request_is_looked_up_and_stored_anew() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    catalogue.add("a", 65, None).unwrap();
    catalogue.extend("a", &chunks(1..5)).unwrap();
    let queries = catalogue.ask("a").unwrap();
    let step = |catalogue: &mut Catalogue, computed, tokens| {
        let scheduled = Scheduled {
            id: "a",
            computed,
            tokens,
        };
        catalogue.step([scheduled].into_iter(), true)
    };
    // The pool may have the blocks: a later step decides.
    let first = step(&mut catalogue, 0, 64);
    assert_eq!((first.started, first.filled), (vec![0], vec![]));
    assert_eq!(first.prompts, [(0, 64)]);
    assert_eq!(catalogue.pause("a").unwrap(), [queries[0].number]);
    assert_eq!(catalogue.lookup("a"), Ok(LookupState::None));
    let again = step(&mut catalogue, 0, 65);
    assert_eq!((again.started, again.filled), (vec![0], vec![(0, 65)]));
    // Computing goes on, and fills nothing.
    let decoding = step(&mut catalogue, 65, 1);
    assert_eq!((decoding.started, decoding.prompts), (vec![], vec![]));
    catalogue
        .begin_store("a", 1, 65, 0, 0, |_, i| Some(i as u64 + 1))
        .unwrap()
        .unwrap();
    assert_eq!(step(&mut catalogue, 66, 1).filled, []);
}

#[test]
fn prefetches_share_no_block_and_keep_theirs_until_they_are_released() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "a", &[true; 4]);
    looked_up(&mut catalogue, "b", &[true; 4]);
    let (blocks, moved) = catalogue
        .begin_prefetch("a", 1, 0, 64, 2, false)
        .unwrap()
        .unwrap();
    assert_eq!((blocks.len(), moved.pool_bytes), (2, 2 * BYTES));
    assert_eq!(catalogue.begin_prefetch("b", 2, 0, 32, 9, false), Ok(None));
    let (others, _) = catalogue
        .begin_prefetch("b", 2, 0, 64, 9, false)
        .unwrap()
        .unwrap();
    assert_eq!(others[0].chunk, chunk(3));
    assert_eq!(
        others[0].parent,
        Some(Parent {
            chunk: chunk(2),
            tokens: 32
        })
    );
    assert_eq!(catalogue.prefetched(), 4);
    catalogue.release(1).unwrap();
    assert_eq!(catalogue.prefetched(), 2);
    // What it finds afterwards counts all the same.
    catalogue.lose(1, &[1]).unwrap();
    assert_eq!(ends(&catalogue, "a"), [(1, 0, BYTES)]);
    catalogue.end(1).unwrap();
    catalogue.end(2).unwrap();
    assert_eq!(catalogue.prefetched(), 0);
    // Only what host memory lacks, for a probe.
    catalogue.change_host(&change(1, true)).unwrap();
    let (lacking, _) = catalogue
        .begin_prefetch("b", 3, 0, 64, 2, true)
        .unwrap()
        .unwrap();
    let lacking: Vec<Chunk> = lacking.iter().map(|block| block.chunk).collect();
    assert_eq!(lacking, [chunk(2), chunk(3)]);
}

#[test]
fn blocks_that_left_a_window_are_not_stored_and_those_that_may_leave_have_readers() {
    let mut catalogue = catalogue(&[Reads::All, Reads::Window(2 * TOKENS)], 1);
    catalogue.add("a", 65, None).unwrap();
    catalogue.extend("a", &chunks(1..5)).unwrap();
    let null = 0;
    let table = |group: usize, index: usize| match (group, index) {
        (1, 0 | 1) => Some(null),
        _ => Some((group * 10 + index) as u64 + 1),
    };
    let blocks = catalogue
        .begin_store("a", 7, 64, null, 0, table)
        .unwrap()
        .unwrap()
        .blocks;
    let own: Vec<(u16, u64)> = blocks.iter().map(|block| (block.group, block.id)).collect();
    assert_eq!(own, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 13), (1, 14)]);
    assert_eq!(catalogue.readers([2, 13, 14].into_iter()), [7]);
    catalogue.on_read(7);
    assert!(!catalogue.is_reading());
    assert_eq!(catalogue.end_store(7, &[0, 5], &[]), Ok(4));
    // Two did not get there: whoever fills them next stores them.
    catalogue.pause("a").unwrap();
    let again = catalogue
        .begin_store("a", 8, 64, null, 0, table)
        .unwrap()
        .unwrap()
        .blocks;
    assert_eq!(again.len(), 2);
}

#[test]
fn nothing_is_left_of_what_nobody_names() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "a", &[true, true, false, false]);
    catalogue
        .begin_load("a", 1, 0, 32, |_, i| Some(i as u64))
        .unwrap();
    catalogue.remove("a").unwrap();
    assert_eq!(catalogue.loads(), 1);
    catalogue.end(1).unwrap();
    // Two are remembered, since the pool has them.
    assert_eq!(catalogue.len(), 2);
    catalogue.forget_pool();
    assert!(catalogue.is_empty());
    let unknown = CatalogueError::UnknownRequest("a".to_owned());
    assert_eq!(catalogue.remove("a"), Err(unknown));
}

#[test]
fn what_is_known_of_one_tenants_blocks_says_nothing_about_anothers() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    let [red, blue] = ["red", "blue"].map(|name| Some(Tenant::named(name).unwrap()));
    let table = |_: usize, index: usize| Some(index as u64 + 1);
    for (job, id, tenant) in [(1, "a", red), (2, "b", blue), (3, "c", None)] {
        catalogue.add(id, 65, tenant).unwrap();
        assert_eq!(catalogue.tenant(id), Ok(tenant));
        catalogue.extend(id, &chunks(1..5)).unwrap();
        assert_eq!(ends(&catalogue, id), []);
        // Each stores all of them, though the others are on their way or there.
        let blocks = catalogue.begin_store(id, job, 64, 0, 0, table).unwrap();
        let blocks: Vec<Chunk> = blocks
            .unwrap()
            .blocks
            .iter()
            .map(|block| block.chunk)
            .collect();
        assert_eq!(blocks, chunks(1..5));
        catalogue.end_store(job, &[], &[]).unwrap();
    }
    for n in 1..5 {
        let change = HostChange {
            tenant: red,
            ..change(n, true)
        };
        catalogue.change_host(&change).unwrap();
    }
    assert_eq!(ends(&catalogue, "a"), [(4, 4 * BYTES, 0)]);
    assert_eq!(ends(&catalogue, "b"), []);
    for query in catalogue.ask("b").unwrap() {
        catalogue.answer(query.number, Some(&[true, true, true, false]));
    }
    assert_eq!(ends(&catalogue, "b"), [(3, 0, 3 * BYTES)]);
    for id in ["a", "b", "c"] {
        catalogue.remove(id).unwrap();
    }
    // A later request of each finds what was known of its own.
    catalogue.add("d", 65, red).unwrap();
    catalogue.extend("d", &chunks(1..5)).unwrap();
    assert_eq!(ends(&catalogue, "d"), [(4, 4 * BYTES, 0)]);
    catalogue.add("e", 65, blue).unwrap();
    catalogue.extend("e", &chunks(1..5)).unwrap();
    let blocks = catalogue.begin_store("e", 4, 64, 0, 0, table).unwrap();
    let blocks: Vec<Chunk> = blocks
        .unwrap()
        .blocks
        .iter()
        .map(|block| block.chunk)
        .collect();
    assert_eq!(blocks, [chunk(4)]);
}

/// Fills all blocks of a request whose tokens are computed, and ends the store; how many it stored.
fn store(catalogue: &mut Catalogue, id: &str, job: u64, tokens: u64) -> usize {
    let table = |_: usize, index: usize| Some(100 + index as u64);
    match catalogue.begin_store(id, job, tokens, 0, 0, table).unwrap() {
        None => 0,
        Some(_) => catalogue.end_store(job, &[], &[]).unwrap(),
    }
}

fn numbers(places: &[Place]) -> Vec<(usize, u8, u64)> {
    let number = |place: &Place| (place.group, place.chunk[0], place.position / TOKENS);
    places.iter().map(number).collect()
}

#[test]
fn places_are_what_a_load_of_the_prompt_needs() {
    let mut catalogue = catalogue(&[Reads::All, Reads::Window(2 * TOKENS)], 1);
    catalogue.add("r", 4 * TOKENS + 1, None).unwrap();
    catalogue.extend("r", &chunks(1..5)).unwrap();
    let places = catalogue.places("r", 3 * TOKENS).unwrap();
    // The group with a window needs the last two blocks.
    assert_eq!(
        numbers(&places),
        [(0, 1, 0), (0, 2, 1), (1, 2, 1), (0, 3, 2), (1, 3, 2)]
    );
    // No further than there are hashes.
    assert_eq!(catalogue.places("r", 9 * TOKENS).unwrap()[..1].len(), 1);
    assert!(catalogue.places("nobody", TOKENS).is_err());
}

#[test]
fn what_is_let_go_was_put_here_and_is_nobody_elses() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    // The pool has the first block from elsewhere. The others are put by this engine.
    looked_up(&mut catalogue, "first", &[true, false, false, false]);
    assert_eq!(store(&mut catalogue, "first", 1, 4 * TOKENS), 3);
    catalogue.remove("first").unwrap();
    looked_up(&mut catalogue, "again", &[true; 4]);
    catalogue.add("other", 2 * TOKENS + 1, None).unwrap();
    catalogue.extend("other", &chunks(1..3)).unwrap();
    let tenant = Tenant::named("red").unwrap();
    catalogue
        .add("tenant", 4 * TOKENS + 1, Some(tenant))
        .unwrap();
    catalogue.extend("tenant", &chunks(1..5)).unwrap();
    assert_eq!(catalogue.let_go("tenant", 0).unwrap(), []);
    // The second is another request's too.
    let gone = catalogue.let_go("again", 0).unwrap();
    assert_eq!(numbers(&gone), [(0, 3, 2), (0, 4, 3)]);
    assert_eq!(catalogue.let_go("again", 0).unwrap(), [], "once");
    assert_eq!(ends(&catalogue, "again"), [(2, 0, 2 * BYTES)]);
    catalogue.remove("other").unwrap();
    let gone = catalogue.let_go("again", TOKENS + 1).unwrap();
    assert_eq!(numbers(&gone), [(0, 2, 1)]);
}

#[test]
fn what_is_on_its_way_is_not_let_go() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "r", &[false; 4]);
    assert_eq!(store(&mut catalogue, "r", 1, 2 * TOKENS), 2);
    let table = |_: usize, index: usize| Some(index as u64 + 1);
    catalogue.begin_load("r", 2, 0, TOKENS, table).unwrap();
    assert_eq!(
        numbers(&catalogue.let_go("r", 0).unwrap()),
        [(0, 2, 1)],
        "the first is being loaded"
    );
    catalogue.end(2).unwrap();
    assert_eq!(numbers(&catalogue.let_go("r", 0).unwrap()), [(0, 1, 0)]);
}

#[test]
fn blocks_beyond_a_limit_are_not_stored_and_cost_no_step() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "r", &[false; 4]);
    catalogue.limit_stores("r", 2 * TOKENS + 5).unwrap();
    let scheduled = |computed| Scheduled {
        id: "r",
        computed,
        tokens: TOKENS,
    };
    let step = catalogue.step([scheduled(TOKENS)].into_iter(), true);
    assert_eq!(step.filled, [(0, 2 * TOKENS)]);
    assert_eq!(store(&mut catalogue, "r", 1, 2 * TOKENS), 2);
    let step = catalogue.step([scheduled(2 * TOKENS)].into_iter(), true);
    assert_eq!(step.filled, []);
    assert_eq!(store(&mut catalogue, "r", 2, 4 * TOKENS), 0);
}

#[test]
fn a_state_is_loaded_from_where_it_ends() {
    let mut catalogue = catalogue(&[Reads::All, Reads::State], 1);
    catalogue.add("r", 4 * TOKENS + 1, None).unwrap();
    catalogue.extend("r", &chunks(1..5)).unwrap();
    for (query, present) in catalogue
        .ask("r")
        .unwrap()
        .iter()
        .zip([[true; 4], [false, true, false, false]])
    {
        catalogue.answer(query.number, Some(&present));
    }
    // Two blocks, and the state after them.
    assert_eq!(ends(&catalogue, "r"), [(2, 0, 3 * BYTES)]);
    let table = |group: usize, index: usize| Some((10 * group + index + 1) as u64);
    let (blocks, _) = catalogue.begin_load("r", 1, 0, 2 * TOKENS, table).unwrap();
    let places: Vec<_> = blocks.iter().map(|b| (b.group, b.id, b.chunk)).collect();
    assert_eq!(
        places,
        [(0, 1, chunk(1)), (0, 2, chunk(2)), (1, 12, chunk(2))]
    );
}

#[test]
fn only_states_that_a_step_or_the_engine_left_are_stored() {
    let mut catalogue = catalogue(&[Reads::All, Reads::State], 1);
    looked_up(&mut catalogue, "r", &[false; 4]);
    let scheduled = |computed, tokens| Scheduled {
        id: "r",
        computed,
        tokens,
    };
    let table = |group: usize, index: usize| Some((10 * group + index + 1) as u64);
    let store = |catalogue: &mut Catalogue, job, tokens| -> Vec<(u16, u64)> {
        let blocks = catalogue
            .begin_store("r", job, tokens, 0, 0, table)
            .unwrap();
        blocks
            .map_or_else(Vec::new, |begun| begun.blocks)
            .iter()
            .map(|block| (block.group, block.id))
            .collect()
    };
    // The first block's state was passed over by a step that ends after the second.
    catalogue.step([scheduled(0, 2 * TOKENS)].into_iter(), true);
    assert_eq!(
        store(&mut catalogue, 1, 2 * TOKENS),
        [(0, 1), (0, 2), (1, 12)]
    );
    // A step that ends elsewhere leaves none, unless the engine says so.
    catalogue.step([scheduled(2 * TOKENS, TOKENS + 3)].into_iter(), true);
    catalogue.note_state("r", 1, 3 * TOKENS);
    catalogue.note_state("r", 0, 3 * TOKENS);
    catalogue.note_state("nobody", 1, 3 * TOKENS);
    assert_eq!(store(&mut catalogue, 2, 3 * TOKENS + 3), [(0, 3), (1, 13)]);
    // Tokens that may be rejected say nothing.
    catalogue.step([scheduled(3 * TOKENS + 3, TOKENS - 3)].into_iter(), false);
    assert_eq!(store(&mut catalogue, 3, 4 * TOKENS), [(0, 4)]);
}

#[test]
fn a_state_waits_for_the_look_up_and_goes_with_a_preemption() {
    let mut catalogue = catalogue(&[Reads::State], 1);
    catalogue.add("r", 4 * TOKENS + 1, None).unwrap();
    catalogue.extend("r", &chunks(1..5)).unwrap();
    let asked = catalogue.ask("r").unwrap();
    let scheduled = |computed, tokens| Scheduled {
        id: "r",
        computed,
        tokens,
    };
    let step = catalogue.step([scheduled(0, 2 * TOKENS)].into_iter(), true);
    assert_eq!(step.filled, []);
    catalogue.answer(asked[0].number, Some(&[false; 4]));
    catalogue.step([scheduled(2 * TOKENS, 1)].into_iter(), true);
    // The engine has given up the first block's state, and keeps the second's for now.
    let table = |_: usize, index: usize| [0, 7, 8].get(index).copied();
    let blocks = catalogue.begin_store("r", 1, 2 * TOKENS + 1, 0, 0, table);
    let blocks: Vec<u64> = blocks
        .unwrap()
        .unwrap()
        .blocks
        .iter()
        .map(|b| b.id)
        .collect();
    assert_eq!(blocks, [7]);
    assert_eq!(catalogue.readers([7].into_iter()), [1]);
    catalogue.end_store(1, &[0], &[]).unwrap();
    catalogue.pause("r").unwrap();
    // From here on the state would have to be seen again.
    let blocks = catalogue.begin_store("r", 2, 2 * TOKENS + 1, 0, 0, table);
    assert_eq!(blocks.unwrap(), None);
}

/// The blocks that the next store of a request takes, by the engine's numbers, which are the
/// blocks' indices.
fn begun(catalogue: &mut Catalogue, id: &str, job: u64, blocks: u64) -> Vec<u64> {
    let stored =
        catalogue.begin_store(id, job, blocks * TOKENS, u64::MAX, 0, |_, i| Some(i as u64));
    let stored = stored.unwrap().map_or_else(Vec::new, |begun| begun.blocks);
    stored.iter().map(|block| block.id).collect()
}

fn came(catalogue: &mut Catalogue, id: &str) {
    catalogue.add(id, 4 * TOKENS + 1, None).unwrap();
    catalogue.extend(id, &chunks(1..5)).unwrap();
}

/// A prompt's first block was not stored and its request is gone, so nothing is known of the block.
/// Stores of later blocks are still under way.
fn beginning_forgotten(catalogue: &mut Catalogue) {
    came(catalogue, "a");
    assert_eq!(begun(catalogue, "a", 1, 1), [0]);
    assert_eq!(begun(catalogue, "a", 2, 3), [1, 2]);
    assert_eq!(catalogue.end_store(1, &[0], &[]), Ok(0));
    catalogue.remove("a").unwrap();
}

#[test]
fn what_is_on_its_way_is_not_stored_again_though_the_prompts_beginning_was_forgotten() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    beginning_forgotten(&mut catalogue);
    came(&mut catalogue, "b");
    assert_eq!(begun(&mut catalogue, "b", 3, 4), [0, 3]);
    // Whoever comes later knows what became of both stores.
    assert_eq!(catalogue.end_store(2, &[], &[]), Ok(2));
    assert_eq!(catalogue.end_store(3, &[], &[]), Ok(2));
    came(&mut catalogue, "c");
    assert_eq!(begun(&mut catalogue, "c", 4, 4), [0_u64; 0]);
    catalogue.remove("b").unwrap();
    catalogue.remove("c").unwrap();
    catalogue.forget_pool();
    assert!(catalogue.is_empty());
}

#[test]
fn what_is_in_the_pool_is_not_stored_again_though_the_prompts_beginning_was_forgotten() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    beginning_forgotten(&mut catalogue);
    assert_eq!(catalogue.end_store(2, &[], &[]), Ok(2));
    came(&mut catalogue, "b");
    assert_eq!(begun(&mut catalogue, "b", 3, 4), [0, 3]);
}

#[test]
fn a_store_that_was_asked_for_meanwhile_is_made_once_the_first_has_failed() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    beginning_forgotten(&mut catalogue);
    assert_eq!(catalogue.end_store(2, &[0, 1], &[]), Ok(0));
    came(&mut catalogue, "b");
    assert_eq!(begun(&mut catalogue, "b", 3, 4), [0, 1, 2, 3]);
}

/// The number of a request's only query.
fn asked(catalogue: &mut Catalogue, id: &str) -> u64 {
    catalogue.ask(id).unwrap()[0].number
}

#[test]
fn an_answer_from_before_a_store_ended_does_not_have_it_made_again() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    came(&mut catalogue, "a");
    assert_eq!(begun(&mut catalogue, "a", 1, 2), [0, 1]);
    came(&mut catalogue, "b");
    let query = asked(&mut catalogue, "b");
    assert_eq!(catalogue.end_store(1, &[], &[]), Ok(2));
    catalogue.answer(query, Some(&[false; 4]));
    assert_eq!(begun(&mut catalogue, "b", 2, 4), [2, 3]);
    // What the pool says later counts: others may have removed it.
    came(&mut catalogue, "c");
    let query = asked(&mut catalogue, "c");
    catalogue.answer(query, Some(&[false, true, true, true]));
    assert_eq!(begun(&mut catalogue, "c", 3, 4), [0]);
}

#[test]
fn an_answer_from_before_a_block_was_lost_does_not_have_it_loaded() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    looked_up(&mut catalogue, "a", &[true; 4]);
    let load = catalogue.begin_load("a", 1, 0, 2 * TOKENS, |_, i| Some(i as u64));
    assert!(load.is_ok());
    came(&mut catalogue, "b");
    let query = asked(&mut catalogue, "b");
    catalogue.lose(1, &[1]).unwrap();
    catalogue.answer(query, Some(&[true; 4]));
    let reaches = ends(&catalogue, "b");
    assert_eq!(reaches.last().map(|reach| reach.0), Some(1));
}

#[test]
fn of_two_answers_the_one_to_the_later_query_counts() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    came(&mut catalogue, "a");
    came(&mut catalogue, "b");
    let (first, second) = (asked(&mut catalogue, "a"), asked(&mut catalogue, "b"));
    catalogue.answer(second, Some(&[true; 4]));
    catalogue.answer(first, Some(&[false; 4]));
    assert_eq!(begun(&mut catalogue, "a", 1, 4), [0_u64; 0]);
}

#[test]
fn an_answer_from_before_the_pool_was_forgotten_has_nothing_loaded() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    came(&mut catalogue, "a");
    let query = asked(&mut catalogue, "a");
    catalogue.forget_pool();
    catalogue.answer(query, Some(&[true; 4]));
    assert!(ends(&catalogue, "a").iter().all(|&(end, ..)| end == 0));
    assert_eq!(begun(&mut catalogue, "a", 1, 4), [0, 1, 2, 3]);
}

/// A prompt's first block was in the engine's own cache, and the later ones are on their way to the
/// engine. Nothing but the job knows them: its request is gone, and the pool was forgotten.
fn later_blocks_under_way(catalogue: &mut Catalogue, is_prefetch: bool) {
    looked_up(catalogue, "a", &[false, true, true, false]);
    let (first, end) = (TOKENS, 3 * TOKENS);
    if is_prefetch {
        let begun = catalogue.begin_prefetch("a", 1, first, end, 2, false);
        assert!(begun.unwrap().is_some());
    } else {
        catalogue
            .begin_load("a", 1, first, end, |_, i| Some(i as u64))
            .unwrap();
    }
    catalogue.remove("a").unwrap();
    // The pool loses them, so that nothing but the job knows them.
    catalogue.forget_pool();
    looked_up(catalogue, "b", &[false, true, true, false]);
}

#[test]
fn what_is_being_loaded_is_known_though_the_prompts_beginning_was_forgotten() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    later_blocks_under_way(&mut catalogue, false);
    assert_eq!(catalogue.is_loading("b", TOKENS, 3 * TOKENS), Ok(true));
    catalogue.end(1).unwrap();
    assert_eq!(catalogue.is_loading("b", TOKENS, 3 * TOKENS), Ok(false));
    catalogue
        .begin_load("b", 2, TOKENS, 3 * TOKENS, |_, i| Some(i as u64))
        .unwrap();
    assert_eq!(catalogue.is_loading("b", TOKENS, 3 * TOKENS), Ok(true));
}

#[test]
fn what_is_prefetched_is_not_fetched_again_though_the_prompts_beginning_was_forgotten() {
    let mut catalogue = catalogue(&[Reads::All], 1);
    later_blocks_under_way(&mut catalogue, true);
    let again = catalogue.begin_prefetch("b", 2, TOKENS, 3 * TOKENS, 2, false);
    assert_eq!(again, Ok(None));
    catalogue.end(1).unwrap();
    let again = catalogue.begin_prefetch("b", 2, TOKENS, 3 * TOKENS, 2, false);
    assert_eq!(again.unwrap().unwrap().0.len(), 2);
}
