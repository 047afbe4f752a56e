//! A store in a directory that the processes of a machine share, or of several hosts if they have all
//! mounted it. It is the embedded default.
//!
//! Each value is one file. It is written beside the values and then renamed, so a value is there
//! whole or not at all, whenever a process dies. Nothing is synced to the disk: after a power
//! failure values may be torn, and their checksum shows that. The bound holds for all processes
//! together. Each process applies the size that it was opened with.
//!
//! Hosts share values, but neither locks nor counts ([`reach`]). A host counts what others have put
//! when it scans, every ten seconds while it puts, so the bound may be exceeded by what others put
//! meanwhile.
//!
//! A process may be stopped (not killed) while it makes room. Until it goes on, the others cannot
//! make any. Their puts then fail with [`ErrorKind::Full`]; their gets go on.

mod directory;
mod failure;
#[cfg(test)]
pub(crate) mod fuzz;
mod names;
mod reach;
mod temp;
mod upkeep;
mod usage;

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{AtFlags, Timespec, Timestamps, UTIME_OMIT};

use crate::{
    Capabilities, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace, PutOutcome,
    PutRequest, Result, Store, StoreStats, deadline, recency, slices,
};
use directory::{Directory, charge, free_bytes};
pub use reach::Hosts;
use upkeep::{Upkeep, each_value, if_there};
use usage::Room;

/// A value's time of last use is not kept finer than this, which saves a system call on most hits.
const RECENCY_GRAIN: Duration = Duration::from_secs(60);
/// Longest time that a put looks for room, unless whoever opens the store says another.
const ROOM_WAIT: Duration = Duration::from_millis(200);
/// Longest time that a failed put waits to give its room back.
const GIVE_BACK_WAIT: Duration = Duration::from_millis(5);
/// Longest time that opening waits for the first count of the bytes in use.
const COUNT_WAIT: Duration = Duration::from_millis(500);

/// Objects in a directory, bounded in bytes. All processes that open the directory share them. The
/// least recently used objects go first.
pub struct FileStore {
    /// Declared first, so that the thread stops before the directory is dropped.
    upkeep: Upkeep,
    directory: Arc<Directory>,
    room_wait: Duration,
}

impl FileStore {
    /// Opens the directory, and creates it if it does not exist. `capacity` is the bound in bytes.
    /// By default it is 10 GiB, or 80 % of what the file system could give the pool, if that is
    /// less. Values count in whole blocks of 4 KiB. If `hosts` does not say who has mounted the
    /// directory, its file system does.
    ///
    /// Fails with [`ErrorKind::Config`] if the path is not absolute, and with
    /// [`ErrorKind::Denied`], [`ErrorKind::Full`] or [`ErrorKind::Io`] if the directory cannot be
    /// used.
    pub fn open(root: &Path, capacity: Option<u64>, hosts: Option<Hosts>) -> Result<Self> {
        if !root.is_absolute() {
            return Err(
                Error::new(ErrorKind::Config, "a file pool needs an absolute path")
                    .with("path", root.display()),
            );
        }
        let directory = Arc::new(Directory::open(root.to_owned(), capacity, hosts)?);
        let store = Self {
            upkeep: Upkeep::start(Arc::clone(&directory))?,
            directory,
            room_wait: ROOM_WAIT,
        };
        store.wait_for_the_first_count()?;
        Ok(store)
    }

    /// Lets a put look for room for so long before it fails with [`ErrorKind::Full`], and no longer
    /// than its deadline. By default this is 200 ms.
    #[must_use]
    pub fn with_room_wait(self, room_wait: Duration) -> Self {
        Self { room_wait, ..self }
    }

    /// Waits a little for the first count of the bytes in use, because puts fail before it. The
    /// count takes a moment in a new directory. It takes longer only in a directory whose count was
    /// lost.
    fn wait_for_the_first_count(&self) -> Result<()> {
        let give_up = Instant::now() + COUNT_WAIT;
        while Instant::now() < give_up {
            match self.directory.usage.lock(give_up) {
                Ok(locked) if locked.count.is_some() => break,
                Ok(_) => {}
                // Whoever holds it is making room, so it has been counted.
                Err(error) if error.kind() == ErrorKind::TimedOut => break,
                Err(error) => return Err(error),
            }
            self.upkeep.make_room(0, give_up);
        }
        Ok(())
    }

    fn put_one(&self, request: &PutRequest<'_>, deadline: Instant) -> Result<PutOutcome> {
        deadline::check(deadline)?;
        let bytes = slices::len_of(request.value);
        let limit = self.capabilities().max_value_bytes;
        if bytes > limit {
            return Err(Error::new(
                ErrorKind::Config,
                format!("a value of {bytes} bytes is larger than the pool takes ({limit})"),
            ));
        }
        let path = self.directory.value_path(&request.key);
        let used_at = time_of_use(request.position);
        match if_there(fs::metadata(&path)) {
            Ok(None) => {}
            Ok(Some(file)) if file.len() == bytes => {
                if was_used_long_ago(&file, used_at)
                    && let Ok(file) = File::open(&path)
                {
                    note_use(&file, used_at);
                }
                return Ok(PutOutcome::AlreadyPresent);
            }
            Ok(Some(_)) => {
                self.directory
                    .remove(std::slice::from_ref(&path), deadline)?;
            }
            Err(error) => return Err(failure::of(error, "look for a value", &path)),
        }
        let mut making = self.begin(bytes, deadline)?;
        deadline::check(deadline)?;
        write_all(&making.file, request.value)
            .map_err(|error| failure::of(error, "write a value", &making.path))?;
        if request.position > 0 {
            note_use(&making.file, used_at);
        }
        if self.directory.reach.hosts() == Hosts::Several {
            // Until then other hosts may see the name before the bytes, and a server's refusal of
            // the bytes is not known.
            let synced = making.file.sync_data();
            synced.map_err(|error| failure::of(error, "write a value", &making.path))?;
        }
        if self.directory.publish(&making.path, &path)? {
            making.published = true;
            return Ok(PutOutcome::Stored);
        }
        // Another put was faster.
        match if_there(fs::metadata(&path)) {
            Ok(Some(file)) if file.len() == bytes => Ok(PutOutcome::AlreadyPresent),
            _ => Err(Error::new(
                ErrorKind::Unavailable,
                "the value is being replaced by others",
            )),
        }
    }

    /// A new temporary file, with room taken for a value of `bytes` bytes.
    fn begin(&self, bytes: u64, deadline: Instant) -> Result<Making<'_>> {
        let bytes = charge(bytes);
        let give_up = deadline.min(Instant::now() + self.room_wait);
        loop {
            if let Some(making) = self.try_begin(bytes, deadline)? {
                return Ok(making);
            }
            if Instant::now() >= give_up {
                // Have the thread make room for later puts.
                self.upkeep.want(bytes);
                deadline::check(deadline)?;
                return Err(Error::new(ErrorKind::Full, "the pool has no room now"));
            }
            self.upkeep.make_room(bytes, give_up);
        }
    }

    /// As [`begin`](Self::begin), but only if there is room now.
    fn try_begin(&self, bytes: u64, deadline: Instant) -> Result<Option<Making<'_>>> {
        let directory = &*self.directory;
        let path = directory.writer.temporary(bytes);
        let file = create_options()
            .create_new(true)
            .open(&path)
            .map_err(|error| failure::of(error, "create a file", &path))?;
        // The file exists before the room is taken, so that a scan sees the file, the taking, or
        // both.
        let mut making = Making {
            directory,
            path,
            file,
            taken: 0,
            published: false,
        };
        let Room::Taken(used) = directory.usage.take(bytes, directory.capacity, deadline)? else {
            return Ok(None);
        };
        making.taken = bytes;
        if used > directory.capacity - directory.capacity / 20 {
            self.upkeep.want(0);
        }
        self.upkeep.watch_others();
        Ok(Some(making))
    }

    fn get_one(&self, request: &mut GetRequest<'_, '_>, deadline: Instant) -> Result<GetOutcome> {
        deadline::check(deadline)?;
        let path = self.directory.value_path(&request.key);
        let failed = |error| failure::of(error, "read a value", &path);
        let Some(file) = if_there(File::open(&path)).map_err(failed)? else {
            return Ok(GetOutcome::Miss);
        };
        let Some(metadata) = if_there(file.metadata()).map_err(failed)? else {
            return Ok(GetOutcome::Miss);
        };
        let used_at = time_of_use(request.position);
        if request.position != GetRequest::NO_USE && was_used_long_ago(&metadata, used_at) {
            note_use(&file, used_at);
        }
        let bytes = metadata.len();
        if bytes > slices::room_of(request.into) {
            return Ok(GetOutcome::TooLarge(bytes));
        }
        let read = if_there(read_all(&file, request.into, bytes)).map_err(failed)?;
        Ok(read.map_or(GetOutcome::Miss, |()| GetOutcome::Hit(bytes)))
    }

    /// Notes the exact time of use, unlike a get: whoever touches a value wants it to be younger than
    /// those that are put meanwhile.
    fn touch_one(&self, key: &Key, position: u64, deadline: Instant) -> Result<bool> {
        deadline::check(deadline)?;
        let path = self.directory.value_path(key);
        let failed = |error| failure::of(error, "touch a value", &path);
        let Some(file) = if_there(fs::metadata(&path)).map_err(failed)? else {
            return Ok(false);
        };
        let used_at = time_of_use(position);
        if file.modified().is_ok_and(|noted| noted >= used_at) {
            return Ok(true);
        }
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT,
            },
            last_modification: timespec(used_at),
        };
        // By name, as opening a file takes longer. Another value may lie there by now: it was put
        // after the look.
        let noted = rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty());
        if_there(noted.map_err(io::Error::from))
            .map(|noted| noted.is_some())
            .map_err(failed)
    }

    fn place(&self, error: Error, key: &Key) -> Error {
        error.with("store", self.url()).with("key", key)
    }
}

impl Store for FileStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: true,
            persistent: true,
            bounded: true,
            pipelined: false,
            // A longer value would be charged more than the capacity.
            max_value_bytes: self.directory.capacity / charge(1) * charge(1),
        }
    }

    fn url(&self) -> String {
        match url::Url::from_file_path(&self.directory.root) {
            Ok(url) => {
                let capacity = self.directory.capacity;
                match self.directory.reach.hosts() {
                    Hosts::One => format!("{url}?size={capacity}"),
                    hosts @ Hosts::Several => {
                        format!("{url}?size={capacity}&hosts={}", hosts.name())
                    }
                }
            }
            Err(()) => unreachable!("the root is absolute"),
        }
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let look = |key: &Key| {
            deadline::check(deadline)?;
            let path = self.directory.value_path(key);
            match if_there(fs::metadata(&path)) {
                Ok(found) => Ok(found.is_some()),
                Err(error) => Err(failure::of(error, "look for a value", &path)),
            }
        };
        let answer = keys
            .iter()
            .map(|key| look(key).map_err(|e| self.place(e, key)))
            .collect();
        self.directory.counters.looked_up(&answer);
        answer
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        self.directory.counters.put_each(batch, |request| {
            self.put_one(request, deadline)
                .map_err(|error| self.place(error, &request.key))
        });
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.directory.counters.get_each(batch, |request| {
            self.get_one(request, deadline)
                .map_err(|error| self.place(error, &request.key))
        });
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        values
            .iter()
            .map(|(key, position)| {
                self.touch_one(key, *position, deadline)
                    .map_err(|error| self.place(error, key))
            })
            .collect::<Result<_>>()
            .inspect_err(|_| self.directory.counters.failed())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        let mut removed = 0;
        for key in keys {
            let path = self.directory.value_path(key);
            let outcome = deadline::check(deadline)
                .and_then(|()| self.directory.remove(std::slice::from_ref(&path), deadline));
            removed += outcome
                .map_err(|error| self.place(error, key))
                .inspect_err(|_| self.directory.counters.failed())?
                .0;
        }
        Ok(removed)
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        let mut visit_entry = |key, entry: &fs::DirEntry| {
            if let Some(file) = if_there(entry.metadata())? {
                visit(Listed {
                    key,
                    bytes: file.len(),
                    last_use: since_the_epoch(file.modified()?),
                });
            }
            Ok(())
        };
        let root = &self.directory.root;
        each_value(root, namespace, &mut visit_entry, &|| {
            Instant::now() < deadline
        })
        .map_err(|error| failure::of(error, "list the pool", root))
        .and_then(|complete| {
            if complete {
                Ok(())
            } else {
                deadline::check(deadline)
            }
        })
        .inspect_err(|_| self.directory.counters.failed())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let facts = || {
            deadline::check(deadline)?;
            let count = self.directory.usage.lock(deadline)?.count;
            let used = count.map_or("unknown".to_owned(), |count| count.used.to_string());
            Ok(vec![
                ("path".into(), self.directory.root.display().to_string()),
                ("capacity_bytes".into(), self.directory.capacity.to_string()),
                ("used_bytes".into(), used),
                ("hosts".into(), self.directory.reach.hosts().name().into()),
                (
                    "disk_free_bytes".into(),
                    free_bytes(&self.directory.root)?.to_string(),
                ),
            ])
        };
        facts().inspect_err(|_| self.directory.counters.failed())
    }

    fn stats(&self) -> StoreStats {
        self.directory.counters.snapshot()
    }

    fn charge(&self, value_bytes: u64) -> u64 {
        charge(value_bytes)
    }
}

/// A value in the making. If it is dropped before it is published, it leaves nothing behind.
struct Making<'a> {
    directory: &'a Directory,
    path: PathBuf,
    file: File,
    taken: u64,
    published: bool,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        // The lock is held from before the file goes until its room is given back. A scan that ended
        // between the two would settle the count without the file, and the room would be given back
        // twice. If any of this fails, the count stays too high until the next scan.
        let locked = (self.taken > 0)
            .then(|| self.directory.usage.lock(Instant::now() + GIVE_BACK_WAIT))
            .and_then(Result::ok);
        let gone = fs::remove_file(&self.path).is_ok();
        if gone && let Some(mut locked) = locked {
            locked.give_back(self.taken);
            let _ = locked.save();
        }
    }
}

/// Options to write a file that only its owner can read.
fn create_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}

/// The time of use to note for a value that is used now and has `position` tokens before it in its
/// prompt.
fn time_of_use(position: u64) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(recency::earlier(position)).unwrap_or(now)
}

fn timespec(time: SystemTime) -> Timespec {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    Timespec {
        tv_sec: since.as_secs() as i64,
        tv_nsec: since.subsec_nanos().into(),
    }
}

/// Nanoseconds from 1970 to a time; 0 for times before.
fn since_the_epoch(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// Whether the noted time of a value's use is so old that it should be renewed.
fn was_used_long_ago(file: &Metadata, used_at: SystemTime) -> bool {
    let since = file
        .modified()
        .ok()
        .and_then(|noted| used_at.duration_since(noted).ok());
    since.is_some_and(|since| since >= RECENCY_GRAIN)
}

/// Notes a value's time of use. This is a hint: if it cannot be noted, nothing is harmed.
fn note_use(file: &File, used_at: SystemTime) {
    let _ = file.set_modified(used_at);
}

fn write_all(mut file: &File, value: &[IoSlice<'_>]) -> io::Result<()> {
    let bytes = slices::len_of(value);
    let mut written = 0;
    while written < bytes {
        let outcome = match written {
            0 => file.write_vectored(value),
            _ => file.write_vectored(&slices::remaining(value, written as usize)),
        };
        match outcome {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => written += n as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read_all(mut file: &File, into: &mut [IoSliceMut<'_>], bytes: u64) -> io::Result<()> {
    let mut read = 0;
    while read < bytes {
        let outcome = match read {
            0 => file.read_vectored(into),
            _ => file.read_vectored(&mut slices::remaining_mut(into, read as usize)),
        };
        match outcome {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => read += n as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linux has a device on which no write ever finds room.
    #[test]
    fn a_device_without_room_is_a_full_pool() {
        let path = Path::new("/dev/full");
        let device = File::options().write(true).open(path).unwrap();
        let value = [IoSlice::new(b"header"), IoSlice::new(b"payload")];
        let error = write_all(&device, &value).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(
            failure::of(error, "write a value", path).kind(),
            ErrorKind::Full
        );
    }
}
