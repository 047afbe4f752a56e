//! Batches of values by number, put and got in one call.

use std::io::{IoSlice, IoSliceMut};
use std::time::Instant;

use penstock_contract::{GetOutcome, GetRequest, Key, Namespace, PutOutcome, PutRequest, Store};
use penstock_value::header::payload_checksum;

use super::{bytes, key, soon};

/// Puts a value of so many bytes under each of so many keys.
pub fn fill(store: &dyn Store, namespace: Namespace, count: u64, size: usize) -> Vec<Key> {
    let keys: Vec<Key> = (0..count).map(|n| key(namespace, n)).collect();
    let values: Vec<_> = (0..count).map(|n| bytes(n, size)).collect();
    let slices: Vec<_> = values.iter().map(|value| [IoSlice::new(value)]).collect();
    let mut batch: Vec<_> = keys
        .iter()
        .zip(&slices)
        .map(|(key, value)| PutRequest::new(*key, value))
        .collect();
    store.put_many(&mut batch, soon());
    for request in batch {
        assert_eq!(request.outcome.unwrap().unwrap(), PutOutcome::Stored);
    }
    keys
}

/// Gets the values that [`fill`] put; every hit is checked.
pub fn fetch(
    store: &dyn Store,
    keys: &[Key],
    size: usize,
    deadline: Instant,
) -> Vec<penstock_contract::Result<GetOutcome>> {
    let mut buffers = vec![vec![0; size]; keys.len()];
    let mut slices: Vec<_> = buffers.iter_mut().map(|b| [IoSliceMut::new(b)]).collect();
    let mut batch: Vec<_> = keys
        .iter()
        .zip(&mut slices)
        .enumerate()
        .map(|(n, (key, into))| GetRequest {
            wants_checksum: n % 2 == 1,
            ..GetRequest::new(*key, into)
        })
        .collect();
    store.get_many(&mut batch, deadline);
    for (n, request) in batch.iter().enumerate() {
        if let (Some(checksum), Some(Ok(GetOutcome::Hit(bytes)))) =
            (request.checksum, &request.outcome)
        {
            assert_eq!(checksum, payload_checksum(request.into, *bytes));
            assert!(n % 2 == 1, "a checksum that nobody wanted");
        }
    }
    let outcomes: Vec<_> = batch
        .into_iter()
        .map(|r| r.outcome.expect("filled in"))
        .collect();
    for (n, outcome) in outcomes.iter().enumerate() {
        if let Ok(GetOutcome::Hit(length)) = outcome {
            assert_eq!(*length, size as u64);
            assert!(
                buffers[n] == bytes(n as u64, size),
                "a hit with bytes that were never put"
            );
        }
    }
    outcomes
}
