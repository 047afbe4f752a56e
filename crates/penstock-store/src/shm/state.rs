//! The protocol by which processes share entries and pages: three kinds of atomic words.
//!
//! An entry's *state* is one word: what the entry is, who has claimed it, and a generation that
//! every claim raises.
//!
//! ```text
//! FREE(g) ──claim──▶ CLAIMED(owner, g+1) ──publish──▶ LIVE(g+1) ──release──▶ FREE(g+1)
//!    ▲                     │                             │
//!    └──────release────────┘         claim: straight to CLAIMED(owner, g+2)
//! ```
//!
//! A claim is published only by its owner. It is released by its owner, or by anybody once the
//! owner's process is dead. Everybody may release or claim an entry that is free or live. Each step
//! is one compare-and-swap. So at whatever instant a process dies or stops, nothing is half-done.
//!
//! A *page* says which entry it belongs to, in which generation. It is in use only while that entry
//! is claimed or live in that very generation. So releasing an entry frees all its pages in the
//! same instant, even those that a killed writer had only just taken.
//!
//! A reader reads an entry's state, then what the entry and its pages hold, then the state again.
//! If the state is the same, nobody has claimed anything of the entry meanwhile: a page changes
//! only after the entry that it belonged to has left its generation. A generation does not come
//! back before 2^32 others have been through the entry.
//!
//! The words are reached through a trait, so that the model checker can put its own in their place.

use std::sync::atomic::Ordering;

/// An atomic word, as far as the protocol needs one.
pub(crate) trait Word {
    /// Reads it.
    fn load(&self, order: Ordering) -> u64;
    /// Replaces `current` by `new`; success orders as acquire and release.
    fn swap_if(&self, current: u64, new: u64) -> bool;
    /// A fence between accesses to any words.
    fn fence(order: Ordering);
}

/// Most processes that can have claims at a time. Owners are numbered from 1 up to this.
pub(crate) const OWNERS: u16 = 1023;
/// Bits of a key's hash that its entry's state repeats. They spare most looks at other keys.
pub(crate) const TAG_BITS: u32 = 20;

const KIND: u64 = 0b11;
const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const LIVE: u64 = 2;
const OWNER_AT: u32 = 2;
const TAG_AT: u32 = 12;
const GENERATION_AT: u32 = 32;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nobody's.
    Free,
    /// Being filled by this owner.
    Claimed(u16),
    /// A value that readers find.
    Live,
}

/// An entry's state word as it was at some instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    /// The state now. What the entry held when it came into this state is visible afterwards.
    pub(crate) fn of(word: &impl Word) -> Self {
        Self(word.load(Ordering::Acquire))
    }

    /// What the entry is. A word that no step of the protocol writes counts as free.
    pub(crate) fn kind(self) -> Kind {
        match self.0 & KIND {
            CLAIMED => Kind::Claimed((self.0 >> OWNER_AT) as u16 & OWNERS),
            LIVE => Kind::Live,
            _ => Kind::Free,
        }
    }

    /// Whether it is a value whose key has this tag.
    pub(crate) fn is_live_with(self, tag: u32) -> bool {
        self.0 & KIND == LIVE && self.0 as u32 >> TAG_AT == tag
    }

    /// Whether these pages belong to the entry in this state.
    pub(crate) fn holds(self, page: Belonging) -> bool {
        self.kind() != Kind::Free && self.generation() == page.generation
    }

    /// How often the entry has been claimed.
    pub(crate) fn generation(self) -> u32 {
        (self.0 >> GENERATION_AT) as u32
    }

    /// Claims an entry that is free or live. The value of a live entry is then gone. Whoever still
    /// sees the entry in its old state does not see what the owner writes into it afterwards.
    pub(crate) fn claim<W: Word>(self, word: &W, owner: u16, tag: u32) -> Option<Self> {
        let generation = self.generation().wrapping_add(1);
        let claimed = Self::new(CLAIMED, owner, tag, generation);
        let won = !matches!(self.kind(), Kind::Claimed(_)) && word.swap_if(self.0, claimed.0);
        // Pairs with the fence in `is_still`.
        W::fence(Ordering::Release);
        won.then_some(claimed)
    }

    /// Shows a claim to the readers, with everything written before. False if the claim is not
    /// there any more.
    pub(crate) fn publish<W: Word>(self, word: &W) -> bool {
        let live = Self::new(LIVE, 0, self.0 as u32 >> TAG_AT, self.generation());
        let published = word.swap_if(self.0, live.0);
        // Two writers that publish one key at once must not both overlook the other.
        W::fence(Ordering::SeqCst);
        published
    }

    /// Frees an entry and all its pages, if it is still in this state.
    pub(crate) fn release(self, word: &impl Word) -> bool {
        self.kind() != Kind::Free
            && word.swap_if(self.0, Self::new(FREE, 0, 0, self.generation()).0)
    }

    /// Whether the entry has been in this state all the time since the state was read. If so,
    /// whatever was read of the entry and its pages meanwhile belongs together.
    pub(crate) fn is_still<W: Word>(self, word: &W) -> bool {
        W::fence(Ordering::Acquire);
        word.load(Ordering::Relaxed) == self.0
    }

    fn new(kind: u64, owner: u16, tag: u32, generation: u32) -> Self {
        Self(
            kind | u64::from(owner) << OWNER_AT
                | u64::from(tag) << TAG_AT
                | u64::from(generation) << GENERATION_AT,
        )
    }
}

/// Which entry a page belongs to, in which generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Belonging {
    /// The entry's number.
    pub(crate) entry: u32,
    /// The one generation of the entry that the page belongs to.
    pub(crate) generation: u32,
}

impl Belonging {
    /// What the page's word says now. A page that never belonged to anybody says entry 0 in
    /// generation 0. No entry is claimed or live in generation 0 before 2^32 claims.
    pub(crate) fn of(word: &impl Word) -> Self {
        let word = word.load(Ordering::Acquire);
        Self {
            entry: word as u32,
            generation: (word >> 32) as u32,
        }
    }

    /// Takes a page that is not in use from the entry that it belonged to. Whoever still sees that
    /// entry as it was does not see what is written into the page afterwards.
    pub(crate) fn give_to<W: Word>(self, word: &W, to: Self) -> bool {
        let won = word.swap_if(self.word(), to.word());
        // Pairs with the fence in `State::is_still`.
        W::fence(Ordering::Release);
        won
    }

    fn word(self) -> u64 {
        u64::from(self.entry) | u64::from(self.generation) << 32
    }
}
