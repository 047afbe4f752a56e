//! Keeping the directory within its bound: scanning, correcting the count, evicting.
//!
//! Only one handle works at a time: the one that holds the lock on `evict.lock`. Each handle has a
//! thread that makes room ahead of need. When more than 95 % is in use, the thread evicts down to
//! 90 %. A put that still finds no room does this work itself. Puts go on asking while a pass makes
//! room, so who has the turn looks first whether a pass is still of use.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex, MutexGuard};
use penstock_evict::{Lru, Policy};

use super::directory::{Directory, charge};
use super::reach::Hosts;
use super::{failure, names};
use crate::{Error, ErrorKind, Key, Namespace, Result};

/// Values removed in one hold of the count's lock. Others wait for the lock meanwhile.
const REMOVED_AT_ONCE: usize = 8;
/// How long a pass of the thread may wait for the count's lock.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a scan says well enough what other hosts have put.
const FRESH: Duration = Duration::from_secs(10);
/// The least time between such scans, as a multiple of what one takes.
const REST: u32 = 20;
/// How long to pause if another process is doing a pass.
const ANOTHERS_TURN: Duration = Duration::from_millis(1);
/// How often a host shows others that it is still there.
const SIGN_OF_LIFE: Duration = Duration::from_secs(24 * 3600);

/// The upkeep thread, and the same work for callers that cannot wait for it.
pub(super) struct Upkeep {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    directory: Arc<Directory>,
    /// The lock on this file excludes other handles. The mutex excludes other threads of this
    /// handle.
    turn: Mutex<File>,
    state: Mutex<State>,
    wake: Condvar,
    /// Until when the last scan tells well enough what other hosts have put.
    fresh_until: Mutex<Instant>,
}

#[derive(Default)]
struct State {
    /// Room wanted, if any is.
    wanted: Option<u64>,
    stop: bool,
}

impl Upkeep {
    /// Starts the thread, which begins with a pass.
    pub(super) fn start(directory: Arc<Directory>) -> Result<Self> {
        let lock_path = directory.reach.turn(&directory.root);
        let turn = super::create_options()
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(|error| failure::of(error, "open the pool's eviction lock", &lock_path))?;
        let shared = Arc::new(Shared {
            directory,
            turn: Mutex::new(turn),
            state: Mutex::new(State {
                wanted: Some(0),
                stop: false,
            }),
            wake: Condvar::new(),
            fresh_until: Mutex::new(Instant::now()),
        });
        let thread = std::thread::Builder::new()
            .name("penstock-file".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.serve()
            })
            .map_err(|e| Error::new(ErrorKind::Io, "cannot start a thread").caused_by(e))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Asks the thread to make room for `bytes` bytes.
    pub(super) fn want(&self, bytes: u64) {
        let mut state = self.shared.state.lock();
        state.wanted = Some(state.wanted.unwrap_or(0).max(bytes));
        self.shared.wake.notify_one();
    }

    /// Asks the thread to look what other hosts have put, if that was not done for a while.
    pub(super) fn watch_others(&self) {
        if self.shared.is_to_look_at_others() {
            self.want(0);
        }
    }

    /// Makes room for `bytes` bytes on the caller's thread, or waits while another thread does.
    /// Gives up at the deadline, or if it is another process's turn.
    pub(super) fn make_room(&self, bytes: u64, deadline: Instant) {
        match self.shared.turn.try_lock() {
            Some(turn) => self.shared.take_turn(&turn, |shared| {
                shared.pass_if_of_use(bytes, deadline, &|| Instant::now() < deadline)
            }),
            None => drop(self.shared.turn.try_lock_until(deadline)),
        }
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, that was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn serve(&self) {
        self.show_life();
        let go_on = || !self.state.lock().stop;
        let mut is_first = true;
        while let Some(wanted) = self.next_wish() {
            let patience = Instant::now() + PATIENCE;
            self.take_turn(&self.turn.lock(), |shared| {
                // The first one is for what others left, whatever the count says.
                if std::mem::take(&mut is_first) {
                    shared.pass(wanted, patience, &go_on)
                } else {
                    shared.pass_if_of_use(wanted, patience, &go_on)
                }
            });
        }
    }

    /// Waits until room is wanted. Returns `None` when the handle is being closed.
    fn next_wish(&self) -> Option<u64> {
        let mut state = self.state.lock();
        while !state.stop {
            if let Some(wanted) = state.wanted.take() {
                return Some(wanted);
            }
            if self.wake.wait_for(&mut state, SIGN_OF_LIFE).timed_out() {
                MutexGuard::unlocked(&mut state, || self.show_life());
            }
        }
        None
    }

    /// Other hosts cannot see this one's locks. They see when its files were changed.
    fn show_life(&self) {
        if self.directory.reach.hosts() == Hosts::Several {
            let _ = self.turn.lock().set_modified(SystemTime::now());
            self.directory.usage.show_life();
            self.directory.writer.show_life();
        }
    }

    /// Does what `act` says in this process's turn, unless it is another's.
    fn take_turn(&self, turn: &File, act: impl FnOnce(&Self) -> Result<()>) {
        if turn.try_lock().is_err() {
            std::thread::sleep(ANOTHERS_TURN);
            return;
        }
        if act(self).is_err() {
            self.directory.counters.failed();
        }
        // This fails only if there is no lock.
        let _ = turn.unlock();
    }

    /// A pass. The deadline limits the wait for the count's lock.
    fn pass(&self, wanted: u64, deadline: Instant, go_on: &dyn Fn() -> bool) -> Result<()> {
        let began = Instant::now();
        let passed = pass(&self.directory, wanted, deadline, go_on);
        *self.fresh_until.lock() = Instant::now() + FRESH.max(began.elapsed() * REST);
        passed
    }

    /// As [`pass`](Self::pass), unless there is room, and it is known well enough what others put.
    fn pass_if_of_use(
        &self,
        wanted: u64,
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<()> {
        let count = self.directory.usage.lock(deadline)?.count;
        let has_room = count.is_some_and(|count| has_room(&self.directory, count.used, wanted));
        if has_room && !self.is_to_look_at_others() {
            return Ok(());
        }
        self.pass(wanted, deadline, go_on)
    }

    fn is_to_look_at_others(&self) -> bool {
        self.directory.reach.hosts() == Hosts::Several && *self.fresh_until.lock() < Instant::now()
    }
}

/// Whether the room that is wanted is there, and as much as there should always be.
fn has_room(directory: &Directory, used: u64, wanted: u64) -> bool {
    let capacity = directory.capacity;
    used <= capacity.saturating_sub(wanted.max(capacity / 20))
}

/// A value as the scan found it.
struct Found {
    used_at: SystemTime,
    key: Key,
    charge: u64,
}

/// Scans and settles the count. Then evicts, if less room is free than wanted, or less than there
/// should always be.
fn pass(
    directory: &Directory,
    wanted: u64,
    deadline: Instant,
    go_on: &dyn Fn() -> bool,
) -> Result<()> {
    let before = directory.usage.lock(deadline)?.count;
    let Some(Scan {
        found,
        values,
        pending,
    }) = scan(directory, go_on)
        .map_err(|error| failure::of(error, "scan the pool", &directory.root))?
    else {
        return Ok(());
    };
    let mut used = {
        let mut locked = directory.usage.lock(deadline)?;
        let settled = locked.settle(before, values, pending);
        locked.save()?;
        settled.used
    };
    if has_room(directory, used, wanted) {
        return Ok(());
    }
    let capacity = directory.capacity;
    let goal = capacity.saturating_sub(wanted.max(capacity / 10));
    let mut recency = by_recency(found);
    while used > goal && go_on() {
        let mut enough = used - goal;
        let mut victims = Vec::with_capacity(REMOVED_AT_ONCE);
        while enough > 0 && victims.len() < REMOVED_AT_ONCE {
            let Some((key, charge)) = recency.evict() else {
                break;
            };
            enough = enough.saturating_sub(charge);
            victims.push(directory.value_path(&key));
        }
        if victims.is_empty() {
            break;
        }
        let (removed, freed) = directory.remove(&victims, deadline)?;
        directory.counters.evicted(removed);
        used = used.saturating_sub(freed);
    }
    Ok(())
}

fn by_recency(mut found: Vec<Found>) -> Lru<Key> {
    found.sort_unstable_by_key(|value| (value.used_at, value.key));
    let mut recency = Lru::new();
    for value in found {
        recency.insert(value.key, value.charge);
    }
    recency
}

struct Scan {
    found: Vec<Found>,
    /// What the values are charged with.
    values: u64,
    /// What the files in the making will be charged with, except those that the scan met under
    /// their final name.
    pending: u64,
}

/// Looks at everything in the directory. Returns `None` if `go_on` stops it.
fn scan(directory: &Directory, go_on: &dyn Fn() -> bool) -> io::Result<Option<Scan>> {
    // Sweep first: a file that is renamed meanwhile is then seen twice rather than not at all, and
    // its inode number identifies it.
    let mut making = directory.writer.sweep()?;
    let mut found = Vec::new();
    let mut values = 0;
    let mut visit = |key, entry: &fs::DirEntry| {
        if let Some(file) = if_there(entry.metadata())? {
            let charge = charge(file.len());
            values += charge;
            making.remove(&file.ino());
            found.push(Found {
                used_at: file.modified()?,
                key,
                charge,
            });
        }
        Ok(())
    };
    let complete = each_value(&directory.root, None, &mut visit, go_on)?;
    let pending = making.into_values().sum();
    Ok(complete.then_some(Scan {
        found,
        values,
        pending,
    }))
}

/// Visits every value's directory entry, of one namespace if one is given. Asks `go_on` before each
/// directory; returns false if it ever said no. Skips what vanishes meanwhile.
pub(super) fn each_value(
    root: &Path,
    namespace: Option<Namespace>,
    visit: &mut dyn FnMut(Key, &fs::DirEntry) -> io::Result<()>,
    go_on: &dyn Fn() -> bool,
) -> io::Result<bool> {
    let namespaces: Vec<(Namespace, PathBuf)> = match namespace {
        Some(namespace) => vec![(namespace, root.join(namespace.to_string()))],
        None => entries(root)?
            .filter_map(|entry| match entry {
                Ok(entry) => Some(Ok((names::namespace_of(&entry.file_name())?, entry.path()))),
                Err(error) => Some(Err(error)),
            })
            .collect::<io::Result<_>>()?,
    };
    for (namespace, path) in namespaces {
        for shard in entries(&path)? {
            if !go_on() {
                return Ok(false);
            }
            for entry in entries(&shard?.path())? {
                let entry = entry?;
                if let Some(key) = names::key_of(namespace, &entry.file_name()) {
                    visit(key, &entry)?;
                }
            }
        }
    }
    Ok(true)
}

/// The entries of a directory; none if it is not there or not a directory.
fn entries(path: &Path) -> io::Result<impl Iterator<Item = io::Result<fs::DirEntry>>> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => None,
        other => if_there(other)?,
    };
    let there = |entry| if_there(entry).transpose();
    Ok(entries.into_iter().flatten().filter_map(there))
}

/// Turns the error for what is not there, or that another host has removed, into `None`.
pub(super) fn if_there<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, StaleNetworkFileHandle};
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), NotFound | StaleNetworkFileHandle) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 1 << 20;

    fn upkeep(root: &Path, hosts: Hosts) -> Upkeep {
        let directory = Directory::open(root.to_owned(), Some(CAPACITY), Some(hosts)).unwrap();
        let upkeep = Upkeep::start(Arc::new(directory)).unwrap();
        let give_up = Instant::now() + Duration::from_secs(60);
        let count = || {
            let locked = upkeep.shared.directory.usage.lock(give_up);
            locked.unwrap().count
        };
        while count().is_none() {
            assert!(Instant::now() < give_up, "never counted");
            std::thread::sleep(Duration::from_millis(1));
        }
        upkeep
    }

    /// Whether there is a pass for a wish.
    fn passes(upkeep: &Upkeep, wanted: u64) -> bool {
        let turn = upkeep.shared.turn.lock();
        let before = *upkeep.shared.fresh_until.lock();
        let give_up = Instant::now() + Duration::from_secs(60);
        upkeep.shared.take_turn(&turn, |shared| {
            shared.pass_if_of_use(wanted, give_up, &|| true)
        });
        *upkeep.shared.fresh_until.lock() != before
    }

    #[test]
    fn a_wish_that_is_granted_already_makes_no_pass() {
        let root = tempfile::tempdir().unwrap();
        let upkeep = upkeep(root.path(), Hosts::One);
        let used = |bytes: u64| {
            let give_up = Instant::now() + Duration::from_secs(60);
            let mut locked = upkeep.shared.directory.usage.lock(give_up).unwrap();
            locked.count.as_mut().unwrap().used = bytes;
            locked.save().unwrap();
        };
        used(CAPACITY / 2);
        assert!(!passes(&upkeep, 0));
        assert!(!passes(&upkeep, CAPACITY / 2));
        assert!(passes(&upkeep, CAPACITY / 2 + 1));
        // That pass has found that nothing is there.
        assert!(!passes(&upkeep, CAPACITY / 2 + 1));
        used(CAPACITY - CAPACITY / 20 + 1);
        assert!(passes(&upkeep, 0));
        assert!(!passes(&upkeep, 0));
    }

    #[test]
    fn what_others_put_is_looked_for_though_there_is_room() {
        let root = tempfile::tempdir().unwrap();
        let upkeep = upkeep(root.path(), Hosts::Several);
        assert!(!passes(&upkeep, 0));
        *upkeep.shared.fresh_until.lock() = Instant::now();
        assert!(passes(&upkeep, 0));
        assert!(!passes(&upkeep, 0));
    }
}
