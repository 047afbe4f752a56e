//! The catalogue: requests and their blocks.

use std::collections::HashMap;

use penstock_contract::{Chunk, HostChange, Tenant};

use crate::CatalogueError;
use crate::error::Result;
use crate::groups::Groups;
use crate::index::{Index, Name};
use crate::job::Job;
use crate::request::Request;

/// What the ranks hold of a group's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Ranks that hold a part of the block.
    pub ranks: u32,
    /// Bytes of the block, on all ranks together.
    pub bytes: u64,
    /// Objects of the block on one rank.
    pub objects: u64,
}

/// A query that is not answered yet.
pub(crate) struct Asked {
    pub(crate) request: Box<str>,
    pub(crate) group: usize,
    /// Whether the same was asked before for this request.
    pub(crate) again: bool,
}

/// The requests of one engine, their blocks, and where these blocks are.
///
/// ```
/// use penstock_catalogue::{Catalogue, Group, Groups, Holding, Reads};
///
/// let group = Group { block_tokens: 16, reads: Reads::All };
/// let mut catalogue = Catalogue::new(Groups::new(vec![group], 16)?, 1000);
/// catalogue.set_holdings(vec![Holding { ranks: 1, bytes: 4096, objects: 1 }])?;
///
/// catalogue.add("a", 40, None)?;
/// catalogue.extend("a", &[[1; 32], [2; 32]])?;
/// let queries = catalogue.ask("a")?;
/// catalogue.answer(queries[0].number, Some(&[true, false]));
/// // Of the tokens from the first to the 32nd, 16 can be loaded: one block, from the pool.
/// let reaches = catalogue.reaches("a", 0, 32)?;
/// assert_eq!((reaches[0].end, reaches[0].pool_bytes), (16, 4096));
/// # Ok::<(), penstock_catalogue::CatalogueError>(())
/// ```
pub struct Catalogue {
    pub(crate) groups: Groups,
    pub(crate) holdings: Vec<Holding>,
    pub(crate) index: Index,
    pub(crate) requests: HashMap<Box<str>, Request>,
    pub(crate) jobs: HashMap<u64, Job>,
    pub(crate) lookups: HashMap<u64, Asked>,
    /// For each block that the engine may give away: the store that has yet to read it.
    pub(crate) reading: HashMap<u64, u64>,
    /// Loads under way.
    pub(crate) loads: usize,
    /// Blocks that prefetches keep or bring.
    pub(crate) prefetched: usize,
}

impl Catalogue {
    /// A catalogue without requests. It remembers up to `remembered` blocks that the pool has and
    /// no request names. Forgetting one costs a second put, which the store recognizes.
    pub fn new(groups: Groups, remembered: usize) -> Self {
        let nothing = Holding {
            ranks: 0,
            bytes: 0,
            objects: 0,
        };
        Self {
            holdings: vec![nothing; groups.count()],
            groups,
            index: Index::new(remembered),
            requests: HashMap::new(),
            jobs: HashMap::new(),
            lookups: HashMap::new(),
            reading: HashMap::new(),
            loads: 0,
            prefetched: 0,
        }
    }

    /// Sets what the ranks hold of each group's blocks.
    ///
    /// # Errors
    /// The number of holdings is not the number of groups, or a group's blocks are on no rank.
    pub fn set_holdings(&mut self, holdings: Vec<Holding>) -> Result<()> {
        if holdings.len() != self.groups.count() {
            return Err(CatalogueError::Config("a holding is wanted for each group"));
        }
        if holdings.iter().any(|holding| holding.ranks == 0) {
            return Err(CatalogueError::Config(
                "each group's blocks must be on some rank",
            ));
        }
        self.holdings = holdings;
        Ok(())
    }

    /// The groups.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The number of blocks that are known, for whatever reason.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A request has come. Its blocks belong to `tenant`, if there is one: what is known of other
    /// blocks of the same chunks says nothing about them.
    ///
    /// # Errors
    /// A request of this name exists already.
    pub fn add(&mut self, id: &str, prompt_tokens: u64, tenant: Option<Tenant>) -> Result<()> {
        if self.requests.contains_key(id) {
            return Err(CatalogueError::DuplicateRequest(id.to_owned()));
        }
        let request = Request::new(prompt_tokens, tenant, self.groups.count());
        self.requests.insert(id.into(), request);
        Ok(())
    }

    /// The tenant that owns the request's blocks.
    ///
    /// # Errors
    /// The request is not known.
    pub fn tenant(&self, id: &str) -> Result<Option<Tenant>> {
        self.request(id).map(|request| request.tenant)
    }

    /// The number of the request's hashes that were handed over.
    ///
    /// # Errors
    /// The request is not known.
    pub fn hashes(&self, id: &str) -> Result<usize> {
        self.request(id).map(|request| request.hashes)
    }

    /// Hands over the request's next hashes, after those it has.
    ///
    /// # Errors
    /// The request is not known.
    pub fn extend(&mut self, id: &str, hashes: &[Chunk]) -> Result<()> {
        let request = found_mut(&mut self.requests, id)?;
        let known = request.hashes;
        request.hashes += hashes.len();
        for (group, blocks) in request.blocks.iter_mut().enumerate() {
            let step = self.groups.hashes_per_block(group);
            // A block is named by the last hash within it.
            let last = (blocks.len() + 1) * step - 1 - known;
            let chunks = hashes.iter().skip(last).step_by(step).copied();
            self.index
                .refer(group as u16, request.tenant, chunks, blocks);
        }
        Ok(())
    }

    /// Removes a request that is gone. Jobs that move its blocks go on.
    ///
    /// # Errors
    /// The request is not known.
    pub fn remove(&mut self, id: &str) -> Result<()> {
        self.request(id)?;
        self.drop_lookup(id);
        if let Some(request) = self.requests.remove(id) {
            // The end of a prompt is useless without its beginning, so it is forgotten first.
            for &number in request.blocks.iter().flat_map(|blocks| blocks.iter().rev()) {
                self.index.release(number);
            }
        }
        Ok(())
    }

    /// Notes that a rank's host memory has a block now, or no longer has it.
    ///
    /// # Errors
    /// There is no such group.
    pub fn change_host(&mut self, change: &HostChange) -> Result<()> {
        let &HostChange {
            group,
            tenant,
            chunk,
            came,
        } = change;
        if usize::from(group) >= self.groups.count() {
            return Err(CatalogueError::Config("a change in no known group"));
        }
        let name = Name {
            group,
            tenant,
            chunk,
        };
        self.index.change_ranks(name, if came { 1 } else { -1 });
        Ok(())
    }

    /// Forgets which blocks the pool has, and which ones this engine has computed: they may be of
    /// other weights than its next ones. Later look-ups tell again what the pool has.
    pub fn forget_pool(&mut self) {
        self.index.forget_pool();
        for request in self.requests.values_mut() {
            request.own_from = None;
        }
    }

    /// Forgets what host memory has: blocks have other names there from now on. Later reports tell
    /// what comes under these.
    pub fn forget_host(&mut self) {
        self.index.forget_host();
    }

    pub(crate) fn request(&self, id: &str) -> Result<&Request> {
        self.requests
            .get(id)
            .ok_or_else(|| CatalogueError::UnknownRequest(id.to_owned()))
    }
}

/// The request of this name. A function of the map alone, for callers that borrow other fields of
/// the catalogue at the same time.
pub(crate) fn found_mut<'a>(
    requests: &'a mut HashMap<Box<str>, Request>,
    id: &str,
) -> Result<&'a mut Request> {
    requests
        .get_mut(id)
        .ok_or_else(|| CatalogueError::UnknownRequest(id.to_owned()))
}
