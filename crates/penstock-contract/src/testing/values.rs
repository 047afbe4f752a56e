//! Keys and values of checks, and how checks put and get them.

use std::io::{IoSlice, IoSliceMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{ErrorKind, GetOutcome, Key, Namespace, PutOutcome, Result, Span, Store};

/// The time that tests wait for what must come. It guards against hanging and says nothing else.
pub const LONG: Duration = Duration::from_secs(120);

/// A deadline that a working store never reaches.
pub fn soon() -> Instant {
    within(LONG)
}

/// A deadline to be reached.
pub fn within(time: Duration) -> Instant {
    Instant::now() + time
}

/// A deadline that is reached already.
pub fn past() -> Instant {
    within(Duration::ZERO)
}

/// Waits until it is so.
///
/// # Panics
/// It is not so for [`LONG`].
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = soon();
    while !holds() {
        assert!(Instant::now() < until, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tries what takes some time, with twice as much each time: how much is enough depends on the
/// machine.
///
/// # Panics
/// [`LONG`] was not enough.
pub fn given_time(what: &str, mut works: impl FnMut(Duration) -> bool) {
    let mut time = Duration::from_millis(60);
    while !works(time) {
        assert!(time < LONG, "never came true: {what}");
        time *= 2;
    }
}

/// The kind of the error that the result must be.
pub fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.expect_err("must fail").kind()
}

/// Gets the first value of a namespace, of 100 bytes at most.
pub fn get_one(store: &dyn Store, namespace: Namespace) -> Result<GetOutcome> {
    let mut into = [0; 100];
    let into = &mut [IoSliceMut::new(&mut into)];
    store.get(&key(namespace, 0), into, soon())
}

/// What is made of every fresh namespace, if tests want others than plain ones.
pub static ADAPT: OnceLock<fn(Namespace) -> Namespace> = OnceLock::new();

/// A namespace that no other check uses, in this process or another.
pub fn fresh_namespace() -> Namespace {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 16];
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    bytes[..4].copy_from_slice(&(NEXT.fetch_add(1, Ordering::Relaxed) as u32).to_le_bytes());
    bytes[4..12].copy_from_slice(&now.to_le_bytes());
    bytes[12..].copy_from_slice(&std::process::id().to_le_bytes());
    ADAPT
        .get()
        .map_or(Namespace(bytes), |adapt| adapt(Namespace(bytes)))
}

/// The n-th key of a namespace.
pub fn key(namespace: Namespace, n: u64) -> Key {
    let mut chunk = [0; 32];
    chunk[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    chunk[8..16].copy_from_slice(&n.to_be_bytes());
    Key::new(namespace, &chunk, Span::new(0..4, 0..2).unwrap()).unwrap()
}

/// Bytes that look different everywhere and for every seed.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len.div_ceil(8))
        .flat_map(|_| word())
        .take(len)
        .collect()
}

/// Puts a value.
pub fn put(store: &dyn Store, key: &Key, value: &[u8]) -> Result<PutOutcome> {
    store.put(key, &[IoSlice::new(value)], soon())
}

/// The value, if there is one.
pub fn get(store: &dyn Store, key: &Key) -> Option<Vec<u8>> {
    let mut into = vec![0; 8 << 20];
    match store
        .get(key, &mut [IoSliceMut::new(&mut into)], soon())
        .unwrap()
    {
        GetOutcome::Hit(n) => {
            into.truncate(n as usize);
            Some(into)
        }
        GetOutcome::Miss => None,
        GetOutcome::TooLarge(n) => panic!("a value of {n} bytes"),
    }
}
