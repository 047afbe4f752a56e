//! The index: which value lies under which key. It has buckets of eight entries, and is read
//! without any lock.
//!
//! A key's hash names the one bucket that its entry can be in. Two processes may publish one key at
//! once. Every value gets a stamp; of two values under a key, the *younger* counts. Whoever
//! publishes a value releases the older ones. A process that dies in between leaves both, but
//! nobody can tell that from one value.

use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::{Duration, Instant};

use penstock_contract::{Error, ErrorKind, KEY_BYTES, Key, Namespace, Result, deadline};
use penstock_evict::DEMOTED;
use rustix::time::{ClockId, clock_gettime};
use twox_hash::XxHash3_64;

use super::geometry::{STAMP_WORD, USED_WORD, WAYS};
use super::segment::Segment;
use super::state::{Kind, State, TAG_BITS};
use crate::recency;

const KEY_WORDS: usize = KEY_BYTES / 8;
/// Words of an entry's body, after the key's.
const LENGTH_WORD: u64 = KEY_WORDS as u64;
const FIRST_WORD: u64 = LENGTH_WORD + 1;
const STAMPED_WORD: u64 = LENGTH_WORD + 2;
const USED_AT_WORD: u64 = LENGTH_WORD + 3;
/// How long to wait before looking again for an entry, if others are filling the whole bucket.
const RETRY: Duration = Duration::from_micros(50);

/// The time of use to note for a value that is used now and has `position` tokens before it in its
/// prompt. It is in nanoseconds since the machine started, the same for all its processes.
fn time_of_use(position: u64) -> u64 {
    let used_at = since_start().saturating_sub(recency::earlier(position));
    (used_at.as_nanos() as u64).max(DEMOTED + 1)
}

/// How long this machine has been up.
pub(super) fn since_start() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A key as the index uses it.
pub(super) struct Name {
    words: [u64; KEY_WORDS],
    hash: u64,
}

impl Name {
    pub(super) fn of(key: &Key) -> Self {
        let bytes = key.to_bytes();
        let mut words = [0; KEY_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Self {
            words,
            hash: XxHash3_64::oneshot(&bytes),
        }
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    fn tag(&self) -> u32 {
        self.hash as u32 & ((1 << TAG_BITS) - 1)
    }
}

/// An entry that held a value at some instant, and what the entry said about the value.
#[derive(Clone, Copy)]
pub(super) struct Found {
    pub(super) entry: u64,
    pub(super) state: State,
    /// Bytes of the value.
    pub(super) bytes: u64,
    /// The value's first page.
    pub(super) first: u64,
    stamp: u64,
}

/// An entry that this handle fills. If it is dropped before it is published, it and its pages are
/// freed.
pub(super) struct Claim<'a> {
    segment: &'a Segment,
    pub(super) entry: u64,
    pub(super) state: State,
    /// Pages that this claim has counted as in use.
    pub(super) pages: u64,
    /// Whether a live value was evicted for the entry.
    pub(super) evicted: bool,
    published: bool,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.published {
            self.state.release(self.segment.state(self.entry));
            self.segment.unused(self.pages);
        }
    }
}

impl Segment {
    fn bucket(&self, name: &Name) -> std::ops::Range<u64> {
        // The bucket is the hash's upper half, scaled. The tag is of the lower half.
        let first = (((name.hash >> 32) * self.geometry.buckets) >> 32) * WAYS;
        first..first + WAYS
    }

    /// The value under a key, at some instant of the call.
    pub(super) fn find(&self, name: &Name) -> Option<Found> {
        let tag = name.tag();
        let live = self.bucket(name).filter_map(|entry| {
            let state = State::of(self.state(entry));
            if !state.is_live_with(tag) {
                return None;
            }
            let is_key = |(word, &part): (u64, &u64)| self.body(entry, word).load(Relaxed) == part;
            (0..).zip(&name.words).all(is_key).then_some(())?;
            self.read(entry, state)
        });
        live.max_by_key(|found| found.stamp)
    }

    /// What an entry says, if it is still in `state`, in which it was live. An entry whose length
    /// no value can have is released.
    pub(super) fn read(&self, entry: u64, state: State) -> Option<Found> {
        let word = |word| self.body(entry, word).load(Relaxed);
        let found = Found {
            entry,
            state,
            bytes: word(LENGTH_WORD),
            first: word(FIRST_WORD),
            stamp: word(STAMPED_WORD),
        };
        if !state.is_still(self.state(entry)) {
            return None;
        }
        if found.bytes > self.geometry.max_value_bytes() {
            // The protocol never writes such a length. It is damage, which must not be met again. The
            // pages are free once their entry is.
            state.release(self.state(entry));
            return None;
        }
        Some(found)
    }

    /// An entry's key. `None` if it is being changed.
    pub(super) fn key_of(&self, found: &Found) -> Option<Key> {
        let mut bytes = [0; KEY_BYTES];
        for (word, bytes) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
            *bytes = self.body(found.entry, word).load(Relaxed).to_le_bytes();
        }
        let is_whole = found.state.is_still(self.state(found.entry));
        Key::from_bytes(&bytes).ok().filter(|_| is_whole)
    }

    /// Every live entry, as it is when the iterator comes by.
    pub(super) fn each(&self) -> impl Iterator<Item = Found> {
        self.each_live()
            .filter_map(|(entry, state)| self.read(entry, state))
    }

    /// Numbers and states of all live entries, as they are when the iterator comes by.
    pub(super) fn each_live(&self) -> impl Iterator<Item = (u64, State)> {
        (0..self.geometry.entries()).filter_map(|entry| {
            let state = State::of(self.state(entry));
            (state.kind() == Kind::Live).then_some((entry, state))
        })
    }

    /// Notes that a value was used, with so many tokens before it in its prompt.
    pub(super) fn note_use(&self, found: &Found, position: u64) {
        // The entry may hold another value by now: a hint that is wrong harms nothing.
        self.body(found.entry, USED_AT_WORD)
            .store(time_of_use(position), Relaxed);
    }

    /// Counts a value as used before all others, unless it is used meanwhile. Returns whether it did
    /// so: not if it is of another namespace, gone, or counted so already.
    pub(super) fn retire(&self, found: &Found, namespace: Namespace) -> bool {
        let word = self.body(found.entry, USED_AT_WORD);
        let used_at = word.load(Relaxed);
        // If the entry is given to another value after this, its time of use changes, too.
        let key = self.key_of(found);
        key.is_some_and(|key| key.namespace == namespace)
            && used_at != DEMOTED
            && word
                .compare_exchange(used_at, DEMOTED, Relaxed, Relaxed)
                .is_ok()
    }

    /// When a value was used last.
    pub(super) fn used_at(&self, found: &Found) -> u64 {
        self.body(found.entry, USED_AT_WORD).load(Relaxed)
    }

    /// Releases a value. False if somebody else was faster.
    pub(super) fn release(&self, found: &Found) -> bool {
        let released = found.state.release(self.state(found.entry));
        if released {
            self.unused(self.geometry.pages_of(found.bytes));
        }
        released
    }

    /// Removes whatever there is under a key; returns whether there was anything.
    pub(super) fn remove(&self, name: &Name) -> bool {
        let mut removed = false;
        while let Some(found) = self.find(name) {
            removed |= self.release(&found);
        }
        removed
    }

    /// Claims an entry for a key. If the key's bucket is full, the least recently used value in it
    /// is evicted.
    pub(super) fn claim(&self, name: &Name, give_up: Instant) -> Result<Claim<'_>> {
        loop {
            let states = || self.bucket(name).map(|e| (e, State::of(self.state(e))));
            let claim = |entry, state: State, evicted| {
                let owner = self.owner.number();
                let state = state.claim(self.state(entry), owner, name.tag())?;
                Some(Claim {
                    segment: self,
                    entry,
                    state,
                    pages: 0,
                    evicted,
                    published: false,
                })
            };
            let mut free = states().filter(|(_, state)| state.kind() == Kind::Free);
            if let Some(claim) = free.find_map(|(entry, state)| claim(entry, state, false)) {
                return Ok(claim);
            }
            let live = states().filter_map(|(entry, state)| {
                (state.kind() == Kind::Live).then(|| self.read(entry, state))?
            });
            if let Some(victim) = live.min_by_key(|found| self.used_at(found)) {
                if let Some(claim) = claim(victim.entry, victim.state, true) {
                    self.unused(self.geometry.pages_of(victim.bytes));
                    return Ok(claim);
                }
                continue;
            }
            // Others are filling all entries of the bucket.
            let freed = states().any(|(_, state)| match state.kind() {
                Kind::Claimed(owner) => self.release_if_dead(owner),
                _ => true,
            });
            if !freed {
                if Instant::now() >= give_up {
                    deadline::check(give_up)?;
                }
                std::thread::sleep(RETRY);
            }
        }
    }

    /// Shows the value to the readers, and releases what was under its key.
    pub(super) fn publish(
        &self,
        mut claim: Claim<'_>,
        name: &Name,
        bytes: u64,
        first: u64,
        position: u64,
    ) -> Result<()> {
        let entry = claim.entry;
        for (word, part) in (0..).zip(&name.words) {
            self.body(entry, word).store(*part, Relaxed);
        }
        let stamp = self.header(STAMP_WORD).fetch_add(1, AcqRel);
        for (word, value) in [
            (LENGTH_WORD, bytes),
            (FIRST_WORD, first),
            (STAMPED_WORD, stamp),
            (USED_AT_WORD, time_of_use(position)),
        ] {
            self.body(entry, word).store(value, Relaxed);
        }
        if !claim.state.publish(self.state(entry)) {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the pool's segment was changed by something that is not a pool",
            ));
        }
        claim.published = true;
        self.release_all_but_the_youngest(name);
        Ok(())
    }

    fn release_all_but_the_youngest(&self, name: &Name) {
        let Some(youngest) = self.find(name) else {
            return;
        };
        for entry in self.bucket(name) {
            let state = State::of(self.state(entry));
            if !state.is_live_with(name.tag()) {
                continue;
            }
            let is_key = (0..)
                .zip(&name.words)
                .all(|(w, part)| self.body(entry, w).load(Relaxed) == *part);
            if let Some(found) = self.read(entry, state)
                && is_key
                && found.stamp < youngest.stamp
            {
                self.release(&found);
            }
        }
    }

    /// Releases everything that processes were filling when they died. One of them may have had
    /// this handle's number, so this handle must not have put anything yet.
    pub(super) fn release_what_the_dead_left(&self) {
        self.release_claims_of(self.owner.number());
        for entry in 0..self.geometry.entries() {
            if let Kind::Claimed(owner) = State::of(self.state(entry)).kind() {
                self.release_if_dead(owner);
            }
        }
    }

    /// Releases everything that a dead process was filling; false if it lives.
    pub(super) fn release_if_dead(&self, owner: u16) -> bool {
        self.owner
            .if_dead(owner, || self.release_claims_of(owner))
            .is_some()
    }

    /// Releases everything that this owner was filling. Nobody may be filling anything as this
    /// owner any more.
    fn release_claims_of(&self, owner: u16) {
        for entry in 0..self.geometry.entries() {
            let state = State::of(self.state(entry));
            if state.kind() == Kind::Claimed(owner) {
                state.release(self.state(entry));
            }
        }
        self.count_used();
    }

    /// Takes pages out of the count of pages in use.
    fn unused(&self, pages: u64) {
        self.header(USED_WORD).fetch_sub(pages, Relaxed);
    }
}
