//! The host tier: values that passed through the arena and stay there until their slot is needed.
//!
//! A kept value was gathered here or verified on arrival, and nobody can have changed it since, so
//! it is written into blocks without another check. Which one goes first is the policy's to say,
//! except that pinned ones (a prefetch waits for its request) are not for it to choose. One that is
//! being written into blocks lives as long as that takes, kept or not.

use std::collections::HashMap;
use std::collections::hash_map::Entry::Vacant;

use penstock_evict::{Lru, Policy};
use penstock_store::Key;

use crate::arena::{Slot, Verified};
use crate::job::Transfer;
use crate::sync::{Mutex, Shared};

/// A value in the host tier.
pub(crate) type Value = Shared<Slot<Verified>>;

/// The values, and who wants them to stay.
pub(crate) struct Kept {
    state: Mutex<State>,
    /// Most values that may be pinned: the others' slots are for whoever needs one.
    bound: usize,
}

#[derive(Default)]
struct State {
    entries: HashMap<Key, Entry>,
    /// The keys that nobody pins.
    order: Lru<Key>,
    /// The keys that each open prefetch has pinned.
    pins: HashMap<u64, Vec<Key>>,
    pinned: usize,
    /// What came (true) and went since the last report; none before the first.
    changes: Option<HashMap<Key, bool>>,
    closed: bool,
}

struct Entry {
    value: Value,
    pins: u32,
}

impl Kept {
    pub(crate) fn new(bound: usize) -> Self {
        Self {
            state: Mutex::default(),
            bound,
        }
    }

    /// Keeps a value, pinned if it came for a prefetch that is still open, and there is room. One that is kept already
    /// stays as it is: equal keys are equal bytes.
    pub(crate) fn keep(&self, key: Key, slot: Slot<Verified>, prefetch: Option<u64>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        if let Vacant(place) = state.entries.entry(key) {
            let value = Shared::new(slot.keep());
            place.insert(Entry { value, pins: 0 });
            state.order.insert(key, 1);
            state.note(key, true);
        }
        if let Some(job) = prefetch {
            state.pin(key, job, self.bound);
        }
    }

    /// The values of those objects that are kept, which counts as a use: of later ones first, so that
    /// a prompt loses its end before its beginning.
    pub(crate) fn find(&self, objects: &[Transfer]) -> Vec<Option<Value>> {
        self.state.lock().find(objects)
    }

    /// Pins what is kept of these objects, as far as there is room, for a prefetch, which opens it.
    pub(crate) fn open(&self, job: u64, objects: &[Transfer]) -> Vec<Option<Value>> {
        let mut state = self.state.lock();
        state.pins.insert(job, Vec::new());
        let found = state.find(objects);
        for (object, value) in objects.iter().zip(&found) {
            if value.is_some() {
                state.pin(object.key, job, self.bound);
            }
        }
        found
    }

    /// Nobody waits any more for what this prefetch brought.
    pub(crate) fn release(&self, job: u64) {
        let mut state = self.state.lock();
        for key in state.pins.remove(&job).unwrap_or_default().iter().rev() {
            state.unpin(key);
        }
    }

    /// How many more values may be pinned.
    pub(crate) fn room(&self) -> usize {
        self.bound - self.state.lock().pinned
    }

    /// Gives one value up; false if there is none that may go. Its slot is free at once, unless it
    /// is being read.
    pub(crate) fn evict(&self) -> bool {
        let mut state = self.state.lock();
        let Some((key, _)) = state.order.evict() else {
            return false;
        };
        state.entries.remove(&key);
        state.note(key, false);
        true
    }

    /// What came (true) and went since the last call; at first, all that there is.
    pub(crate) fn take_changes(&self) -> Vec<(Key, bool)> {
        let mut state = self.state.lock();
        match state.changes.replace(HashMap::new()) {
            Some(changes) => changes.into_iter().collect(),
            None => state.entries.keys().map(|key| (*key, true)).collect(),
        }
    }

    /// Gives everything up, and keeps nothing any more.
    pub(crate) fn close(&self) {
        *self.state.lock() = State {
            closed: true,
            ..State::default()
        };
    }
}

impl State {
    fn find(&mut self, objects: &[Transfer]) -> Vec<Option<Value>> {
        let mut found: Vec<_> = objects
            .iter()
            .rev()
            .map(|object| {
                let entry = self.entries.get(&object.key)?;
                let value = entry
                    .value
                    .is_of(object)
                    .then(|| Shared::clone(&entry.value))?;
                self.order.touch(&object.key);
                Some(value)
            })
            .collect();
        found.reverse();
        found
    }

    fn pin(&mut self, key: Key, job: u64, bound: usize) {
        let (Some(keys), Some(entry)) = (self.pins.get_mut(&job), self.entries.get_mut(&key))
        else {
            return;
        };
        if entry.pins == 0 && self.pinned == bound {
            return;
        }
        keys.push(key);
        entry.pins += 1;
        if entry.pins == 1 {
            self.pinned += 1;
            self.order.remove(&key);
        }
    }

    fn unpin(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.pins -= 1;
            if entry.pins == 0 {
                self.pinned -= 1;
                self.order.insert(*key, 1);
            }
        }
    }

    fn note(&mut self, key: Key, came: bool) {
        let Some(changes) = &mut self.changes else {
            return;
        };
        // What came and went, or went and came, since the last report is no change to its reader.
        if changes.get(&key) == Some(&!came) {
            changes.remove(&key);
        } else {
            changes.insert(key, came);
        }
    }
}
