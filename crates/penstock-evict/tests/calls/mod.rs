//! Random calls of a policy.

use std::ops::Range;

use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Insert(u8, u64),
    Touch(u8),
    Remove(u8),
    Evict,
}

/// Calls with forty keys; entries weigh as given.
pub(crate) fn call(weights: Range<u64>) -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => (0u8..40, weights).prop_map(|(key, weight)| Call::Insert(key, weight)),
        4 => (0u8..40).prop_map(Call::Touch),
        1 => (0u8..40).prop_map(Call::Remove),
        2 => Just(Call::Evict),
    ]
}
