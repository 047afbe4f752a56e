//! A segment, which is opened, or created once for all processes.
//!
//! It is a file in `/dev/shm`. Whoever sets it up holds a lock meanwhile, and writes the magic
//! number last. A segment without this number was left by a creator that died, and is set up from
//! scratch.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use penstock_contract::{Error, ErrorKind, Result};
use rustix::fs::{FallocateFlags, OFlags};

use super::geometry::{BODY_WORDS, Geometry};
use super::mapping::Mapping;
use super::nodes;
use super::owner::{ByteLock, Owner, SETUP};

const DIRECTORY: &str = "/dev/shm";
const PREFIX: &str = "penstock-";
const MAGIC: u64 = u64::from_le_bytes(*b"PNSKSHM\0");
/// The version of everything in a segment. Segments of other versions are not read.
const VERSION: u64 = 2;
/// Magic, version, size.
const IDENTITY_BYTES: usize = 24;
const LONGEST_NAME: usize = 200;
/// Longest time that opening waits for another process to set the segment up. That takes about a
/// second for two GiB.
const SETUP_WAIT: Duration = Duration::from_secs(120);
const SETUP_RETRY: Duration = Duration::from_millis(2);

/// A pool's memory and this handle's place in it.
pub(super) struct Segment {
    pub(super) geometry: Geometry,
    pub(super) owner: Owner,
    mapping: Mapping,
    path: PathBuf,
}

impl Segment {
    /// Opens the segment of this name. Creates it if it does not exist and a size is given. If it
    /// exists with another size, that is an error.
    pub(super) fn open(name: &str, size: Option<u64>) -> Result<Self> {
        let path = path_of(name)?;
        let wanted = size.map(Geometry::of).transpose()?;
        let give_up = Instant::now() + SETUP_WAIT;
        loop {
            let file = open_file(&path, wanted.is_some())?;
            let geometry = match identity(&file, &path)? {
                Some(geometry) => geometry,
                None => {
                    let Some(geometry) = set_up(&file, &path, wanted.as_ref(), give_up)? else {
                        continue;
                    };
                    geometry
                }
            };
            if let Some(wanted) = wanted
                && wanted != geometry
            {
                return Err(failure(
                    ErrorKind::Config,
                    &path,
                    format!(
                        "the pool is there with {} bytes, not {}: leave the size out, give that \
                         one, or remove the file to have it created anew",
                        geometry.size, wanted.size
                    ),
                ));
            }
            let mapping = Mapping::new(&file, &geometry)
                .map_err(|error| io_failure(error, "map the pool's segment", &path))?;
            return Ok(Self {
                geometry,
                owner: Owner::register(file).map_err(|error| error.with("path", path.display()))?,
                mapping,
                path,
            });
        }
    }

    /// Whether all of the memory is still there. Whoever touches memory that its file no longer has
    /// is ended by the kernel (SIGBUS), so every operation asks first. This does not help against a
    /// file that is cut while an operation runs: only this user and root can do that.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the file was cut short.
    pub(super) fn check(&self) -> Result<()> {
        match self.owner.file_bytes() {
            Ok(bytes) if bytes >= self.geometry.file_bytes() => Ok(()),
            Ok(bytes) => Err(failure(
                ErrorKind::Unavailable,
                &self.path,
                format!(
                    "the pool's segment was cut short to {bytes} bytes: remove the file, and start \
                     again what uses it"
                ),
            )),
            Err(error) => Err(io_failure(error, "look at the pool's segment", &self.path)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// A word of the header.
    pub(super) fn header(&self, word: u64) -> &AtomicU64 {
        self.mapping.word(word)
    }

    /// An entry's state.
    pub(super) fn state(&self, entry: u64) -> &AtomicU64 {
        self.mapping.word(self.geometry.state_word(entry))
    }

    /// A word of an entry's body.
    pub(super) fn body(&self, entry: u64, word: u64) -> &AtomicU64 {
        debug_assert!(word < BODY_WORDS);
        self.mapping.word(self.geometry.body_word(entry) + word)
    }

    /// What a page belongs to.
    pub(super) fn belonging(&self, page: u64) -> &AtomicU64 {
        self.mapping.word(self.geometry.belonging_word(page))
    }

    /// Which page follows a page in its value.
    pub(super) fn link(&self, page: u64) -> &AtomicU64 {
        self.mapping.word(self.geometry.link_word(page))
    }
}

fn path_of(name: &str) -> Result<PathBuf> {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    if !(1..=LONGEST_NAME).contains(&name.len()) || !name.bytes().all(allowed) {
        return Err(Error::new(
            ErrorKind::Config,
            "a shared-memory pool's name has 1 to 200 letters, digits, dots, dashes and underscores",
        ));
    }
    Ok(Path::new(DIRECTORY).join(format!("{PREFIX}{name}")))
}

fn open_file(path: &Path, create: bool) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(path);
    let file = match file {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !create => {
            return Err(failure(
                ErrorKind::Config,
                path,
                "there is no such pool: give a size to create it",
            ));
        }
        Err(error) => return Err(io_failure(error, "open the pool's segment", path)),
    };
    // Anybody may create files in the directory, even under our names.
    let metadata = file
        .metadata()
        .map_err(|error| io_failure(error, "look at the pool's segment", path))?;
    let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
    if !metadata.is_file() || !is_ours || metadata.mode() & 0o077 != 0 {
        return Err(failure(
            ErrorKind::Denied,
            path,
            "the pool's segment is not a file that belongs to this user alone",
        ));
    }
    Ok(file)
}

/// What a segment says about itself. `None` if it is not set up.
fn identity(file: &File, path: &Path) -> Result<Option<Geometry>> {
    let mut bytes = [0; IDENTITY_BYTES];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(io_failure(error, "read the pool's segment", path)),
    }
    let mut words = [0; IDENTITY_BYTES / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [magic, version, size] = words;
    let refuse = |problem: String| {
        let message = format!("{problem}: remove the file, or choose another name");
        Err(failure(ErrorKind::Config, path, message))
    };
    match magic {
        0 => return Ok(None),
        MAGIC => {}
        _ => return refuse("the file is not a pool's segment".to_owned()),
    }
    if version != VERSION {
        return refuse(format!(
            "the pool's segment has format version {version}, not {VERSION}"
        ));
    }
    let length = file.metadata().map(|file| file.len());
    match Geometry::of(size) {
        Ok(geometry) if length.is_ok_and(|length| length >= geometry.file_bytes()) => {
            Ok(Some(geometry))
        }
        _ => refuse("the pool's segment is damaged".to_owned()),
    }
}

/// Sets a segment up, unless another process does so first. `None` if the file was removed
/// meanwhile.
fn set_up(
    file: &File,
    path: &Path,
    wanted: Option<&Geometry>,
    give_up: Instant,
) -> Result<Option<Geometry>> {
    let _lock = loop {
        match ByteLock::try_new(file, SETUP.into()) {
            Ok(Some(lock)) => break lock,
            Ok(None) if Instant::now() < give_up => std::thread::sleep(SETUP_RETRY),
            Ok(None) => {
                return Err(failure(
                    ErrorKind::Unavailable,
                    path,
                    "another process has been creating the pool for two minutes",
                ));
            }
            Err(error) => return Err(io_failure(error, "lock the pool's segment", path)),
        }
    };
    if let Some(geometry) = identity(file, path)? {
        return Ok(Some(geometry));
    }
    let is_there = |file: fs::Metadata| {
        fs::symlink_metadata(path)
            .is_ok_and(|there| (there.dev(), there.ino()) == (file.dev(), file.ino()))
    };
    if !file.metadata().is_ok_and(is_there) {
        return Ok(None);
    }
    let Some(geometry) = wanted else {
        return Err(failure(
            ErrorKind::Config,
            path,
            "the pool was never set up: give a size to do so",
        ));
    };
    fill(file, geometry, path).inspect_err(|_| {
        // Remove it while the lock is held, so that it is not another's. If it stays, the next
        // process finishes it.
        let _ = fs::remove_file(path);
    })?;
    Ok(Some(*geometry))
}

/// Makes the file a segment with nothing in it.
fn fill(file: &File, geometry: &Geometry, path: &Path) -> Result<()> {
    let bytes = geometry.file_bytes();
    let no_room = |free: Option<u64>| {
        let free = free.map_or(String::new(), |free| format!(", where {free} are free"));
        failure(
            ErrorKind::Full,
            path,
            format!(
                "a pool of {bytes} bytes does not fit {DIRECTORY}{free}: choose a smaller size, \
                 remove pools that nobody needs, or enlarge it (mount -o remount,size=…, or \
                 --shm-size of the container)"
            ),
        )
    };
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => no_room(None),
        _ => io_failure(error, "make room for the pool's segment", path),
    };
    // Make it zeros all over, even where a creator that died had begun.
    file.set_len(0).map_err(failed)?;
    // Check this first: the attempt would fill the memory up to the brim before it fails.
    let space = rustix::fs::fstatvfs(file).map_err(|error| failed(error.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if bytes > free {
        return Err(no_room(Some(free)));
    }
    file.set_len(bytes).map_err(failed)?;
    nodes::spread(file, bytes);
    // Allocate all of it now: memory that is missing later would be a SIGBUS.
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome.map_err(|error| failed(error.into()))?,
        }
    }
    let words = [VERSION, geometry.size];
    for (at, word) in (8..).step_by(8).zip(words) {
        file.write_all_at(&word.to_le_bytes(), at).map_err(failed)?;
    }
    file.write_all_at(&MAGIC.to_le_bytes(), 0).map_err(failed)
}

fn failure(kind: ErrorKind, path: &Path, message: impl Into<String>) -> Error {
    Error::new(kind, message).with("path", path.display())
}

fn io_failure(error: io::Error, attempt: &str, path: &Path) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Io,
    };
    failure(kind, path, format!("cannot {attempt}")).caused_by(error)
}
