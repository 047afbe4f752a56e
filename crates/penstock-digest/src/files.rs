//! Files, digested by threads of their own.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use parking_lot::{Condvar, Mutex};

use crate::cache::Cache;
use crate::error::{DigestError, Result};
use crate::pieces::{Digest, PIECE_BYTES, digest_of_pieces, digest_piece, pieces};
use crate::stamp::Stamp;

/// Others go first: a model is loading meanwhile.
const NICE: i32 = 10;

/// How often a process that waits for another one's digests looks.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

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
    ///
    /// # Panics
    /// The system gives no thread.
    pub fn start(paths: Vec<PathBuf>, threads: usize, cache: Option<&Path>) -> Self {
        Self::start_at(SystemTime::now, paths, threads, cache)
    }

    /// The same by another clock.
    fn start_at(
        now: fn() -> SystemTime,
        paths: Vec<PathBuf>,
        threads: usize,
        cache: Option<&Path>,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let cache = cache.map(Path::to_owned);
        let for_thread = Arc::clone(&shared);
        let for_later = paths.clone();
        thread::Builder::new()
            .name("penstock-digest".to_owned())
            .spawn(move || {
                // A thread that stays as important as others is only less polite.
                let _ = rustix::process::nice(NICE);
                let cache = cache.as_deref().map(Cache::new);
                let outcome =
                    digest_files(now, &for_thread, &paths, threads.max(1), cache.as_ref());
                *for_thread.outcome.lock() = Some(outcome.map_err(Arc::new));
                for_thread.ended.notify_all();
            })
            .expect("the system gives a thread");
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
            let metadata = fs::metadata(path).map_err(DigestError::read(path))?;
            check_same(path, &metadata, stamp)?;
            Ok(*digest)
        });
        Some(digests.collect::<Result<_>>().map_err(Arc::new))
    }

    /// How far they have come.
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

    fn check_unchanged(&self) -> Result<()> {
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(DigestError::read(self.path))?;
        check_same(self.path, &metadata, &self.stamp)
    }
}

fn check_same(path: &Path, metadata: &fs::Metadata, stamp: &Stamp) -> Result<()> {
    if Stamp::of(metadata) == *stamp {
        return Ok(());
    }
    Err(DigestError::Changed(path.to_owned()))
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
    now: fn() -> SystemTime,
    shared: &Shared,
    paths: &[PathBuf],
    threads: usize,
    cache: Option<&Cache>,
) -> Result<Vec<Found>> {
    let files: Vec<Opened> = paths
        .iter()
        .map(|path| Opened::open(path))
        .collect::<Result<_>>()?;
    let stamps: Vec<Stamp> = files.iter().map(|file| file.stamp).collect();
    let bytes = stamps.iter().map(|stamp| stamp.bytes).sum();
    shared.bytes.store(bytes, Ordering::Relaxed);
    let known = |stamp: &Stamp| cache.and_then(|cache| cache.get(stamp));
    let mut digests: Vec<Option<Digest>> = stamps.iter().map(known).collect();
    if digests.iter().any(Option::is_none) {
        let lock = cache.and_then(|cache| cache.lock_file(&stamps));
        if let Some(lock) = &lock {
            wait_for(shared, lock)?;
            digests = stamps.iter().map(known).collect();
        }
        let wanted: Vec<&Opened> = files
            .iter()
            .zip(&digests)
            .filter_map(|(file, digest)| digest.is_none().then_some(file))
            .collect();
        let wanted_bytes: u64 = wanted.iter().map(|file| file.stamp.bytes).sum();
        shared.done.store(bytes - wanted_bytes, Ordering::Relaxed);
        let mut read = read_all(shared, &wanted, threads)?.into_iter();
        for (file, digest) in files.iter().zip(&mut digests) {
            if digest.is_none() {
                let new = read.next().expect("each wanted file was read");
                file.check_unchanged()?;
                if let Some(cache) = cache
                    && file.stamp.is_settled(now())
                {
                    cache.put(&file.stamp, &new);
                }
                *digest = Some(new);
            }
        }
    }
    shared.done.store(bytes, Ordering::Relaxed);
    Ok(digests.into_iter().flatten().zip(stamps).collect())
}

/// Waits until no other process reads the same files. It lets go of the lock if it dies.
fn wait_for(shared: &Shared, lock: &File) -> Result<()> {
    loop {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => thread::sleep(LOOK_AGAIN),
            // A file system without locks: each process reads for itself.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
        }
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
            scope.spawn(|| {
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
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;
    use crate::pieces::digest_bytes;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A clock by which each file was last changed long ago.
    fn later() -> SystemTime {
        SystemTime::now() + Duration::from_secs(3600)
    }

    fn file(folder: &TempDir, name: &str, content: &[u8]) -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn cache_of(folder: &TempDir) -> PathBuf {
        folder.path().join("cache/digests")
    }

    /// The digests, and the bytes that were read for them.
    fn digests(paths: &[PathBuf], cache: Option<&Path>) -> (Vec<Digest>, u64) {
        let job = FileDigests::start_at(later, paths.to_vec(), 2, cache);
        let outcome = job.wait(LIMIT).unwrap();
        let digests = outcome.unwrap();
        let progress = job.progress();
        assert_eq!(progress.done, progress.bytes);
        (digests, progress.read)
    }

    fn failure(job: &FileDigests) -> String {
        let outcome = job.wait(LIMIT).unwrap();
        outcome.unwrap_err().to_string()
    }

    fn entries(cache: &Path) -> Vec<PathBuf> {
        let names = fs::read_dir(cache).unwrap();
        let paths = names.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_none()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// A file has the digest of the same bytes in memory, and one changed byte is enough for
        /// another, wherever it is.
        #[test]
        fn every_byte_counts(
            extra in -3_i64..4,
            whole_pieces in 0_usize..3,
            place in any::<prop::sample::Index>(),
            threads in 1_usize..4,
        ) {
            let bytes = (whole_pieces * PIECE_BYTES) as i64 + extra;
            prop_assume!(bytes > 0);
            let mut content: Vec<u8> = (0..bytes).map(|at| ((at * 31) >> 3) as u8).collect();
            let folder = TempDir::new().unwrap();
            let path = file(&folder, "weights", &content);
            let job = FileDigests::start(vec![path.clone()], threads, None);
            let outcome = job.wait(LIMIT).unwrap();
            let found = outcome.unwrap()[0];
            prop_assert_eq!(found, digest_bytes(&content, threads));
            let changed = place.index(content.len());
            content[changed] ^= 1;
            let other = file(&folder, "other", &content);
            prop_assert_ne!(digests(&[other], None).0[0], found);
        }
    }

    #[test]
    fn pieces_and_files_have_an_order() {
        let folder = TempDir::new().unwrap();
        let (zeros, ones) = (vec![0; PIECE_BYTES], vec![1; PIECE_BYTES]);
        let paths = [
            file(&folder, "a", &[&zeros[..], &ones].concat()),
            file(&folder, "b", &[&ones[..], &zeros].concat()),
            file(&folder, "empty", b""),
        ];
        let (found, read) = digests(&paths, None);
        assert_eq!(read, 4 * PIECE_BYTES as u64);
        assert_ne!(found[0], found[1]);
        assert_eq!(found[2], digest_bytes(b"", 1));
    }

    #[test]
    fn what_was_read_once_is_known() {
        let folder = TempDir::new().unwrap();
        let paths = [file(&folder, "a", b"one"), file(&folder, "b", b"three")];
        let cache = cache_of(&folder);
        let (first, read) = digests(&paths, Some(&cache));
        assert_eq!(read, 8);
        assert_eq!(digests(&paths, Some(&cache)), (first.clone(), 0));
        // A link leads to the same file, a file beside it is read alone.
        let linked = folder.path().join("linked");
        std::os::unix::fs::symlink(&paths[0], &linked).unwrap();
        let more = [linked, file(&folder, "c", b"seven")];
        let (found, read) = digests(&more, Some(&cache));
        assert_eq!((found[0], read), (first[0], 5));
    }

    #[test]
    fn a_file_that_was_overwritten_is_read_again_though_its_time_was_set_back() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "a", b"one");
        let cache = cache_of(&folder);
        let before = fs::metadata(&path).unwrap();
        let (first, _) = digests(std::slice::from_ref(&path), Some(&cache));
        loop {
            fs::write(&path, b"two").unwrap();
            let open = File::options().write(true).open(&path).unwrap();
            open.set_modified(before.modified().unwrap()).unwrap();
            // Until the file system's clock has ticked.
            if Stamp::of(&fs::metadata(&path).unwrap()) != Stamp::of(&before) {
                break;
            }
        }
        let after = fs::metadata(&path).unwrap();
        assert_eq!(after.modified().unwrap(), before.modified().unwrap());
        let (second, read) = digests(&[path], Some(&cache));
        assert_eq!(read, 3);
        assert_ne!(first, second);
    }

    #[test]
    fn what_may_change_within_the_same_tick_is_not_kept() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "a", b"one");
        let cache = cache_of(&folder);
        // By this clock no file has been there yet.
        let changed_now = || SystemTime::UNIX_EPOCH;
        let job = FileDigests::start_at(changed_now, vec![path], 1, Some(&cache));
        assert!(job.wait(LIMIT).unwrap().is_ok());
        assert!(entries(&cache).is_empty());
    }

    #[test]
    fn a_damaged_digest_is_made_again() {
        let folder = TempDir::new().unwrap();
        let paths = [file(&folder, "a", b"one")];
        let cache = cache_of(&folder);
        let (found, _) = digests(&paths, Some(&cache));
        let entry = entries(&cache).remove(0);
        for damage in [&b""[..], &[0; 40], &[7; 41]] {
            fs::write(&entry, damage).unwrap();
            assert_eq!(digests(&paths, Some(&cache)), (found.clone(), 3));
            assert_eq!(digests(&paths, Some(&cache)), (found.clone(), 0));
        }
    }

    #[test]
    fn of_many_that_want_the_same_files_one_reads() {
        let folder = TempDir::new().unwrap();
        let paths = vec![file(&folder, "a", &vec![3; 3 * PIECE_BYTES])];
        let cache = cache_of(&folder);
        let start = || FileDigests::start_at(later, paths.clone(), 2, Some(&cache));
        let jobs: Vec<FileDigests> = (0..6).map(|_| start()).collect();
        let outcomes = jobs.iter().map(|job| job.wait(LIMIT).unwrap());
        let outcomes: Vec<_> = outcomes.collect();
        let digest = outcomes[0].as_ref().unwrap()[0];
        for outcome in &outcomes {
            assert_eq!(outcome.as_ref().unwrap()[0], digest);
        }
        let read: u64 = jobs.iter().map(|job| job.progress().read).sum();
        assert_eq!(read, 3 * PIECE_BYTES as u64);
    }

    #[test]
    fn without_a_folder_to_keep_them_digests_are_made_each_time() {
        let folder = TempDir::new().unwrap();
        let paths = [file(&folder, "a", b"one")];
        let not_a_folder = file(&folder, "cache", b"");
        for _ in 0..2 {
            assert_eq!(digests(&paths, Some(&not_a_folder)).1, 3);
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = TempDir::new().unwrap();
        let missing = folder.path().join("missing");
        let job = FileDigests::start(vec![missing.clone()], 1, None);
        let said = failure(&job);
        assert!(said.contains(missing.to_str().unwrap()), "{said}");
        let job = FileDigests::start(vec![folder.path().to_owned()], 1, None);
        assert!(failure(&job).contains("not a regular file"));
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_has_no_digest() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "a", b"");
        let open = File::options().write(true).open(&path).unwrap();
        // Reading so much takes minutes.
        open.set_len(1 << 40).unwrap();
        let job = FileDigests::start(vec![path], 1, None);
        while job.progress().read == 0 {
            thread::yield_now();
        }
        open.set_len(1 << 23).unwrap();
        assert!(failure(&job).contains("changed while it was read"));
    }

    #[test]
    fn a_file_that_was_replaced_since_the_start_has_no_digest() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "a", b"one");
        let job = FileDigests::start(vec![path.clone()], 1, None);
        assert!(job.wait(LIMIT).unwrap().is_ok());
        // The same content in another file: nobody knows which was read.
        fs::rename(file(&folder, "b", b"one"), &path).unwrap();
        assert!(failure(&job).contains("changed while it was read"));
        fs::remove_file(&path).unwrap();
        assert!(failure(&job).contains("cannot read"));
    }

    #[test]
    fn whoever_gives_up_stops_the_threads() {
        let folder = TempDir::new().unwrap();
        let path = file(&folder, "a", b"");
        let open = File::options().write(true).open(&path).unwrap();
        open.set_len(1 << 40).unwrap();
        let job = FileDigests::start(vec![path], 2, None);
        assert!(job.wait(Duration::ZERO).is_none());
        let shared = Arc::clone(&job.shared);
        drop(job);
        let mut outcome = shared.outcome.lock();
        let is_over = |outcome: &mut Option<_>| outcome.is_none();
        shared.ended.wait_while_for(&mut outcome, is_over, LIMIT);
        let error = outcome.as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(**error, DigestError::GivenUp));
    }
}
