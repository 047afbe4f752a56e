use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::pieces::digest_bytes;

const LIMIT: Duration = Duration::from_secs(60);

/// A machine on which each file was last changed long ago.
const LATER: Machine = Machine {
    now: || SystemTime::now() + Duration::from_secs(3600),
    notes_changes: |_| true,
};

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
    let job = FileDigests::start_on(LATER, paths.to_vec(), 2, cache);
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

/// What is kept of a file that was read on this machine, and what is read when it is read again.
fn kept_on(machine: Machine) -> (usize, u64) {
    let folder = TempDir::new().unwrap();
    let path = file(&folder, "a", b"one");
    let cache = cache_of(&folder);
    let job = FileDigests::start_on(machine, vec![path.clone()], 1, Some(&cache));
    assert!(job.wait(LIMIT).unwrap().is_ok());
    let kept = entries(&cache).len();
    // Somebody else has put it there.
    assert_eq!(
        digests(std::slice::from_ref(&path), Some(&cache)).1,
        [3, 0][kept]
    );
    let job = FileDigests::start_on(machine, vec![path], 1, Some(&cache));
    assert!(job.wait(LIMIT).unwrap().is_ok());
    (kept, job.progress().read)
}

#[test]
fn a_file_that_was_just_changed_is_not_kept() {
    let now = || SystemTime::now() + Duration::from_secs(30);
    assert_eq!(kept_on(Machine { now, ..LATER }), (0, 3));
    assert_eq!(kept_on(LATER), (1, 0));
}

#[test]
fn where_changes_may_leave_no_other_stamp_nothing_is_kept() {
    let notes_changes = |_: &File| false;
    assert_eq!(
        kept_on(Machine {
            notes_changes,
            ..LATER
        }),
        (0, 3)
    );
}

#[test]
fn file_systems_in_memory_do_not_note_each_change() {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let path = file(&folder, "a", b"one");
    assert!(!notes_changes(&File::open(path).unwrap()));
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
    let start = || FileDigests::start_on(LATER, paths.clone(), 2, Some(&cache));
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
fn a_file_whose_owner_or_links_change_is_the_same() {
    let folder = TempDir::new().unwrap();
    let path = file(&folder, "a", &vec![3; PIECE_BYTES + 7]);
    let job = FileDigests::start(vec![path.clone()], 1, None);
    let first = job.wait(LIMIT).unwrap().unwrap();
    let before = Stamp::of(&fs::metadata(&path).unwrap());
    let mut link = 0;
    // Until the file system's clock has ticked.
    while Stamp::of(&fs::metadata(&path).unwrap()) == before {
        link += 1;
        fs::hard_link(&path, folder.path().join(format!("link {link}"))).unwrap();
    }
    assert_eq!(job.wait(LIMIT).unwrap().unwrap(), first);
    // The content changes, and the time that programs can set is set back.
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, vec![4; PIECE_BYTES + 7]).unwrap();
    let open = File::options().write(true).open(&path).unwrap();
    open.set_modified(modified).unwrap();
    assert!(failure(&job).contains("changed while it was read"));
}

#[test]
fn a_cache_that_others_may_write_is_not_believed() {
    let folder = TempDir::new().unwrap();
    let paths = [file(&folder, "a", b"one")];
    let cache = cache_of(&folder);
    let (first, _) = digests(&paths, Some(&cache));
    let stamp = Stamp::of(&fs::metadata(&paths[0]).unwrap());
    Cache::new(&cache).unwrap().put(&stamp, &[7; 32]);
    assert_eq!(digests(&paths, Some(&cache)), (vec![[7; 32]], 0));
    let read = (first, 3);
    for mode in [0o777, 0o1777, 0o770] {
        fs::set_permissions(&cache, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(digests(&paths, Some(&cache)), read);
    }
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o700)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&cache, Some(65534), None).unwrap();
        assert_eq!(digests(&paths, Some(&cache)), read);
        std::os::unix::fs::chown(&cache, Some(0), None).unwrap();
    } else {
        eprintln!("skipped: a cache of another user, as only root can make one");
    }
    // Nor is a link followed, or a FIFO waited for.
    let entry = cache.join(stamp.name());
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(&entry, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &entry).unwrap();
    assert_eq!(digests(&paths, Some(&cache)), read);
    fs::remove_file(&entry).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&entry).status();
    assert!(made.unwrap().success());
    assert_eq!(digests(&paths, Some(&cache)), read);
}

/// The lock that another process has, which may stand still.
fn locked(cache: &Path, path: &Path) -> (Cache, Stamp, File) {
    let cache = Cache::new(cache).unwrap();
    let stamp = Stamp::of(&fs::metadata(path).unwrap());
    let lock = cache.lock_file(&[stamp]).unwrap();
    lock.try_lock().unwrap();
    (cache, stamp, lock)
}

#[test]
fn what_another_process_has_found_is_taken_though_its_lock_stays() {
    let folder = TempDir::new().unwrap();
    let path = file(&folder, "a", b"one");
    let (cache, stamp, _lock) = locked(&cache_of(&folder), &path);
    let job = FileDigests::start_on(LATER, vec![path], 1, Some(&cache_of(&folder)));
    assert!(job.wait(Duration::ZERO).is_none());
    cache.put(&stamp, &[7; 32]);
    assert_eq!(job.wait(LIMIT).unwrap().unwrap(), [[7; 32]]);
    assert_eq!(job.progress().read, 0);
}

#[test]
fn who_waits_in_vain_reads_for_itself() {
    let folder = TempDir::new().unwrap();
    let path = file(&folder, "a", b"one");
    let (_, _, _lock) = locked(&cache_of(&folder), &path);
    let shared = Shared::default();
    let other = Cache::new(&cache_of(&folder)).unwrap();
    let lock = other.lock_file(&[Stamp::of(&fs::metadata(&path).unwrap())]);
    wait_for(&shared, &lock.unwrap(), Duration::ZERO, || false).unwrap();
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
