//! What the file system says of a file or a folder.

use std::time::{Duration, SystemTime};

use rustix::fs::{FileType, Stat};

/// The space that the file system sets aside even for a short file. Values are charged in whole
/// blocks of this many bytes.
const BLOCK_BYTES: u64 = 4096;

/// The bytes that a value of this length is charged with.
pub(super) fn charge(value_bytes: u64) -> u64 {
    value_bytes
        .max(1)
        .checked_next_multiple_of(BLOCK_BYTES)
        .unwrap_or(u64::MAX)
}

/// A file or a folder, as it was when somebody looked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) is_file: bool,
    pub(super) is_link: bool,
    pub(super) bytes: u64,
    /// Bytes that lie on the disk. A file with holes has fewer than `bytes`, and so has one that the
    /// file system compresses, or has not written yet.
    pub(super) allocated: u64,
    /// Since 1970.
    pub(super) modified: Duration,
    pub(super) owner: u32,
    pub(super) group: u32,
    /// Permissions, and none of the bits above them but the one that hands on a folder's group.
    pub(super) mode: u32,
    /// The file system and the file's number there: no other file has the same while it lives.
    pub(super) identity: (u64, u64),
}

impl Seen {
    #[allow(
        clippy::unnecessary_cast,
        reason = "the fields have other types on other processors"
    )]
    pub(super) fn new(stat: &Stat) -> Self {
        let kind = FileType::from_raw_mode(stat.st_mode as _);
        let seconds = Duration::from_secs((stat.st_mtime as i64).try_into().unwrap_or(0));
        Self {
            is_file: kind == FileType::RegularFile,
            is_link: kind == FileType::Symlink,
            bytes: (stat.st_size as i64).try_into().unwrap_or(0),
            allocated: (stat.st_blocks as u64).saturating_mul(512),
            modified: seconds + Duration::from_nanos(stat.st_mtime_nsec as u64),
            owner: stat.st_uid,
            group: stat.st_gid,
            mode: stat.st_mode as u32 & 0o2777,
            identity: (stat.st_dev as u64, stat.st_ino as u64),
        }
    }

    /// When the file was last written, or used if it is a value.
    pub(super) fn modified(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.modified
    }

    /// When the file was last written or used, as nanoseconds since 1970.
    pub(super) fn modified_nanos(&self) -> u64 {
        self.modified.as_nanos().try_into().unwrap_or(u64::MAX)
    }

    /// Whether most of it is a hole. No value is written that way.
    pub(super) fn is_hollow(&self) -> bool {
        self.allocated < self.bytes / 2 && self.bytes > BLOCK_BYTES
    }
}
