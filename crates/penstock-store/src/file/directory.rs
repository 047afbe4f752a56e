//! The pool's directory: what the handle and its upkeep thread share.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::reach::{Hosts, Reach};
use super::temp::Writer;
use super::upkeep::if_there;
use super::usage::Usage;
use super::{failure, names};
use crate::Counters;
use crate::{Error, ErrorKind, Key, Result};

/// The space that the file system sets aside even for a short file. Values are charged in whole
/// blocks of this many bytes.
const BLOCK_BYTES: u64 = 4096;
const DEFAULT_CAPACITY: u64 = 10 << 30;

/// The bytes that a value of this length is charged with.
pub(super) fn charge(value_bytes: u64) -> u64 {
    value_bytes
        .max(1)
        .checked_next_multiple_of(BLOCK_BYTES)
        .unwrap_or(u64::MAX)
}

/// A pool's directory and this handle's place in it.
pub(super) struct Directory {
    pub(super) root: PathBuf,
    pub(super) capacity: u64,
    pub(super) reach: Reach,
    pub(super) usage: Usage,
    pub(super) writer: Writer,
    pub(super) counters: Counters,
}

impl Directory {
    pub(super) fn open(root: PathBuf, capacity: Option<u64>, hosts: Option<Hosts>) -> Result<Self> {
        let temporaries = root.join("tmp");
        create_directories(&temporaries)
            .map_err(|error| failure::of(error, "create the pool's directory", &root))?;
        let reach = Reach::of(&root, hosts)?;
        let usage = Usage::open(&reach.usage(&root))?;
        let capacity = match capacity {
            Some(capacity) => capacity,
            None => default_capacity(&root, &usage)?,
        };
        let writer = Writer::register(temporaries, &reach)?;
        Ok(Self {
            root,
            capacity,
            reach,
            usage,
            writer,
            counters: Counters::default(),
        })
    }

    pub(super) fn value_path(&self, key: &Key) -> PathBuf {
        names::value_path(&self.root, key)
    }

    /// Removes values and gives their room back. Returns how many there were, and the room they
    /// had. The count's lock is held throughout, so nobody else on this machine can remove or
    /// replace a value between reading its length and removing it.
    pub(super) fn remove(&self, paths: &[PathBuf], deadline: Instant) -> Result<(u64, u64)> {
        let mut locked = self.usage.lock(deadline)?;
        let (mut removed, mut freed) = (0, 0);
        let outcome = paths.iter().try_for_each(|path| {
            let file = if_there(fs::symlink_metadata(path))
                .map_err(|error| failure::of(error, "look at a value", path))?;
            let gone = if_there(fs::remove_file(path))
                .map_err(|error| failure::of(error, "remove a value", path))?;
            // Another host may remove it at the same time.
            if let (Some(file), Some(())) = (file, gone) {
                removed += 1;
                freed += charge(file.len());
            }
            Ok(())
        });
        if freed > 0 {
            locked.give_back(freed);
            locked.save()?;
        }
        outcome.map(|()| (removed, freed))
    }

    /// Gives a value its name, unless the name is taken. Returns whether the name was free.
    pub(super) fn publish(&self, temporary: &Path, path: &Path) -> Result<bool> {
        loop {
            match rename_if_free(temporary, path) {
                Ok(()) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    // Either this is the first value of its directory, or someone took the file
                    // from us.
                    let parent = path
                        .parent()
                        .filter(|_| temporary.exists())
                        .ok_or_else(|| {
                            Error::new(ErrorKind::Unavailable, "the pool's directory was emptied")
                        })?;
                    create_directories(parent)
                        .map_err(|error| failure::of(error, "create a directory", parent))?;
                }
                Err(error) => return Err(failure::of(error, "publish a value", path)),
            }
        }
    }
}

/// The bound of a pool for which none was given: 10 GiB, or 80 % of what the file system could give
/// the pool, if that is less.
fn default_capacity(root: &Path, usage: &Usage) -> Result<u64> {
    let count = usage.lock(Instant::now() + Duration::from_secs(1))?.count;
    let used = count.map_or(0, |count| count.used);
    let possible = free_bytes(root)?.saturating_add(used) / 5 * 4;
    Ok(possible.min(DEFAULT_CAPACITY))
}

/// Bytes that the file system could still give us.
pub(super) fn free_bytes(path: &Path) -> Result<u64> {
    let space = rustix::fs::statvfs(path)
        .map_err(|error| failure::of(error.into(), "ask for the free space", path))?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

/// Creates a directory and its missing parents, for the owner only.
fn create_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn rename_if_free(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not know the flag. The plain rename may replace a value without our
        // knowing. That leaves the count too high until the next scan.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => fs::rename(from, to),
        outcome => outcome.map_err(io::Error::from),
    }
}
