//! Whole values, header in front, as they lie in a store: for whoever scrubs a store, or carries
//! values from one store to another. Nothing is decrypted for good, removed or mended here.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::Ordering;
use std::time::Instant;

use penstock_contract::{
    Error, ErrorKind, GetOutcome, GetRequest, Key, PutOutcome, PutRequest, Result, unanswered,
};

use super::SealedStore;
use crate::Keyring;
use crate::coded::{self, Whole};
use crate::encryption::check_closed;
use crate::header::{self, ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Rejection};

/// What can be said of a whole value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The value is what was sealed under its key, and this store's readers accept it.
    Sound,
    /// This store's readers do not accept it, but others may: it is encrypted with a key or a
    /// context (a tenant's cache salt) that is not known here, it is of another format version, or
    /// it is whole but not encrypted and this store has keys. What can be checked of it was.
    Unreadable(Rejection),
    /// The value is not what was sealed under its key. No reader can use it.
    Damaged(Rejection),
}

/// What became of a whole value that was to be put.
#[derive(Debug)]
pub enum Carried {
    /// The store took the value, see [`PutOutcome::Stored`].
    Stored,
    /// The store had the value already, see [`PutOutcome::AlreadyPresent`].
    AlreadyPresent,
    /// The value is damaged, so it was not put.
    Refused(Rejection),
    /// The store failed.
    Failed(Error),
}

impl SealedStore {
    /// Gets whole values, not verified, in the batch's order. Each key comes with the bytes that
    /// its value is expected to have, header included; a longer value costs a second get. `None`
    /// is a value that is not there.
    pub fn get_whole(
        &self,
        batch: &[(Key, u64)],
        deadline: Instant,
    ) -> Vec<Result<Option<Vec<u8>>>> {
        let outcomes = self.get_sized(batch, deadline);
        let again = |key: Key, bytes: u64| {
            let mut second = self.get_sized(&[(key, bytes)], deadline).into_iter();
            match second.next().unwrap_or_else(|| Err(unanswered())) {
                Ok(Arrived::Larger(_)) => Err(Error::new(
                    ErrorKind::Unavailable,
                    "the value is being replaced by others",
                )
                .with("key", key)),
                Ok(Arrived::Whole(value)) => Ok(value),
                Err(error) => Err(error),
            }
        };
        batch
            .iter()
            .zip(outcomes)
            .map(|(&(key, _), outcome)| match outcome? {
                Arrived::Whole(value) => Ok(value),
                Arrived::Larger(bytes) => again(key, bytes),
            })
            .collect()
    }

    fn get_sized(&self, batch: &[(Key, u64)], deadline: Instant) -> Vec<Result<Arrived>> {
        // A server may say of a value what it likes: that must not cost any amount of memory.
        let most = self.store.capabilities().max_value_bytes;
        let mut values: Vec<Vec<u8>> = batch
            .iter()
            .map(|&(_, bytes)| vec![0; usize::try_from(bytes.min(most)).unwrap_or(usize::MAX)])
            .collect();
        let mut memory: Vec<[IoSliceMut<'_>; 1]> = values
            .iter_mut()
            .map(|value| [IoSliceMut::new(value)])
            .collect();
        let mut requests: Vec<GetRequest<'_, '_>> = batch
            .iter()
            .zip(&mut memory)
            .map(|(&(key, _), into)| GetRequest {
                position: GetRequest::NO_USE,
                ..GetRequest::new(key, into)
            })
            .collect();
        if !requests.is_empty() {
            self.store.get_many(&mut requests, deadline);
        }
        let outcomes: Vec<_> = requests
            .into_iter()
            .map(|request| request.outcome.unwrap_or_else(|| Err(unanswered())))
            .collect();
        outcomes
            .into_iter()
            .zip(values)
            .map(|(outcome, mut value)| match outcome? {
                GetOutcome::Hit(bytes) => {
                    value.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
                    Ok(Arrived::Whole(Some(value)))
                }
                GetOutcome::Miss => Ok(Arrived::Whole(None)),
                GetOutcome::TooLarge(bytes) => Ok(Arrived::Larger(bytes)),
            })
            .collect()
    }

    /// Looks at a whole value. The value stays as it is.
    pub fn examine(&self, key: &Key, value: &[u8]) -> Finding {
        let finding = self.look(key, value);
        if matches!(finding, Finding::Damaged(_)) {
            self.rejected.fetch_add(1, Ordering::Relaxed);
        }
        finding
    }

    fn look(&self, key: &Key, value: &[u8]) -> Finding {
        match look_plain(key, value) {
            Ok(()) if self.keys.is_some() => Finding::Unreadable(Rejection::Unencrypted),
            Ok(()) => Finding::Sound,
            Err(Rejection::Encrypted) => {
                if let Err(rejection) = check_closed(value, key) {
                    return Finding::Damaged(rejection);
                }
                let Some(keys) = &self.keys else {
                    return Finding::Unreadable(Rejection::Encrypted);
                };
                match look_encrypted(keys, key, value) {
                    Ok(()) => Finding::Sound,
                    Err(why @ (Rejection::UnknownKey | Rejection::Authentication)) => {
                        Finding::Unreadable(why)
                    }
                    Err(why) => Finding::Damaged(why),
                }
            }
            Err(why @ Rejection::Version { .. }) => Finding::Unreadable(why),
            Err(why) => Finding::Damaged(why),
        }
    }

    /// Puts whole values as they are, in the batch's order. Each is examined first, and none that
    /// is damaged is put.
    pub fn put_whole(&self, batch: &[(Key, &[u8])], deadline: Instant) -> Vec<Carried> {
        let findings: Vec<Finding> = batch
            .iter()
            .map(|(key, value)| self.examine(key, value))
            .collect();
        let slices: Vec<[IoSlice<'_>; 1]> = batch
            .iter()
            .map(|(_, value)| [IoSlice::new(value)])
            .collect();
        let mut requests: Vec<PutRequest<'_>> = batch
            .iter()
            .zip(&slices)
            .zip(&findings)
            .filter(|(_, finding)| !matches!(finding, Finding::Damaged(_)))
            .map(|(((key, _), value), _)| PutRequest::new(*key, value))
            .collect();
        if !requests.is_empty() {
            self.store.put_many(&mut requests, deadline);
        }
        let mut outcomes = requests
            .into_iter()
            .map(|request| request.outcome.unwrap_or_else(|| Err(unanswered())));
        findings
            .iter()
            .map(|finding| match finding {
                Finding::Damaged(rejection) => Carried::Refused(*rejection),
                Finding::Sound | Finding::Unreadable(_) => match outcomes.next() {
                    Some(Ok(PutOutcome::Stored)) => Carried::Stored,
                    Some(Ok(PutOutcome::AlreadyPresent)) => Carried::AlreadyPresent,
                    Some(Err(error)) => Carried::Failed(error),
                    None => Carried::Failed(unanswered()),
                },
            })
            .collect()
    }
}

/// Checks a whole value that is not encrypted. A coded one says itself how to decode it.
fn look_plain(key: &Key, value: &[u8]) -> std::result::Result<(), Rejection> {
    let value_bytes = value.len() as u64;
    let payload_len = header::payload_len(value, value_bytes, HEADER_BYTES);
    match coded::verify_slices(&[value], value_bytes, key, payload_len, None)? {
        Whole::Plain => Ok(()),
        Whole::Coded(coded) => coded.decoded(&value[HEADER_BYTES..]).map(drop),
    }
}

/// Checks a whole value that is encrypted. It is decrypted in a copy.
fn look_encrypted(keys: &Keyring, key: &Key, value: &[u8]) -> std::result::Result<(), Rejection> {
    let value_bytes = value.len() as u64;
    let payload_len = header::payload_len(value, value_bytes, ENCRYPTED_HEADER_BYTES);
    let mut copy = value.to_vec();
    let slices = &mut [IoSliceMut::new(&mut copy)];
    match keys.open_slices(slices, value_bytes, key, b"", payload_len)? {
        Whole::Plain => Ok(()),
        Whole::Coded(coded) => coded.decoded(&copy[ENCRYPTED_HEADER_BYTES..]).map(drop),
    }
}

/// What a get of an expected length brought.
enum Arrived {
    /// The whole value; `None` if it is not there.
    Whole(Option<Vec<u8>>),
    /// The value has more bytes than were expected.
    Larger(u64),
}
