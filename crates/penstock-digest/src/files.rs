//! Files, digested by threads of their own.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};
use penstock_threads::contain;

use crate::cache::Cache;
use crate::error::{DigestError, Result};
use crate::pieces::{Digest, PIECE_BYTES, digest_of_pieces, digest_piece, pieces};
use crate::stamp::{Stamp, notes_changes};

/// Others go first: a model is loading meanwhile.
const NICE: i32 = 10;

/// How often a process that waits for another one's digests looks.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long a process waits for another one's digests: so long, and the time in which a slow disk
/// gives the files. Then it reads for itself: the other may stand still, or be gone and have left the
/// lock to a child.
const PATIENCE: Duration = Duration::from_secs(10);
const SLOW_BYTES_PER_SECOND: u64 = 500_000_000;

/// What is known of the machine's files.
#[derive(Clone, Copy)]
struct Machine {
    now: fn() -> SystemTime,
    /// Whether each change of a file leaves another stamp, once it is settled.
    notes_changes: fn(&File) -> bool,
}

/// How far digests have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of all files.
    pub bytes: u64,
    /// Bytes that are digested, or were known.
    pub done: u64,
    /// Bytes of these that were read.
    pub read: u64,
}

/// Digests of files under way. Nobody waits for the threads when this is dropped: they stop after
/// their piece.
pub struct FileDigests {
    paths: Vec<PathBuf>,
    shared: Arc<Shared>,
}

/// What a file was when it was digested.
type Found = (Digest, Stamp);

#[derive(Default)]
struct Shared {
    outcome: Mutex<Option<std::result::Result<Vec<Found>, Arc<DigestError>>>>,
    ended: Condvar,
    is_given_up: AtomicBool,
    bytes: AtomicU64,
    done: AtomicU64,
    read: AtomicU64,
}

impl FileDigests {
    /// Begins to digest files with so many threads. With a folder as `cache`, files that did not
    /// change since are not read again, and of the processes that want the same files one reads.
    pub fn start(paths: Vec<PathBuf>, threads: usize, cache: Option<&Path>) -> Self {
        let machine = Machine {
            now: SystemTime::now,
            notes_changes,
        };
        Self::start_on(machine, paths, threads, cache)
    }

    /// Begins to digest files as [`start`](Self::start) does, on a machine of the caller's choice.
    fn start_on(
        machine: Machine,
        paths: Vec<PathBuf>,
        threads: usize,
        cache: Option<&Path>,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let cache = cache.map(Path::to_owned);
        let for_thread = Arc::clone(&shared);
        let for_later = paths.clone();
        let spawned = thread::Builder::new()
            .name("penstock-digest".to_owned())
            .spawn(move || {
                // A thread that stays as important as others is only less polite.
                let _ = rustix::process::nice(NICE);
                let cache = cache.as_deref().and_then(Cache::new);
                let outcome = contain("penstock-digest", || {
                    digest_files(machine, &for_thread, &paths, threads.max(1), cache.as_ref())
                });
                let outcome = outcome.unwrap_or(Err(DigestError::Panicked));
                *for_thread.outcome.lock() = Some(outcome.map_err(Arc::new));
                for_thread.ended.notify_all();
            });
        if let Err(source) = spawned {
            *shared.outcome.lock() = Some(Err(Arc::new(DigestError::NoThread(source))));
        }
        Self {
            paths: for_later,
            shared,
        }
    }

    /// Waits for the digests, in the order of their files, for so long at most. None if they are
    /// not there by then.
    ///
    /// They are those of the files that were there from [`start`](Self::start) to now: whoever read
    /// one meanwhile has read what was digested.
    ///
    /// # Errors
    /// A file cannot be read, or was changed or replaced since the start.
    pub fn wait(
        &self,
        limit: Duration,
    ) -> Option<std::result::Result<Vec<Digest>, Arc<DigestError>>> {
        let mut outcome = self.shared.outcome.lock();
        if outcome.is_none() {
            self.shared
                .ended
                .wait_while_for(&mut outcome, |outcome| outcome.is_none(), limit);
        }
        let found = match outcome.as_ref()? {
            Ok(found) => found,
            Err(error) => return Some(Err(Arc::clone(error))),
        };
        let digests = self.paths.iter().zip(found).map(|(path, (digest, stamp))| {
            check_same(path, digest, stamp)?;
            Ok(*digest)
        });
        Some(digests.collect::<Result<_>>().map_err(Arc::new))
    }

    /// How far the digests have come.
    pub fn progress(&self) -> Progress {
        // Relaxed: for people to see.
        Progress {
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            done: self.shared.done.load(Ordering::Relaxed),
            read: self.shared.read.load(Ordering::Relaxed),
        }
    }
}

impl Drop for FileDigests {
    fn drop(&mut self) {
        self.shared.is_given_up.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn check(&self) -> Result<()> {
        if self.is_given_up.load(Ordering::Relaxed) {
            return Err(DigestError::GivenUp);
        }
        Ok(())
    }
}

/// A file that is open, as it was then.
struct Opened<'a> {
    path: &'a Path,
    file: File,
    stamp: Stamp,
}

impl<'a> Opened<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let file = File::open(path).map_err(DigestError::read(path))?;
        let stamp = stamp_of(path, &file)?;
        Ok(Self { path, file, stamp })
    }
}

/// Checks that a file is the one that was digested, and has the same content.
fn check_same(path: &Path, digest: &Digest, stamp: &Stamp) -> Result<()> {
    let metadata = fs::metadata(path).map_err(DigestError::read(path))?;
    let now = Stamp::of(&metadata);
    if now == *stamp {
        return Ok(());
    }
    // An owner, a mode or a link that changes leaves the content as it is. It says so by the same
    // time as a change of content that was then set back.
    if now.is_same_but_for_the_inode(stamp) && digest_again(path)? == (*digest, now) {
        return Ok(());
    }
    Err(DigestError::Changed(path.to_owned()))
}

fn digest_again(path: &Path) -> Result<(Digest, Stamp)> {
    let file = Opened::open(path)?;
    let mut buffer = vec![0; PIECE_BYTES];
    let pieces = (0..pieces(file.stamp.bytes))
        .map(|piece| Ok(read_piece(&file, piece, &mut buffer)?.0))
        .collect::<Result<Vec<_>>>()?;
    let digest = digest_of_pieces(file.stamp.bytes, &pieces);
    Ok((digest, stamp_of(path, &file.file)?))
}

fn stamp_of(path: &Path, file: &File) -> Result<Stamp> {
    let metadata = file.metadata().map_err(DigestError::read(path))?;
    if !metadata.is_file() {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        return Err(DigestError::read(path)(source));
    }
    Ok(Stamp::of(&metadata))
}

fn digest_files(
    machine: Machine,
    shared: &Shared,
    paths: &[PathBuf],
    threads: usize,
    cache: Option<&Cache>,
) -> Result<Vec<Found>> {
    // Before anything is read: what changes later must leave another stamp.
    let began = (machine.now)();
    let files: Vec<Opened> = paths
        .iter()
        .map(|path| Opened::open(path))
        .collect::<Result<_>>()?;
    let stamps: Vec<Stamp> = files.iter().map(|file| file.stamp).collect();
    let bytes = stamps.iter().map(|stamp| stamp.bytes).sum();
    shared.bytes.store(bytes, Ordering::Relaxed);
    let is_kept: Vec<bool> = files
        .iter()
        .map(|file| file.stamp.is_settled(began) && (machine.notes_changes)(&file.file))
        .collect();
    let known = || -> Vec<Option<Digest>> {
        let files = stamps.iter().zip(&is_kept);
        let found = files.map(|(stamp, is_kept)| cache.filter(|_| *is_kept)?.get(stamp));
        found.collect()
    };
    let mut digests = known();
    if digests.iter().any(Option::is_none) {
        // Of files that are not kept, other processes cannot tell the digests.
        let is_told = cache.filter(|_| is_kept.iter().all(|kept| *kept));
        let lock = is_told.and_then(|cache| cache.lock_file(&stamps));
        if let Some(lock) = &lock {
            let patience = PATIENCE + Duration::from_secs(bytes / SLOW_BYTES_PER_SECOND);
            wait_for(shared, lock, patience, || {
                digests = known();
                digests.iter().all(Option::is_some)
            })?;
        }
        let wanted: Vec<&Opened> = files
            .iter()
            .zip(&digests)
            .filter_map(|(file, digest)| digest.is_none().then_some(file))
            .collect();
        let wanted_bytes: u64 = wanted.iter().map(|file| file.stamp.bytes).sum();
        shared.done.store(bytes - wanted_bytes, Ordering::Relaxed);
        let mut read = read_all(shared, &wanted, threads)?.into_iter();
        for ((file, is_kept), digest) in files.iter().zip(is_kept).zip(&mut digests) {
            if digest.is_none() {
                let new = read.next().expect("each wanted file was read");
                check_same(file.path, &new, &file.stamp)?;
                if let Some(cache) = cache
                    && is_kept
                {
                    cache.put(&file.stamp, &new);
                }
                *digest = Some(new);
            }
        }
        if let Some(lock) = &lock {
            // A child that this process has forked has the file open too, and the lock with it.
            let _ = lock.unlock();
        }
    }
    shared.done.store(bytes, Ordering::Relaxed);
    Ok(digests.into_iter().flatten().zip(stamps).collect())
}

/// Waits until no other process reads the same files, or all digests are there, but not for ever.
/// Who has the lock lets go of it if it dies.
fn wait_for(
    shared: &Shared,
    lock: &File,
    patience: Duration,
    mut are_known: impl FnMut() -> bool,
) -> Result<()> {
    let began = Instant::now();
    loop {
        let tried = lock.try_lock();
        // What another process has found is looked at after the lock, which it gives back later.
        if are_known() || !matches!(tried, Err(TryLockError::WouldBlock)) {
            // A file system without locks: each process reads for itself.
            return Ok(());
        }
        if began.elapsed() >= patience {
            return Ok(());
        }
        thread::sleep(LOOK_AGAIN);
        shared.check()?;
    }
}

/// The digests of whole files, each read once, by all threads together.
fn read_all(shared: &Shared, files: &[&Opened], threads: usize) -> Result<Vec<Digest>> {
    let counts = files.iter().map(|file| pieces(file.stamp.bytes));
    let places: Vec<(usize, usize)> = counts
        .enumerate()
        .flat_map(|(file, count)| (0..count).map(move |piece| (file, piece)))
        .collect();
    let digests = Mutex::new(vec![Digest::default(); places.len()]);
    let first_error = Mutex::new(None);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = vec![0; PIECE_BYTES];
        // Relaxed: the counter only gives each piece to one thread.
        while let place = next.fetch_add(1, Ordering::Relaxed)
            && let Some(&(file, piece)) = places.get(place)
        {
            let read = shared.check().and_then(|()| {
                let digest = read_piece(files[file], piece, &mut buffer)?;
                shared.done.fetch_add(digest.1, Ordering::Relaxed);
                shared.read.fetch_add(digest.1, Ordering::Relaxed);
                Ok(digest.0)
            });
            match read {
                Ok(digest) => digests.lock()[place] = digest,
                Err(error) => {
                    first_error.lock().get_or_insert(error);
                    next.store(places.len(), Ordering::Relaxed);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(places.len()) {
            // Without another thread, this one does all.
            let _ = thread::Builder::new().spawn_scoped(scope, || {
                let _ = rustix::process::nice(NICE);
                work();
            });
        }
        work();
    });
    if let Some(error) = first_error.into_inner() {
        return Err(error);
    }
    let mut digests = digests.into_inner().into_iter();
    Ok(files
        .iter()
        .map(|file| {
            let own: Vec<Digest> = digests.by_ref().take(pieces(file.stamp.bytes)).collect();
            digest_of_pieces(file.stamp.bytes, &own)
        })
        .collect())
}

/// The digest of a piece, and its bytes.
fn read_piece(file: &Opened, piece: usize, buffer: &mut [u8]) -> Result<(Digest, u64)> {
    let start = piece as u64 * PIECE_BYTES as u64;
    let bytes = (file.stamp.bytes - start).min(PIECE_BYTES as u64);
    let buffer = &mut buffer[..bytes as usize];
    file.file.read_exact_at(buffer, start).map_err(|error| {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            DigestError::Changed(file.path.to_owned())
        } else {
            DigestError::read(file.path)(error)
        }
    })?;
    Ok((digest_piece(buffer), bytes))
}

#[cfg(test)]
mod tests;
