//! A prompt's values in a store with room for some 80 of them: what goes first.

use std::io::{IoSlice, IoSliceMut};

use penstock_contract::{GetOutcome, GetRequest, Key, PutRequest, Store};

use super::sealed::{SHARED, put_sealed};
use super::{key, soon};

pub const BLOCKS: u64 = 60;
const BYTES: usize = 100_000;
/// Tokens of a block, so many that it counts as used a second before the one in front of it.
const TOKENS: u64 = 2_500;

/// The keys of the prompt's blocks, in order.
fn keys() -> Vec<Key> {
    (0..BLOCKS).map(|n| key(SHARED, n)).collect()
}

/// Puts it, from the first block to the last; each with its place in it, or as if nobody knew that.
pub fn put(store: &dyn Store, tells_places: bool) {
    let value = vec![7; BYTES];
    let slices = [IoSlice::new(&value)];
    for (n, key) in (0..).zip(keys()) {
        let position = if tells_places { n * TOKENS } else { 0 };
        let mut batch = [PutRequest {
            position,
            ..PutRequest::new(key, &slices)
        }];
        store.put_many(&mut batch, soon());
        assert!(batch[0].outcome.take().unwrap().is_ok());
    }
}

/// Reads it, each block with its place.
pub fn read(store: &dyn Store) {
    let mut into = vec![0; BYTES];
    for (n, key) in (0..).zip(keys()) {
        let into = &mut [IoSliceMut::new(&mut into)];
        let mut batch = [GetRequest {
            position: n * TOKENS,
            ..GetRequest::new(key, into)
        }];
        store.get_many(&mut batch, soon());
        assert!(matches!(batch[0].outcome, Some(Ok(GetOutcome::Hit(_)))));
    }
}

/// Touches it as one, the end first: the places count, not the order.
pub fn touch(store: &dyn Store) {
    let mut values: Vec<(Key, u64)> = keys()
        .into_iter()
        .zip((0..).step_by(TOKENS as usize))
        .collect();
    values.reverse();
    assert_eq!(
        store.touch(&values, soon()).unwrap(),
        vec![true; values.len()]
    );
}

/// Looks at each block as a scrub does, from the last to the first: no use of any.
pub fn look(store: &dyn Store) {
    let mut into = vec![0; BYTES];
    for key in keys().into_iter().rev() {
        let into = &mut [IoSliceMut::new(&mut into)];
        let mut batch = [GetRequest {
            position: GetRequest::NO_USE,
            ..GetRequest::new(key, into)
        }];
        store.get_many(&mut batch, soon());
        assert!(matches!(batch[0].outcome, Some(Ok(GetOutcome::Hit(_)))));
    }
}

/// Puts others, until some of the prompt has to go: what is left is its beginning, of whose end so
/// many may be going already.
pub fn assert_the_beginning_stays(store: &dyn Store, going: usize) {
    (100..130).for_each(|n| assert!(put_sealed(store, n, BYTES).is_ok()));
    let present = store.contains(&keys(), soon()).unwrap();
    let left = present.iter().filter(|&&there| there).count();
    assert!(0 < left && left < present.len(), "{left}");
    let in_a_row = present.iter().take_while(|&&there| there).count();
    assert!(left - in_a_row <= going, "{present:?}");
}
