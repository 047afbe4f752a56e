//! Digests of files that were read before, in a folder: one small file for each.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;

use crate::pieces::Digest;
use crate::stamp::Stamp;

/// A folder with digests by their files' stamps. What goes wrong with it costs time only: files are
/// read again.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Makes the folder, for its owner alone: whoever can write to it decides what a model is.
    pub(crate) fn new(folder: &Path) -> Self {
        use std::os::unix::fs::DirBuilderExt;
        let _ = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder);
        Self {
            folder: folder.to_owned(),
        }
    }

    pub(crate) fn get(&self, stamp: &Stamp) -> Option<Digest> {
        let text = fs::read(self.folder.join(stamp.name())).ok()?;
        let (digest, check) = text.split_first_chunk()?;
        (check == check_of(digest)).then_some(*digest)
    }

    pub(crate) fn put(&self, stamp: &Stamp, digest: &Digest) {
        let place = self.folder.join(stamp.name());
        let beside = place.with_extension(process::id().to_string());
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)
            .and_then(|mut file| {
                file.write_all(digest)?;
                file.write_all(&check_of(digest))
            })
            .and_then(|()| fs::rename(&beside, &place));
        if written.is_err() {
            let _ = fs::remove_file(&beside);
        }
    }

    /// The lock that the processes of a machine take before they read these files, so that one of
    /// them reads and the others find its digests here. None if there can be no lock.
    pub(crate) fn lock_file(&self, stamps: &[Stamp]) -> Option<File> {
        let mut hasher = blake3::Hasher::new_derive_key("penstock 2026-11 the lock of some files");
        for stamp in stamps {
            hasher.update(stamp.name().as_bytes());
        }
        let place = self
            .folder
            .join(format!("{}.lock", hasher.finalize().to_hex()));
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(place)
            .ok()
    }
}

/// A machine that goes down while it writes may leave a file of zeros.
fn check_of(digest: &Digest) -> [u8; 8] {
    let hash = blake3::hash(digest);
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    [a, b, c, d, e, f, g, h]
}
