//! Values that come from a store in this machine's memory to where they are used, in one copy.

use std::time::Instant;

use super::{Got, SealedStore, Verified, Wanted};
use crate::contract::Internal;
use crate::{GetOutcome, GetRequest, Store};

impl SealedStore {
    /// Whether values can be read in place: the nearest store is this machine's memory, and values
    /// are not encrypted.
    pub fn is_read_in_place(&self) -> bool {
        self.nearest().is_some()
    }

    /// Gets a value from the nearest store straight to where it is used.
    ///
    /// What the memory holds afterwards has a meaning only with the proof that is returned. Without
    /// it the value may be elsewhere, or damaged: get it as usual.
    pub fn read_in_place(&self, mut wanted: Wanted<'_>, deadline: Instant) -> Option<Verified> {
        let store = self.nearest()?;
        let mut batch = [GetRequest {
            position: wanted.position,
            wants_checksum: true,
            ..GetRequest::new(*wanted.key, &mut wanted.memory)
        }];
        store.get_many(&mut batch, deadline);
        let [request] = batch;
        let (outcome, checksum) = (request.outcome, request.checksum);
        let Some(Ok(GetOutcome::Hit(bytes))) = outcome else {
            return None;
        };
        match self.check(wanted, bytes, checksum) {
            Ok(Got::Payload(verified)) => Some(verified),
            _ => None,
        }
    }

    fn nearest(&self) -> Option<&dyn Store> {
        let tiers = self.store.tiers(Internal(()));
        let store = &**tiers.first().unwrap_or(&self.store);
        (self.keys.is_none() && store.is_in_memory(Internal(()))).then_some(store)
    }
}
