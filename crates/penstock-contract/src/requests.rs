//! What a store is asked to put and to get, and what became of it.

use std::io::{IoSlice, IoSliceMut};

use crate::{Key, Result};

/// What became of a put that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The value is in the store.
    Stored,
    /// The store already had a value of this length under the key and kept it.
    AlreadyPresent,
}

/// What became of a get that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetOutcome {
    /// The whole value, of this many bytes, now fills the destination from its start. It may
    /// be shorter than the destination.
    Hit(u64),
    /// No such key.
    Miss,
    /// The value, of this many bytes, does not fit the destination, whose content is now
    /// unspecified.
    TooLarge(u64),
}

/// One value to put: its bytes are the slices' concatenation.
pub struct PutRequest<'a> {
    /// The object's name.
    pub key: Key,
    /// The value's bytes, in order.
    pub value: &'a [IoSlice<'a>],
    /// Tokens before this value in its prompt, as far as is known, else 0. A prefix is only useful
    /// from its beginning, but plain LRU evicts the beginning first. So a store that evicts the
    /// least recently used value may count values further on in a prompt as used earlier: then it
    /// evicts the end before the beginning.
    pub position: u64,
    /// Filled in by the store.
    pub outcome: Option<Result<PutOutcome>>,
}

impl<'a> PutRequest<'a> {
    /// A request that no store has seen, for a value whose place in a prompt is not known.
    pub fn new(key: Key, value: &'a [IoSlice<'a>]) -> Self {
        Self {
            key,
            value,
            position: 0,
            outcome: None,
        }
    }
}

/// One value to get into the caller's memory.
pub struct GetRequest<'a, 'b> {
    /// The object's name.
    pub key: Key,
    /// Where the value's bytes go, in order.
    pub into: &'a mut [IoSliceMut<'b>],
    /// Tokens before the value in its prompt, as in [`PutRequest::position`]; or
    /// [`GetRequest::NO_USE`].
    pub position: u64,
    /// Whether [`Self::checksum`] is wanted.
    pub wants_checksum: bool,
    /// Whether the bytes are used where they arrive. Otherwise they are copied on at once, so they
    /// are worth room in the processor's caches.
    pub is_in_place: bool,
    /// The checksum that `penstock-value` computes of what the destination holds now, if this is a
    /// hit and the store had time to compute it. A store has time while other values are on their
    /// way and this one is still in the processor's caches. Whoever changes the destination
    /// afterwards resets this to `None`. A store that leaves it `None` is right too.
    pub checksum: Option<u64>,
    /// Filled in by the store.
    pub outcome: Option<Result<GetOutcome>>,
}

impl<'a, 'b> GetRequest<'a, 'b> {
    /// The position of a get that is no use of its value. Stores that note positions then keep the
    /// time of use that they have noted.
    pub const NO_USE: u64 = u64::MAX;

    /// A request that no store has seen. Its value's checksum is not wanted, its place in a prompt
    /// is not known, and it is not used where it arrives.
    pub fn new(key: Key, into: &'a mut [IoSliceMut<'b>]) -> Self {
        Self {
            key,
            into,
            position: 0,
            wants_checksum: false,
            is_in_place: false,
            checksum: None,
            outcome: None,
        }
    }
}
