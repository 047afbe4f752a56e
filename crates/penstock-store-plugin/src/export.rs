//! The library's side of the border: turns any store into a [`Plugin`].
//!
//! All functions here are called by Penstock, which keeps the rules of [`crate::abi`]: pointers are
//! valid for the counts beside them until the call returns, and a handle came from `open` and was
//! not closed.
#![allow(unsafe_code, reason = "the border is in C's terms")]

use std::any::Any;
use std::io::{IoSlice, IoSliceMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::time::{Duration, Instant};

use penstock_contract::{
    Error, ErrorKind, GetOutcome, GetRequest, Key, Namespace, PutOutcome, PutRequest, Result,
    Store, unanswered,
};

use crate::abi::{
    Bytes, DONE, FAILED, Handle, MAGIC, NO, Plugin, RawBatchBytes, RawCapabilities, RawGet, RawKey,
    RawPut, RawStats, Sink, TOO_LARGE, VERSION, WENT_WRONG, WHOLE, YES,
};

/// A store that a URL opens.
pub trait Open: Store + Sized {
    /// Opens the store that a URL names. This checks the URL, and does not wait for a server. An
    /// error must not repeat the URL, which may hold a password.
    fn open(url: &str) -> Result<Self>;
}

impl Plugin {
    /// The border of a library with this store.
    pub const fn of<S: Open>() -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            bytes: size_of::<Self>() as u32,
            request_bytes: [size_of::<RawPut>() as u32, size_of::<RawGet>() as u32],
            open: open::<S>,
            close: close::<S>,
            about: about::<S>,
            contains: contains::<S>,
            touch: touch::<S>,
            put_many: put_many::<S>,
            get_many: get_many::<S>,
            remove: remove::<S>,
            list: list::<S>,
            describe: describe::<S>,
            stats: stats::<S>,
            charge: charge::<S>,
            batch_bytes: Some(batch_bytes::<S>),
        }
    }
}

/// Does an operation. Its error, or its panic, goes to the sink.
fn guarded(sink: Sink, operation: impl FnOnce() -> Result<()>) -> u32 {
    // What a panic leaves behind is the store's own: it is behind its locks, or was never shared.
    let done = catch_unwind(AssertUnwindSafe(operation));
    let error = match done {
        Ok(Ok(())) => return DONE,
        Ok(Err(error)) => error,
        Err(panic) => panicked(&*panic),
    };
    fail(sink, WHOLE, &error);
    FAILED
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let said = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::new(ErrorKind::Unavailable, "the store panicked").with("panic", said.unwrap_or("?"))
}

fn fail(sink: Sink, index: usize, error: &Error) {
    let (kind, message) = (error.kind().name(), error.to_string());
    let (kind, message) = (
        Bytes::lend(kind.as_bytes()),
        Bytes::lend(message.as_bytes()),
    );
    // SAFETY: the sink is this call's, and takes what it wants of the bytes before it returns.
    unsafe { (sink.fail)(sink.context, index, kind, message) }
}

fn tell(sink: Sink, name: &str, text: &str) {
    let (name, text) = (Bytes::lend(name.as_bytes()), Bytes::lend(text.as_bytes()));
    // SAFETY: as in `fail`.
    unsafe { (sink.text)(sink.context, name, text) }
}

fn deadline(nanoseconds: u64) -> Instant {
    // A day is as good as more, and is never too much for the clock.
    Instant::now() + Duration::from_nanos(nanoseconds).min(Duration::from_secs(86_400))
}

/// The store behind a handle.
///
/// # Safety
///
/// The handle came from [`open`] of the same store, and is not closed while the reference lives.
unsafe fn store<'a, S: Store>(handle: Handle) -> &'a S {
    // SAFETY: the caller's promise; `open` made it of a box.
    unsafe { &*handle.cast_const().cast::<S>() }
}

/// What is at a pointer that may be null if there is nothing.
///
/// # Safety
///
/// As for [`slice::from_raw_parts`], if `count` is not 0.
unsafe fn many<'a, T>(start: *const T, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { slice::from_raw_parts(start, count) },
    }
}

/// As [`many`], to be changed.
///
/// # Safety
///
/// As for [`slice::from_raw_parts_mut`], if `count` is not 0.
unsafe fn many_mut<'a, T>(start: *mut T, count: usize) -> &'a mut [T] {
    match count {
        0 => &mut [],
        // SAFETY: the caller's promise.
        _ => unsafe { slice::from_raw_parts_mut(start, count) },
    }
}

fn key(raw: &RawKey) -> Result<Key> {
    Key::from_bytes(raw).map_err(|error| Error::new(ErrorKind::Protocol, error.to_string()))
}

fn keys(raw: &[RawKey]) -> Result<Vec<Key>> {
    raw.iter().map(key).collect()
}

/// Writes one answer for each question, if there are as many.
fn answer(found: &[bool], into: &mut [u8]) -> Result<()> {
    if found.len() != into.len() {
        return Err(unanswered());
    }
    for (into, found) in into.iter_mut().zip(found) {
        *into = u8::from(*found);
    }
    Ok(())
}

unsafe extern "C" fn open<S: Open>(url: Bytes, handle: *mut Handle, sink: Sink) -> u32 {
    guarded(sink, || {
        // SAFETY: bytes that live as long as the call.
        let url = unsafe { many(url.start, url.len) };
        let url = std::str::from_utf8(url)
            .map_err(|_| Error::new(ErrorKind::Config, "a pool's URL is text"))?;
        let store = Box::into_raw(Box::new(S::open(url)?));
        // SAFETY: room for a handle.
        unsafe { handle.write(store.cast()) };
        Ok(())
    })
}

unsafe extern "C" fn close<S: Store>(handle: Handle) {
    let close = || {
        // SAFETY: `open` made it of a box, and nobody uses it any more.
        drop(unsafe { Box::from_raw(handle.cast::<S>()) });
    };
    // Whoever closes does not want to hear of it.
    let _ = catch_unwind(AssertUnwindSafe(close));
}

unsafe extern "C" fn about<S: Store>(
    handle: Handle,
    into: *mut RawCapabilities,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: a handle that is open.
        let store = unsafe { store::<S>(handle) };
        let can = store.capabilities();
        let raw = RawCapabilities {
            shared: can.shared.into(),
            persistent: can.persistent.into(),
            bounded: can.bounded.into(),
            pipelined: can.pipelined.into(),
            max_value_bytes: can.max_value_bytes,
        };
        // SAFETY: room for it.
        unsafe { into.write(raw) };
        tell(sink, "url", &store.url());
        Ok(())
    })
}

unsafe extern "C" fn contains<S: Store>(
    handle: Handle,
    keys: *const RawKey,
    count: usize,
    found: *mut u8,
    left: u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle, and so many keys and answers.
        let (store, keys, found) = unsafe {
            (
                store::<S>(handle),
                many(keys, count),
                many_mut(found, count),
            )
        };
        answer(&store.contains(&self::keys(keys)?, deadline(left))?, found)
    })
}

unsafe extern "C" fn touch<S: Store>(
    handle: Handle,
    keys: *const RawKey,
    positions: *const u64,
    count: usize,
    found: *mut u8,
    left: u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle, and so many keys, positions and answers.
        let (store, keys, positions, found) = unsafe {
            let (keys, positions) = (many(keys, count), many(positions, count));
            (store::<S>(handle), keys, positions, many_mut(found, count))
        };
        let positions = positions.iter().copied();
        let values: Vec<(Key, u64)> = self::keys(keys)?.into_iter().zip(positions).collect();
        answer(&store.touch(&values, deadline(left))?, found)
    })
}

unsafe extern "C" fn put_many<S: Store>(
    handle: Handle,
    batch: *mut RawPut,
    count: usize,
    left: u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle, and so many requests.
        let (store, batch) = unsafe { (store::<S>(handle), many_mut(batch, count)) };
        let request = |raw: &RawPut| -> Result<PutRequest<'_>> {
            // SAFETY: so many iovecs, which slices are by guarantee, of bytes to be read.
            let value = unsafe { many(raw.pieces.cast::<IoSlice<'_>>(), raw.count) };
            let mut request = PutRequest::new(key(&raw.key)?, value);
            request.position = raw.position;
            Ok(request)
        };
        let mut requests = batch.iter().map(request).collect::<Result<Vec<_>>>()?;
        store.put_many(&mut requests, deadline(left));
        let outcomes: Vec<_> = requests.into_iter().map(|each| each.outcome).collect();
        for (index, (raw, outcome)) in batch.iter_mut().zip(outcomes).enumerate() {
            raw.outcome = match outcome {
                None => continue,
                Some(Ok(PutOutcome::Stored)) => YES,
                Some(Ok(PutOutcome::AlreadyPresent)) => NO,
                Some(Err(error)) => {
                    fail(sink, index, &error);
                    WENT_WRONG
                }
            };
        }
        Ok(())
    })
}

unsafe extern "C" fn get_many<S: Store>(
    handle: Handle,
    batch: *mut RawGet,
    count: usize,
    left: u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle, and so many requests.
        let (store, batch) = unsafe { (store::<S>(handle), many_mut(batch, count)) };
        let request = |raw: &RawGet| -> Result<GetRequest<'_, '_>> {
            // SAFETY: so many iovecs, which slices are by guarantee, of bytes that nobody else
            // reads or writes until this returns.
            let into = unsafe { many_mut(raw.pieces.cast::<IoSliceMut<'_>>(), raw.count) };
            let mut request = GetRequest::new(key(&raw.key)?, into);
            request.position = raw.position;
            Ok(request)
        };
        let mut requests = batch.iter().map(request).collect::<Result<Vec<_>>>()?;
        store.get_many(&mut requests, deadline(left));
        let outcomes: Vec<_> = requests.into_iter().map(|each| each.outcome).collect();
        for (index, (raw, outcome)) in batch.iter_mut().zip(outcomes).enumerate() {
            (raw.outcome, raw.bytes) = match outcome {
                None => continue,
                Some(Ok(GetOutcome::Hit(bytes))) => (YES, bytes),
                Some(Ok(GetOutcome::Miss)) => (NO, 0),
                Some(Ok(GetOutcome::TooLarge(bytes))) => (TOO_LARGE, bytes),
                Some(Err(error)) => {
                    fail(sink, index, &error);
                    (WENT_WRONG, 0)
                }
            };
        }
        Ok(())
    })
}

unsafe extern "C" fn remove<S: Store>(
    handle: Handle,
    keys: *const RawKey,
    count: usize,
    removed: *mut u64,
    left: u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle, and so many keys.
        let (store, keys) = unsafe { (store::<S>(handle), many(keys, count)) };
        let there = store.remove(&self::keys(keys)?, deadline(left))?;
        // SAFETY: room for it.
        unsafe { removed.write(there) };
        Ok(())
    })
}

unsafe extern "C" fn list<S: Store>(
    handle: Handle,
    namespace: *const u8,
    left: u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle; a namespace, or null.
        let (store, namespace) =
            unsafe { (store::<S>(handle), namespace.cast::<[u8; 16]>().as_ref()) };
        let mut visit = |object: penstock_contract::Listed| {
            let key = object.key.to_bytes();
            // SAFETY: the sink is this call's, and reads the key before it returns.
            unsafe { (sink.object)(sink.context, &key, object.bytes, object.last_use) };
        };
        store.list(
            namespace.copied().map(Namespace),
            &mut visit,
            deadline(left),
        )
    })
}

unsafe extern "C" fn describe<S: Store>(handle: Handle, left: u64, sink: Sink) -> u32 {
    guarded(sink, || {
        // SAFETY: a handle that is open.
        let store = unsafe { store::<S>(handle) };
        for (name, fact) in store.describe(deadline(left))? {
            tell(sink, &name, &fact);
        }
        Ok(())
    })
}

unsafe extern "C" fn stats<S: Store>(handle: Handle, into: *mut RawStats, sink: Sink) -> u32 {
    guarded(sink, || {
        // SAFETY: a handle that is open.
        let counted = unsafe { store::<S>(handle) }.stats();
        let raw = [
            counted.lookups,
            counted.lookup_hits,
            counted.gets,
            counted.misses,
            counted.puts,
            counted.puts_present,
            counted.bytes_read,
            counted.bytes_written,
            counted.evictions,
            counted.errors,
            counted.connects,
        ];
        // SAFETY: room for them.
        unsafe { into.write(raw) };
        Ok(())
    })
}

unsafe extern "C" fn charge<S: Store>(
    handle: Handle,
    bytes: u64,
    into: *mut u64,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: an open handle, and room for the answer.
        unsafe { into.write(store::<S>(handle).charge(bytes)) };
        Ok(())
    })
}

unsafe extern "C" fn batch_bytes<S: Store>(
    handle: Handle,
    into: *mut RawBatchBytes,
    sink: Sink,
) -> u32 {
    guarded(sink, || {
        // SAFETY: a handle that is open.
        let best = unsafe { store::<S>(handle) }.batch_bytes();
        // SAFETY: room for them.
        unsafe { into.write([best.put, best.get]) };
        Ok(())
    })
}
