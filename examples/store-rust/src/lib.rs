//! A store for Penstock in an LMDB database: `lmdb:///absolute/path?size=10GiB`.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions, MdbError, RwTxn, WithoutTls};
use penstock_store_plugin::Open;
use penstock_store_plugin::contract::{
    Capabilities, Counters, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace,
    PutOutcome, PutRequest, Result, Store, StoreStats, deadline, slices,
};

const DEFAULT_SIZE: u64 = 1 << 30;
/// How long opening waits for somebody who writes.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a writer looks whether it is its turn.
const PAUSE: Duration = Duration::from_micros(200);
/// Bytes of a number in the order.
const NUMBER_BYTES: usize = 8;

/// Values by key, and keys by the order in which they were put. Each value has its number in that
/// order in front of it.
pub struct LmdbStore {
    env: Env<WithoutTls>,
    values: Database<Bytes, Bytes>,
    order: Database<Bytes, Bytes>,
    path: PathBuf,
    size: u64,
    counters: Counters,
}

penstock_store_plugin::export!(LmdbStore);

impl Open for LmdbStore {
    fn open(url: &str) -> Result<Self> {
        let wrong = || {
            Error::new(
                ErrorKind::Config,
                "an LMDB pool is lmdb:///absolute/path?size=BYTES (or KiB, MiB, GiB)",
            )
        };
        let rest = url.strip_prefix("lmdb://").ok_or_else(wrong)?;
        let (path, size) = match rest.split_once("?size=") {
            Some((path, size)) => (path, parse_size(size).ok_or_else(wrong)?),
            None => (rest, DEFAULT_SIZE),
        };
        if !path.starts_with('/') || path.contains('?') {
            return Err(wrong());
        }
        Self::at(Path::new(path), size)
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let unit = units.iter().find(|(unit, _)| text.ends_with(unit));
    let (number, shift) = unit.map_or((text, 0), |(unit, shift)| {
        (text.trim_end_matches(unit), *shift)
    });
    let size: u64 = number.parse().ok()?;
    size.checked_mul(1 << shift).filter(|size| *size >= 1 << 20)
}

/// The same for every failure of the database, but that it is full.
fn failed(error: heed::Error) -> Error {
    let kind = match error {
        heed::Error::Mdb(MdbError::MapFull) => ErrorKind::Full,
        _ => ErrorKind::Io,
    };
    Error::new(kind, error.to_string())
}

impl LmdbStore {
    /// Opens the database in a folder, which is made if it is not there.
    fn at(path: &Path, size: u64) -> Result<Self> {
        fs::create_dir_all(path).map_err(|cause| {
            Error::new(ErrorKind::Io, "the folder cannot be made").caused_by(cause)
        })?;
        let env = Self::opened(path, size)?;
        // Processes that were killed while they read have left their places in the table of readers.
        // What they read last keeps all pages from use that were freed since.
        env.clear_stale_readers().map_err(failed)?;
        let _turn = Turn::take(path, Instant::now() + PATIENCE)?;
        let mut write = env.write_txn().map_err(failed)?;
        let values = env
            .create_database(&mut write, Some("values"))
            .map_err(failed)?;
        let order = env
            .create_database(&mut write, Some("order"))
            .map_err(failed)?;
        write.commit().map_err(failed)?;
        Ok(Self {
            env,
            values,
            order,
            path: path.to_owned(),
            size,
            counters: Counters::default(),
        })
    }

    /// The database of a folder, which this process may open once only. It stays open, as other
    /// handles may come.
    fn opened(path: &Path, size: u64) -> Result<Env<WithoutTls>> {
        static OPENED: Mutex<Option<HashMap<PathBuf, Env<WithoutTls>>>> = Mutex::new(None);
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = opened.get_or_insert_default();
        if let Some(env) = opened.get(path) {
            return Ok(env.clone());
        }
        let env = Self::map(path, size)?;
        opened.insert(path.to_owned(), env.clone());
        Ok(env)
    }

    #[allow(
        unsafe_code,
        reason = "heed leaves it to its user that the file is nobody else's"
    )]
    fn map(path: &Path, size: u64) -> Result<Env<WithoutTls>> {
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        // A file system's block is a page of the database.
        options
            .map_size(size.next_multiple_of(4096) as usize)
            .max_dbs(2)
            .max_readers(1024);
        // SAFETY: only LMDB writes to the folder's files. A cache needs no flush to the disk: what a
        // crash of the machine tears does not verify.
        let opened = unsafe {
            options.flags(EnvFlags::NO_SYNC | EnvFlags::NO_READ_AHEAD);
            options.open(path)
        };
        opened.map_err(failed)
    }

    fn find(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        deadline::check(deadline)?;
        let read = self.env.read_txn().map_err(failed)?;
        keys.iter()
            .map(|key| {
                let value = self.values.get(&read, &key.to_bytes()).map_err(failed)?;
                Ok(value.is_some())
            })
            .collect()
    }

    fn get_one(&self, request: &mut GetRequest<'_, '_>) -> Result<GetOutcome> {
        let read = self.env.read_txn().map_err(failed)?;
        let value = self
            .values
            .get(&read, &request.key.to_bytes())
            .map_err(failed)?;
        // The value stays as it is in the map until the transaction ends.
        let Some((_, value)) = value.and_then(apart) else {
            return Ok(GetOutcome::Miss);
        };
        let bytes = value.len() as u64;
        if bytes > slices::room_of(request.into) {
            return Ok(GetOutcome::TooLarge(bytes));
        }
        slices::scatter(value, request.into);
        Ok(GetOutcome::Hit(bytes))
    }

    fn put_one(&self, request: &PutRequest<'_>, deadline: Instant) -> Result<PutOutcome> {
        let bytes = slices::len_of(request.value);
        let limit = self.capabilities().max_value_bytes;
        if bytes > limit {
            return Err(Error::new(
                ErrorKind::Config,
                format!("a value of {bytes} bytes is larger than the store takes ({limit})"),
            ));
        }
        let _turn = Turn::take(&self.path, deadline)?;
        match self.write(request, bytes) {
            // Readers that were killed may be what keeps the room: see `at`.
            Err(heed::Error::Mdb(MdbError::MapFull)) if self.has_cleared_readers() => {
                self.write(request, bytes)
            }
            done => done,
        }
        .map_err(failed)
    }

    /// Whether places of readers that are gone were there, and are free now.
    fn has_cleared_readers(&self) -> bool {
        self.env.clear_stale_readers().is_ok_and(|gone| gone > 0)
    }

    fn write(&self, request: &PutRequest<'_>, bytes: u64) -> heed::Result<PutOutcome> {
        let key = request.key.to_bytes();
        let mut write = self.env.write_txn()?;
        let there = self.values.get(&write, &key)?.and_then(apart);
        if there.is_some_and(|(_, value)| value.len() as u64 == bytes) {
            return Ok(PutOutcome::AlreadyPresent);
        }
        self.take_out(&mut write, &key)?;
        self.make_room(&mut write, bytes)?;
        let last = self.order.last(&write)?;
        let last = last.and_then(|(number, _)| number.try_into().ok());
        let number = last.map_or(0, |number| u64::from_be_bytes(number) + 1);
        let number = number.to_be_bytes();
        self.order.put(&mut write, &number, &key)?;
        let mut rest = [&number[..]]
            .into_iter()
            .chain(request.value.iter().map(|slice| &**slice));
        self.values
            .put_reserved(&mut write, &key, NUMBER_BYTES + bytes as usize, |room| {
                rest.try_for_each(|slice| std::io::Write::write_all(room, slice))
            })?;
        write.commit()?;
        Ok(PutOutcome::Stored)
    }

    /// Removes the values that were put first, until the file has room for so many bytes. A quarter
    /// of it stays free, as pages can be used again only after the transaction that frees them.
    fn make_room(&self, write: &mut RwTxn<'_>, bytes: u64) -> heed::Result<()> {
        let most = self.size / 4 * 3;
        loop {
            let mut used = 0;
            for database in [&self.values, &self.order] {
                let stat = database.stat(write)?;
                let pages = stat.branch_pages + stat.leaf_pages + stat.overflow_pages;
                used += pages as u64 * u64::from(stat.page_size);
            }
            if used + bytes <= most {
                return Ok(());
            }
            let Some((number, key)) = self.order.first(write)? else {
                return Ok(());
            };
            let (number, key) = (number.to_vec(), key.to_vec());
            self.order.delete(write, &number)?;
            let was_there = self.values.delete(write, &key)?;
            self.counters.evicted(was_there.into());
        }
    }

    /// Removes a value and its place in the order. Returns whether it was there.
    fn take_out(&self, write: &mut RwTxn<'_>, key: &[u8]) -> heed::Result<bool> {
        let there = self.values.get(write, key)?.and_then(apart);
        if let Some(number) = there.map(|(number, _)| *number) {
            self.order.delete(write, &number)?;
        }
        self.values.delete(write, key)
    }
}

/// The number of a stored value, and what was put.
fn apart(stored: &[u8]) -> Option<(&[u8; NUMBER_BYTES], &[u8])> {
    stored.split_first_chunk()
}

/// The turn to write: whoever has it is the only one of all processes. LMDB's own lock has no
/// deadline, so nobody waits for that; whoever writes takes a turn first.
struct Turn(File);

impl Turn {
    /// Waits for the turn until the deadline. The kernel takes it back from a process that ends.
    fn take(folder: &Path, deadline: Instant) -> Result<Self> {
        let io = |what: &'static str| move |cause| Error::new(ErrorKind::Io, what).caused_by(cause);
        let mut options = File::options();
        options.create(true).append(true);
        let file = options
            .open(folder.join("turn.lock"))
            .map_err(io("the file that writers lock cannot be opened"))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::Error(cause)) => {
                    return Err(io("the file that writers lock cannot be locked")(cause));
                }
                Err(TryLockError::WouldBlock) => deadline::check(deadline)?,
            }
            thread::sleep(PAUSE.min(deadline.saturating_duration_since(Instant::now())));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // To close the file is not enough: a fork of this process may have it too.
        let _ = self.0.unlock();
    }
}

impl Store for LmdbStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: true,
            persistent: true,
            bounded: true,
            pipelined: false,
            max_value_bytes: self.size / 8,
        }
    }

    fn url(&self) -> String {
        format!("lmdb://{}?size={}", self.path.display(), self.size)
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let answer = self.find(keys, deadline);
        self.counters.looked_up(&answer);
        answer
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        self.counters.put_each(batch, |request| {
            deadline::check(deadline).and_then(|()| self.put_one(request, deadline))
        });
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.counters.get_each(batch, |request| {
            deadline::check(deadline).and_then(|()| self.get_one(request))
        });
    }

    /// What was put first goes first, however it is used.
    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        let keys: Vec<Key> = values.iter().map(|(key, _)| *key).collect();
        self.find(&keys, deadline)
            .inspect_err(|_| self.counters.failed())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        let remove = || {
            deadline::check(deadline)?;
            let _turn = Turn::take(&self.path, deadline)?;
            let mut write = self.env.write_txn().map_err(failed)?;
            let mut removed = 0;
            for key in keys {
                deadline::check(deadline)?;
                let was_there = self.take_out(&mut write, &key.to_bytes());
                removed += u64::from(was_there.map_err(failed)?);
            }
            write.commit().map_err(failed)?;
            Ok(removed)
        };
        remove().inspect_err(|_: &Error| self.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        let in_time = || deadline::check(deadline).inspect_err(|_| self.counters.failed());
        in_time()?;
        let read = self.env.read_txn().map_err(failed)?;
        let found: Box<dyn Iterator<Item = _>> = match &namespace {
            Some(namespace) => {
                let found = self.values.prefix_iter(&read, &namespace.0);
                Box::new(found.map_err(failed)?)
            }
            None => Box::new(self.values.iter(&read).map_err(failed)?),
        };
        for entry in found {
            in_time()?;
            let (key, stored) = entry.map_err(failed)?;
            let key = key.try_into().ok().map(Key::from_bytes);
            let (Some(Ok(key)), Some((_, value))) = (key, apart(stored)) else {
                continue;
            };
            visit(Listed {
                key,
                bytes: value.len() as u64,
                last_use: 0,
            });
        }
        Ok(())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        deadline::check(deadline)?;
        let read = self.env.read_txn().map_err(failed)?;
        let objects = self.values.len(&read).map_err(failed)?;
        Ok(vec![
            ("path".into(), self.path.display().to_string()),
            ("capacity_bytes".into(), self.size.to_string()),
            ("objects".into(), objects.to_string()),
        ])
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }
}
