//! The pool's directory: what the handle and its upkeep thread share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use penstock_contract::{Counters, Result};

use super::failure;
use super::folder::Folder;
use super::place::Place;
use super::reach::Hosts;
use super::trust::Trust;
use super::usage::Usage;

const DEFAULT_CAPACITY: u64 = 10 << 30;

/// A pool's directory.
pub(super) struct Directory {
    pub(super) path: PathBuf,
    pub(super) capacity: u64,
    pub(super) trust: Trust,
    pub(super) counters: Counters,
    hosts: Option<Hosts>,
    place: RwLock<Arc<Place>>,
    /// Held by the thread that opens a new place.
    renewing: Mutex<()>,
}

impl Directory {
    pub(super) fn open(
        path: &Path,
        capacity: Option<u64>,
        hosts: Option<Hosts>,
        trust: &Trust,
    ) -> Result<Self> {
        // Without a slash at the end, behind which a link would be followed.
        let path: PathBuf = path.components().collect();
        let place = Place::open(&path, hosts, trust, true)?;
        let capacity = match capacity {
            Some(capacity) => capacity,
            None => default_capacity(&place.root, &place.usage)?,
        };
        Ok(Self {
            path,
            capacity,
            trust: trust.clone(),
            counters: Counters::default(),
            hosts,
            place: RwLock::new(Arc::new(place)),
            renewing: Mutex::new(()),
        })
    }

    /// This handle's place in the directory.
    pub(super) fn place(&self) -> Arc<Place> {
        Arc::clone(&self.place.read())
    }

    /// Opens a new place instead of a stale one, and makes the directory anew if it is gone. Does
    /// nothing if the place is whole, or another thread has opened a new one.
    pub(super) fn renew(&self, stale: &Arc<Place>, deadline: Instant) -> Result<()> {
        self.renew_if(stale, deadline, true, || !stale.is_whole_at(&self.path))
            .map(|_| ())
    }

    /// Follows the path, if another directory is there by now: somebody has removed or renamed this
    /// one, and made a new one. Returns whether this handle has a new place. A directory that is not
    /// believed is not followed.
    pub(super) fn follow(&self, stale: &Arc<Place>, deadline: Instant) -> bool {
        let is_replaced = || stale.root.is_replaced_at(&self.path);
        is_replaced()
            && self
                .renew_if(stale, deadline, false, is_replaced)
                .is_ok_and(|is_new| is_new)
    }

    fn renew_if(
        &self,
        stale: &Arc<Place>,
        deadline: Instant,
        make: bool,
        is_stale: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let Some(_renewing) = self.renewing.try_lock_until(deadline) else {
            return Ok(false);
        };
        if !Arc::ptr_eq(&self.place(), stale) {
            return Ok(true);
        }
        if !is_stale() {
            return Ok(false);
        }
        let new = Arc::new(Place::open(&self.path, self.hosts, &self.trust, make)?);
        // Nothing is closed while others wait for the lock.
        let old = std::mem::replace(&mut *self.place.write(), new);
        drop(old);
        Ok(true)
    }
}

/// The bound of a pool for which none was given: 10 GiB, or 80 % of what the file system could give
/// the pool, if that is less.
fn default_capacity(root: &Folder, usage: &Usage) -> Result<u64> {
    let used = usage.peek().map_or(0, |count| count.used);
    let possible = free_bytes(root)?.saturating_add(used) / 5 * 4;
    Ok(possible.min(DEFAULT_CAPACITY))
}

/// Bytes that the file system could still give us.
pub(super) fn free_bytes(folder: &Folder) -> Result<u64> {
    let space = rustix::fs::fstatvfs(folder)
        .map_err(|error| failure::of(error.into(), "ask for the free space", folder.path()))?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}
