//! How far a prompt reaches in a pool.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use penstock_catalogue::Groups;
use penstock_contract::{
    CHUNK_BYTES, Error, ErrorKind, Key, Namespace, Result, Store, Tenancy, Tenant,
};
use penstock_layout::Span;

use crate::hashing::Prefix;
use crate::index::{Belief, Index};

/// A group's objects in the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The namespace of its objects.
    pub namespace: Namespace,
    /// The spans of a block on all ranks. An engine loads a block if the pool has all of them.
    pub spans: Vec<Span>,
}

/// One way to serve a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    groups: Groups,
    parts: Vec<Part>,
}

impl Variant {
    /// `parts` has the objects of each group.
    ///
    /// # Errors
    /// [`ErrorKind::Config`]: a group's objects are not given, or it has none.
    pub fn new(groups: Groups, parts: Vec<Part>) -> Result<Self> {
        if parts.len() != groups.count() || parts.iter().any(|part| part.spans.is_empty()) {
            let what = "each group of layers must have its spans";
            return Err(Error::new(ErrorKind::Config, what));
        }
        Ok(Self { groups, parts })
    }

    /// The groups of layers.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// This variant, for the objects of one tenant alone.
    #[must_use]
    pub fn of_tenant(&self, tenant: Tenant) -> Self {
        let mut own = self.clone();
        for part in &mut own.parts {
            part.namespace = part.namespace.of_tenant(tenant);
        }
        own
    }
}

/// Blocks that the pool is asked for first.
const FIRST_BLOCKS: usize = 16;
/// How many times as many blocks are asked for when all were there.
const GROWTH: usize = 4;
/// The most keys in one call to the store, unless one block has more.
const MOST_KEYS: usize = 8192;

/// Answers for one pool. Any number of threads may ask at the same time.
pub struct Finder {
    store: Arc<dyn Store>,
    index: Mutex<Index>,
    asked: AtomicU64,
}

impl Finder {
    /// `blocks` is how many blocks the index remembers.
    pub fn new(store: Arc<dyn Store>, blocks: usize, belief: Belief) -> Self {
        Self {
            store,
            index: Mutex::new(Index::new(blocks, belief)),
            asked: AtomicU64::new(0),
        }
    }

    /// The tokens that an engine would find, if it has the first `own` of them itself; None if the
    /// index does not know all that is needed to tell. Does no I/O.
    pub fn known(&self, variant: &Variant, prefix: &Prefix, own: u64) -> Option<u64> {
        let is_known = Cell::new(true);
        let index = self.index.lock();
        let now = Instant::now();
        let tokens = reach(variant, prefix, own, |position, chunks| {
            let part = &variant.parts[position];
            let is_missing = |chunk| match index.get(part.namespace, chunk, now) {
                Some(is_there) => !is_there,
                None => {
                    is_known.set(false);
                    true
                }
            };
            chunks.iter().position(is_missing)
        });
        is_known.get().then_some(tokens)
    }

    /// The tokens that an engine would find, if it has the first `own` of them itself. Asks the
    /// pool for what the index does not know.
    ///
    /// # Errors
    /// The pool failed, or did not answer in time.
    pub fn find(
        &self,
        variant: &Variant,
        prefix: &Prefix,
        own: u64,
        deadline: Instant,
    ) -> Result<u64> {
        let failed = RefCell::new(None);
        let tokens = reach(variant, prefix, own, |position, chunks| {
            if failed.borrow().is_some() {
                // No block is missing where none is asked for: else a search for a shorter run
                // would not end.
                return (!chunks.is_empty()).then_some(0);
            }
            self.first_missing(&variant.parts[position], chunks, deadline)
                .unwrap_or_else(|error| {
                    failed.replace(Some(error));
                    Some(0)
                })
        });
        failed.into_inner().map_or(Ok(tokens), Err)
    }

    /// Blocks that the index has an answer for.
    pub fn indexed(&self) -> usize {
        self.index.lock().len()
    }

    /// Blocks that the pool was asked for, since the beginning.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Forgets what the pool said.
    pub fn forget(&self) {
        self.index.lock().clear();
    }

    fn first_missing(
        &self,
        part: &Part,
        chunks: &[[u8; CHUNK_BYTES]],
        deadline: Instant,
    ) -> Result<Option<usize>> {
        let (mut at, mut blocks) = (0, FIRST_BLOCKS);
        loop {
            {
                let (index, now) = (self.index.lock(), Instant::now());
                let believed = |chunk| index.get(part.namespace, chunk, now);
                while at < chunks.len() && believed(&chunks[at]) == Some(true) {
                    at += 1;
                }
                match chunks.get(at) {
                    None => return Ok(None),
                    Some(chunk) if believed(chunk) == Some(false) => return Ok(Some(at)),
                    Some(_) => {}
                }
            }
            let most = (MOST_KEYS / part.spans.len()).max(1);
            let some = &chunks[at..chunks.len().min(at + blocks.min(most))];
            let answers = self.ask(part, some, deadline)?;
            // The answers count, whatever the index has room for.
            if let Some(missing) = answers.iter().position(|is_there| !is_there) {
                return Ok(Some(at + missing));
            }
            at += some.len();
            blocks *= GROWTH;
        }
    }

    fn ask(
        &self,
        part: &Part,
        chunks: &[[u8; CHUNK_BYTES]],
        deadline: Instant,
    ) -> Result<Vec<bool>> {
        let namespace = part.namespace;
        let keys: Vec<Key> = chunks
            .iter()
            .flat_map(|&chunk| {
                part.spans.iter().map(move |&span| Key {
                    namespace,
                    chunk,
                    span,
                })
            })
            .collect();
        // Before the question: what is stored while the pool answers may be missing in the answer.
        let now = Instant::now();
        let found = self.store.contains(&keys, deadline)?;
        self.asked.fetch_add(chunks.len() as u64, Ordering::Relaxed);
        let whole: Vec<bool> = found
            .chunks(part.spans.len())
            .map(|spans| spans.iter().all(|&is_there| is_there))
            .collect();
        let mut index = self.index.lock();
        for (chunk, &is_there) in chunks.iter().zip(&whole) {
            index.set(namespace, chunk, is_there, now);
        }
        Ok(whole)
    }
}

/// The tokens from the first on that need not be computed, if the first `own` of them are there.
/// `missing` tells the first of some blocks of a group that is not there. The prompt's last token is
/// left to compute. `own` is rounded down to whole blocks of all groups.
pub(crate) fn reach(
    variant: &Variant,
    prefix: &Prefix,
    own: u64,
    missing: impl Fn(usize, &[[u8; CHUNK_BYTES]]) -> Option<usize>,
) -> u64 {
    let groups = &variant.groups;
    let aligned = |tokens: u64| tokens / groups.alignment() * groups.alignment();
    let limit = groups.last_end(prefix.tokens);
    groups.reach(
        aligned(own).min(limit),
        limit,
        |position, blocks: Range<usize>| {
            let step = groups.hashes_per_block(position);
            // A block is named by the last hash within it.
            let named = prefix.hashes.iter().skip(step - 1).step_by(step);
            let chunks: Vec<[u8; CHUNK_BYTES]> = named
                .skip(blocks.start)
                .take(blocks.len())
                .copied()
                .collect();
            let start = blocks.start;
            missing(position, &chunks).map(|at| start + at)
        },
    )
}
