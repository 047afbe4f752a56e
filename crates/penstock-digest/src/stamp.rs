//! What tells that a file is still the same, without reading it.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A file that was changed less than this before it is read may change again without another time of
/// change: within the same tick of the file system's clock, or through a mapping of the file into
/// memory. Linux notes a time when a clean page is first written to, and has cleaned a page after some
/// 35 seconds.
const UNSETTLED: Duration = Duration::from_secs(60);

/// File systems that note the time of each change of a file, in a way that no program can set back:
/// their magic numbers, as in `linux/magic.h`. Others may have no such time, as images that are only
/// read, or never clean pages, as file systems in memory.
const NOTE_CHANGES: [u64; 10] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
    0x794c_7630, // overlayfs, which containers have over one of these
    0x6969,      // NFS
    0x00c3_6400, // Ceph
    0x0bd0_0bd0, // Lustre
];

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

    /// Whether a change after this moment will have another stamp.
    pub(crate) fn is_settled(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let newest = self.modified.0.max(self.changed.0);
        now.as_secs() as i64 - newest > UNSETTLED.as_secs() as i64
    }
}

/// Whether each change of this file leaves another stamp, once it is settled.
pub(crate) fn notes_changes(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|system| {
        // 32 bits on every file system; the field is wider or signed on some machines.
        let magic = u64::from(system.f_type as u32);
        NOTE_CHANGES.contains(&magic)
    })
}
