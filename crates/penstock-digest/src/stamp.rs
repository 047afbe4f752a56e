//! What tells that a file is still the same, without reading it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A file whose time of change is less than this old may change again within the same tick of the
/// file system's clock. Two seconds are the coarsest that is in use.
const TICK: Duration = Duration::from_secs(2);

/// A file at one moment. The time of the last change of the inode is in it, because no program can
/// set that time: tools that copy files set the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    pub(crate) bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// A name for the stamp, for a file in a folder.
    pub(crate) fn name(&self) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("penstock 2026-11 the stamp of a file");
        for number in [self.device, self.inode, self.bytes] {
            hasher.update(&number.to_le_bytes());
        }
        for number in [
            self.modified.0,
            self.modified.1,
            self.changed.0,
            self.changed.1,
        ] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Whether nothing but the time of the inode's last change tells the two apart. Programs can set
    /// the other time, so the content may still be another.
    pub(crate) fn is_same_but_for_the_inode(&self, other: &Self) -> bool {
        let changed = other.changed;
        Self { changed, ..*self } == *other
    }

    /// Whether a later change will have another stamp.
    pub(crate) fn is_settled(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let newest = self.modified.0.max(self.changed.0);
        now.as_secs() as i64 - newest > TICK.as_secs() as i64
    }
}
