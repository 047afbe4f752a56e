//! The border: what crosses it, in C's layout. Penstock and a library may come from different
//! compilers, and have allocators and standard libraries of their own.
//!
//! So nothing that one side has allocated is freed by the other, every string goes through a
//! callback that copies it, and no panic crosses. Times are nanoseconds left, as two clocks need not
//! agree on more.

use std::ffi::c_void;

use penstock_contract::KEY_BYTES;

/// The name of the one symbol that a library exports: a [`Plugin`].
pub const SYMBOL: &str = "PENSTOCK_STORE";
/// What every [`Plugin`] begins with.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PNSKSTOR");
/// The version of this border. Another version is another border: nothing but [`Plugin::magic`],
/// [`Plugin::version`] and [`Plugin::bytes`] may be read of it.
///
/// What is added at the end of a [`Plugin`] leaves the version as it is. Penstock reads what it knows
/// of, up to [`Plugin::bytes`], and does without the rest.
pub const VERSION: u32 = 1;
/// Bytes that every [`Plugin`] of this version has: what comes after them was added later.
pub const FIRST_BYTES: usize = std::mem::offset_of!(Plugin, batch_bytes);

/// A key, as [`penstock_contract::Key::to_bytes`] makes it.
pub type RawKey = [u8; KEY_BYTES];

/// Bytes that live as long as the call.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Bytes {
    /// The first one; not null, whatever the length.
    pub start: *const u8,
    /// How many.
    pub len: usize,
}

impl Bytes {
    /// Lends text, or other bytes.
    pub fn lend(bytes: &[u8]) -> Self {
        Self {
            start: bytes.as_ptr(),
            len: bytes.len(),
        }
    }
}

/// Takes what an operation has to say beyond its status. Every function may be called any number of
/// times, by the thread that the operation runs on, until the operation returns.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Sink {
    /// Handed back to the functions.
    pub context: *mut c_void,
    /// A request of the batch failed, or the operation did ([`WHOLE`]): kind and message.
    pub fail: unsafe extern "C" fn(*mut c_void, index: usize, kind: Bytes, message: Bytes),
    /// A name and what it stands for: a fact, or a text that was asked for.
    pub text: unsafe extern "C" fn(*mut c_void, name: Bytes, text: Bytes),
    /// An object of a listing: key, bytes, last use.
    pub object: unsafe extern "C" fn(*mut c_void, *const RawKey, u64, u64),
}

/// The index of a failure that is the operation's, not a request's.
pub const WHOLE: usize = usize::MAX;

/// What an operation returns: it is done, and its results are in place.
pub const DONE: u32 = 0;
/// What an operation returns if it failed. [`Sink::fail`] was called with [`WHOLE`].
pub const FAILED: u32 = 1;

/// Outcome of a request that nobody has answered.
pub const UNANSWERED: u32 = 0;
/// Outcome of a put: stored. Outcome of a get: a hit.
pub const YES: u32 = 1;
/// Outcome of a put: already present. Outcome of a get: a miss.
pub const NO: u32 = 2;
/// Outcome of a get: the value does not fit.
pub const TOO_LARGE: u32 = 3;
/// Outcome of a request that failed. [`Sink::fail`] was called with its index.
pub const WENT_WRONG: u32 = 4;

/// A value to put. Its pieces are `iovec`s, as [`std::io::IoSlice`] guarantees to be.
#[repr(C)]
pub struct RawPut {
    /// The object's name.
    pub key: RawKey,
    /// Tokens before this value in its prompt.
    pub position: u64,
    /// The value's bytes: `iovec`s, to be read.
    pub pieces: *const c_void,
    /// How many `iovec`s.
    pub count: usize,
    /// Set by the library.
    pub outcome: u32,
}

/// A value to get into the caller's memory.
#[repr(C)]
pub struct RawGet {
    /// The object's name.
    pub key: RawKey,
    /// As [`RawPut::position`].
    pub position: u64,
    /// Where the value goes: `iovec`s, to be written.
    pub pieces: *mut c_void,
    /// How many `iovec`s.
    pub count: usize,
    /// Set by the library with a hit, and if the value is too large.
    pub bytes: u64,
    /// Set by the library.
    pub outcome: u32,
}

/// [`penstock_contract::Capabilities`].
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct RawCapabilities {
    /// 1 if other processes see what this one puts.
    pub shared: u8,
    /// 1 if values outlive the process.
    pub persistent: u8,
    /// 1 if the store itself keeps within a bound.
    pub bounded: u8,
    /// 1 if a batch takes less time than its requests one by one.
    pub pipelined: u8,
    /// Largest value accepted, in bytes.
    pub max_value_bytes: u64,
}

/// [`penstock_contract::BatchBytes`]: those of puts, then those of gets.
pub type RawBatchBytes = [u64; 2];

/// [`penstock_contract::StoreStats`], in the order of its fields.
pub type RawStats = [u64; 11];

/// A store of the library, as a thing that only the library can look into.
pub type Handle = *mut c_void;

/// Everything that a library has to offer. It lives as long as the library is loaded.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Plugin {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of this struct, as the library was built with it.
    pub bytes: u32,
    /// Bytes of a [`RawPut`], and of a [`RawGet`].
    pub request_bytes: [u32; 2],
    /// Opens the store of a URL. The handle is written only if this is [`DONE`].
    pub open: unsafe extern "C" fn(url: Bytes, *mut Handle, Sink) -> u32,
    /// Closes a store. Nobody uses the handle any more.
    pub close: unsafe extern "C" fn(Handle),
    /// What the store can do, and its URL ([`Sink::text`], without credentials).
    pub about: unsafe extern "C" fn(Handle, *mut RawCapabilities, Sink) -> u32,
    /// Whether the store has each of so many keys: 1 or 0.
    pub contains: unsafe extern "C" fn(Handle, *const RawKey, usize, *mut u8, u64, Sink) -> u32,
    /// The same for keys that are used now, with their positions.
    pub touch:
        unsafe extern "C" fn(Handle, *const RawKey, *const u64, usize, *mut u8, u64, Sink) -> u32,
    /// Puts so many values.
    pub put_many: unsafe extern "C" fn(Handle, *mut RawPut, usize, u64, Sink) -> u32,
    /// Gets so many values.
    pub get_many: unsafe extern "C" fn(Handle, *mut RawGet, usize, u64, Sink) -> u32,
    /// Removes so many keys, and says how many there were.
    pub remove: unsafe extern "C" fn(Handle, *const RawKey, usize, *mut u64, u64, Sink) -> u32,
    /// Lists a namespace (16 bytes), or all if this is null.
    pub list: unsafe extern "C" fn(Handle, *const u8, u64, Sink) -> u32,
    /// Facts about the store ([`Sink::text`]).
    pub describe: unsafe extern "C" fn(Handle, u64, Sink) -> u32,
    /// Counters of this handle.
    pub stats: unsafe extern "C" fn(Handle, *mut RawStats, Sink) -> u32,
    /// What a value takes up of the store's bound.
    pub charge: unsafe extern "C" fn(Handle, u64, *mut u64, Sink) -> u32,
    /// How many bytes one call takes best. Null, or beyond [`Self::bytes`], if the library does not
    /// say.
    pub batch_bytes: Option<unsafe extern "C" fn(Handle, *mut RawBatchBytes, Sink) -> u32>,
}
