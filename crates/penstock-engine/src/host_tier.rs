//! The host tier: values that passed through the arena and stay there until their slot is needed.
//!
//! A kept value was gathered here or verified on arrival, and nobody can have changed it since. So
//! it is written into blocks without another check.
//!
//! The policy decides which values stay. When a job asks for blocks, the policy is told of them,
//! prompt by prompt. So the policy may hold a value before the value has come, and may also give it
//! up before that. A value that the policy does not hold stays only while it is pinned: a prefetch
//! waits for its request. A value that is being written into blocks lives until that is done,
//! whether it is kept or not.

use std::collections::HashMap;
use std::collections::hash_map::Entry::{Occupied, Vacant};

use penstock_contract::{Key, Namespace, Tenancy};
use penstock_evict::{Chooser, Policy};

use crate::arena::{Slot, Verified};
use crate::job::Transfer;
use crate::sync::{Mutex, Shared};

/// The memory that the policy may take beside the slots: one byte for so many bytes of a slot.
const POLICY_SHARE: usize = 64;

/// The memory that the policy takes for each name that it remembers, about: its node, its links and
/// its place in the index.
const NAME_BYTES: usize = 256;

/// The most names for each slot: more tell the policy nothing (decision 15).
const MOST_NAMES: usize = 64;

/// The names for each slot that the policy's other accounts take (decision 31).
const OTHER_NAMES: usize = 3;

/// A value in the host tier.
pub(crate) type Value = Shared<Slot<Verified>>;

/// The values, and which prefetches want them to stay.
pub(crate) struct HostTier {
    state: Mutex<State>,
    /// The most values that the policy may hold.
    capacity: u64,
    /// The most values that may be pinned. The other slots are for whoever needs one.
    bound: usize,
}

#[derive(Default)]
struct State {
    entries: HashMap<Key, Entry>,
    /// Holds every value that is not pinned, and values that are on their way.
    policy: Chooser<Key>,
    /// How many jobs that are not over want each value.
    wanted: HashMap<Key, u32>,
    /// What each open prefetch has pinned.
    pins: HashMap<u64, Vec<Name>>,
    pinned: usize,
    /// What came (true) and went (false) since the last report. None before the first report.
    changes: Option<HashMap<Key, bool>>,
    closed: bool,
}

struct Entry {
    value: Value,
    pins: u32,
    /// Whether the value came for a prefetch, and no other job has asked for it.
    is_new: bool,
}

/// An object's key, and the key of the object before it.
type Name = (Key, Option<Key>);

fn name(object: &Transfer) -> Name {
    (object.key, object.parent)
}

impl HostTier {
    /// A host tier for `slots` values of up to `slot_bytes`. Prefetches pin `bound` of them at
    /// most.
    pub(crate) fn new(slots: usize, slot_bytes: usize, bound: usize) -> Self {
        let names = (slot_bytes / POLICY_SHARE / NAME_BYTES).saturating_sub(OTHER_NAMES);
        let state = State {
            policy: Chooser::remembering(names.clamp(1, MOST_NAMES)),
            ..State::default()
        };
        Self {
            state: Mutex::new(state),
            capacity: slots as u64,
            bound,
        }
    }

    /// Notes that a job uses these objects. Those that are kept are likely to stay. The others are
    /// kept when they come, unless the policy gives them up before.
    pub(crate) fn want(&self, objects: &[Transfer]) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        for object in objects {
            *state.wanted.entry(object.key).or_default() += 1;
        }
        state.want(objects.iter().map(name), self.capacity);
    }

    /// Notes that a job that wanted these objects is over, and which of them did not come. No room is
    /// kept for those, unless another job still wants them.
    pub(crate) fn forgo(&self, objects: &[Transfer], absent: Vec<Key>) {
        let mut state = self.state.lock();
        for object in objects {
            if let Occupied(mut wanted) = state.wanted.entry(object.key) {
                *wanted.get_mut() -= 1;
                if *wanted.get() == 0 {
                    wanted.remove();
                }
            }
        }
        for key in absent {
            if !state.entries.contains_key(&key) && !state.wanted.contains_key(&key) {
                state.policy.remove(&key);
            }
        }
    }

    /// Keeps a value if the policy holds it. If it came for a prefetch that is still open, and
    /// there is room, it is kept and pinned. A value that is kept already stays as it is: equal
    /// keys are equal bytes.
    pub(crate) fn keep(&self, object: &Transfer, slot: Slot<Verified>, prefetch: Option<u64>) {
        let mut state = self.state.lock();
        let is_open = prefetch.is_some_and(|job| state.pins.contains_key(&job));
        let is_pinned = is_open && state.pinned < self.bound;
        let is_held = state.policy.contains(&object.key);
        if state.closed || !(is_held || is_pinned) {
            return;
        }
        if let Vacant(place) = state.entries.entry(object.key) {
            place.insert(Entry {
                value: Shared::new(slot.keep()),
                pins: 0,
                is_new: !is_held,
            });
            state.note(object.key, true);
        }
        if let Some(job) = prefetch {
            state.pin(name(object), job, self.bound);
        }
    }

    /// For each object, its value if it is kept.
    pub(crate) fn find(&self, objects: &[Transfer]) -> Vec<Option<Value>> {
        self.state.lock().find(objects)
    }

    /// Opens a prefetch: pins the values of its objects that are kept, as far as there is room, and
    /// returns them.
    pub(crate) fn open(&self, job: u64, objects: &[Transfer]) -> Vec<Option<Value>> {
        let mut state = self.state.lock();
        state.pins.insert(job, Vec::new());
        let found = state.find(objects);
        for (object, value) in objects.iter().zip(&found) {
            if value.is_some() {
                state.pin(name(object), job, self.bound);
            }
        }
        found
    }

    /// Notes that nobody waits any more for what this prefetch brought. Values that no other job
    /// has asked for count as used now.
    pub(crate) fn release(&self, job: u64) {
        let mut state = self.state.lock();
        let names = state.pins.remove(&job).unwrap_or_default();
        let is_unused = |name: &Name| state.unpin(&name.0);
        let unused: Vec<Name> = names.into_iter().filter(is_unused).collect();
        state.want(unused.into_iter(), self.capacity);
    }

    /// How many more values may be pinned.
    pub(crate) fn room(&self) -> usize {
        self.bound - self.state.lock().pinned
    }

    /// Gives up one value; false if there is none that may go. Its slot is free at once, unless it
    /// is being read.
    pub(crate) fn evict(&self) -> bool {
        let mut state = self.state.lock();
        // If there is nothing else to give up, values on their way stay wanted.
        while state.entries.len() > state.pinned {
            let Some((key, _)) = state.policy.evict() else {
                return false;
            };
            if state.give_up(&key) {
                return true;
            }
        }
        false
    }

    /// What came (true) and went (false) since the last call. The first call returns all that there
    /// is.
    pub(crate) fn take_changes(&self) -> Vec<(Key, bool)> {
        let mut state = self.state.lock();
        match state.changes.replace(HashMap::new()) {
            Some(changes) => changes.into_iter().collect(),
            None => state.entries.keys().map(|key| (*key, true)).collect(),
        }
    }

    /// Gives up the values of a namespace and of those made from it, and reports no change of them.
    /// Those that are pinned stay until their prefetch is released. Those that are on their way are
    /// not kept, unless somebody asks for them again.
    pub(crate) fn forget(&self, namespace: Namespace) {
        let mut state = self.state.lock();
        let is_of = |key: &Key| key.namespace.family() == namespace.family();
        let known = state.entries.keys().chain(state.wanted.keys());
        let gone: Vec<Key> = known.copied().filter(is_of).collect();
        for key in gone {
            state.policy.remove(&key);
            state.give_up(&key);
            if let Some(pinned) = state.entries.get_mut(&key) {
                // The policy is not to hear of it once it is released.
                pinned.is_new = false;
            }
        }
        if let Some(changes) = &mut state.changes {
            changes.retain(|key, _| !is_of(key));
        }
    }

    /// Gives up one value that is not to be loaded. If it is pinned, it stays until its prefetch is
    /// released.
    pub(crate) fn discard(&self, key: &Key) {
        let mut state = self.state.lock();
        state.policy.remove(key);
        state.give_up(key);
    }

    /// Gives up everything, and keeps nothing from then on.
    pub(crate) fn close(&self) {
        *self.state.lock() = State {
            closed: true,
            ..State::default()
        };
    }
}

impl State {
    fn find(&self, objects: &[Transfer]) -> Vec<Option<Value>> {
        let find = |object: &Transfer| {
            let value = &self.entries.get(&object.key)?.value;
            value.is_of(object).then(|| Shared::clone(value))
        };
        objects.iter().map(find).collect()
    }

    fn want(&mut self, names: impl Iterator<Item = Name>, capacity: u64) {
        let chains = chains(names);
        // The last chain first, so that it is the oldest.
        for chain in chains.iter().rev() {
            for (key, _) in &chain.blocks {
                if let Some(entry) = self.entries.get_mut(key) {
                    entry.is_new = false;
                }
            }
            self.policy.use_chain(chain.parent.as_ref(), &chain.blocks);
        }
        while self.policy.weight() > capacity
            && let Some((key, _)) = self.policy.evict()
        {
            self.give_up(&key);
        }
    }

    /// Notes that the policy no longer holds a value. Returns whether that makes room now.
    fn give_up(&mut self, key: &Key) -> bool {
        let is_free = self.entries.get(key).is_some_and(|entry| entry.pins == 0);
        if is_free {
            self.entries.remove(key);
            self.note(*key, false);
        }
        is_free
    }

    fn pin(&mut self, name: Name, job: u64, bound: usize) {
        let (Some(names), Some(entry)) = (self.pins.get_mut(&job), self.entries.get_mut(&name.0))
        else {
            return;
        };
        if entry.pins == 0 && self.pinned == bound {
            return;
        }
        names.push(name);
        entry.pins += 1;
        self.pinned += usize::from(entry.pins == 1);
    }

    /// Takes away one pin. Returns whether only prefetches have asked for the value and none does
    /// any more: then the policy must still hear of it.
    fn unpin(&mut self, key: &Key) -> bool {
        let Some(entry) = self.entries.get_mut(key) else {
            return false;
        };
        entry.pins -= 1;
        if entry.pins > 0 {
            return false;
        }
        let is_new = entry.is_new;
        self.pinned -= 1;
        // If the policy gave it up meanwhile, only the pin kept it.
        if !is_new && !self.policy.contains(key) {
            self.give_up(key);
        }
        is_new
    }

    fn note(&mut self, key: Key, came: bool) {
        let Some(changes) = &mut self.changes else {
            return;
        };
        // A value that came and went, or went and came, since the last report is no change to the
        // reader.
        if changes.get(&key) == Some(&!came) {
            changes.remove(&key);
        } else {
            changes.insert(key, came);
        }
    }
}

/// Blocks that follow one another in a prompt, each with weight one, and the block before them.
struct Chain {
    parent: Option<Key>,
    blocks: Vec<(Key, u64)>,
}

/// The chains that objects make up, in the order of their beginnings. One job may have parts of
/// several prompts, or several parts of the same layers, side by side.
fn chains(names: impl Iterator<Item = Name>) -> Vec<Chain> {
    let mut chains: Vec<Chain> = Vec::new();
    let mut ends: HashMap<Key, usize> = HashMap::new();
    for (key, parent) in names {
        let known = parent.and_then(|parent| ends.remove(&parent));
        let at = known.unwrap_or(chains.len());
        if known.is_none() {
            let blocks = Vec::new();
            chains.push(Chain { parent, blocks });
        }
        chains[at].blocks.push((key, 1));
        ends.insert(key, at);
    }
    chains
}
