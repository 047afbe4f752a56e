//! The file store: what every store does, and what only a shared directory has to.

use std::fs::{self, FileTimes};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use penstock_contract::{ErrorKind, Key, PutOutcome, Store};
use penstock_store::{FileStore, Hosts, Trust};
use rustix::process::Signal;

use crate::behaviour::directory::{charged, open, path_of, used_bytes};
use crate::behaviour::sealed::{
    Process, SHARED, assert_whole, listed, put_sealed, put_sealed_by, whole_values,
};
use crate::behaviour::{eventually, key, prompt, soon, within};

/// Names the role of a process that a test starts, and the pool it works on.
const ROLE: &str = "PENSTOCK_TEST_ROLE";
const ROOT: &str = "PENSTOCK_TEST_ROOT";
const CAPACITY: u64 = 8 << 20;

#[test]
fn behaves() {
    let root = tempfile::tempdir().unwrap();
    crate::behaviour::run_all(|| open(root.path(), 32 << 20));
}

#[test]
fn behaves_as_one_of_several_hosts() {
    let root = tempfile::tempdir().unwrap();
    let open = || -> Arc<dyn Store> {
        let store = FileStore::open(
            root.path(),
            Some(32 << 20),
            Some(Hosts::Several),
            &Trust::default(),
        );
        Arc::new(store.unwrap())
    };
    crate::behaviour::run_all(open);
    // No file lies where one machine's own would.
    assert!(!root.path().join("usage").exists());
    assert!(open().url().ends_with("&hosts=several"));
}

#[test]
fn stays_within_its_bound() {
    let root = tempfile::tempdir().unwrap();
    crate::behaviour::stays_within_its_bound(|| open(root.path(), 4 << 20), 4 << 20);
}

#[test]
fn what_is_retired_goes_first() {
    let root = tempfile::tempdir().unwrap();
    crate::behaviour::retired_goes_first(|| open(root.path(), 4 << 20), 4 << 20);
}

#[test]
fn a_value_that_another_has_replaced_is_not_removed_as_damaged() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), 4 << 20);
    let key = key(crate::behaviour::fresh_namespace(), 0);
    crate::behaviour::put(&*store, &key, &[1; 1000]).unwrap();
    store.remove_damaged(&key, 1001, soon()).unwrap();
    assert_eq!(crate::behaviour::get(&*store, &key).unwrap(), [1; 1000]);
    store.remove_damaged(&key, 1000, soon()).unwrap();
    assert_eq!(crate::behaviour::get(&*store, &key), None);
    store.remove_damaged(&key, 1000, soon()).unwrap();
    let late = store.remove_damaged(&key, 1000, crate::behaviour::past());
    assert_eq!(late.unwrap_err().kind(), ErrorKind::TimedOut);
}

/// The processes that the tests start; does nothing in a run of the tests themselves.
#[test]
#[ignore = "a role of other tests' processes"]
fn in_a_process_of_its_own() {
    let (Ok(role), Some(root)) = (std::env::var(ROLE), std::env::var_os(ROOT)) else {
        return;
    };
    let root = PathBuf::from(root);
    match role.as_str() {
        "put without end" => {
            let store = open(&root, CAPACITY);
            for n in u64::from(std::process::id()) << 32.. {
                match put_sealed(&*store, n, 200_000 + (n % 5) as usize * 50_000) {
                    Ok(_) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Full, "{error}"),
                }
            }
        }
        "put and get under pressure" => {
            let store = open(&root, CAPACITY);
            let (mut stored, mut found) = (0, 0);
            for n in 0..600 {
                // The same keys as the other processes, in another order.
                let n = (n * 7 + u64::from(std::process::id())) % 200;
                match put_sealed(&*store, n, 100_000 + (n % 3) as usize * 30_000) {
                    Ok(_) => stored += 1,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Full, "{error}"),
                }
                found += u64::from(assert_whole(&*store, &key(SHARED, n)));
            }
            assert!(
                stored > 300 && found > 100,
                "stored {stored}, found {found}"
            );
        }
        "open and close" => {
            let count = |what| fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
            let before = (count("fd"), count("task"));
            for n in 0..100 {
                let store = open(&root, CAPACITY);
                put_sealed(&*store, n, 1000).unwrap();
                assert_whole(&*store, &key(SHARED, n));
            }
            // A joined thread may be listed a moment longer.
            eventually("all is closed", || (count("fd"), count("task")) == before);
            assert_eq!(fs::read_dir(root.join("tmp")).unwrap().count(), 0);
        }
        "fill a small disk" => {
            let disk = SmallDisk::mount("4m").expect("may be mounted in a namespace of its own");
            fill(&disk);
        }
        "write what is too long for a file" => {
            let pool = root.join("pool");
            let store = open(&pool, CAPACITY);
            for n in 0..4 {
                let stored = put_sealed(&*store, n, 100_000).unwrap();
                assert_eq!(stored, PutOutcome::Stored);
                refuses(&*store, &pool, 10 + n, 200_000);
            }
            assert!((0..4).all(|n| assert_whole(&*store, &key(SHARED, n))));
        }
        other => panic!("no such role: {other}"),
    }
}

fn start(role: &str, root: &Path) -> Process {
    start_under(&[], role, root)
}

fn start_under(starter: &[&str], role: &str, root: &Path) -> Process {
    let test = "file::in_a_process_of_its_own";
    Process::start_under(
        starter,
        test,
        &[(ROLE, role.as_ref()), (ROOT, root.as_ref())],
    )
}

/// All files that hold values or will, each as long as it is now.
fn files(root: &Path) -> Vec<(PathBuf, u64)> {
    fn gather(path: &Path, found: &mut Vec<(PathBuf, u64)>) {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => gather(&entry.path(), found),
                Ok(metadata) => found.push((entry.path(), metadata.len())),
                Err(_) => {}
            }
        }
    }
    let mut found = Vec::new();
    gather(root, &mut found);
    found.retain(|(path, _)| *path != root.join("usage"));
    found
}

fn bytes_on_disk(root: &Path) -> u64 {
    files(root).iter().map(|(_, bytes)| bytes).sum()
}

/// The files, and the record of what is in use: tells why a bound was not held.
fn what_lies_in(root: &Path) -> String {
    format!(
        "{} bytes lie there; used, taken, given back: {:?}; {:#?}",
        bytes_on_disk(root),
        count_of(root).get(1..4),
        files(root)
    )
}

/// The record that the processes keep together, as words. Empty before the first scan.
fn count_of(root: &Path) -> Vec<u64> {
    let record = fs::read(root.join("usage")).unwrap_or_default();
    let words = record.as_chunks::<8>().0;
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

#[test]
fn processes_share_one_bound_and_see_only_whole_values() {
    let root = tempfile::tempdir().unwrap();
    let mut processes: Vec<Process> = (0..3)
        .map(|_| start("put and get under pressure", root.path()))
        .collect();
    while processes.iter_mut().any(Process::is_running) {
        // Stopped wherever they are: a sum taken while they run is no instant's.
        processes.iter_mut().for_each(Process::stop);
        let bytes = bytes_on_disk(root.path());
        assert!(bytes <= CAPACITY, "{}", what_lies_in(root.path()));
        // The bound follows from this: room is counted before it is written, until it is empty.
        let rounded: u64 = files(root.path())
            .iter()
            .map(|(_, bytes)| bytes.next_multiple_of(4096))
            .sum();
        assert!(
            count_of(root.path())
                .get(1)
                .is_none_or(|used| *used >= rounded),
            "{}",
            what_lies_in(root.path())
        );
        processes
            .iter_mut()
            .for_each(|process| process.signal(Signal::CONT));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(processes.into_iter().all(Process::succeeds));
    let most = bytes_on_disk(root.path());
    assert!(most > CAPACITY / 2, "there was pressure: {most} bytes");
    let store = open(root.path(), CAPACITY);
    eventually("the count is exact", || {
        used_bytes(&*store) == charged(&*store)
    });
    assert!(whole_values(&*store) > 20);
}

#[test]
fn a_killed_process_leaves_no_partial_value_and_no_lost_room() {
    let root = tempfile::tempdir().unwrap();
    let temporaries = || fs::read_dir(root.path().join("tmp")).unwrap().count();
    for round in 0..12 {
        let mut process = start("put without end", root.path());
        let known = listed_files(root.path()).len();
        eventually("the process puts", || {
            listed_files(root.path()).len() != known
        });
        if round % 2 == 0 {
            // In the middle of a value: besides that there is the process's own registration.
            eventually("it writes a value", || {
                process.stop();
                let is_writing = temporaries() > 1;
                if !is_writing {
                    process.signal(Signal::CONT);
                }
                is_writing
            });
        } else {
            // Wherever it is.
            std::thread::sleep(Duration::from_micros(700 * round));
        }
        process.kill();
        assert!(bytes_on_disk(root.path()) <= CAPACITY);
        let store = open(root.path(), CAPACITY);
        assert!(whole_values(&*store) > 0);
        eventually("the count is exact again", || {
            used_bytes(&*store) == charged(&*store)
        });
        // This handle's own registration is all there is.
        eventually("left-overs are gone", || temporaries() == 1);
    }
}

#[test]
fn a_stopped_process_holds_nobody_up() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    let mut process = start("put without end", root.path());
    eventually("the process puts", || !listed_files(root.path()).is_empty());
    for n in 0..30 {
        process.stop();
        let soon = within(Duration::from_millis(50));
        if let Err(error) = put_sealed_by(&*store, n, 100_000, soon) {
            assert!(
                matches!(error.kind(), ErrorKind::Full | ErrorKind::TimedOut),
                "{error}"
            );
        }
        // Reading asks nobody.
        for object in listed(&*store) {
            assert_whole(&*store, &object.key);
        }
        process.signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(n));
    }
    process.kill();
    eventually("puts succeed again", || {
        put_sealed(&*store, 1000, 1000).is_ok()
    });
}

fn listed_files(root: &Path) -> Vec<PathBuf> {
    let namespace = root.join(SHARED.to_string());
    let shards = fs::read_dir(namespace).into_iter().flatten().flatten();
    let files = shards.flat_map(|shard| fs::read_dir(shard.path()).into_iter().flatten().flatten());
    files.map(|file| file.path()).collect()
}

#[test]
fn handles_come_and_go_without_a_trace() {
    let root = tempfile::tempdir().unwrap();
    assert!(start("open and close", root.path()).succeeds());
}

#[test]
fn the_least_recently_used_go_first_also_by_other_handles() {
    let root = tempfile::tempdir().unwrap();
    let size = 100_000;
    {
        let store = open(root.path(), CAPACITY);
        (0..60).for_each(|n| assert!(put_sealed(&*store, n, size).is_ok()));
    }
    age(root.path());
    let store = open(root.path(), CAPACITY);
    // A get and a put of what is there are uses; a look-up is none.
    assert!(assert_whole(&*store, &key(SHARED, 0)));
    assert_eq!(
        put_sealed(&*store, 1, size).unwrap(),
        PutOutcome::AlreadyPresent
    );
    assert_eq!(store.contains(&[key(SHARED, 2)], soon()).unwrap(), [true]);
    let other = open(root.path(), CAPACITY);
    (100..140).for_each(|n| assert!(put_sealed(&*other, n, size).is_ok()));
    let keys: Vec<Key> = (0..60).map(|n| key(SHARED, n)).collect();
    let left = store.contains(&keys, soon()).unwrap();
    assert_eq!(left[..3], [true, true, false]);
    let oldest = left[2..]
        .iter()
        .position(|&left| left)
        .expect("not all were evicted");
    assert!(
        left[2 + oldest..].iter().all(|&left| left),
        "in order of use: {left:?}"
    );
    assert!(oldest >= 10);
}

/// Makes it as if a prompt's values had been put an hour ago, one second apart.
fn age(root: &Path) {
    let hour = SystemTime::now() - Duration::from_secs(3600);
    for n in 0..prompt::BLOCKS {
        let times = FileTimes::new().set_modified(hour + Duration::from_secs(n));
        let file = fs::File::options()
            .write(true)
            .open(path_of(root, n))
            .unwrap();
        file.set_times(times).unwrap();
    }
}

#[test]
fn of_a_prompt_the_end_goes_first_as_its_blocks_are_put() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    prompt::put(&*store, true);
    prompt::assert_the_beginning_stays(&*store, 0);
}

#[test]
fn what_is_touched_stays() {
    let root = tempfile::tempdir().unwrap();
    crate::behaviour::touched_outlives_untouched(|| open(root.path(), 4 << 20), 4 << 20);
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    prompt::put(&*store, false);
    age(root.path());
    prompt::touch(&*store);
    prompt::assert_the_beginning_stays(&*store, 0);
}

#[test]
fn of_a_prompt_the_end_goes_first_as_its_blocks_are_read() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    prompt::put(&*store, false);
    age(root.path());
    prompt::read(&*store);
    prompt::look(&*store);
    prompt::assert_the_beginning_stays(&*store, 0);
}

#[test]
fn a_lost_or_damaged_count_is_made_anew() {
    let root = tempfile::tempdir().unwrap();
    {
        let store = open(root.path(), CAPACITY);
        (0..40).for_each(|n| assert!(put_sealed(&*store, n, 100_000).is_ok()));
    }
    let usage = root.path().join("usage");
    let damages: [&dyn Fn(); 3] = [
        &|| fs::remove_file(&usage).unwrap(),
        &|| fs::write(&usage, b"garbage").unwrap(),
        &|| fs::write(&usage, [0xff; 64]).unwrap(),
    ];
    for (n, damage) in (1000..).zip(damages) {
        damage();
        let store = open(root.path(), CAPACITY);
        assert_eq!(put_sealed(&*store, n, 100_000).unwrap(), PutOutcome::Stored);
        eventually("the count is exact", || {
            used_bytes(&*store) == charged(&*store)
        });
        assert!(listed(&*store).len() > 40);
    }
}

#[test]
fn values_that_others_brought_or_took_are_counted_by_the_next_scan() {
    let root = tempfile::tempdir().unwrap();
    {
        let store = open(root.path(), CAPACITY);
        (0..40).for_each(|n| assert!(put_sealed(&*store, n, 100_000).is_ok()));
    }
    (0..20).for_each(|n| fs::remove_file(path_of(root.path(), n)).unwrap());
    let store = open(root.path(), CAPACITY);
    eventually("the count is exact", || {
        used_bytes(&*store) == charged(&*store)
    });
    drop(store);
    for n in 100..150 {
        let path = path_of(root.path(), n);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, vec![0; 200_000]).unwrap();
    }
    assert!(bytes_on_disk(root.path()) > CAPACITY);
    let store = open(root.path(), CAPACITY);
    eventually("back within the bound", || {
        bytes_on_disk(root.path()) <= CAPACITY
    });
    eventually("the count is exact", || {
        used_bytes(&*store) == charged(&*store)
    });
}

#[test]
fn what_is_not_ours_stays() {
    let root = tempfile::tempdir().unwrap();
    let strangers = ["notes.txt", "tmp/notes.txt", "photos/aa/holiday.jpg"];
    for name in strangers {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, vec![0; 1 << 20]).unwrap();
    }
    let store = open(root.path(), 2 << 20);
    (0..100).for_each(|n| assert!(put_sealed(&*store, n, 100_000).is_ok()));
    assert!(strangers.iter().all(|name| root.path().join(name).exists()));
    assert!(
        listed(&*store)
            .iter()
            .all(|object| object.key.namespace == SHARED)
    );
}

#[test]
fn only_the_owner_can_look_inside() {
    let root = tempfile::tempdir().unwrap();
    let pool = root.path().join("deep/pool");
    let store = open(&pool, CAPACITY);
    put_sealed(&*store, 0, 10).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&pool), 0o700);
    assert_eq!(mode(&path_of(&pool, 0)), 0o600);
    assert_eq!(mode(&pool.join("usage")), 0o600);
}

#[test]
fn a_path_that_is_no_directory_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, b"").unwrap();
    assert!(FileStore::open(&file, Some(CAPACITY), None, &Trust::default()).is_err());
    let error = FileStore::open(
        Path::new("relative"),
        Some(CAPACITY),
        None,
        &Trust::default(),
    )
    .err()
    .unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
}

/// A small file system in memory.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Nothing if this process may not mount.
    fn mount(size: &str) -> Option<Self> {
        let at = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(at.path())
            .stderr(Stdio::null())
            .status();
        mounted
            .is_ok_and(|status| status.success())
            .then(|| Self(at))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("--lazy")
            .arg(self.0.path())
            .status();
    }
}

/// A put that the operating system refuses in the middle, which leaves nothing behind.
fn refuses(store: &dyn Store, pool: &Path, n: u64, len: usize) {
    let error = put_sealed(store, n, len).expect_err("there is no room for it");
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert!(!assert_whole(store, &key(SHARED, n)));
    assert_eq!(
        used_bytes(store),
        charged(store),
        "a refused put keeps no room"
    );
    let making = fs::read_dir(pool.join("tmp")).unwrap();
    assert_eq!(making.count(), 1, "the store's own lock alone");
}

/// Puts until the disk is full, long before the pool is. The oldest values then make room.
fn fill(disk: &SmallDisk) {
    let pool = disk.0.path().join("pool");
    let store = open(&pool, 64 << 20);
    let keys: Vec<Key> = (0..64).map(|n| key(SHARED, n)).collect();
    for n in 0..64 {
        let stored = put_sealed(&*store, n, 200_000).unwrap();
        assert_eq!(stored, PutOutcome::Stored);
    }
    let left = store.contains(&keys, soon()).unwrap();
    let oldest = left.iter().position(|&left| left).expect("some are there");
    assert!((10..64).contains(&(64 - oldest)), "{left:?}");
    assert!(left[oldest..].iter().all(|&left| left), "{left:?}");
    assert!(keys[oldest..].iter().all(|key| assert_whole(&*store, key)));
    assert!(store.stats().evictions >= oldest as u64);
    assert_eq!(used_bytes(&*store), charged(&*store));
    // What could never find room makes nobody go.
    refuses(&*store, &pool, 64, 6 << 20);
    assert_eq!(store.contains(&keys, soon()).unwrap(), left);
    // A put that has no time for a scan has a thread make room for those that come.
    let hurried = FileStore::open(&pool, Some(64 << 20), None, &Trust::default()).unwrap();
    let hurried = hurried.with_room_wait(Duration::ZERO);
    let mut n = 100;
    eventually("there is room again and again", || {
        if put_sealed(&hurried, n, 200_000).is_ok() {
            n += 1;
        }
        n == 140
    });
    drop(hurried);
    let keys: Vec<Key> = (0..140).map(|n| key(SHARED, n)).collect();
    // Other things on the disk may leave the pool nothing.
    store.remove(&keys, soon()).unwrap();
    let strange = fs::File::create(disk.0.path().join("strange")).unwrap();
    while (&strange).write_all(&[1; 4096]).is_ok() {}
    refuses(&*store, &pool, 65, 200_000);
    strange.set_len(0).unwrap();
    let stored = put_sealed(&*store, 65, 200_000).unwrap();
    assert_eq!(stored, PutOutcome::Stored);
}

/// Runs a program with a root and file systems of its own, which many systems let anybody have.
const IN_A_NAMESPACE: [&str; 5] = ["unshare", "--user", "--map-root-user", "--mount", "--"];

/// Where neither this process nor one in a namespace may mount, this says that it was skipped. What
/// is seen here is then seen in part by the next test, and by that of a full device (`file/mod.rs`).
#[test]
fn on_a_full_disk_the_oldest_values_make_room() {
    if let Some(disk) = SmallDisk::mount("4m") {
        return fill(&disk);
    }
    let [unshare, options @ ..] = IN_A_NAMESPACE;
    let allowed = Command::new(unshare).args(options).arg("true").output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: a full disk, as mounting is not permitted here, nor are namespaces");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    assert!(start_under(&IN_A_NAMESPACE, "fill a small disk", root.path()).succeeds());
}

/// A process has a limit to the size of its files, some way into which a write is cut short and the
/// next is refused, as when a disk fills up.
#[test]
fn a_write_that_is_refused_half_way_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    // In units of 512 bytes; a signal that is ignored stays so, and the write returns an error.
    let limited = r#"trap "" XFSZ; ulimit -f 300; exec "$0" "$@""#;
    let role = "write what is too long for a file";
    assert!(start_under(&["sh", "-c", limited], role, root.path()).succeeds());
}

#[test]
fn a_host_shows_others_that_it_is_still_there() {
    let root = tempfile::tempdir().unwrap();
    let url = format!("file://{}?size=1MiB&hosts=several", root.path().display());
    let open = || penstock_store::open(&url, &penstock_store::OpenOptions::default()).unwrap();
    drop(open());
    let old = SystemTime::now() - Duration::from_secs(40 * 24 * 3600);
    let own = || {
        let tmp = fs::read_dir(root.path().join("tmp")).unwrap();
        tmp.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let left = own();
    assert_eq!(left.len(), 2, "a count and a turn: {left:?}");
    for path in &left {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(old).unwrap();
    }
    let _store = open();
    eventually("its files are as of now", || {
        own()
            .iter()
            .all(|path| fs::metadata(path).unwrap().modified().unwrap() > old)
    });
}
