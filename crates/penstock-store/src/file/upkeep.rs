//! Keeping the directory within its bound: scanning, correcting the count, evicting.
//!
//! Only one handle works at a time: the one that holds the lock on `evict.lock`. Each handle has a
//! thread that makes room ahead of need. When more than 95 % is in use, the thread evicts down to
//! 90 %. A put that still finds no room does this work itself. Puts go on asking while a pass makes
//! room, so who has the turn looks first whether a pass is still of use.
//!
//! If the disk is full before the pool is, the oldest values make room on the disk.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex, MutexGuard};
use penstock_contract::{Error, ErrorKind, Key, Namespace, Result};
use penstock_evict::{Lru, Policy};

use super::directory::{Directory, free_bytes};
use super::failure;
use super::folder::{Folder, Judged};
use super::names::{self, ValuePath};
use super::place::Place;
use super::reach::Hosts;
use super::seen::charge;

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
    /// Excludes other threads of this handle. The lock on the place's file excludes other handles.
    turn: Mutex<()>,
    state: Mutex<State>,
    wake: Condvar,
    /// Until when the last scan tells well enough what other hosts have put.
    fresh_until: Mutex<Instant>,
}

#[derive(Default)]
struct State {
    /// Room wanted, if any is.
    wanted: Option<u64>,
    /// Room wanted on the disk, which is full.
    disk: Option<u64>,
    stop: bool,
}

impl Upkeep {
    /// Starts the thread, which begins with a pass.
    pub(super) fn start(directory: Arc<Directory>) -> Result<Self> {
        let shared = Arc::new(Shared {
            directory,
            turn: Mutex::new(()),
            state: Mutex::new(State {
                wanted: Some(0),
                disk: None,
                stop: false,
            }),
            wake: Condvar::new(),
            fresh_until: Mutex::new(Instant::now()),
        });
        let thread = std::thread::Builder::new()
            .name("penstock-file".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let rest = |pause| shared.rest(pause);
                    penstock_threads::serve("penstock-file", rest, || shared.serve());
                }
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

    /// Asks the thread to make room for `bytes` bytes on the disk, which is full. It has more time than
    /// a put.
    pub(super) fn want_disk(&self, bytes: u64) {
        let mut state = self.shared.state.lock();
        state.disk = Some(state.disk.unwrap_or(0).max(bytes));
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
        self.on_this_thread(deadline, |shared, place| {
            shared.pass_if_of_use(place, bytes, deadline, &|| Instant::now() < deadline)
        });
    }

    /// Evicts the oldest values, because the disk has no room for `bytes` bytes. Returns the bytes
    /// that they had. `None` if it is another's turn, who may be doing the same.
    pub(super) fn free_disk(&self, bytes: u64, deadline: Instant) -> Option<u64> {
        self.on_this_thread(deadline, |shared, place| {
            let go_on = || Instant::now() < deadline;
            shared.pass(place, Aim::Disk(bytes), deadline, &go_on)
        })
    }

    fn on_this_thread<T>(
        &self,
        deadline: Instant,
        act: impl FnOnce(&Shared, &Place) -> Result<T>,
    ) -> Option<T> {
        match self.shared.turn.try_lock() {
            Some(_turn) => self.shared.take_turn(deadline, act),
            None => {
                drop(self.shared.turn.try_lock_until(deadline));
                None
            }
        }
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread contains panics. If one escaped all the same, the thread is gone.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Waits for so long, unless the handle is being closed. Whether it is not.
    fn rest(&self, pause: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.stop {
            self.wake.wait_for(&mut state, pause);
        }
        !state.stop
    }

    fn serve(&self) {
        self.show_life();
        let go_on = || !self.state.lock().stop;
        let mut is_first = true;
        while let Some(aim) = self.next_wish() {
            let patience = Instant::now() + PATIENCE;
            let _turn = self.turn.lock();
            self.take_turn(patience, |shared, place| {
                match aim {
                    // The first one is for what others left, whatever the count says.
                    Aim::Bound(wanted) if !std::mem::take(&mut is_first) => {
                        shared.pass_if_of_use(place, wanted, patience, &go_on)
                    }
                    aim => shared.pass(place, aim, patience, &go_on).map(|_| ()),
                }
            });
        }
    }

    /// Waits until room is wanted. Returns `None` when the handle is being closed.
    fn next_wish(&self) -> Option<Aim> {
        let mut state = self.state.lock();
        while !state.stop {
            if let Some(wanted) = state.disk.take() {
                return Some(Aim::Disk(wanted));
            }
            if let Some(wanted) = state.wanted.take() {
                return Some(Aim::Bound(wanted));
            }
            if self.wake.wait_for(&mut state, SIGN_OF_LIFE).timed_out() {
                MutexGuard::unlocked(&mut state, || self.show_life());
            }
        }
        None
    }

    fn show_life(&self) {
        self.directory.place().show_life();
    }

    /// Does what `act` says in this process's turn, unless it is another's. What of the directory was
    /// removed is made anew first.
    fn take_turn<T>(
        &self,
        deadline: Instant,
        act: impl FnOnce(&Self, &Place) -> Result<T>,
    ) -> Option<T> {
        let stale = self.directory.place();
        if self.directory.renew(&stale, deadline).is_err() {
            self.directory.counters.failed();
        }
        let place = self.directory.place();
        if place.turn.try_lock().is_err() {
            std::thread::sleep(ANOTHERS_TURN);
            return None;
        }
        let turn = Turn(&place);
        let done = act(self, &place);
        if done.is_err() {
            self.directory.counters.failed();
        }
        drop(turn);
        done.ok()
    }

    /// A pass. The deadline limits the wait for the count's lock. Returns the bytes that the evicted
    /// values had.
    fn pass(
        &self,
        place: &Place,
        aim: Aim,
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<u64> {
        let began = Instant::now();
        let passed = pass(&self.directory, place, aim, deadline, go_on);
        *self.fresh_until.lock() = Instant::now() + FRESH.max(began.elapsed() * REST);
        passed
    }

    /// Makes a [`pass`](Self::pass), unless there is room, and it is known well enough what others
    /// put.
    fn pass_if_of_use(
        &self,
        place: &Place,
        wanted: u64,
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<()> {
        let count = place.usage.lock_while(deadline, go_on)?.count;
        let has_room = count.is_some_and(|count| has_room(&self.directory, count.used, wanted));
        if has_room && !self.is_to_look_at_others() {
            return Ok(());
        }
        self.pass(place, Aim::Bound(wanted), deadline, go_on)
            .map(|_| ())
    }

    fn is_to_look_at_others(&self) -> bool {
        self.directory.place().reach.hosts() == Hosts::Several
            && *self.fresh_until.lock() < Instant::now()
    }
}

/// This process's turn, which ends also if what is done in it panics.
struct Turn<'a>(&'a Place);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // This fails only if there is no lock.
        let _ = self.0.turn.unlock();
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

/// What a pass makes room for.
#[derive(Clone, Copy)]
enum Aim {
    /// Room for so many bytes within the pool's bound, or as many as should always be free if that
    /// is more.
    Bound(u64),
    /// Room for so many bytes on the disk, which is full.
    Disk(u64),
}

/// Scans and settles the count. Then evicts, if less room is free than wanted, or less than there
/// should always be. Returns the bytes that the evicted values had.
fn pass(
    directory: &Directory,
    place: &Place,
    aim: Aim,
    deadline: Instant,
    go_on: &dyn Fn() -> bool,
) -> Result<u64> {
    let before = place.usage.lock_while(deadline, go_on)?.count;
    let Some(Scan {
        found,
        values,
        pending,
    }) = scan(place, go_on)?
    else {
        return Ok(0);
    };
    let (used, aim) = {
        let mut locked = place.usage.lock_while(deadline, go_on)?;
        let settled = locked.settle(before, values, pending);
        match (locked.save(), aim) {
            (Ok(()), aim) => (settled.used, aim),
            // There is no room even for the count, which is written again when there is.
            (Err(error), Aim::Bound(wanted) | Aim::Disk(wanted))
                if failure::is_of_a_full_disk(&error) =>
            {
                (settled.used, Aim::Disk(wanted))
            }
            (Err(error), _) => return Err(error),
        }
    };
    let mut needed = match aim {
        Aim::Bound(wanted) if has_room(directory, used, wanted) => 0,
        Aim::Bound(wanted) => {
            let capacity = directory.capacity;
            let goal = capacity.saturating_sub(wanted.max(capacity / 10));
            used.saturating_sub(goal)
        }
        // What all of them have would not do.
        Aim::Disk(wanted) if values.saturating_add(free_bytes(&place.root)?) < wanted => 0,
        // A little more, so that the next puts find room, too.
        Aim::Disk(wanted) => wanted.max(used / 20),
    };
    let mut freed = 0;
    let mut recency = by_recency(found);
    while needed > 0 && go_on() {
        let mut enough = needed;
        let mut victims = Vec::with_capacity(REMOVED_AT_ONCE);
        while enough > 0 && victims.len() < REMOVED_AT_ONCE {
            let Some((key, charge)) = recency.evict() else {
                break;
            };
            enough = enough.saturating_sub(charge);
            victims.push(ValuePath::of(&key));
        }
        if victims.is_empty() {
            break;
        }
        let (removed, bytes) = place.remove(&victims, deadline, go_on)?;
        directory.counters.evicted(removed);
        needed = needed.saturating_sub(bytes);
        freed += bytes;
    }
    Ok(freed)
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

/// Looks at everything in the directory, and removes values that are longer than they can be.
/// Returns `None` if `go_on` stops it.
fn scan(place: &Place, go_on: &dyn Fn() -> bool) -> Result<Option<Scan>> {
    let failed = |error, path: &Path| failure::of(error, "scan the pool", path);
    // Sweep first: a file that is renamed meanwhile is then seen twice rather than not at all, and
    // its inode number identifies it.
    let mut making = place
        .writer
        .sweep()
        .map_err(|error| failed(error, place.writer.folder().path()))?;
    let mut found = Vec::new();
    let mut values = 0;
    let mut visit = |key, shard: &Folder, name: &str| {
        let failed = |error| failed(error, shard.path());
        match shard.judge(name).map_err(failed)? {
            Judged::Value(seen) => {
                let charge = charge(seen.bytes);
                values += charge;
                making.remove(&seen.identity.1);
                found.push(Found {
                    used_at: seen.modified(),
                    key,
                    charge,
                });
            }
            Judged::TooLong => {
                shard.remove(name).map_err(failed)?;
            }
            Judged::Strange | Judged::Nothing => {}
        }
        Ok(())
    };
    let complete = each_value(&place.root, None, &mut visit, go_on)?;
    let pending = making.into_values().sum();
    Ok(complete.then_some(Scan {
        found,
        values,
        pending,
    }))
}

/// Visits every value's name and the folder that it is in, of one namespace if one is given. Asks
/// `go_on` before each folder; returns false if it ever said no. Skips what vanishes meanwhile, and
/// folders that are not believed.
pub(super) fn each_value(
    root: &Folder,
    namespace: Option<Namespace>,
    visit: &mut dyn FnMut(Key, &Folder, &str) -> Result<()>,
    go_on: &dyn Fn() -> bool,
) -> Result<bool> {
    let namespaces: Vec<Namespace> = match namespace {
        Some(namespace) => vec![namespace],
        None => names_in(root)?
            .iter()
            .filter_map(|name| names::namespace_of(name))
            .collect(),
    };
    for namespace in namespaces {
        let Some(folder) = believed(root, &namespace.to_string())? else {
            continue;
        };
        for shard in names_in(&folder)? {
            if !go_on() {
                return Ok(false);
            }
            let Some(shard) = believed(&folder, &shard)? else {
                continue;
            };
            for name in names_in(&shard)? {
                if let Some(key) = names::key_of(namespace, &name) {
                    visit(key, &shard, &name)?;
                }
            }
        }
    }
    Ok(true)
}

fn names_in(folder: &Folder) -> Result<Vec<String>> {
    let names = folder.names().and_then(Iterator::collect);
    names.map_err(|error| failure::of(error, "list the pool", folder.path()))
}

/// A folder in another one, if it is there and believed.
fn believed(folder: &Folder, name: &str) -> Result<Option<Folder>> {
    match folder.open(name) {
        Err(error) if error.kind() == ErrorKind::Denied => Ok(None),
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use penstock_contract::testing::{LONG, eventually, soon, within};

    use super::super::trust::Trust;
    use super::*;

    const CAPACITY: u64 = 1 << 20;

    fn upkeep(root: &Path, hosts: Hosts) -> Upkeep {
        let trust = Trust::default();
        let directory = Directory::open(root, Some(CAPACITY), Some(hosts), &trust).unwrap();
        let upkeep = Upkeep::start(Arc::new(directory)).unwrap();
        eventually("it is counted", || {
            let place = upkeep.shared.directory.place();
            place.usage.lock(soon()).unwrap().count.is_some()
        });
        upkeep
    }

    /// Whether there is a pass for a wish.
    fn passes(upkeep: &Upkeep, wanted: u64) -> bool {
        let _turn = upkeep.shared.turn.lock();
        let before = *upkeep.shared.fresh_until.lock();
        let give_up = soon();
        upkeep.shared.take_turn(give_up, |shared, place| {
            shared.pass_if_of_use(place, wanted, give_up, &|| true)
        });
        *upkeep.shared.fresh_until.lock() != before
    }

    #[test]
    fn a_wish_that_is_granted_already_makes_no_pass() {
        let root = tempfile::tempdir().unwrap();
        let upkeep = upkeep(root.path(), Hosts::One);
        let used = |bytes: u64| {
            let place = upkeep.shared.directory.place();
            let mut locked = place.usage.lock(soon()).unwrap();
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
        let fresh_until = &upkeep.shared.fresh_until;
        *fresh_until.lock() = within(60 * LONG);
        assert!(!passes(&upkeep, 0));
        let over = Instant::now();
        *fresh_until.lock() = over;
        assert!(passes(&upkeep, 0));
        assert!(
            *fresh_until.lock() >= over + FRESH,
            "not looked for again at once"
        );
    }
}
