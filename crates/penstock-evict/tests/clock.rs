//! What a hand gives up was used longest ago, or nearly, and it keeps to its places.

mod calls;

use std::collections::HashMap;

use calls::{Call, call};
use penstock_evict::{Clock, Lru, Policy, Progress, Round, Sweep, horizon};
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #[test]
    fn where_a_turn_frees_one_place_it_is_least_recently_used(
        places in 1u64..32,
        uses in vec(0u8..60, 0..400),
    ) {
        let (mut clock, mut lru): (Clock<u8>, Lru<u8>) = (Clock::new(places), Lru::default());
        for key in uses {
            clock.insert(key, 1);
            lru.insert(key, 1);
            while lru.weight() > places {
                lru.evict();
            }
            for key in 0..60 {
                prop_assert_eq!(clock.contains(&key), lru.contains(&key));
            }
        }
        let victims: Vec<_> = std::iter::from_fn(|| clock.evict()).collect();
        let expected: Vec<_> = std::iter::from_fn(|| lru.evict()).collect();
        prop_assert_eq!(victims, expected);
    }

    #[test]
    fn what_goes_is_of_the_sixteenth_that_was_used_longest_ago(
        places in 32u64..200,
        uses in vec(0u16..300, 0..2000),
    ) {
        let mut clock: Clock<u16> = Clock::new(places);
        let mut order: Vec<u16> = Vec::new();
        for key in uses {
            let is_new = !clock.contains(&key);
            clock.insert(key, 1);
            if is_new && order.len() as u64 == places {
                let gone = order.iter().position(|key| !clock.contains(key)).unwrap();
                prop_assert!((gone as u64) < places / 16, "{gone} were used before it");
            }
            order.retain(|&other| other != key && clock.contains(&other));
            order.push(key);
        }
    }

    #[test]
    fn the_end_of_a_prompt_goes_before_its_beginning(
        places in 8u64..100,
        lengths in vec(1u64..30, 1..60),
    ) {
        let mut clock: Clock<(usize, u64)> = Clock::new(places);
        for (prompt, length) in lengths.into_iter().enumerate() {
            let chain: Vec<_> = (0..length.min(places)).map(|n| ((prompt, n), 1)).collect();
            clock.use_chain(None, &chain);
        }
        // In a row from the first, but for the sixteenth that is going.
        let mut held: Vec<(usize, u64)> = std::iter::from_fn(|| clock.evict()).map(|(key, _)| key).collect();
        let taken = held.len() as u64;
        held.sort_unstable();
        let torn: u64 = held
            .chunk_by(|a, b| a.0 == b.0)
            .map(|prompt| prompt.last().unwrap().1 + 1 - prompt.len() as u64)
            .sum();
        prop_assert!(torn <= places / 16, "{torn} of {taken}");
    }

    #[test]
    fn it_neither_loses_nor_duplicates_and_keeps_to_its_places(
        places in 1u64..30,
        calls in vec(call(0..8), 0..400),
    ) {
        let mut clock: Clock<u8> = Clock::new(places);
        // What it may hold: it gives up what it likes to take in another.
        let mut known: HashMap<u8, u64> = HashMap::new();
        for call in calls {
            match call {
                Call::Insert(key, weight) => {
                    let before = known.insert(key, weight);
                    prop_assert_eq!(clock.insert(key, weight), before);
                    prop_assert_eq!(clock.contains(&key), weight <= places);
                }
                Call::Touch(key) => prop_assert_eq!(clock.touch(&key), known.contains_key(&key)),
                Call::Remove(key) => prop_assert_eq!(clock.remove(&key), known.remove(&key)),
                Call::Evict => match clock.evict() {
                    Some((key, weight)) => prop_assert_eq!(known.remove(&key), Some(weight)),
                    None => prop_assert!(known.is_empty()),
                },
            }
            known.retain(|key, _| clock.contains(key));
            prop_assert_eq!(clock.len(), known.len());
            prop_assert_eq!(clock.weight(), known.values().sum::<u64>());
            let taken: u64 = known.values().map(|&weight| weight.max(1)).sum();
            prop_assert!(taken <= places);
        }
        while let Some((key, weight)) = clock.evict() {
            prop_assert_eq!(known.remove(&key), Some(weight));
        }
        prop_assert!(known.is_empty());
        // Every place is free again.
        for key in 0..places {
            clock.insert(key as u8, 1);
        }
        prop_assert_eq!(clock.len() as u64, places);
    }

    #[test]
    fn nothing_goes_while_there_is_room_worth_a_search(gone in vec(0u8..64, 8..64)) {
        let mut clock: Clock<u8> = Clock::new(64);
        (0..64).for_each(|key| {
            clock.insert(key, 1);
        });
        let removed = gone.iter().filter(|key| clock.remove(key).is_some()).count();
        for new in 0..removed.saturating_sub(4) {
            let before = clock.len();
            clock.insert(100 + new as u8, 1);
            prop_assert_eq!(clock.len(), before + 1);
        }
    }
}

#[test]
fn a_search_that_finds_everything_in_use_clears_it_and_then_gives_up() {
    // All that the hand meets is always used.
    let mut sweep = Sweep::new(100, 0, 10);
    let mut rounds = Vec::new();
    loop {
        rounds.push(sweep.round());
        match sweep.pass(100) {
            Progress::Searching => {}
            Progress::Miscounted => panic!("nothing was counted on"),
            Progress::InVain => break,
        }
    }
    let turns = [Round::Evicting, Round::Clearing].map(|round| {
        let is_it = |met: &&Round| **met == round;
        rounds.iter().filter(is_it).count()
    });
    assert_eq!(turns, [3, 2]);
    assert!(!Round::Sparing.gives_up(true, 9, || 8));
    assert!(Round::Evicting.gives_up(true, 9, || 9));
    assert!(!Round::Evicting.gives_up(true, 9, || 10));
    assert!(!Round::Evicting.gives_up(false, 9, || unreachable!("not asked")));
    assert!(Round::Clearing.gives_up(false, 9, || unreachable!("not asked")));
}

#[test]
fn a_count_of_free_places_that_was_wrong_is_noticed_after_a_turn() {
    let mut sweep = Sweep::new(100, 50, 10);
    assert_eq!(sweep.round(), Round::Sparing);
    assert_eq!(sweep.pass(99), Progress::Searching);
    assert_eq!(sweep.pass(1), Progress::Miscounted);
    assert_eq!(sweep.round(), Round::Evicting);
}

#[test]
fn the_horizon_is_drawn_once_a_turn_for_a_sixteenth_or_what_is_needed() {
    let sweep = |count| Sweep::new(160, 0, count);
    assert_eq!(sweep(1).wants_horizon(159), None);
    assert_eq!(sweep(1).wants_horizon(160), Some(10));
    assert_eq!(sweep(30).wants_horizon(160), Some(30));
    assert_eq!(
        Sweep::new(160, 50, 1).wants_horizon(160),
        None,
        "there is room"
    );
    let mut uses = [(5, 2), (1, 1), (9, 4), (3, 3)];
    for (room, expected) in [(1, 1), (2, 3), (4, 3), (5, 5), (10, 9), (99, 9)] {
        assert_eq!(horizon(&mut uses, room), expected);
    }
    assert_eq!(horizon(&mut [], 1), 0);
}
