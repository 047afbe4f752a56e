//! A store in memory that the processes of a machine share: values move at the speed of a copy.
//!
//! A pool is one segment, a file in `/dev/shm` that every process maps. It has entries that name
//! values, and pages that hold the values' bytes. Nothing in it is ever locked. An entry or a page
//! changes hands by one compare-and-swap (see [`state`]). So a process may be killed or stopped at
//! any instruction, and it holds nobody up. What it had under way is free again once the kernel has
//! taken its lock away (see [`owner`]). Readers copy a value out and then check that it was not
//! touched. A look-up makes one system call: it asks whether the file still has all of the memory.
//!
//! The segment stays when the last process ends, until the machine stops or somebody removes the
//! file. If it is removed, processes that have it open keep it, and those that come later get a new
//! one.
//!
//! A fork of a process that has a pool open can read the pool, but must open it anew to put. If the
//! parent dies while the fork lives, what the parent had under way does not count as a dead
//! process's.

mod geometry;
mod in_place;
mod index;
mod mapping;
mod nodes;
mod owner;
mod pages;
mod segment;
mod state;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use index::{Name, since_start};
use penstock_contract::memory::{Claim, Lent, Reserved, Run, SharedMemory};
use penstock_contract::{
    Capabilities, Counters, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace,
    PutOutcome, PutRequest, Result, Store, StoreStats, deadline, slices,
};
use penstock_evict::DEMOTED;
use penstock_value::copies::SummedCopy;
use penstock_value::header::HEADER_BYTES;
use segment::Segment;

use crate::OpenOptions;
use crate::parameters::{self, refused};

/// How its URL looks.
pub(crate) const USAGE: &str = "shm://NAME?size=1GiB";

/// Entries visited between two looks at the clock.
const ENTRIES_A_LOOK: usize = 4096;

/// Opens the shared memory of a URL.
pub(crate) fn open(url: &str, _options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let url = parameters::parse(url, USAGE)?;
    let is_name = url.username().is_empty() && url.password().is_none() && url.port().is_none();
    let name = url
        .host_str()
        .filter(|_| is_name && matches!(url.path(), "" | "/"))
        .ok_or_else(|| refused("a shared-memory pool's URL has a name and no path", USAGE))?;
    let size = parameters::size(&url, USAGE)?;
    Ok(Arc::new(ShmStore::open(name, size)?))
}

/// Objects in shared memory, bounded in bytes. The least recently used objects go first.
pub struct ShmStore {
    name: String,
    segment: Segment,
    counters: Counters,
}

impl ShmStore {
    /// Opens the pool of this name: 1 to 200 letters, digits, dots, dashes and underscores. If the
    /// pool does not exist, it is created with `size` bytes, all of which are set aside at once.
    ///
    /// Fails with [`ErrorKind::Config`] if the pool does not exist and no size is given, if it has
    /// another size, or if this is not a pool. Fails with [`ErrorKind::Full`] if the machine does
    /// not have that much shared memory, and with [`ErrorKind::Denied`] if the pool is another
    /// user's.
    pub fn open(name: &str, size: Option<u64>) -> Result<Self> {
        let segment = Segment::open(name, size)?;
        segment.release_what_the_dead_left();
        Ok(Self {
            name: name.to_owned(),
            segment,
            counters: Counters::default(),
        })
    }

    /// Whether an operation may begin, or go on: its time is not over, and the memory is there.
    fn ready(&self, deadline: Instant) -> Result<()> {
        deadline::check(deadline)?;
        self.segment.check()
    }

    fn put_one(&self, request: &PutRequest<'_>, deadline: Instant) -> Result<PutOutcome> {
        self.ready(deadline)?;
        let (value, position) = (request.value, request.position);
        let bytes = slices::len_of(value);
        let name = Name::of(&request.key);
        let Some((claim, first)) = self.take_room(&name, bytes, position, deadline)? else {
            return Ok(PutOutcome::AlreadyPresent);
        };
        self.segment.write(first, value, deadline)?;
        self.publish(claim, &name, bytes, first, position)
    }

    /// Claims an entry and takes pages for a value, unless it is there already. Returns the first
    /// page.
    fn take_room(
        &self,
        name: &Name,
        bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> Result<Option<(index::Claim<'_>, u64)>> {
        let limit = self.segment.geometry.max_value_bytes();
        if bytes > limit {
            return Err(Error::new(
                ErrorKind::Config,
                format!("a value of {bytes} bytes is larger than the pool takes ({limit})"),
            ));
        }
        if self.is_present(name, bytes, position) {
            return Ok(None);
        }
        if !self.segment.owner.is_this_process() {
            return Err(Error::new(
                ErrorKind::Config,
                "the pool was opened before a fork: open it anew in the child",
            ));
        }
        let mut claim = self.segment.claim(name, deadline)?;
        let mut evicted = u64::from(claim.evicted);
        let count = self.segment.geometry.pages_of(bytes);
        let first = self
            .segment
            .take_pages(&mut claim, count, &mut evicted, deadline);
        self.counters.evicted(evicted);
        Ok(Some((claim, first?)))
    }

    /// Shows a value whose pages are filled.
    fn publish(
        &self,
        claim: index::Claim<'_>,
        name: &Name,
        bytes: u64,
        first: u64,
        position: u64,
    ) -> Result<PutOutcome> {
        // Another put may have been faster.
        if self.is_present(name, bytes, position) {
            return Ok(PutOutcome::AlreadyPresent);
        }
        self.segment.publish(claim, name, bytes, first, position)?;
        Ok(PutOutcome::Stored)
    }

    fn is_present(&self, name: &Name, bytes: u64, position: u64) -> bool {
        let found = self.segment.find(name);
        let present = found.filter(|found| found.bytes == bytes);
        present
            .inspect(|found| self.segment.note_use(found, position))
            .is_some()
    }

    fn get_one(&self, request: &mut GetRequest<'_, '_>, deadline: Instant) -> Result<GetOutcome> {
        let name = Name::of(&request.key);
        let room = slices::room_of(request.into);
        loop {
            self.ready(deadline)?;
            let Some(found) = self.segment.find(&name) else {
                return Ok(GetOutcome::Miss);
            };
            if found.bytes > room {
                return Ok(GetOutcome::TooLarge(found.bytes));
            }
            let payload_bytes = found.bytes.saturating_sub(HEADER_BYTES as u64);
            let mut payload = (request.wants_checksum)
                .then(|| SummedCopy::new(payload_bytes, request.is_in_place));
            let copy = payload.as_mut();
            if self
                .segment
                .read_value(&found, request.into, copy, deadline)?
            {
                request.checksum = payload.map(SummedCopy::finish);
                if request.position != GetRequest::NO_USE {
                    self.segment.note_use(&found, request.position);
                }
                return Ok(GetOutcome::Hit(found.bytes));
            }
        }
    }

    fn place(&self, error: Error, key: &Key) -> Error {
        error.with("store", self.url()).with("key", key)
    }
}

impl Store for ShmStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: true,
            persistent: true,
            bounded: true,
            pipelined: false,
            max_value_bytes: self.segment.geometry.max_value_bytes(),
        }
    }

    fn url(&self) -> String {
        format!("shm://{}?size={}", self.name, self.segment.geometry.size)
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let answer = self.ready(deadline).map(|()| {
            keys.iter()
                .map(|key| self.segment.find(&Name::of(key)).is_some())
                .collect()
        });
        self.counters.looked_up(&answer);
        answer
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        self.counters.put_each(batch, |request| {
            self.put_one(request, deadline)
                .map_err(|error| self.place(error, &request.key))
        });
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.counters.get_each(batch, |request| {
            self.get_one(request, deadline)
                .map_err(|error| self.place(error, &request.key))
        });
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        self.ready(deadline)
            .inspect_err(|_| self.counters.failed())?;
        let touch = |&(key, position): &(Key, u64)| {
            let found = self.segment.find(&Name::of(&key));
            found
                .inspect(|found| self.segment.note_use(found, position))
                .is_some()
        };
        Ok(values.iter().map(touch).collect())
    }

    fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        let (mut retired, mut outcome) = (false, Ok(()));
        for (n, found) in self.segment.each().enumerate() {
            if n % ENTRIES_A_LOOK == 0 {
                outcome = self.ready(deadline);
                if outcome.is_err() {
                    self.counters.failed();
                    break;
                }
            }
            retired |= self.segment.retire(&found, namespace);
        }
        if retired {
            self.segment.look_for_the_retired();
        }
        outcome
    }

    fn used_at(&self, last_use: u64) -> Option<SystemTime> {
        let ago = since_start().saturating_sub(Duration::from_nanos(last_use));
        (last_use != DEMOTED).then(|| SystemTime::now() - ago)
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.ready(deadline)
            .inspect_err(|_| self.counters.failed())?;
        let removed = keys
            .iter()
            .filter(|key| self.segment.remove(&Name::of(key)));
        Ok(removed.count() as u64)
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.ready(deadline)
            .inspect_err(|_| self.counters.failed())?;
        for (n, found) in self.segment.each().enumerate() {
            if n % ENTRIES_A_LOOK == 0 {
                self.ready(deadline)
                    .inspect_err(|_| self.counters.failed())?;
            }
            let Some(key) = self.segment.key_of(&found) else {
                continue;
            };
            if namespace.is_some_and(|namespace| key.namespace != namespace) {
                continue;
            }
            // Skip a value that is being replaced, or was being replaced by a process that died.
            let youngest = self.segment.find(&Name::of(&key));
            if youngest.is_some_and(|youngest| youngest.entry == found.entry) {
                visit(Listed {
                    key,
                    bytes: found.bytes,
                    last_use: self.segment.used_at(&found),
                });
            }
        }
        Ok(())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.ready(deadline)
            .inspect_err(|_| self.counters.failed())?;
        let geometry = &self.segment.geometry;
        let (mut objects, mut pages, mut bytes) = (0_u64, 0, 0);
        for found in self.segment.each() {
            objects += 1;
            pages += geometry.pages_of(found.bytes);
            bytes += found.bytes;
        }
        let facts = [
            ("path", self.segment.path().display().to_string()),
            ("size_bytes", geometry.size.to_string()),
            (
                "capacity_bytes",
                (geometry.pages * geometry.page_bytes).to_string(),
            ),
            ("used_bytes", (pages * geometry.page_bytes).to_string()),
            ("value_bytes", bytes.to_string()),
            ("objects", objects.to_string()),
            ("page_bytes", geometry.page_bytes.to_string()),
        ];
        Ok(facts.map(|(name, fact)| (name.into(), fact)).into())
    }

    fn memory(&self) -> Option<&dyn SharedMemory> {
        Some(self)
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }

    fn charge(&self, value_bytes: u64) -> u64 {
        let geometry = &self.segment.geometry;
        geometry.pages_of(value_bytes) * geometry.page_bytes
    }
}

// SAFETY: the store owns the mapping of its segment, and unmaps it when it is dropped.
#[allow(unsafe_code)]
unsafe impl SharedMemory for ShmStore {
    fn warm_up(&self, stop: &dyn Fn() -> bool) {
        self.segment.mapping().warm_up(stop);
    }

    fn claim(&self, key: &Key) -> Option<Claim<'_>> {
        let claim = self.segment.owner.claim(Name::of(key).hash())?;
        Some(Box::new(claim))
    }

    fn region(&self) -> Run {
        self.segment.mapping().all()
    }

    fn lend(&self, key: &Key, position: u64, deadline: Instant) -> Option<Box<dyn Lent + '_>> {
        let lent = self.lend_one(key, position, deadline)?;
        Some(Box::new(lent))
    }

    fn reserve(
        &self,
        key: &Key,
        payload_bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> Result<Option<Box<dyn Reserved + '_>>> {
        let reserved = self.reserve_one(key, payload_bytes, position, deadline)?;
        Ok(reserved.map(|reserved| Box::new(reserved) as Box<dyn Reserved>))
    }
}
