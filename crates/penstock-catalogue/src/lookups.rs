//! Look-ups: which questions go to the pool, and what its answers tell.

use penstock_contract::Chunk;

use crate::catalogue::{Asked, Catalogue, found_mut};
use crate::error::{CatalogueError, Result};
use crate::request::Lookup;

/// A question to the pool: which of these blocks it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// The number by which the answer names this query.
    pub number: u64,
    /// The position of the blocks' group.
    pub group: usize,
    /// The number of blocks.
    pub blocks: usize,
}

/// Whoever puts queries to the pool.
pub trait Asker {
    /// Why a query could not be put.
    type Error: From<CatalogueError>;

    /// Puts a query to the pool, about these chunks. Returns false if too many wait already.
    ///
    /// # Errors
    /// The query cannot be put.
    fn put(
        &mut self,
        query: &Query,
        chunks: impl ExactSizeIterator<Item = Chunk>,
    ) -> std::result::Result<bool, Self::Error>;

    /// Nobody waits for the answer to the query of this number any more.
    fn cancel(&mut self, number: u64);
}

/// The state of a request's look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No look-up began since the request came or was last paused.
    None,
    /// The look-up is under way.
    Asked,
    /// The look-up was answered, failed or was not needed.
    Over,
}

impl Catalogue {
    /// Begins a look-up of all the request's blocks, with one query for each group. If some group
    /// has no block of the request, there is nothing to ask, and the result is empty. Once the
    /// look-up is over, it may begin again: others may have put more.
    ///
    /// # Errors
    /// The request is not known.
    pub fn ask(&mut self, id: &str) -> Result<Vec<Query>> {
        let again = matches!(self.request(id)?.lookup, Lookup::Answered { .. });
        self.drop_lookup(id);
        let request = found_mut(&mut self.requests, id)?;
        if request.blocks.iter().any(Vec::is_empty) {
            request.lookup = Lookup::Answered { is_heard: false };
            return Ok(Vec::new());
        }
        let mut queries = Vec::with_capacity(request.blocks.len());
        for (group, numbers) in request.blocks.iter().enumerate() {
            let number = self.index.ask();
            let asked = Asked {
                request: id.into(),
                group,
                again,
            };
            self.lookups.insert(number, asked);
            queries.push(Query {
                number,
                group,
                blocks: numbers.len(),
            });
        }
        request.lookup = Lookup::Asked {
            left: queries.len(),
            has_failed: false,
        };
        Ok(queries)
    }

    /// Begins a look-up as [`ask`](Self::ask) does, and has all its queries put to the pool. Returns
    /// the number of blocks that are asked for. One answer is worth nothing without the others: if a
    /// query is not put, those before it are cancelled, and the request does without. Then the
    /// result is None.
    ///
    /// # Errors
    /// The request is not known, or what `asker` fails with: then the request is a miss, too.
    pub fn ask_through<A: Asker>(
        &mut self,
        id: &str,
        asker: &mut A,
    ) -> std::result::Result<Option<usize>, A::Error> {
        let queries = self.ask(id)?;
        for (position, query) in queries.iter().enumerate() {
            let put = asker.put(query, self.chunks(id, query)?);
            if !matches!(put, Ok(true)) {
                for before in &queries[..position] {
                    asker.cancel(before.number);
                }
                self.set_miss(id)?;
                return put.map(|_| None);
            }
        }
        Ok(Some(queries.iter().map(|query| query.blocks).sum()))
    }

    /// The chunks of the blocks that a query of the request asks for.
    ///
    /// # Errors
    /// The request is not known.
    pub fn chunks(
        &self,
        id: &str,
        query: &Query,
    ) -> Result<impl ExactSizeIterator<Item = Chunk> + '_> {
        Ok(self.chunks_of_group(id, query.group)?.take(query.blocks))
    }

    /// The chunks of all the request's blocks of a group.
    ///
    /// # Errors
    /// The request is not known.
    pub fn chunks_of_group(
        &self,
        id: &str,
        group: usize,
    ) -> Result<impl ExactSizeIterator<Item = Chunk> + '_> {
        let numbers = self.request(id)?.blocks[group].iter();
        Ok(numbers.map(|&number| self.index.name(number).chunk))
    }

    /// Takes in which of the request's blocks of a group node memory has, none if it does not say:
    /// host memory has these. Other engines may have them given up at any time. This costs time,
    /// never a token.
    ///
    /// # Errors
    /// The request is not known.
    pub fn note_node(&mut self, id: &str, group: usize, present: &[bool]) -> Result<()> {
        let request = found_mut(&mut self.requests, id)?;
        for (index, &number) in request.blocks[group].iter().enumerate() {
            self.index
                .set_in_node(number, present.get(index).copied().unwrap_or(false));
        }
        Ok(())
    }

    /// Notes that the request is a miss: the pool need not be asked, or cannot be.
    ///
    /// # Errors
    /// The request is not known.
    pub fn set_miss(&mut self, id: &str) -> Result<()> {
        self.drop_lookup(id);
        found_mut(&mut self.requests, id)?.lookup = Lookup::Answered { is_heard: false };
        Ok(())
    }

    /// Takes in an answer: for each block, whether the pool has it; none if the query failed.
    /// Returns how many blocks the pool has, or zero if they were asked for again. An answer that
    /// nobody waits for is ignored. So is what it says of a block that was stored, lost or removed
    /// since the query began, or of which a later query told.
    pub fn answer(&mut self, query: u64, present: Option<&[bool]>) -> usize {
        let Some(asked) = self.lookups.remove(&query) else {
            return 0;
        };
        let Some(request) = self.requests.get_mut(&asked.request) else {
            return 0;
        };
        let mut found = 0;
        for (&number, &is_there) in request.blocks[asked.group]
            .iter()
            .zip(present.unwrap_or(&[]))
        {
            self.index.answer(query, number, is_there);
            found += usize::from(is_there && !asked.again);
        }
        if let Lookup::Asked { left, has_failed } = request.lookup {
            let has_failed = has_failed || present.is_none();
            request.lookup = match left {
                1 => Lookup::Answered {
                    is_heard: !has_failed,
                },
                _ => Lookup::Asked {
                    left: left - 1,
                    has_failed,
                },
            };
        }
        found
    }

    /// The state of the request's look-up.
    ///
    /// # Errors
    /// The request is not known.
    pub fn lookup(&self, id: &str) -> Result<State> {
        Ok(match self.request(id)?.lookup {
            Lookup::None => State::None,
            Lookup::Asked { .. } => State::Asked,
            Lookup::Answered { .. } => State::Over,
        })
    }

    /// Drops the request's look-up: nobody waits for it any more. Returns the queries that need no
    /// answer now.
    pub fn drop_lookup(&mut self, id: &str) -> Vec<u64> {
        let Some(request) = self.requests.get_mut(id) else {
            return Vec::new();
        };
        let is_asked = matches!(request.lookup, Lookup::Asked { .. });
        request.lookup = Lookup::None;
        if !is_asked {
            return Vec::new();
        }
        let own = self.lookups.iter();
        let own = own.filter(|(_, asked)| *asked.request == *id);
        let own: Vec<u64> = own.map(|(&number, _)| number).collect();
        for number in &own {
            self.lookups.remove(number);
        }
        own
    }
}
