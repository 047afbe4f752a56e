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
//!
//! Another user of the machine may have made what lies there, or bend names elsewhere. So folders and
//! values are believed only if nobody but trusted users can have written them ([`trust`]), and all
//! are reached through folders that are held open ([`folder`]). Whatever else has a value's name is
//! a miss. A put replaces it.
//!
//! The directory may be removed while it is in use. The next put makes it anew.

mod directory;
mod failure;
mod folder;
#[cfg(test)]
pub(crate) mod fuzz;
mod names;
mod place;
mod reach;
mod seen;
mod temp;
mod trust;
mod upkeep;
mod usage;
mod whole;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use directory::{Directory, free_bytes};
use failure::if_there;
use folder::{Folder, Judged, fresh_len, is_too_long, note_use};
use names::ValuePath;
use penstock_contract::{
    Capabilities, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace, PutOutcome,
    PutRequest, Result, Store, StoreStats, deadline, slices,
};
use place::Place;
pub use reach::Hosts;
use seen::{Seen, charge};
pub use trust::Trust;
use upkeep::{Upkeep, each_value};
use usage::Room;
use whole::{read_all, write_all};

use crate::parameters::{self, refused};
use crate::{OpenOptions, recency};

/// How its URL looks.
pub(crate) const USAGE: &str = "file:///absolute/path?size=10GiB[&hosts=several][&trust=UID,group]";

/// A value's time of last use is not kept finer than this, which saves a system call on most hits.
const RECENCY_GRAIN: Duration = Duration::from_secs(60);
/// The time of use of a value that was retired, since 1970. Zero is what some file systems say if
/// they know none.
const RETIRED: Duration = Duration::from_secs(1);
/// Longest time that a put looks for room, unless whoever opens the store says another.
const ROOM_WAIT: Duration = Duration::from_millis(200);
/// Longest time that a failed put waits to give its room back.
const GIVE_BACK_WAIT: Duration = Duration::from_millis(5);
/// Longest time that opening waits for the first count of the bytes in use.
const COUNT_WAIT: Duration = Duration::from_millis(500);
/// How often a put makes room on a full disk. If somebody else takes that room each time, more values
/// would go in vain.
const DISK_ROUNDS: usize = 3;

/// Opens the directory of a URL.
pub(crate) fn open(text: &str, _options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let url = parameters::parse(text, USAGE)?;
    // A parsed URL is always absolute: `file:pool` would become `/pool`.
    let path = (text.starts_with("file://") && !url.has_host() && url.path().len() > 1)
        .then(|| url.to_file_path().ok())
        .flatten();
    let problem = "a file pool's URL has three slashes and an absolute path";
    let path = path.ok_or_else(|| refused(problem, USAGE))?;
    let (mut hosts, mut trust) = (None, None);
    let size = parameters::size_beside(&url, USAGE, &mut |name, value| match name {
        "hosts" if hosts.is_none() => {
            hosts = Hosts::parse(value);
            hosts.is_some()
        }
        "trust" if trust.is_none() => {
            trust = Trust::parse(value);
            trust.is_some()
        }
        _ => false,
    })?;
    let store = FileStore::open(&path, size, hosts, &trust.unwrap_or_default())?;
    Ok(Arc::new(store))
}

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
    /// directory, its file system does. `trust` names whom the pool believes besides this process's
    /// own user and root.
    ///
    /// Fails with [`ErrorKind::Config`] if the path is not absolute. Fails with
    /// [`ErrorKind::Denied`] if the directory belongs to a user who is not trusted, or such a user
    /// may write into it. Fails with that, [`ErrorKind::Full`] or [`ErrorKind::Io`] if the directory
    /// cannot be used.
    pub fn open(
        root: &Path,
        capacity: Option<u64>,
        hosts: Option<Hosts>,
        trust: &Trust,
    ) -> Result<Self> {
        if !root.is_absolute() {
            return Err(
                Error::new(ErrorKind::Config, "a file pool needs an absolute path")
                    .with("path", root.display()),
            );
        }
        let directory = Arc::new(Directory::open(root, capacity, hosts, trust)?);
        let store = Self {
            upkeep: Upkeep::start(Arc::clone(&directory))?,
            directory,
            room_wait: ROOM_WAIT,
        };
        store.wait_for_the_first_count();
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
    /// lost. Whoever holds the count's lock holds nobody up: the upkeep thread counts later.
    fn wait_for_the_first_count(&self) {
        let give_up = Instant::now() + COUNT_WAIT;
        while Instant::now() < give_up {
            if self.directory.place().usage.peek().is_some() {
                break;
            }
            self.upkeep.make_room(0, give_up);
        }
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
        let give_up = deadline.min(Instant::now() + self.room_wait);
        let (mut is_renewed, mut rounds) = (false, 0);
        loop {
            let place = self.directory.place();
            let failed = match self.try_put(&place, request, bytes, deadline) {
                Err(error) => error,
                outcome => return outcome,
            };
            if failure::is_of_what_is_gone(&failed) && !is_renewed {
                is_renewed = true;
                self.directory.renew(&place, deadline)?;
            } else if failure::is_of_a_full_disk(&failed) && rounds < DISK_ROUNDS {
                match self.upkeep.free_disk(charge(bytes), give_up) {
                    Some(freed) if freed > 0 => rounds += 1,
                    None if Instant::now() < give_up => {}
                    // A scan may take longer than a put may: have the thread make room.
                    Some(_) | None => {
                        self.upkeep.want_disk(charge(bytes));
                        return Err(failed);
                    }
                }
            } else {
                return Err(failed);
            }
        }
    }

    /// Puts a value, but only in this place, and only if the disk has room.
    fn try_put(
        &self,
        place: &Arc<Place>,
        request: &PutRequest<'_>,
        bytes: u64,
        deadline: Instant,
    ) -> Result<PutOutcome> {
        let path = ValuePath::of(&request.key);
        let used_at = time_of_use(request.position);
        let look = |shard: &Folder| {
            shard.judge(path.file()).map_err(|error| {
                failure::of(error, "look for a value", &shard.path().join(path.file()))
            })
        };
        let shard = place.shard(&path)?;
        if let Some(shard) = &shard {
            match look(shard)? {
                Judged::Nothing => {}
                Judged::Value(seen) if seen.bytes == bytes => {
                    if was_used_long_ago(&seen, used_at) {
                        // This is a hint.
                        let _ = shard.note(path.file(), used_at);
                    }
                    return Ok(PutOutcome::AlreadyPresent);
                }
                Judged::Value(_) | Judged::TooLong | Judged::Strange => {
                    place.remove(std::slice::from_ref(&path), deadline, &|| true)?;
                }
            }
        }
        let mut making = self.begin(place, bytes, deadline)?;
        deadline::check(deadline)?;
        let failed = |error| {
            let path = place.writer.folder().path().join(&making.name);
            failure::of(error, "write a value", &path)
        };
        write_all(&making.file, request.value).map_err(failed)?;
        if request.position > 0 {
            note_use(&making.file, used_at);
        }
        if place.reach.hosts() == Hosts::Several {
            // Until then other hosts may see the name before the bytes, and a server's refusal of
            // the bytes is not known.
            making.file.sync_data().map_err(failed)?;
        }
        let shard = match shard {
            Some(shard) => shard,
            None => place.make_shard(&path)?,
        };
        let folder = place.writer.folder();
        match folder.rename(&making.name, &shard, path.file()) {
            Ok(()) => {
                making.published = true;
                return Ok(PutOutcome::Stored);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                let path = shard.path().join(path.file());
                return Err(failure::of(error, "publish a value", &path));
            }
        }
        // Another put was faster.
        match look(&shard)? {
            Judged::Value(seen) if seen.bytes == bytes => Ok(PutOutcome::AlreadyPresent),
            _ => Err(Error::new(
                ErrorKind::Unavailable,
                "the value is being replaced by others",
            )),
        }
    }

    /// A new temporary file, for a value of `bytes` bytes.
    fn begin(&self, place: &Arc<Place>, bytes: u64, deadline: Instant) -> Result<Making> {
        let bytes = charge(bytes);
        let give_up = deadline.min(Instant::now() + self.room_wait);
        loop {
            if let Some(making) = self.try_begin(place, bytes, deadline)? {
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

    /// A new temporary file, with `bytes` of room taken. `None` if there is no room now.
    fn try_begin(
        &self,
        place: &Arc<Place>,
        bytes: u64,
        deadline: Instant,
    ) -> Result<Option<Making>> {
        let directory = &*self.directory;
        let name = place.writer.temporary(bytes);
        let file = place.writer.folder().create(&name).map_err(|error| {
            let path = place.writer.folder().path().join(&name);
            failure::of(error, "create a file", &path)
        })?;
        // The file exists before the room is taken, so that a scan sees the file, the taking, or
        // both.
        let mut making = Making {
            place: Arc::clone(place),
            name,
            file,
            taken: 0,
            published: false,
        };
        let Room::Taken(used) = place.usage.take(bytes, directory.capacity, deadline)? else {
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
        let place = self.directory.place();
        match self.try_get(&place, request, deadline)? {
            GetOutcome::Miss if self.directory.follow(&place, deadline) => {
                self.try_get(&self.directory.place(), request, deadline)
            }
            outcome => Ok(outcome),
        }
    }

    fn try_get(
        &self,
        place: &Place,
        request: &mut GetRequest<'_, '_>,
        deadline: Instant,
    ) -> Result<GetOutcome> {
        let path = ValuePath::of(&request.key);
        let failed = |error| {
            failure::of(
                error,
                "read a value",
                &place.root.path().join(path.as_str()),
            )
        };
        // The file itself tells who can have written it, so its folders need not be looked at.
        let Some((file, seen)) = place.root.value(path.as_str()).map_err(failed)? else {
            return Ok(GetOutcome::Miss);
        };
        let used_at = time_of_use(request.position);
        if request.position != GetRequest::NO_USE && was_used_long_ago(&seen, used_at) {
            note_use(&file, used_at);
        }
        if seen.bytes > slices::room_of(request.into) {
            if is_too_long(&file, &seen).map_err(failed)? {
                place.remove(std::slice::from_ref(&path), deadline, &|| true)?;
                return Ok(GetOutcome::Miss);
            }
            return Ok(GetOutcome::TooLarge(seen.bytes));
        }
        match read_all(&file, request.into, seen.bytes) {
            // Another host has put a shorter value in its place, and this one believes the old length.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(GetOutcome::Miss),
            outcome => {
                let read = if_there(outcome).map_err(failed)?;
                Ok(read.map_or(GetOutcome::Miss, |()| GetOutcome::Hit(seen.bytes)))
            }
        }
    }

    /// Notes the exact time of use, unlike a get: whoever touches a value wants it to be younger than
    /// those that are put meanwhile.
    fn touch_one(&self, key: &Key, position: u64, deadline: Instant) -> Result<bool> {
        deadline::check(deadline)?;
        let place = self.directory.place();
        let path = ValuePath::of(key);
        let failed = |error| {
            failure::of(
                error,
                "touch a value",
                &place.root.path().join(path.as_str()),
            )
        };
        let Judged::Value(seen) = place.root.judge(path.as_str()).map_err(failed)? else {
            return Ok(false);
        };
        let used_at = time_of_use(position);
        if seen.modified() >= used_at {
            return Ok(true);
        }
        // By name, as opening a file takes longer. Another value may lie there by now: it was put
        // after the look.
        place.root.note(path.as_str(), used_at).map_err(failed)
    }

    /// Removes a value of so many bytes. One that has another length by now stays.
    fn remove_if_still(&self, key: &Key, bytes: u64, deadline: Instant) -> Result<()> {
        deadline::check(deadline)?;
        let place = self.directory.place();
        let path = ValuePath::of(key);
        // Opened anew, which makes some network file systems ask their server.
        let still = place.root.value(path.as_str()).and_then(|opened| {
            opened.map_or(Ok(false), |(file, _)| Ok(fresh_len(&file)? == bytes))
        });
        let still = still.map_err(|error| {
            let path = place.root.path().join(path.as_str());
            failure::of(error, "look at a damaged value", &path)
        })?;
        if still {
            place.remove(std::slice::from_ref(&path), deadline, &|| true)?;
        }
        Ok(())
    }

    /// Which of the keys have values in this place.
    fn look_for(&self, place: &Place, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let look = |key: &Key| {
            deadline::check(deadline)?;
            let path = ValuePath::of(key);
            match place.root.judge(path.as_str()) {
                Ok(judged) => Ok(matches!(judged, Judged::Value(_))),
                Err(error) => {
                    let path = place.root.path().join(path.as_str());
                    Err(failure::of(error, "look for a value", &path))
                }
            }
        };
        keys.iter()
            .map(|key| look(key).map_err(|error| self.named(error, key)))
            .collect()
    }

    fn named(&self, error: Error, key: &Key) -> Error {
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
        let Ok(url) = url::Url::from_file_path(&self.directory.path) else {
            unreachable!("the path is absolute");
        };
        let hosts = match self.directory.place().reach.hosts() {
            Hosts::One => String::new(),
            hosts @ Hosts::Several => format!("&hosts={}", hosts.name()),
        };
        let trust = self.directory.trust.name();
        let trust = trust.map_or(String::new(), |names| format!("&trust={names}"));
        format!("{url}?size={}{hosts}{trust}", self.directory.capacity)
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let place = self.directory.place();
        let mut answer = self.look_for(&place, keys, deadline);
        let is_missed = |answer: &Vec<bool>| answer.contains(&false);
        if answer.as_ref().is_ok_and(is_missed) && self.directory.follow(&place, deadline) {
            answer = self.look_for(&self.directory.place(), keys, deadline);
        }
        self.directory.counters.looked_up(&answer);
        answer
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        self.directory.counters.put_each(batch, |request| {
            self.put_one(request, deadline)
                .map_err(|error| self.named(error, &request.key))
        });
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.directory.counters.get_each(batch, |request| {
            self.get_one(request, deadline)
                .map_err(|error| self.named(error, &request.key))
        });
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        values
            .iter()
            .map(|(key, position)| {
                self.touch_one(key, *position, deadline)
                    .map_err(|error| self.named(error, key))
            })
            .collect::<Result<_>>()
            .inspect_err(|_| self.directory.counters.failed())
    }

    /// What other users have put stays as it was: only they may set its time.
    fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        let mut retire = |_, shard: &Folder, name: &str| {
            // This is a hint.
            let _ = shard.note_exactly(name, SystemTime::UNIX_EPOCH + RETIRED);
            Ok(())
        };
        let mut place = self.directory.place();
        if self.directory.follow(&place, deadline) {
            place = self.directory.place();
        }
        let go_on = || Instant::now() < deadline;
        let done = each_value(&place.root, Some(namespace), &mut retire, &go_on);
        in_time(done, deadline).inspect_err(|_| self.directory.counters.failed())
    }

    fn used_at(&self, last_use: u64) -> Option<SystemTime> {
        let used_at = Duration::from_nanos(last_use);
        (used_at > RETIRED).then(|| SystemTime::UNIX_EPOCH + used_at)
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        let mut removed = 0;
        for key in keys {
            let path = ValuePath::of(key);
            let place = self.directory.place();
            let outcome = deadline::check(deadline)
                .and_then(|()| place.remove(std::slice::from_ref(&path), deadline, &|| true));
            removed += outcome
                .map_err(|error| self.named(error, key))
                .inspect_err(|_| self.directory.counters.failed())?
                .0;
        }
        Ok(removed)
    }

    fn remove_damaged(&self, key: &Key, bytes: u64, deadline: Instant) -> Result<()> {
        self.remove_if_still(key, bytes, deadline)
            .map_err(|error| self.named(error, key))
            .inspect_err(|_| self.directory.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        let mut visit_one = |key, shard: &Folder, name: &str| {
            let judged = shard
                .judge(name)
                .map_err(|error| failure::of(error, "look at a value", &shard.path().join(name)))?;
            if let Judged::Value(seen) = judged {
                visit(Listed {
                    key,
                    bytes: seen.bytes,
                    last_use: seen.modified_nanos(),
                });
            }
            Ok(())
        };
        let mut place = self.directory.place();
        if self.directory.follow(&place, deadline) {
            place = self.directory.place();
        }
        let go_on = || Instant::now() < deadline;
        let done = each_value(&place.root, namespace, &mut visit_one, &go_on);
        in_time(done, deadline).inspect_err(|_| self.directory.counters.failed())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let facts = || {
            deadline::check(deadline)?;
            let place = self.directory.place();
            let used = place
                .usage
                .peek()
                .map_or("unknown".to_owned(), |count| count.used.to_string());
            Ok(vec![
                ("path".into(), self.directory.path.display().to_string()),
                ("capacity_bytes".into(), self.directory.capacity.to_string()),
                ("used_bytes".into(), used),
                ("hosts".into(), place.reach.hosts().name().into()),
                (
                    "disk_free_bytes".into(),
                    free_bytes(&place.root)?.to_string(),
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
struct Making {
    place: Arc<Place>,
    name: String,
    file: File,
    taken: u64,
    published: bool,
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        // The lock is held from before the file goes until its room is given back. A scan that ended
        // between the two would settle the count without the file, and the room would be given back
        // twice. If any of this fails, the count stays too high until the next scan.
        let locked = (self.taken > 0)
            .then(|| self.place.usage.lock(Instant::now() + GIVE_BACK_WAIT))
            .and_then(Result::ok);
        let gone = self.place.writer.folder().remove(&self.name);
        if gone.is_ok_and(|gone| gone)
            && let Some(mut locked) = locked
        {
            locked.give_back(self.taken);
            let _ = locked.save();
        }
    }
}

/// Fails if a walk was stopped at the deadline.
fn in_time(complete: Result<bool>, deadline: Instant) -> Result<()> {
    if complete? {
        Ok(())
    } else {
        deadline::check(deadline)
    }
}

/// The time of use to note for a value that is used now and has `position` tokens before it in its
/// prompt.
fn time_of_use(position: u64) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(recency::earlier(position)).unwrap_or(now)
}

/// Whether the noted time of a value's use is so old that it should be renewed.
fn was_used_long_ago(seen: &Seen, used_at: SystemTime) -> bool {
    let since = used_at.duration_since(seen.modified());
    since.is_ok_and(|since| since >= RECENCY_GRAIN)
}
