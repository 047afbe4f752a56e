//! A store in a library: Penstock's side of the border that `penstock-store-plugin` describes.
#![allow(unsafe_code, reason = "the border is in C's terms")]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::LazyLock;
use std::time::Instant;

use libloading::Library;
use parking_lot::Mutex;
use penstock_store_plugin::abi::{
    Bytes, DONE, FIRST_BYTES, Handle, MAGIC, NO, Plugin, RawBatchBytes, RawCapabilities, RawGet,
    RawKey, RawPut, RawStats, SYMBOL, Sink, TOO_LARGE, UNANSWERED, VERSION, WENT_WRONG, WHOLE, YES,
};

use super::Secrets;
use crate::{
    BatchBytes, Capabilities, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace,
    PutOutcome, PutRequest, Result, Store, StoreStats, slices, unanswered,
};

/// A store of a library. The library stays loaded as long as the process lives: its threads may
/// outlive its stores.
pub(super) struct NativeStore {
    plugin: Plugin,
    handle: Handle,
    capabilities: Capabilities,
    url: String,
    secrets: Secrets,
}

// SAFETY: the library made the handle of a `Store`, which is `Send` and `Sync`; its functions may be
// called from any thread.
unsafe impl Send for NativeStore {}
// SAFETY: as above.
unsafe impl Sync for NativeStore {}

/// Loads a library, once in this process, and checks that it is one of this version.
fn load(path: &Path) -> Result<Plugin> {
    static LOADED: LazyLock<Mutex<HashMap<PathBuf, Plugin>>> = LazyLock::new(Mutex::default);
    let mut loaded = LOADED.lock();
    if let Some(plugin) = loaded.get(path) {
        return Ok(*plugin);
    }
    let failed = |what: String| Error::new(ErrorKind::Config, what).with("library", path.display());
    // SAFETY: the operator has installed the library to be run in this process.
    let library = unsafe { Library::new(path) }
        .map_err(|error| failed(format!("the store's library does not load: {error}")))?;
    // SAFETY: only an address is taken of the symbol; what is there is checked next.
    let found = unsafe { library.get::<*const Plugin>(SYMBOL.as_bytes()) };
    let found = found.map_err(|_| {
        failed(format!(
            "the library is no store for Penstock: it exports no {SYMBOL}"
        ))
    })?;
    // SAFETY: whatever a library exports under this name has at least the head that all versions
    // have in common.
    let plugin = unsafe { read(*found) }.map_err(failed)?;
    // The library must stay where it is: it has threads and statics.
    std::mem::forget(library);
    loaded.insert(path.to_owned(), plugin);
    Ok(plugin)
}

/// Reads a [`Plugin`] of this version, all of whose parts have the size that they have here. What an
/// older library does not have is null; what a newer one has besides is left out.
///
/// # Safety
///
/// There is the head that all versions have in common, and what it says is there.
unsafe fn read(plugin: *const Plugin) -> std::result::Result<Plugin, String> {
    // SAFETY: the caller's promise.
    let (magic, version, bytes) = unsafe { ((*plugin).magic, (*plugin).version, (*plugin).bytes) };
    if magic != MAGIC {
        return Err(format!("the library's {SYMBOL} is not a store's border"));
    }
    if version != VERSION {
        return Err(format!(
            "the store's library was built for version {version} of Penstock's border, and this \
             Penstock has version {VERSION}: install the two that fit"
        ));
    }
    let bytes = bytes as usize;
    let is_whole = bytes >= FIRST_BYTES && bytes.is_multiple_of(size_of::<usize>());
    // SAFETY: if it is as long as that, it has this field.
    let requests = is_whole.then(|| unsafe { (*plugin).request_bytes });
    if requests != Some([size_of::<RawPut>() as u32, size_of::<RawGet>() as u32]) {
        return Err(format!(
            "the store's library says version {version}, but its parts have other sizes: it was \
             built wrongly, or for another kind of machine"
        ));
    }
    let mut known = MaybeUninit::<Plugin>::zeroed();
    let bytes = bytes.min(size_of::<Plugin>());
    // SAFETY: there are so many bytes, and room for them. They end between two fields: those after
    // the first bytes are pointers, null if they are not there.
    Ok(unsafe {
        std::ptr::copy_nonoverlapping(plugin.cast::<u8>(), known.as_mut_ptr().cast(), bytes);
        known.assume_init()
    })
}

/// What an operation had to say, while it runs and after it.
struct Heard<'v> {
    secrets: &'v Secrets,
    whole: Option<Error>,
    of_requests: HashMap<usize, Error>,
    texts: Vec<(String, String)>,
    visit: Option<&'v mut dyn FnMut(Listed)>,
    /// A panic of the visitor. It goes on when the library has returned.
    panic: Option<Box<dyn Any + Send>>,
}

/// # Safety
///
/// The bytes live as long as the returned text is used.
unsafe fn text<'a>(bytes: Bytes) -> std::borrow::Cow<'a, str> {
    // SAFETY: the caller's promise.
    String::from_utf8_lossy(unsafe { slice::from_raw_parts(bytes.start, bytes.len) })
}

unsafe extern "C" fn fail(context: *mut c_void, index: usize, kind: Bytes, message: Bytes) {
    // SAFETY: the context is what `Heard::sink` made it of, and the bytes live during this call.
    let (heard, kind, message) =
        unsafe { (&mut *context.cast::<Heard<'_>>(), text(kind), text(message)) };
    let error = heard.secrets.error(&kind, &message);
    if index == WHOLE {
        heard.whole = Some(error);
    } else {
        heard.of_requests.insert(index, error);
    }
}

unsafe extern "C" fn told(context: *mut c_void, name: Bytes, fact: Bytes) {
    // SAFETY: as in `fail`.
    let (heard, name, fact) =
        unsafe { (&mut *context.cast::<Heard<'_>>(), text(name), text(fact)) };
    let (name, fact) = (heard.secrets.hide(&name), heard.secrets.hide(&fact));
    heard.texts.push((name, fact));
}

unsafe extern "C" fn object(context: *mut c_void, key: *const RawKey, bytes: u64, last_use: u64) {
    // SAFETY: as in `fail`.
    let (heard, key) = unsafe { (&mut *context.cast::<Heard<'_>>(), &*key) };
    let (Ok(key), Some(visit), None) = (Key::from_bytes(key), &mut heard.visit, &heard.panic)
    else {
        return;
    };
    let listed = Listed {
        key,
        bytes,
        last_use,
    };
    heard.panic = catch_unwind(AssertUnwindSafe(|| visit(listed))).err();
}

impl<'v> Heard<'v> {
    fn new(secrets: &'v Secrets) -> Self {
        Self {
            secrets,
            whole: None,
            of_requests: HashMap::new(),
            texts: Vec::new(),
            visit: None,
            panic: None,
        }
    }

    fn sink(&mut self) -> Sink {
        Sink {
            context: (&raw mut *self).cast(),
            fail,
            text: told,
            object,
        }
    }

    /// Runs an operation of the library, which is given the sink.
    fn during(&mut self, operation: impl FnOnce(Sink) -> u32) -> Result<()> {
        let status = operation(self.sink());
        if let Some(panic) = self.panic.take() {
            resume_unwind(panic);
        }
        match status {
            DONE => Ok(()),
            _ => Err(self.whole.take().unwrap_or_else(unanswered)),
        }
    }

    fn of_request(&mut self, index: usize) -> Error {
        self.of_requests.remove(&index).unwrap_or_else(unanswered)
    }
}

fn left(deadline: Instant) -> u64 {
    let left = deadline.saturating_duration_since(Instant::now());
    u64::try_from(left.as_nanos()).unwrap_or(u64::MAX)
}

fn raw(keys: &[Key]) -> Vec<RawKey> {
    keys.iter().map(Key::to_bytes).collect()
}

impl NativeStore {
    pub(super) fn open(path: &Path, url: &str, secrets: Secrets) -> Result<Self> {
        Self::of(load(path)?, url, secrets)
    }

    fn of(plugin: Plugin, url: &str, secrets: Secrets) -> Result<Self> {
        let (mut heard, mut handle) = (Heard::new(&secrets), std::ptr::null_mut());
        heard.during(|sink| {
            // SAFETY: the URL lives during the call, and there is room for a handle.
            unsafe { (plugin.open)(Bytes::lend(url.as_bytes()), &raw mut handle, sink) }
        })?;
        let mut store = Self {
            plugin,
            handle,
            capabilities: Capabilities {
                shared: false,
                persistent: false,
                bounded: false,
                pipelined: false,
                max_value_bytes: 0,
            },
            url: String::new(),
            secrets,
        };
        let (can, url) = store.about()?;
        (store.capabilities, store.url) = (can, url);
        Ok(store)
    }

    fn about(&self) -> Result<(Capabilities, String)> {
        let (mut heard, mut raw) = (Heard::new(&self.secrets), RawCapabilities::default());
        // SAFETY: an open handle, and room for the answer.
        heard.during(|sink| unsafe { (self.plugin.about)(self.handle, &raw mut raw, sink) })?;
        let can = Capabilities {
            shared: raw.shared != 0,
            persistent: raw.persistent != 0,
            bounded: raw.bounded != 0,
            pipelined: raw.pipelined != 0,
            max_value_bytes: raw.max_value_bytes,
        };
        let url = heard.texts.pop().ok_or_else(unanswered)?.1;
        Ok((can, url))
    }
}

impl Drop for NativeStore {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and this is the last use of it.
        unsafe { (self.plugin.close)(self.handle) }
    }
}

impl Store for NativeStore {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let (keys, mut found) = (raw(keys), vec![0_u8; keys.len()]);
        Heard::new(&self.secrets).during(|sink| {
            let (keys, count, found) = (keys.as_ptr(), keys.len(), found.as_mut_ptr());
            // SAFETY: an open handle, and so many keys and answers.
            unsafe { (self.plugin.contains)(self.handle, keys, count, found, left(deadline), sink) }
        })?;
        Ok(found.into_iter().map(|found| found != 0).collect())
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let request = |request: &PutRequest<'_>| RawPut {
            key: request.key.to_bytes(),
            position: request.position,
            pieces: request.value.as_ptr().cast(),
            count: request.value.len(),
            outcome: UNANSWERED,
        };
        let mut requests: Vec<RawPut> = batch.iter().map(request).collect();
        let mut heard = Heard::new(&self.secrets);
        let done = heard.during(|sink| {
            let (start, count) = (requests.as_mut_ptr(), requests.len());
            // SAFETY: an open handle, and so many requests, whose slices the batch borrows.
            unsafe { (self.plugin.put_many)(self.handle, start, count, left(deadline), sink) }
        });
        for (index, (request, raw)) in batch.iter_mut().zip(requests).enumerate() {
            request.outcome = match (&done, raw.outcome) {
                (_, YES) => Some(Ok(PutOutcome::Stored)),
                (_, NO) => Some(Ok(PutOutcome::AlreadyPresent)),
                (_, WENT_WRONG) => Some(Err(heard.of_request(index))),
                (Err(error), _) => Some(Err(again(error))),
                (Ok(()), _) => None,
            };
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        let request = |request: &mut GetRequest<'_, '_>| RawGet {
            key: request.key.to_bytes(),
            position: request.position,
            pieces: request.into.as_mut_ptr().cast(),
            count: request.into.len(),
            bytes: 0,
            outcome: UNANSWERED,
        };
        let mut requests: Vec<RawGet> = batch.iter_mut().map(request).collect();
        let mut heard = Heard::new(&self.secrets);
        let done = heard.during(|sink| {
            let (start, count) = (requests.as_mut_ptr(), requests.len());
            // SAFETY: an open handle, and so many requests, whose slices the batch borrows.
            unsafe { (self.plugin.get_many)(self.handle, start, count, left(deadline), sink) }
        });
        for (index, (request, raw)) in batch.iter_mut().zip(requests).enumerate() {
            request.outcome = match (&done, raw.outcome) {
                (_, YES) if raw.bytes <= slices::room_of(request.into) => {
                    Some(Ok(GetOutcome::Hit(raw.bytes)))
                }
                (_, YES) => Some(Err(unanswered())),
                (_, NO) => Some(Ok(GetOutcome::Miss)),
                (_, TOO_LARGE) => Some(Ok(GetOutcome::TooLarge(raw.bytes))),
                (_, WENT_WRONG) => Some(Err(heard.of_request(index))),
                (Err(error), _) => Some(Err(again(error))),
                (Ok(()), _) => None,
            };
        }
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        let keys: Vec<RawKey> = values.iter().map(|(key, _)| key.to_bytes()).collect();
        let positions: Vec<u64> = values.iter().map(|(_, position)| *position).collect();
        let mut found = vec![0_u8; values.len()];
        Heard::new(&self.secrets).during(|sink| {
            let (keys, positions) = (keys.as_ptr(), positions.as_ptr());
            let (count, found, left) = (values.len(), found.as_mut_ptr(), left(deadline));
            // SAFETY: an open handle, and so many keys, positions and answers.
            unsafe { (self.plugin.touch)(self.handle, keys, positions, count, found, left, sink) }
        })?;
        Ok(found.into_iter().map(|found| found != 0).collect())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        let (keys, mut removed) = (raw(keys), 0);
        Heard::new(&self.secrets).during(|sink| {
            let (keys, count, removed) = (keys.as_ptr(), keys.len(), &raw mut removed);
            // SAFETY: an open handle, so many keys, and room for the answer.
            unsafe { (self.plugin.remove)(self.handle, keys, count, removed, left(deadline), sink) }
        })?;
        Ok(removed)
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        // What the visitor is not to hear of it is left out here, whatever the store says.
        let mut wanted = |listed: Listed| {
            if namespace.is_none_or(|namespace| listed.key.namespace == namespace) {
                visit(listed);
            }
        };
        let mut heard = Heard::new(&self.secrets);
        heard.visit = Some(&mut wanted);
        heard.during(|sink| {
            let raw = namespace
                .as_ref()
                .map_or(std::ptr::null(), |n| n.0.as_ptr());
            // SAFETY: an open handle; a namespace, or null.
            unsafe { (self.plugin.list)(self.handle, raw, left(deadline), sink) }
        })
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let mut heard = Heard::new(&self.secrets);
        heard.during(|sink| {
            // SAFETY: a handle that is open.
            unsafe { (self.plugin.describe)(self.handle, left(deadline), sink) }
        })?;
        Ok(heard.texts)
    }

    fn stats(&self) -> StoreStats {
        let (mut heard, mut raw) = (Heard::new(&self.secrets), RawStats::default());
        // If this fails, nothing was counted.
        // SAFETY: an open handle, and room for the answer.
        let _ =
            heard.during(|sink| unsafe { (self.plugin.stats)(self.handle, &raw mut raw, sink) });
        let [
            lookups,
            lookup_hits,
            gets,
            misses,
            puts,
            puts_present,
            bytes_read,
            bytes_written,
            evictions,
            errors,
            connects,
        ] = raw;
        StoreStats {
            lookups,
            lookup_hits,
            gets,
            misses,
            puts,
            puts_present,
            bytes_read,
            bytes_written,
            evictions,
            errors,
            connects,
        }
    }

    fn charge(&self, value_bytes: u64) -> u64 {
        let (mut heard, mut charge) = (Heard::new(&self.secrets), value_bytes);
        let into = &raw mut charge;
        // If this fails, a value takes up what it has.
        // SAFETY: an open handle, and room for the answer.
        let _ = heard
            .during(|sink| unsafe { (self.plugin.charge)(self.handle, value_bytes, into, sink) });
        charge
    }

    fn batch_bytes(&self) -> BatchBytes {
        let Some(batch_bytes) = self.plugin.batch_bytes else {
            return BatchBytes::default();
        };
        let (mut heard, mut raw) = (Heard::new(&self.secrets), RawBatchBytes::default());
        let into = &raw mut raw;
        // SAFETY: an open handle, and room for the answer.
        match heard.during(|sink| unsafe { batch_bytes(self.handle, into, sink) }) {
            Ok(()) => BatchBytes {
                put: raw[0],
                get: raw[1],
            },
            // Any size is as good.
            Err(_) => BatchBytes::default(),
        }
    }
}

/// The error that a whole batch shares.
fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, IoSliceMut};

    use penstock_layout::Span;
    use penstock_store_testing::soon;

    use super::*;
    use crate::MemoryStore;

    const BEST: BatchBytes = BatchBytes {
        put: 3 << 20,
        get: 1 << 20,
    };

    /// A store in memory that says how large batches should be.
    struct Choosy(MemoryStore);

    impl penstock_store_plugin::Open for Choosy {
        fn open(_: &str) -> Result<Self> {
            Ok(Self(MemoryStore::new(1 << 20)))
        }
    }

    impl Store for Choosy {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }
        fn url(&self) -> String {
            self.0.url()
        }
        fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
            self.0.contains(keys, deadline)
        }
        fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
            self.0.put_many(batch, deadline);
        }
        fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
            self.0.get_many(batch, deadline);
        }
        fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
            self.0.touch(values, deadline)
        }
        fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
            self.0.remove(keys, deadline)
        }
        fn list(
            &self,
            namespace: Option<Namespace>,
            visit: &mut dyn FnMut(Listed),
            deadline: Instant,
        ) -> Result<()> {
            self.0.list(namespace, visit, deadline)
        }
        fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
            self.0.describe(deadline)
        }
        fn stats(&self) -> StoreStats {
            self.0.stats()
        }
        fn batch_bytes(&self) -> BatchBytes {
            BEST
        }
    }

    /// Reads what a library exports that was built when a [`Plugin`] had so many bytes.
    fn exported(plugin: Plugin, bytes: usize) -> std::result::Result<Plugin, String> {
        let plugin = Plugin {
            bytes: bytes as u32,
            ..plugin
        };
        // No longer than that, so that nothing is read beyond it unnoticed; the rest is not null.
        let mut words = vec![usize::MAX; bytes.div_ceil(size_of::<usize>())];
        let (from, into) = ((&raw const plugin).cast::<u8>(), words.as_mut_ptr());
        // SAFETY: both have so many bytes, and the copy is aligned as words are.
        unsafe {
            let bytes = bytes.min(size_of::<Plugin>());
            std::ptr::copy_nonoverlapping(from, into.cast(), bytes);
            read(words.as_ptr().cast())
        }
    }

    fn of_sizes(bytes: usize) -> std::result::Result<Plugin, String> {
        exported(Plugin::of::<Choosy>(), bytes)
    }

    #[test]
    fn another_version_and_other_sizes_are_told_apart() {
        let bytes = size_of::<Plugin>();
        let plugin = || Plugin::of::<Choosy>();
        let other = Plugin {
            version: VERSION + 1,
            ..plugin()
        };
        let said = exported(other, bytes).err().unwrap();
        assert!(said.contains("version 2"), "{said}");
        let foreign = Plugin {
            magic: 1,
            ..plugin()
        };
        let said = exported(foreign, bytes).err().unwrap();
        assert!(said.contains("border"), "{said}");
        let requests = Plugin {
            request_bytes: [1, 1],
            ..plugin()
        };
        for wrong in [
            exported(requests, bytes),
            of_sizes(FIRST_BYTES - size_of::<usize>()),
            of_sizes(FIRST_BYTES + 4),
            of_sizes(size_of::<usize>() * 2),
        ] {
            let said = wrong.err().unwrap();
            assert!(said.contains("sizes"), "{said}");
        }
    }

    #[test]
    fn a_library_that_was_built_before_or_after_is_used_as_far_as_it_goes() {
        for (bytes, best) in [
            (FIRST_BYTES, BatchBytes::default()),
            (size_of::<Plugin>(), BEST),
            (size_of::<Plugin>() + 3 * size_of::<usize>(), BEST),
        ] {
            let plugin = of_sizes(bytes).unwrap();
            let store = NativeStore::of(plugin, "x://y", Secrets::of("x://y")).unwrap();
            assert_eq!(store.batch_bytes(), best, "{bytes}");
            let span = Span::new(0..1, 0..1).unwrap();
            let key = Key::new(Namespace([1; 16]), b"a block", span).unwrap();
            let put = store.put(&key, &[IoSlice::new(b"value")], soon());
            assert_eq!(put.unwrap(), PutOutcome::Stored);
            let mut room = [0; 5];
            let got = store.get(&key, &mut [IoSliceMut::new(&mut room)], soon());
            assert_eq!(got.unwrap(), GetOutcome::Hit(5));
            assert_eq!(&room, b"value");
        }
    }

    #[test]
    fn what_a_library_says_of_batches_while_it_fails_does_not_count() {
        unsafe extern "C" fn fails(_: Handle, into: *mut RawBatchBytes, _: Sink) -> u32 {
            // SAFETY: there is room for it.
            unsafe { into.write([7, 7]) };
            penstock_store_plugin::abi::FAILED
        }
        let plugin = Plugin {
            batch_bytes: Some(fails),
            ..Plugin::of::<Choosy>()
        };
        let store = NativeStore::of(plugin, "x://y", Secrets::of("x://y")).unwrap();
        assert_eq!(store.batch_bytes(), BatchBytes::default());
    }
}
