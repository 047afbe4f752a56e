//! The shared-memory pool's protocol under a model checker, in every order that the memory model
//! allows.

#[path = "../../penstock-store/src/shm/state.rs"]
#[allow(dead_code, reason = "the models need not all of it")]
mod state;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;
use state::{Belonging, Kind, State, Word};
use std::sync::atomic::Ordering;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn swap_if(&self, current: u64, new: u64) -> bool {
        self.compare_exchange(current, new, AcqRel, Acquire).is_ok()
    }

    fn fence(order: Ordering) {
        fence(order);
    }
}

const TAG: u32 = 5;

/// Two entries, each with a body of a word, and a page of two words that is the first one's.
struct Pool {
    entries: [AtomicU64; 2],
    bodies: [AtomicU64; 2],
    page: AtomicU64,
    bytes: [AtomicU64; 2],
}

impl Pool {
    /// Entry 0 is live, and the page's words are its generation.
    fn new() -> Arc<Self> {
        let word = || AtomicU64::new(0);
        let pool = Self {
            entries: [word(), word()],
            bodies: [word(), word()],
            page: word(),
            bytes: [word(), word()],
        };
        assert!(pool.put(0, 1, 1));
        Arc::new(pool)
    }

    /// Puts a value of two equal words, if nobody else has the entry or the page.
    fn put(&self, entry: u32, owner: u16, value: u64) -> bool {
        let word = &self.entries[entry as usize];
        let Some(claimed) = State::of(word).claim(word, owner, TAG) else {
            return false;
        };
        self.bodies[entry as usize].store(value, Relaxed);
        if !self.take_page(entry, claimed) {
            claimed.release(word);
            return false;
        }
        self.bytes
            .iter()
            .for_each(|byte| byte.store(value, Relaxed));
        assert!(claimed.publish(word), "a claim is its owner's");
        true
    }

    /// Takes the page, evicting what it belongs to.
    fn take_page(&self, entry: u32, claimed: State) -> bool {
        let belonging = Belonging::of(&self.page);
        let holder = &self.entries[belonging.entry as usize];
        let state = State::of(holder);
        if state.holds(belonging) {
            let evicted = state.kind() == Kind::Live && state.release(holder);
            if !evicted && State::of(holder).holds(belonging) {
                return false;
            }
        }
        let mine = Belonging {
            entry,
            generation: claimed.generation(),
        };
        belonging.give_to(&self.page, mine)
    }

    /// A value, if it was whole.
    fn get(&self, entry: u32) -> Option<(State, u64)> {
        let word = &self.entries[entry as usize];
        let state = State::of(word);
        if !state.is_live_with(TAG) {
            return None;
        }
        let body = self.bodies[entry as usize].load(Relaxed);
        let [a, b] = [0, 1].map(|n| self.bytes[n].load(Relaxed));
        state.is_still(word).then(|| {
            assert_eq!(a, b, "half of one value and half of another");
            assert_eq!(a, body, "one value's body and another's bytes");
            (state, a)
        })
    }
}

#[test]
fn a_reader_gets_one_whole_value_whoever_takes_its_page() {
    loom::model(|| {
        let pool = Pool::new();
        let writer = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.put(1, 2, 2))
        };
        let reader = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.get(1).is_none_or(|(_, value)| value == 2))
        };
        assert!(pool.get(0).is_none_or(|(_, value)| value == 1));
        assert!(writer.join().unwrap());
        assert!(reader.join().unwrap());
        assert!(pool.get(0).is_none());
        assert_eq!(pool.get(1).unwrap().1, 2);
    });
}

#[test]
fn a_value_that_is_put_over_another_is_seen_whole_or_not_at_all() {
    loom::model(|| {
        let pool = Pool::new();
        let writer = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.put(0, 2, 2))
        };
        if let Some((state, value)) = pool.get(0) {
            assert_eq!(u64::from(state.generation()), value);
        }
        assert!(writer.join().unwrap());
        assert_eq!(pool.get(0).unwrap().1, 2);
    });
}

#[test]
fn a_page_has_one_owner_among_those_who_want_it() {
    loom::model(|| {
        let pool = Pool::new();
        let writer = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.put(1, 2, 2))
        };
        let mine = pool.put(0, 1, 3);
        let theirs = writer.join().unwrap();
        assert!(mine || theirs, "one of the two at least");
        let live: Vec<u64> = [0, 1]
            .into_iter()
            .filter_map(|e| pool.get(e))
            .map(|(_, v)| v)
            .collect();
        assert_eq!(live.len(), 1, "a page is in one value");
        assert!(if live[0] == 2 { theirs } else { mine });
    });
}

#[test]
fn of_two_who_publish_one_key_at_least_one_sees_both() {
    loom::model(|| {
        let entries = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let publish = |mine: usize, entries: &[AtomicU64; 2]| {
            let word = &entries[mine];
            let claimed = State::of(word).claim(word, 1, TAG).unwrap();
            assert!(claimed.publish(word));
            State::of(&entries[1 - mine]).is_live_with(TAG)
        };
        let other = {
            let entries = Arc::clone(&entries);
            thread::spawn(move || publish(1, &entries))
        };
        let sees = publish(0, &entries);
        assert!(sees | other.join().unwrap());
    });
}

#[test]
fn what_a_dead_writer_left_is_free_at_once() {
    loom::model(|| {
        let pool = Pool::new();
        // It dies with the page taken and half of it written.
        let word = &pool.entries[1];
        let left = State::of(word).claim(word, 7, TAG).unwrap();
        assert!(pool.take_page(1, left));
        pool.bytes[0].store(9, Relaxed);
        let buriers = [0, 1].map(|_| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                let state = State::of(&pool.entries[1]);
                state.kind() == Kind::Claimed(7) && state.release(&pool.entries[1])
            })
        });
        // Finds the page free before or after.
        let stored = pool.put(0, 1, 4);
        let buried = buriers.map(|burier| burier.join().unwrap());
        assert_eq!(buried.into_iter().filter(|buried| *buried).count(), 1);
        assert!(pool.get(1).is_none());
        assert!(stored || pool.put(0, 1, 4));
        assert_eq!(pool.get(0).unwrap().1, 4);
    });
}
