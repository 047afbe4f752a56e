//! An object on its way from a store into a slot.

use std::io::IoSliceMut;
use std::iter;
use std::time::Duration;

use penstock_value::sealed::{Destination, Wanted};

use crate::arena::{Empty, Slot};
use crate::load_job::LoadTicket;

/// Time given to the removal of values that did not verify.
pub(super) const REMOVE_TIMEOUT: Duration = Duration::from_secs(1);

/// An object that is being fetched, and the slot that it is fetched into.
pub(super) struct Fetching {
    pub(super) ticket: LoadTicket,
    pub(super) slot: Slot<Empty>,
    /// Whether node memory had a damaged value of it.
    pub(super) was_damaged: bool,
}

impl Fetching {
    /// Notes that node memory had a damaged value of it.
    pub(super) fn damaged(self) -> Self {
        Self {
            was_damaged: true,
            ..self
        }
    }
}

impl Destination for Fetching {
    fn wanted(&mut self, _header_bytes: usize) -> Wanted<'_> {
        let transfer = self.ticket.transfer();
        Wanted {
            key: &transfer.key,
            context: &transfer.context,
            position: transfer.position,
            payload_bytes: Some(transfer.bytes as u64),
            memory: iter::once(IoSliceMut::new(self.slot.value_mut(transfer.bytes))).collect(),
        }
    }
}
