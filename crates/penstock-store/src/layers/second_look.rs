//! What is done about a value that did not verify.

use std::time::Instant;

use crate::{Key, Store};

/// What a tier has of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look<T> {
    /// A copy that verifies.
    Whole(T),
    /// A copy that does not, and is of no use to anybody.
    Damaged,
    /// No copy, one that cannot be judged, or no answer.
    Nothing,
}

/// To be called when a store gave a damaged value: removes the damaged copies, and no other, and
/// returns the first whole one.
///
/// `look` gets the value from one tier and verifies it. A store without tiers had only the
/// one copy: it is removed unseen. What cannot be removed by the deadline stays, to be found damaged
/// again.
pub fn look_again<T>(
    store: &dyn Store,
    key: &Key,
    deadline: Instant,
    mut look: impl FnMut(&dyn Store) -> Look<T>,
) -> Option<T> {
    let remove = |store: &dyn Store| {
        // Best effort, as said.
        let _ = store.remove(&[*key], deadline);
    };
    if store.tiers().is_empty() {
        remove(store);
    }
    for tier in store.tiers() {
        match look(&**tier) {
            Look::Whole(value) => return Some(value),
            Look::Damaged => remove(&**tier),
            Look::Nothing => {}
        }
    }
    None
}
