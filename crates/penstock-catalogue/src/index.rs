//! Names of blocks as numbers, and what is known of each.
//!
//! A hash table can find any block, but each search costs two misses of the processor's caches. For
//! a prompt of thousands of blocks, these misses are most of the time. A block's hash is chained,
//! so it implies which block comes before it. The index therefore finds a block through the block
//! before it: its follower usually lies next to it in memory.
//!
//! The table holds only the blocks that cannot be found this way:
//! - the first block of a prompt;
//! - all followers of a block but one;
//! - blocks whose predecessor was forgotten;
//! - blocks that jobs name, because reports about them give nothing but the hash.

use hashbrown::HashTable;
use penstock_contract::{Chunk, Tenant};

use crate::free::Free;
use crate::remembered::Remembered;

/// Identifies the content of a block among all others of the engine, and whose it is: tenants that
/// give the same salt have the same chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) group: u16,
    pub(crate) tenant: Option<Tenant>,
    pub(crate) chunk: Chunk,
}

/// The number of a block, for as long as the block is known.
pub(crate) type Number = u32;

/// The pool has the block.
const IN_POOL: u16 = 1;
/// The block cannot be decrypted here: it is not loaded, and not stored as long as it is there.
const FOREIGN: u16 = 2;
/// The block is kept in host memory for a request that waits, or is on its way there.
const PREFETCHED: u16 = 4;
/// The block is in the table.
const LISTED: u16 = 8;

/// This engine has put the block into the pool, or found it there when it wanted to.
const OURS: u16 = 16;
/// Node memory had the block when it was last asked.
const IN_NODE: u16 = 32;
/// This engine has computed the block, on top of blocks that it has computed.
const COMPUTED: u16 = 64;
/// This engine has loaded the block, and may still have it in its own cache.
const LOADED: u16 = 128;
/// What the pool has of the block was to be compared with what this engine has computed.
const WITNESSED: u16 = 256;

const NONE: Number = Number::MAX;

/// What is known of a block.
#[derive(Clone, Copy, Default)]
pub(crate) struct State {
    /// How many requests and jobs name it.
    references: u32,
    /// Ranks whose host memory has all that they hold of the block. They report changes in any
    /// order, so this can be negative for a while.
    ranks: i32,
    /// Number of loads that bring it.
    pub(crate) loading: u16,
    /// Number of stores that take it.
    pub(crate) storing: u16,
    flags: u16,
    /// The question since which it is known whether the pool has the block, see [`Index::answer`].
    known_since: u64,
}

/// What is known of a block in the pool.
const OF_POOL: u16 = IN_POOL | FOREIGN | OURS | WITNESSED;

impl State {
    pub(crate) fn is_in_pool(&self) -> bool {
        self.flags & IN_POOL != 0
    }

    /// Whether it can be loaded from the pool.
    pub(crate) fn is_loadable(&self) -> bool {
        self.flags & (IN_POOL | FOREIGN) == IN_POOL
    }

    /// Whether this engine put it there, and one request alone names it.
    pub(crate) fn may_be_let_go(&self) -> bool {
        let wanted = IN_POOL | OURS;
        self.flags & wanted == wanted && self.references == 1
    }

    pub(crate) fn is_prefetched(&self) -> bool {
        self.flags & PREFETCHED != 0
    }

    /// Whether host memory has it: that of exactly so many ranks, or node memory.
    pub(crate) fn is_held_by(&self, ranks: i32) -> bool {
        self.ranks == ranks || self.flags & (IN_NODE | FOREIGN) == IN_NODE
    }

    /// Whether every copy of it that this engine may have is computed on top of its own blocks.
    pub(crate) fn is_computed(&self) -> bool {
        self.flags & COMPUTED != 0
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.flags & LOADED != 0
    }

    pub(crate) fn is_witnessed(&self) -> bool {
        self.flags & WITNESSED != 0
    }

    fn is_worth_remembering(&self) -> bool {
        self.flags & (IN_POOL | FOREIGN | LOADED) != 0
    }

    /// Takes in what another number of the same block knows of it. If the newer of both knows that
    /// the pool does not have it, the older does not count.
    fn learn(&mut self, other: &Self) {
        self.flags |= other.flags & (IN_NODE | COMPUTED | LOADED);
        if self.is_loaded() {
            self.flags &= !COMPUTED;
        }
        let (newer, older) = if self.known_since < other.known_since {
            (other, &*self)
        } else {
            (&*self, other)
        };
        let mut of_pool = newer.flags & OF_POOL;
        if newer.is_in_pool() || newer.known_since == older.known_since {
            of_pool |= older.flags & OF_POOL;
        }
        let since = newer.known_since;
        self.flags = self.flags & !OF_POOL | of_pool;
        self.known_since = since;
    }
}

/// All blocks of which something is known, or which a request or a job names.
pub(crate) struct Index {
    table: HashTable<Number>,
    names: Vec<Name>,
    states: Vec<State>,
    neighbours: Vec<Neighbours>,
    free: Free,
    /// Blocks that nothing names any more, but that the pool has.
    remembered: Remembered,
    bound: usize,
    /// Questions that the pool was asked.
    questions: u64,
}

/// A block that follows this one in some prompt, and the block before it. The follower counts only
/// if it names this block as the one before it: its number may belong to another block by now.
#[derive(Clone, Copy)]
struct Neighbours {
    next: Number,
    before: Number,
}

const ALONE: Neighbours = Neighbours {
    next: NONE,
    before: NONE,
};

/// Block hashes are spread evenly already.
fn hash(name: &Name) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = name.chunk;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
        ^ u64::from(name.group).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Index {
    /// An index that remembers up to `bound` blocks that nothing names. It makes that room at once,
    /// page by page, so that no later request has to wait for it.
    pub(crate) fn new(bound: usize) -> Self {
        let mut index = Self {
            table: HashTable::with_capacity(bound),
            names: Vec::with_capacity(bound),
            states: Vec::with_capacity(bound),
            neighbours: Vec::with_capacity(bound),
            free: Free::below(bound),
            remembered: Remembered::default(),
            bound,
            questions: 0,
        };
        let nothing = Name {
            group: 0,
            tenant: None,
            chunk: [0; 32],
        };
        index.names.resize(bound, nothing);
        index.states.resize(bound, State::default());
        index.neighbours.resize(bound, ALONE);
        index.remembered.grow(bound);
        index
    }

    /// Blocks that are known.
    pub(crate) fn len(&self) -> usize {
        self.names.len() - self.free.len()
    }

    /// Makes room for so many more blocks.
    fn reserve(&mut self, more: usize) {
        let new = more.saturating_sub(self.free.len());
        self.names.reserve(new);
        self.states.reserve(new);
        self.neighbours.reserve(new);
        self.remembered.reserve(new);
    }

    pub(crate) fn state(&self, number: Number) -> &State {
        &self.states[number as usize]
    }

    pub(crate) fn state_mut(&mut self, number: Number) -> &mut State {
        &mut self.states[number as usize]
    }

    pub(crate) fn name(&self, number: Number) -> &Name {
        &self.names[number as usize]
    }

    /// Appends to `numbers` the numbers of further blocks of a prompt. Each of these blocks is then
    /// named once more.
    ///
    /// As soon as one block is new here, all blocks after it are taken for new too. More may be
    /// known about one of them, from a prompt whose beginning was forgotten. Whoever is about to
    /// name the block in a job finds that ([`join`](Self::join)). Until then it is of no use, since
    /// nothing can be loaded before the blocks in front of it.
    pub(crate) fn refer(
        &mut self,
        group: u16,
        tenant: Option<Tenant>,
        chunks: impl ExactSizeIterator<Item = Chunk>,
        numbers: &mut Vec<Number>,
    ) {
        self.reserve(chunks.len());
        numbers.reserve(chunks.len());
        let mut chunks = chunks.map(|chunk| Name {
            group,
            tenant,
            chunk,
        });
        for name in chunks.by_ref() {
            let known = match numbers.last() {
                Some(&before) => self.follower(before, &name),
                None => self.find(&name),
            };
            if let Some(number) = known {
                self.refer_again(number);
                numbers.push(number);
            } else {
                numbers.push(self.follow(numbers.last().copied(), name));
                break;
            }
        }
        for name in chunks {
            let number = self.make(name);
            if let Some(&before) = numbers.last() {
                self.link(before, number);
            }
            numbers.push(number);
        }
    }

    /// The block of this name that follows a block, if it is known.
    fn follower(&mut self, before: Number, name: &Name) -> Option<Number> {
        let next = self.next(before);
        if let Some(next) = next
            && self.names[next as usize] == *name
        {
            return Some(next);
        }
        let number = self.find(name)?;
        if next.is_none() && self.neighbours[number as usize].before == NONE {
            self.link(before, number);
        }
        Some(number)
    }

    /// Makes a new block, named once, behind the block before it.
    fn follow(&mut self, before: Option<Number>, name: Name) -> Number {
        let number = self.make(name);
        match before {
            Some(before) if self.next(before).is_none() => self.link(before, number),
            _ => self.list(number),
        }
        number
    }

    /// The follower of a block that is found through it.
    fn next(&self, before: Number) -> Option<Number> {
        let next = self.neighbours[before as usize].next;
        let knows = self.neighbours.get(next as usize)?;
        (knows.before == before).then_some(next)
    }

    fn link(&mut self, before: Number, number: Number) {
        self.neighbours[before as usize].next = number;
        self.neighbours[number as usize].before = before;
    }

    fn find(&self, name: &Name) -> Option<Number> {
        let is_it = |&number: &Number| self.names[number as usize] == *name;
        self.table.find(hash(name), is_it).copied()
    }

    /// The number of a block. The block is put into the table if it was not there.
    fn listed(&mut self, name: Name) -> Number {
        self.find(&name).unwrap_or_else(|| {
            let number = self.make(name);
            self.states[number as usize].references = 0;
            self.list(number);
            number
        })
    }

    /// The number that a request or a job gives to the block of this one's name in the table: this
    /// one, if there is no other.
    pub(crate) fn listed_as(&self, number: Number) -> Number {
        if self.states[number as usize].flags & LISTED != 0 {
            return number;
        }
        self.find(&self.names[number as usize])
            .filter(|&other| self.states[other as usize].references > 0)
            .unwrap_or(number)
    }

    /// The number that jobs give to a block, so that no two jobs know the same block by different
    /// numbers. It has all that is known of the block. If it is another one, then that is named once
    /// more, and this one once less. The block is in the table then.
    pub(crate) fn join(&mut self, number: Number) -> Number {
        let other = self.listed_as(number);
        if other == number {
            self.list(number);
            return number;
        }
        let known = self.states[number as usize];
        self.states[other as usize].learn(&known);
        if known.references == 1 {
            // Nothing would find it any more.
            self.states[number as usize].flags = 0;
        }
        self.refer_again(other);
        self.release(number);
        other
    }

    /// Makes sure that a block can be found by its name alone. No other block of that name can then
    /// be found: if requests or jobs name such a block, that one stays in the table, and this one
    /// does not come into it.
    fn list(&mut self, number: Number) {
        if self.states[number as usize].flags & LISTED != 0 {
            return;
        }
        let name = self.names[number as usize];
        // A report about its past may have made another block of the same name.
        if let Some(other) = self.find(&name) {
            let known = self.states[other as usize];
            if known.references > 0 {
                return;
            }
            self.remembered.remove(other);
            self.forget(other);
            let state = &mut self.states[number as usize];
            state.ranks += known.ranks;
            state.learn(&known);
        }
        self.states[number as usize].flags |= LISTED;
        let names = &self.names;
        self.table
            .insert_unique(hash(&name), number, |&n| hash(&names[n as usize]));
    }

    /// Makes a block that is new here, named once.
    fn make(&mut self, name: Name) -> Number {
        let state = State {
            references: 1,
            ..State::default()
        };
        if let Some(number) = self.free.pop() {
            self.names[number as usize] = name;
            self.states[number as usize] = state;
            return number;
        }
        self.names.push(name);
        self.states.push(state);
        self.neighbours.push(ALONE);
        self.remembered.grow(self.names.len());
        (self.names.len() - 1) as Number
    }

    /// Notes that a known block is named once more.
    pub(crate) fn refer_again(&mut self, number: Number) {
        let state = &mut self.states[number as usize];
        state.references += 1;
        if state.references == 1 {
            self.remembered.remove(number);
        }
    }

    /// Notes that a block is named once less.
    pub(crate) fn release(&mut self, number: Number) {
        let state = &mut self.states[number as usize];
        state.references -= 1;
        if state.references == 0 {
            self.settle(number);
        }
    }

    /// Decides what becomes of a block that nothing names. If the pool has it, it is remembered as
    /// long as there is room. If host memory has it, it is kept. Otherwise it is forgotten.
    fn settle(&mut self, number: Number) {
        let state = self.states[number as usize];
        if state.references > 0 {
            return;
        }
        self.remembered.remove(number);
        if state.is_worth_remembering() {
            self.remembered.push(number);
            while self.remembered.len() > self.bound
                && let Some(oldest) = self.remembered.pop()
            {
                self.states[oldest as usize].flags &= !(OF_POOL | LOADED);
                self.settle(oldest);
            }
        } else if state.ranks == 0 {
            self.forget(number);
        }
    }

    fn forget(&mut self, number: Number) {
        let next = self.next(number);
        self.neighbours[number as usize] = ALONE;
        if let Some(next) = next {
            self.neighbours[next as usize].before = NONE;
            self.list(next);
        }
        if self.states[number as usize].flags & LISTED != 0 {
            let name = self.names[number as usize];
            let found = self.table.find_entry(hash(&name), |&other| other == number);
            if let Ok(entry) = found {
                entry.remove();
            }
        }
        self.states[number as usize] = State::default();
        self.free.push(number);
    }

    /// The number of a new question to the pool. They count up from 1.
    pub(crate) fn ask(&mut self) -> u64 {
        self.questions += 1;
        self.questions
    }

    /// Takes in whether the pool has a block, as it answered to this question. Says nothing
    /// about a block of which newer things are known. An answer is as old as its question; what
    /// became known otherwise is newer than all questions that were asked by then.
    pub(crate) fn answer(&mut self, question: u64, number: Number, is_there: bool) {
        let state = &mut self.states[number as usize];
        let since = 2 * question;
        if since <= state.known_since {
            return;
        }
        state.known_since = since;
        if is_there {
            state.flags |= IN_POOL;
        } else {
            // Whoever stores it next may use another key.
            state.flags &= !OF_POOL;
        }
    }

    /// What is known of a block of the pool, to be changed: it is known as of now.
    fn knows(&mut self, number: Number) -> &mut u16 {
        let now = self.now();
        let state = &mut self.states[number as usize];
        state.known_since = now;
        &mut state.flags
    }

    fn now(&self) -> u64 {
        2 * self.questions + 1
    }

    /// Notes that this engine has brought a block into the pool.
    pub(crate) fn set_stored(&mut self, number: Number) {
        *self.knows(number) |= IN_POOL | OURS;
    }

    /// Notes that a block of this engine's is about to be removed from the pool.
    pub(crate) fn set_removed(&mut self, number: Number) {
        *self.knows(number) &= !OF_POOL;
    }

    /// Notes that the pool no longer has a block, or not all of it. Node memory does not have it
    /// either: it was looked for there first.
    pub(crate) fn set_lost(&mut self, number: Number) {
        *self.knows(number) &= !(IN_POOL | OURS | WITNESSED | IN_NODE);
    }

    /// Notes whether node memory has all of a block.
    pub(crate) fn set_in_node(&mut self, number: Number, is_there: bool) {
        let flags = &mut self.states[number as usize].flags;
        *flags = if is_there {
            *flags | IN_NODE
        } else {
            *flags & !IN_NODE
        };
    }

    /// Notes that this engine has computed a block on top of its own blocks. If it has loaded the
    /// block before, both copies may be in its cache, and nobody knows which one a request gets.
    pub(crate) fn set_computed(&mut self, number: Number) {
        let state = &mut self.states[number as usize];
        if !state.is_loaded() {
            state.flags |= COMPUTED;
        }
    }

    /// Notes that this engine loads a block.
    pub(crate) fn set_loaded(&mut self, number: Number) {
        let flags = &mut self.states[number as usize].flags;
        *flags = *flags & !COMPUTED | LOADED;
    }

    /// Notes that the pool's value of a block is to be compared.
    pub(crate) fn set_witnessed(&mut self, number: Number) {
        self.states[number as usize].flags |= WITNESSED;
    }

    /// Notes that the pool has a block that cannot be decrypted here.
    pub(crate) fn set_foreign(&mut self, number: Number) {
        *self.knows(number) |= IN_POOL | FOREIGN;
    }

    pub(crate) fn set_prefetched(&mut self, number: Number, is_so: bool) {
        let flags = &mut self.states[number as usize].flags;
        *flags = if is_so {
            *flags | PREFETCHED
        } else {
            *flags & !PREFETCHED
        };
    }

    /// Notes that a rank's host memory has a block now (`by` is 1), or no longer has it (-1).
    pub(crate) fn change_ranks(&mut self, name: Name, by: i32) {
        let number = self.listed(name);
        self.states[number as usize].ranks += by;
        let state = self.states[number as usize];
        if state.references == 0 && !state.is_worth_remembering() {
            self.settle(number);
        }
    }

    /// Forgets what host memory and node memory have.
    pub(crate) fn forget_host(&mut self) {
        let mut had = Vec::new();
        for (number, state) in self.states.iter_mut().enumerate() {
            state.flags &= !IN_NODE;
            if std::mem::take(&mut state.ranks) != 0 {
                had.push(number as Number);
            }
        }
        for number in had {
            self.settle(number);
        }
    }

    /// Forgets what the pool has, what it has yet to answer, and what this engine has computed.
    pub(crate) fn forget_pool(&mut self) {
        while self.remembered.pop().is_some() {}
        let now = self.now();
        for number in 0..self.names.len() as Number {
            let state = &mut self.states[number as usize];
            let was_worth_it = state.is_worth_remembering();
            state.flags &= !(OF_POOL | COMPUTED);
            if state.references == 0 {
                state.flags &= !LOADED;
            }
            state.known_since = now;
            if was_worth_it {
                self.settle(number);
            }
        }
    }
}

#[cfg(test)]
mod tests;
