//! Digests of files that were read before, in a folder: one small file for each.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process;
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags};

use crate::pieces::Digest;
use crate::stamp::Stamp;

/// Nothing is opened through a link, and nothing that waits for another process, as a FIFO does.
const FILE: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);
const FOR_THE_OWNER: Mode = Mode::RUSR.union(Mode::WUSR);

/// A folder with digests by their files' stamps. What goes wrong with it costs time only: files are
/// read again.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: Arc<OwnedFd>,
}

impl Cache {
    /// Makes the folder, for its owner alone: whoever can write to it decides what a model is. `None`
    /// if there is none, or somebody else than this user and root can write to it.
    pub(crate) fn new(folder: &Path) -> Option<Self> {
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
        let seen = rustix::fs::fstat(&folder).ok()?;
        let is_own = [0, rustix::process::geteuid().as_raw()].contains(&seen.st_uid);
        let for_others = Mode::WGRP | Mode::WOTH;
        let is_ours = is_own && !Mode::from_raw_mode(seen.st_mode).intersects(for_others);
        is_ours.then(|| Self {
            folder: Arc::new(folder),
        })
    }

    pub(crate) fn get(&self, stamp: &Stamp) -> Option<Digest> {
        let mut text = Vec::new();
        let file = self.open(&stamp.name(), OFlags::RDONLY).ok()?;
        file.take(1 << 10).read_to_end(&mut text).ok()?;
        let (digest, check) = text.split_first_chunk()?;
        (check == check_of(digest)).then_some(*digest)
    }

    pub(crate) fn put(&self, stamp: &Stamp, digest: &Digest) {
        let name = stamp.name();
        let beside = format!("{name}.{}", process::id());
        let written = self
            .open(&beside, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)
            .and_then(|mut file| {
                file.write_all(digest)?;
                file.write_all(&check_of(digest))
            })
            .and_then(|()| {
                rustix::fs::renameat(&self.folder, &beside, &self.folder, &name)
                    .map_err(io::Error::from)
            });
        if written.is_err() {
            let _ = rustix::fs::unlinkat(&self.folder, &beside, AtFlags::empty());
        }
    }

    fn open(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let file = rustix::fs::openat(&self.folder, name, FILE | flags, FOR_THE_OWNER)?;
        Ok(file.into())
    }

    /// The lock that the processes of a machine take before they read these files, so that one of
    /// them reads and the others find its digests here. None if there can be no lock.
    pub(crate) fn lock_file(&self, stamps: &[Stamp]) -> Option<File> {
        let mut hasher = blake3::Hasher::new_derive_key("penstock 2026-11 the lock of some files");
        for stamp in stamps {
            hasher.update(stamp.name().as_bytes());
        }
        let name = format!("{}.lock", hasher.finalize().to_hex());
        self.open(&name, OFlags::WRONLY | OFlags::CREATE).ok()
    }
}

/// A machine that goes down while it writes may leave a file of zeros.
fn check_of(digest: &Digest) -> [u8; 8] {
    let hash = blake3::hash(digest);
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    [a, b, c, d, e, f, g, h]
}
