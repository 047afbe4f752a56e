//! What every store must do, driven by its capabilities.
//!
//! Each check opens a store of its own by the function it is given and uses a namespace of its own,
//! so that stores which share a server do not disturb each other.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{ErrorKind, GetOutcome, GetRequest, Key, Listed, PutOutcome, PutRequest, Span, Store};

use super::values::{bytes, fresh_namespace, get, key, past, put, soon};

/// What a check is given: opens the store, a handle of its own each time.
pub type Open<'a> = &'a dyn Fn() -> Arc<dyn Store>;

/// A check: its name, and what it does. It panics if the store is not as it must be.
pub type Check = (&'static str, fn(Open<'_>));

/// All checks of what every store does, in the order in which [`run_all`] makes them.
pub const CHECKS: [Check; 15] = [
    ("round trips of every size", round_trips_of_every_size),
    ("destinations of every size", destinations_of_every_size),
    (
        "a value that is there is kept or replaced",
        a_value_that_is_there_is_kept_or_replaced,
    ),
    ("too long a value is refused", too_long_a_value_is_refused),
    (
        "a batch tells hits from misses",
        a_batch_tells_hits_from_misses,
    ),
    ("contains answers in order", contains_answers_in_order),
    ("a touch tells what is there", a_touch_tells_what_is_there),
    (
        "retired stays while there is room",
        retired_stays_while_there_is_room,
    ),
    ("removed is gone", removed_is_gone),
    ("listings are by namespace", listings_are_by_namespace),
    ("describes itself", describes_itself),
    ("counts what it does", counts_what_it_does),
    ("past deadlines fail at once", past_deadlines_fail_at_once),
    (
        "readers never see a torn value",
        readers_never_see_a_torn_value,
    ),
    (
        "handles see each others values",
        handles_see_each_others_values,
    ),
];

/// Runs every check that the store's capabilities allow.
pub fn run_all(open: impl Fn() -> Arc<dyn Store>) {
    for (_, check) in CHECKS {
        check(&open);
    }
}

/// What became of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The store is as it must be.
    Passed,
    /// The store is not as it must be: what was found, and where in the suite.
    Failed(String),
}

/// Makes one check, and catches its panic. Nothing is written to standard error meanwhile, whoever
/// panics in this process.
pub fn try_check(check: fn(Open<'_>), open: Open<'_>) -> Outcome {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let said = || SAID.lock().unwrap_or_else(PoisonError::into_inner);
    let before = panic::take_hook();
    said().clear();
    panic::set_hook(Box::new(move |info| said().push(info.to_string())));
    let done = panic::catch_unwind(AssertUnwindSafe(|| check(open)));
    panic::set_hook(before);
    match done {
        Ok(()) => Outcome::Passed,
        // The first one says what is wrong; those after it are threads that waited for that one.
        Err(_) => Outcome::Failed(said().first().cloned().unwrap_or_default()),
    }
}

/// Cuts in odd places, an empty piece among them.
fn cut(value: &[u8]) -> Vec<&[u8]> {
    let mut pieces = vec![&value[..0]];
    let mut rest = value;
    for size in [1, 7, 64, 0, 4096, 65_537, 1 << 20].into_iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, later) = rest.split_at(size.min(rest.len()));
        pieces.push(piece);
        rest = later;
    }
    pieces
}

fn round_trips_of_every_size(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let limit = store.capabilities().max_value_bytes as usize;
    let sizes = [
        0,
        1,
        2,
        63,
        64,
        65,
        4095,
        4096,
        4097,
        65_536,
        1_048_577,
        (4 << 20) + 3,
    ];
    for (n, size) in sizes
        .into_iter()
        .filter(|&size| size <= limit / 2)
        .enumerate()
    {
        let (key, value) = (key(namespace, n as u64), bytes(n as u64, size));
        let pieces: Vec<IoSlice<'_>> = cut(&value).into_iter().map(IoSlice::new).collect();
        assert_eq!(
            store.put(&key, &pieces, soon()).unwrap(),
            PutOutcome::Stored,
            "{size}"
        );
        // Another cut on the way back, and guards around the destination.
        let mut into = vec![0xee; size + 2];
        let (first, rest) = into[1..=size].split_at_mut(size / 3);
        let (second, third) = rest.split_at_mut(rest.len() / 2);
        let mut slices = [first, second, &mut [], third].map(IoSliceMut::new);
        let outcome = store.get(&key, &mut slices, soon()).unwrap();
        assert_eq!(outcome, GetOutcome::Hit(size as u64));
        assert!(into[1..=size] == value, "{size} bytes came back changed");
        assert_eq!(
            (into[0], into[size + 1]),
            (0xee, 0xee),
            "{size}: written outside"
        );
    }
    // More pieces than one system call takes.
    let (key, value) = (key(namespace, 1000), bytes(1000, 5000));
    let pieces: Vec<IoSlice<'_>> = value.chunks(1).map(IoSlice::new).collect();
    assert_eq!(
        store.put(&key, &pieces, soon()).unwrap(),
        PutOutcome::Stored
    );
    let mut into = vec![0; 5000];
    let mut slices: Vec<_> = into.chunks_mut(1).map(IoSliceMut::new).collect();
    assert_eq!(
        store.get(&key, &mut slices, soon()).unwrap(),
        GetOutcome::Hit(5000)
    );
    assert!(into == value, "5000 pieces came back changed");
}

fn destinations_of_every_size(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let (key, value) = (key(namespace, 0), bytes(1, 100_000));
    put(&*store, &key, &value).unwrap();
    let get = |size: usize| {
        let mut into = vec![0xee; size];
        let (a, b) = into.split_at_mut(size / 2);
        let mut slices = [IoSliceMut::new(a), IoSliceMut::new(b)];
        let outcome = store.get(&key, &mut slices, soon()).unwrap();
        (outcome, into)
    };
    for size in [100_000, 100_001, 300_000] {
        let (outcome, into) = get(size);
        assert_eq!(outcome, GetOutcome::Hit(100_000), "into {size}");
        assert!(into[..100_000] == value);
    }
    for size in [0, 1, 99_999] {
        assert_eq!(get(size).0, GetOutcome::TooLarge(100_000), "into {size}");
    }
    let (outcome, into) = get(100_000);
    assert_eq!(
        outcome,
        GetOutcome::Hit(100_000),
        "after destinations that were too small"
    );
    assert!(into == value);
}

fn a_value_that_is_there_is_kept_or_replaced(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let key = key(namespace, 0);
    let (first, same_length, longer, shorter) =
        (bytes(1, 1000), bytes(2, 1000), bytes(3, 9000), bytes(4, 10));
    assert_eq!(put(&*store, &key, &first).unwrap(), PutOutcome::Stored);
    match put(&*store, &key, &same_length).unwrap() {
        PutOutcome::AlreadyPresent => assert!(get(&*store, &key).unwrap() == first),
        PutOutcome::Stored => assert!(get(&*store, &key).unwrap() == same_length),
    }
    for value in [longer, shorter] {
        assert_eq!(put(&*store, &key, &value).unwrap(), PutOutcome::Stored);
        assert!(
            get(&*store, &key).unwrap() == value,
            "another length replaces"
        );
    }
    assert_eq!(store.remove(&[key], soon()).unwrap(), 1);
    assert_eq!(
        put(&*store, &key, &same_length).unwrap(),
        PutOutcome::Stored
    );
    assert!(
        get(&*store, &key).unwrap() == same_length,
        "what was removed is not kept"
    );
}

fn too_long_a_value_is_refused(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let limit = store.capabilities().max_value_bytes;
    if limit > 64 << 20 {
        return;
    }
    let (key, value) = (key(namespace, 0), vec![1; limit as usize + 1]);
    let error = put(&*store, &key, &value).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert_eq!(get(&*store, &key), None);
    let fits = &value[..limit as usize];
    assert_eq!(
        put(&*store, &key, fits).unwrap(),
        PutOutcome::Stored,
        "the limit itself fits"
    );
}

fn a_batch_tells_hits_from_misses(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let values: Vec<Vec<u8>> = (0..40).map(|n| bytes(n, 100 * n as usize)).collect();
    let even: Vec<usize> = (0..40).step_by(2).collect();
    let pieces: Vec<[IoSlice<'_>; 1]> = values.iter().map(|v| [IoSlice::new(v)]).collect();
    let mut batch: Vec<PutRequest<'_>> = even
        .iter()
        .map(|&n| PutRequest::new(key(namespace, n as u64), &pieces[n]))
        .collect();
    store.put_many(&mut batch, soon());
    for request in batch {
        assert_eq!(request.outcome.unwrap().unwrap(), PutOutcome::Stored);
    }
    let mut buffers = vec![vec![0; 2000]; 40];
    let mut slices: Vec<[IoSliceMut<'_>; 1]> = buffers
        .iter_mut()
        .map(|buffer| [IoSliceMut::new(buffer)])
        .collect();
    let mut batch: Vec<GetRequest<'_, '_>> = slices
        .iter_mut()
        .enumerate()
        .map(|(n, into)| GetRequest::new(key(namespace, n as u64), into))
        .collect();
    store.get_many(&mut batch, soon());
    let outcomes: Vec<GetOutcome> = batch
        .into_iter()
        .map(|request| request.outcome.unwrap().unwrap())
        .collect();
    for (n, outcome) in outcomes.into_iter().enumerate() {
        let len = values[n].len();
        if n % 2 == 1 {
            assert_eq!(outcome, GetOutcome::Miss, "{n}");
        } else if len > 2000 {
            assert_eq!(outcome, GetOutcome::TooLarge(len as u64), "{n}");
        } else {
            assert_eq!(outcome, GetOutcome::Hit(len as u64), "{n}");
            assert!(buffers[n][..len] == values[n], "{n}");
        }
    }
    store.put_many(&mut [], soon());
    store.get_many(&mut [], soon());
}

fn contains_answers_in_order(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    for n in (0..60).step_by(3) {
        put(&*store, &key(namespace, n), b"x").unwrap();
    }
    let keys: Vec<Key> = (0..60).rev().map(|n| key(namespace, n)).collect();
    let expected: Vec<bool> = (0..60).rev().map(|n| n % 3 == 0).collect();
    assert_eq!(store.contains(&keys, soon()).unwrap(), expected);
    assert!(store.contains(&[], soon()).unwrap().is_empty());
    let twice = [keys[59], keys[58], keys[59]];
    assert_eq!(store.contains(&twice, soon()).unwrap(), [true, false, true]);
    // Every part of the key counts.
    let there = key(namespace, 0);
    let span = Span::new(0..4, 2..4).unwrap();
    let others = [
        Key {
            namespace: fresh_namespace(),
            ..there
        },
        Key { span, ..there },
        Key {
            chunk: [1; 32],
            ..there
        },
    ];
    assert_eq!(store.contains(&others, soon()).unwrap(), [false; 3]);
}

fn a_touch_tells_what_is_there(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    for n in (0..60).step_by(3) {
        put(&*store, &key(namespace, n), b"x").unwrap();
    }
    let values: Vec<(Key, u64)> = (0..60).map(|n| (key(namespace, n), 16 * n)).collect();
    let expected: Vec<bool> = (0..60).map(|n| n % 3 == 0).collect();
    assert_eq!(store.touch(&values, soon()).unwrap(), expected);
    assert!(store.touch(&[], soon()).unwrap().is_empty());
    store.remove(&[values[3].0], soon()).unwrap();
    assert_eq!(
        store.touch(&values[..4], soon()).unwrap(),
        [true, false, false, false]
    );
    assert_eq!(get(&*store, &values[0].0).unwrap(), b"x", "as it was");
}

fn retired_stays_while_there_is_room(open: Open<'_>) {
    let (store, namespace, other) = (open(), fresh_namespace(), fresh_namespace());
    let keys = [key(namespace, 0), key(namespace, 1), key(other, 0)];
    for key in &keys {
        put(&*store, key, b"value").unwrap();
    }
    store.retire(namespace, soon()).unwrap();
    store.retire(fresh_namespace(), soon()).unwrap();
    assert_eq!(store.contains(&keys, soon()).unwrap(), [true; 3]);
    assert_eq!(get(&*store, &keys[0]).unwrap(), b"value");
    put(&*store, &keys[1], b"value").unwrap();
    store.retire(namespace, soon()).unwrap();
    assert_eq!(get(&*store, &keys[1]).unwrap(), b"value");
    assert_eq!(store.remove(&keys, soon()).unwrap(), 3);
}

fn removed_is_gone(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let keys: Vec<Key> = (0..10).map(|n| key(namespace, n)).collect();
    for key in &keys[..6] {
        put(&*store, key, b"value").unwrap();
    }
    assert_eq!(
        store.remove(&keys[3..], soon()).unwrap(),
        3,
        "only those that were there"
    );
    assert_eq!(store.remove(&keys[3..], soon()).unwrap(), 0);
    assert_eq!(store.remove(&[], soon()).unwrap(), 0);
    for (n, key) in keys.iter().enumerate() {
        assert_eq!(get(&*store, key).is_some(), n < 3, "{n}");
    }
}

fn listings_are_by_namespace(open: Open<'_>) {
    let store = open();
    let (one, other) = (fresh_namespace(), fresh_namespace());
    for n in 0..50 {
        put(&*store, &key(one, n), &bytes(n, n as usize)).unwrap();
    }
    put(&*store, &key(other, 0), b"other").unwrap();
    // Some stores cannot list, and say so.
    let cannot = store.list(None, &mut |_| {}, soon()).err();
    if cannot.is_some_and(|error| error.kind() == ErrorKind::Unsupported) {
        return;
    }
    let list = |namespace| {
        let mut listed = HashMap::new();
        let mut visit = |object: Listed| {
            assert_eq!(
                listed.insert(object.key, object.bytes),
                None,
                "listed twice"
            );
        };
        store.list(namespace, &mut visit, soon()).unwrap();
        listed
    };
    let expected: HashMap<Key, u64> = (0..50).map(|n| (key(one, n), n)).collect();
    assert_eq!(list(Some(one)), expected);
    assert_eq!(list(Some(other)), HashMap::from([(key(other, 0), 5)]));
    assert_eq!(list(Some(fresh_namespace())), HashMap::new());
    let all = list(None);
    assert!(
        expected
            .iter()
            .all(|(key, bytes)| all.get(key) == Some(bytes))
    );
    assert_eq!(all.get(&key(other, 0)), Some(&5));
}

fn describes_itself(open: Open<'_>) {
    let store = open();
    let facts = store.describe(soon()).unwrap();
    assert!(!facts.is_empty());
    assert!(facts.iter().all(|(name, _)| !name.is_empty()));
    assert!(store.url().contains("://"));
}

fn counts_what_it_does(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let before = store.stats();
    put(&*store, &key(namespace, 0), &bytes(0, 1000)).unwrap();
    put(&*store, &key(namespace, 1), &bytes(1, 500)).unwrap();
    assert!(get(&*store, &key(namespace, 0)).is_some());
    assert!(get(&*store, &key(namespace, 2)).is_none());
    store
        .contains(&[0, 1, 2].map(|n| key(namespace, n)), soon())
        .unwrap();
    let after = store.stats();
    assert_eq!(after.puts - before.puts, 2);
    assert_eq!(after.bytes_written - before.bytes_written, 1500);
    assert_eq!(
        (after.gets - before.gets, after.misses - before.misses),
        (1, 1)
    );
    assert_eq!(after.bytes_read - before.bytes_read, 1000);
    assert_eq!(
        (
            after.lookups - before.lookups,
            after.lookup_hits - before.lookup_hits
        ),
        (3, 2)
    );
    assert_eq!(after.errors, before.errors);
}

fn past_deadlines_fail_at_once(open: Open<'_>) {
    let (store, namespace) = (open(), fresh_namespace());
    let key = key(namespace, 0);
    let value = bytes(0, 1 << 20);
    put(&*store, &key, &value).unwrap();
    let past = past();
    let mut into = vec![0; 1 << 20];
    let kinds = [
        store
            .get(&key, &mut [IoSliceMut::new(&mut into)], past)
            .unwrap_err()
            .kind(),
        store
            .put(&key, &[IoSlice::new(&value[1..])], past)
            .unwrap_err()
            .kind(),
        store.contains(&[key], past).unwrap_err().kind(),
        store.touch(&[(key, 0)], past).unwrap_err().kind(),
        store.remove(&[key], past).unwrap_err().kind(),
        store.list(None, &mut |_| {}, past).unwrap_err().kind(),
    ];
    assert_eq!(kinds, [ErrorKind::TimedOut; 6]);
    assert!(
        get(&*store, &key).unwrap() == value,
        "nothing came of any of them"
    );
    assert!(store.stats().errors >= 6);
}

/// Values that tell by themselves whether they are whole: a number, and the bytes it stands for.
mod torn {
    use crate::testing::values::bytes;

    pub(super) fn payload(seed: u64) -> Vec<u8> {
        bytes(seed, 30_000 + (seed % 7) as usize * 9_973)
    }

    pub(super) fn assert_whole(value: &[u8]) {
        let (seed, found) = value.split_at(8);
        let seed = u64::from_le_bytes(seed.try_into().expect("eight bytes"));
        assert!(found == payload(seed), "a torn value");
    }
}

/// Writers that keep replacing values of several lengths, readers that check each they get, and
/// removals in between.
fn readers_never_see_a_torn_value(open: Open<'_>) {
    const KEYS: u64 = 4;
    const ROUNDS: u64 = 150;
    let (store, namespace) = (open(), fresh_namespace());
    let verified = AtomicU64::new(0);
    let (store, verified) = (&*store, &verified);
    let put_whole = |seed: u64| {
        let (header, payload) = (seed.to_le_bytes(), torn::payload(seed));
        let pieces = [IoSlice::new(&header), IoSlice::new(&payload)];
        store.put(&key(namespace, seed % KEYS), &pieces, soon())
    };
    // The readers may be done before a writer has begun.
    put_whole(0).unwrap();
    std::thread::scope(|scope| {
        let put_whole = &put_whole;
        for writer in 0..2 {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let seed = writer * ROUNDS + round;
                    let key = key(namespace, seed % KEYS);
                    match put_whole(seed) {
                        Ok(_) => {}
                        // Two put different lengths at once.
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
                    }
                    if round % 10 == 9 {
                        store.remove(&[key], soon()).unwrap();
                    }
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(move || {
                for round in 0..4 * ROUNDS {
                    let key = key(namespace, round % KEYS);
                    let Some(value) = get(store, &key) else {
                        continue;
                    };
                    torn::assert_whole(&value);
                    verified.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(
        verified.load(Ordering::Relaxed) > 0,
        "no reader ever met a value"
    );
}

fn handles_see_each_others_values(open: Open<'_>) {
    let (a, b, namespace) = (open(), open(), fresh_namespace());
    if !a.capabilities().shared {
        return;
    }
    put(&*a, &key(namespace, 0), b"from a").unwrap();
    assert_eq!(get(&*b, &key(namespace, 0)).unwrap(), b"from a");
    assert_eq!(b.remove(&[key(namespace, 0)], soon()).unwrap(), 1);
    assert_eq!(get(&*a, &key(namespace, 0)), None);
}
