//! What a client tells of its next requests: which blocks will be asked for, and which will not.

use penstock_contract::Chunk;

use crate::catalogue::{Catalogue, found_mut};
use crate::error::Result;

/// A block of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The position of the block's group.
    pub group: usize,
    /// The block's hash.
    pub chunk: Chunk,
    /// Tokens before the block.
    pub position: u64,
}

impl Catalogue {
    /// The blocks that a load of the request's first `end` tokens needs, in the prompt's order, as
    /// far as the request's hashes go.
    ///
    /// # Errors
    /// The request is not known.
    pub fn places(&self, id: &str, end: u64) -> Result<Vec<Place>> {
        let request = self.request(id)?;
        let needed = self.needed(request, 0, end);
        let mut places: Vec<Place> = needed
            .map(|(group, index, number)| Place {
                group,
                chunk: self.index.name(number).chunk,
                position: index as u64 * self.groups.at(group).block_tokens,
            })
            .collect();
        places.sort_by_key(|place| place.position);
        Ok(places)
    }

    /// Stores no block of the request that has tokens beyond the first `tokens`.
    ///
    /// # Errors
    /// The request is not known.
    pub fn limit_stores(&mut self, id: &str, tokens: u64) -> Result<()> {
        found_mut(&mut self.requests, id)?.storable = tokens;
        Ok(())
    }

    /// Lets go of the request's blocks that have tokens beyond the first `tokens`: those that this
    /// engine has put into the pool, and that no other request or job names. They count as gone
    /// from now on. Returns them, for the pool to remove.
    ///
    /// # Errors
    /// The request is not known.
    pub fn let_go(&mut self, id: &str, tokens: u64) -> Result<Vec<Place>> {
        let request = self.request(id)?;
        let mut gone = Vec::new();
        for (position, group) in self.groups.iter().enumerate() {
            let first = (tokens / group.block_tokens) as usize;
            let numbers = request.blocks[position].iter().enumerate().skip(first);
            let own = numbers.filter(|&(_, &number)| self.index.state(number).may_be_let_go());
            gone.extend(own.map(|(index, &number)| {
                let place = Place {
                    group: position,
                    chunk: self.index.name(number).chunk,
                    position: index as u64 * group.block_tokens,
                };
                (number, place)
            }));
        }
        for &(number, _) in &gone {
            self.index.set_removed(number);
        }
        gone.sort_by_key(|(_, place)| place.position);
        Ok(gone.into_iter().map(|(_, place)| place).collect())
    }
}
