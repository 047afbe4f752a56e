//! Second chance is what its definition says, and keeps to its places.

mod calls;

use std::collections::HashMap;

use calls::{Call, call};
use penstock_evict::{Clock, Policy, Progress, Round, Sweep};
use proptest::collection::vec;
use proptest::prelude::*;

/// The definition: a queue, of whose front what was used goes to the end, as if it were new.
#[derive(Default)]
struct Naive(Vec<(u8, bool)>);

impl Naive {
    fn touch(&mut self, key: u8) -> bool {
        let found = self.0.iter_mut().find(|entry| entry.0 == key);
        found.map(|entry| entry.1 = true).is_some()
    }

    fn evict(&mut self) -> Option<u8> {
        loop {
            if self.0.is_empty() {
                return None;
            }
            match self.0.remove(0) {
                (key, true) => self.0.push((key, false)),
                (key, false) => return Some(key),
            }
        }
    }
}

proptest! {
    #[test]
    fn it_agrees_with_its_definition(places in 1usize..20, uses in vec(0u8..40, 0..400)) {
        let mut clock: Clock<u8> = Clock::new(places as u64);
        let mut naive = Naive::default();
        for key in uses {
            if !naive.touch(key) {
                if naive.0.len() == places {
                    naive.evict();
                }
                naive.0.push((key, false));
            }
            clock.insert(key, 1);
            for key in 0..40 {
                prop_assert_eq!(clock.contains(&key), naive.0.iter().any(|entry| entry.0 == key));
            }
        }
        let victims: Vec<u8> = std::iter::from_fn(|| clock.evict()).map(|(key, _)| key).collect();
        let expected: Vec<u8> = std::iter::from_fn(|| naive.evict()).collect();
        prop_assert_eq!(victims, expected);
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
    assert!(!Round::Sparing.gives_up(true, || false));
    assert!(Round::Evicting.gives_up(true, || false));
    assert!(!Round::Evicting.gives_up(true, || true));
    assert!(!Round::Evicting.gives_up(false, || unreachable!("not asked")));
    assert!(Round::Clearing.gives_up(false, || unreachable!("not asked")));
}

#[test]
fn a_count_of_free_places_that_was_wrong_is_noticed_after_a_turn() {
    let mut sweep = Sweep::new(100, 50, 10);
    assert_eq!(sweep.round(), Round::Sparing);
    assert_eq!(sweep.pass(99), Progress::Searching);
    assert_eq!(sweep.pass(1), Progress::Miscounted);
    assert_eq!(sweep.round(), Round::Evicting);
}
