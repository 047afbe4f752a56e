//! Puts: values that are put at about the same time go into one pack, whoever puts them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use penstock_contract::{ErrorKind, Namespace, PutOutcome, PutRequest, slices};
use penstock_value::interrupt;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::address::Settings;
use super::failure::Failure;
use super::listing::Catalogue;
use super::pack::{Id, Kind, Local, MOST_VALUES, Name, pack_head};

/// The longest value.
pub(super) const MOST_VALUE_BYTES: u64 = 1 << 30;
/// Packs that may be on their way at once, by their bytes. Beyond that, puts fail at once.
const PACKS_UNDER_WAY: u64 = 16;
/// The longest time until a pack has landed. Listings of what is new rely on it.
const LONGEST_PUT: Duration = Duration::from_secs(30);

/// Gathers values into packs.
pub(super) struct Writer {
    settings: Settings,
    catalogue: Arc<Catalogue>,
    /// For each namespace, the pack that takes values now.
    open: Mutex<HashMap<Namespace, Arc<Gathering>>>,
    bytes_under_way: AtomicU64,
}

/// What became of a value that is to be put.
enum Added {
    /// The value is in a pack, which has not landed yet.
    ToPack(Arc<Gathering>),
    /// The bucket has the value.
    Present,
}

/// A pack, from its first value until it has landed or failed.
struct Gathering {
    pack: Mutex<Pack>,
    is_full: Notify,
    has_landed: Condvar,
}

struct Pack {
    values: Vec<(Local, u32)>,
    pieces: Vec<Bytes>,
    bytes: u64,
    /// When the last of those who wait gives up.
    deadline: Instant,
    outcome: Option<Result<(), Failure>>,
}

impl Writer {
    pub(super) fn new(settings: Settings, catalogue: Arc<Catalogue>) -> Self {
        Self {
            settings,
            catalogue,
            open: Mutex::default(),
            bytes_under_way: AtomicU64::new(0),
        }
    }

    /// Puts a batch and waits until the packs with its values have landed. `describe` makes the
    /// error of one request.
    pub(super) fn put_many(
        self: &Arc<Self>,
        runtime: &Handle,
        batch: &mut [PutRequest<'_>],
        deadline: Instant,
        describe: impl Fn(&Failure, &PutRequest<'_>) -> penstock_contract::Error,
    ) {
        let mut waiting = Vec::with_capacity(batch.len());
        for request in &mut *batch {
            let (pack, outcome) = match self.add(runtime, request, deadline) {
                Ok(Added::ToPack(pack)) => (Some(pack), None),
                Ok(Added::Present) => (None, Some(Ok(PutOutcome::AlreadyPresent))),
                Err(failure) => (None, Some(Err(describe(&failure, request)))),
            };
            request.outcome = outcome;
            waiting.push(pack);
        }
        for (request, pack) in batch.iter_mut().zip(waiting) {
            if let Some(pack) = pack {
                let landed = pack.landed(deadline);
                let outcome = landed.map(|()| PutOutcome::Stored);
                request.outcome = Some(outcome.map_err(|failure| describe(&failure, request)));
            }
        }
    }

    /// Adds a value to the open pack, unless it is in the bucket already.
    fn add(
        self: &Arc<Self>,
        runtime: &Handle,
        request: &PutRequest<'_>,
        deadline: Instant,
    ) -> Result<Added, Failure> {
        if Instant::now() >= deadline {
            return Err(Failure::late());
        }
        let bytes = slices::len_of(request.value);
        if bytes > MOST_VALUE_BYTES {
            return Err(Failure::new(
                ErrorKind::Config,
                format!(
                    "a value of {bytes} bytes is larger than the store takes ({MOST_VALUE_BYTES})"
                ),
            ));
        }
        let local = Local::of(&request.key);
        let namespace = request.key.namespace;
        let found = self.catalogue.of(namespace).index.lock().find(&local);
        if found.is_some_and(|found| u64::from(found.bytes) == bytes) {
            return Ok(Added::Present);
        }
        let room = PACKS_UNDER_WAY * self.settings.pack_bytes + MOST_VALUE_BYTES;
        if self.bytes_under_way.fetch_add(bytes, Relaxed) + bytes > room {
            self.bytes_under_way.fetch_sub(bytes, Relaxed);
            return Err(Failure::new(
                ErrorKind::Unavailable,
                "too many puts wait for the object store",
            ));
        }
        let value = Bytes::from(slices::gather(request.value));
        let pack = self.join(runtime, namespace, local, value, deadline);
        Ok(Added::ToPack(pack))
    }

    fn join(
        self: &Arc<Self>,
        runtime: &Handle,
        namespace: Namespace,
        local: Local,
        value: Bytes,
        deadline: Instant,
    ) -> Arc<Gathering> {
        let mut open = self.open.lock();
        let gathering = Arc::clone(open.entry(namespace).or_insert_with(|| {
            let gathering = Arc::new(Gathering::new(deadline));
            runtime.spawn(Arc::clone(self).send(namespace, Arc::clone(&gathering)));
            gathering
        }));
        let mut pack = gathering.pack.lock();
        pack.values.push((local, value.len() as u32));
        pack.bytes += value.len() as u64;
        pack.pieces.push(value);
        pack.deadline = pack.deadline.max(deadline);
        if pack.bytes >= self.settings.pack_bytes || pack.values.len() as u32 >= MOST_VALUES {
            open.remove(&namespace);
            gathering.is_full.notify_one();
        }
        drop(pack);
        gathering
    }

    /// Waits until the pack is full or has waited long enough, and sends it.
    async fn send(self: Arc<Self>, namespace: Namespace, gathering: Arc<Gathering>) {
        let full = gathering.is_full.notified();
        // Either way, the pack is sent.
        let _ = tokio::time::timeout(self.settings.linger, full).await;
        {
            let mut open = self.open.lock();
            if open
                .get(&namespace)
                .is_some_and(|now| Arc::ptr_eq(now, &gathering))
            {
                open.remove(&namespace);
            }
        }
        // Nobody adds to it any more.
        let (values, pieces, bytes, deadline) = {
            let mut pack = gathering.pack.lock();
            let pieces = std::mem::take(&mut pack.pieces);
            (
                std::mem::take(&mut pack.values),
                pieces,
                pack.bytes,
                pack.deadline,
            )
        };
        let (head, entries) = pack_head(namespace, &values);
        let name = Name {
            id: Id::fresh(),
            kind: Kind::Pack,
            count: values.len() as u32,
        };
        let pieces = std::iter::once(Bytes::from(head)).chain(pieces).collect();
        let deadline = deadline.min(Instant::now() + LONGEST_PUT);
        let put = self.catalogue.bucket.put(namespace, &name, pieces);
        let outcome = tokio::time::timeout_at(deadline.into(), put).await;
        let outcome = outcome.unwrap_or_else(|_| Err(Failure::late()));
        if outcome.is_ok() {
            self.catalogue
                .of(namespace)
                .index
                .lock()
                .add_pack(name, &entries);
        }
        self.bytes_under_way.fetch_sub(bytes, Relaxed);
        gathering.pack.lock().outcome = Some(outcome);
        gathering.has_landed.notify_all();
    }
}

impl Gathering {
    fn new(deadline: Instant) -> Self {
        let pack = Pack {
            values: Vec::new(),
            pieces: Vec::new(),
            bytes: 0,
            deadline,
            outcome: None,
        };
        Self {
            pack: Mutex::new(pack),
            is_full: Notify::new(),
            has_landed: Condvar::new(),
        }
    }

    fn landed(&self, deadline: Instant) -> Result<(), Failure> {
        let mut pack = self.pack.lock();
        loop {
            if let Some(outcome) = &pack.outcome {
                return outcome.clone();
            }
            let is_over = interrupt::wait_until(&self.has_landed, &mut pack, deadline);
            if is_over && pack.outcome.is_none() {
                return Err(Failure::late());
            }
        }
    }
}
