//! The store does what every store must do.

use std::fs;
use std::io::IoSlice;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use penstock_store_lmdb::LmdbStore;
use penstock_store_plugin::Open;
use penstock_store_plugin::contract::{ErrorKind, PutOutcome, Result, Store};
use penstock_store_testing::{LONG, fresh_namespace, key, put, run_all, soon, within};

#[test]
fn behaves() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=256MiB", folder.path().display());
    run_all(|| Arc::new(LmdbStore::open(&url).unwrap()) as Arc<dyn Store>);
}

#[test]
fn makes_room() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=16MiB", folder.path().display());
    let (store, namespace) = (LmdbStore::open(&url).unwrap(), fresh_namespace());
    for n in 0..100 {
        let outcome = put(&store, &key(namespace, n), &vec![n as u8; 1 << 20]);
        assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{n}");
    }
    assert!(store.stats().evictions > 0);
}

#[test]
fn makes_room_for_small_values_too() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=4MiB", folder.path().display());
    let (store, namespace) = (LmdbStore::open(&url).unwrap(), fresh_namespace());
    for n in 0..30_000 {
        let outcome = put(&store, &key(namespace, n), b"small");
        assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{n}");
    }
    assert!(store.stats().evictions > 0);
}

#[test]
fn a_value_that_was_removed_or_replaced_leaves_no_place_in_the_order() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=16MiB", folder.path().display());
    let (store, namespace) = (LmdbStore::open(&url).unwrap(), fresh_namespace());
    let keys: Vec<_> = (0..100).map(|n| key(namespace, n)).collect();
    let value = |bytes: usize| vec![7; bytes];
    for key in &keys[..3] {
        put(&store, key, &value(1 << 20)).unwrap();
    }
    assert_eq!(store.remove(&keys[..1], soon()).unwrap(), 1);
    put(&store, &keys[0], &value(1 << 20)).unwrap();
    put(&store, &keys[1], &value(1 << 10)).unwrap();
    // The first of all is now the one that was neither removed nor replaced.
    for key in &keys[3..] {
        put(&store, key, &value(1 << 20)).unwrap();
        if store.stats().evictions > 0 {
            break;
        }
    }
    let found = store.contains(&keys[..3], soon()).unwrap();
    assert_eq!(found, [true, true, false]);
}

#[test]
fn what_is_put_and_removed_again_takes_no_room() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=1MiB", folder.path().display());
    let (store, namespace) = (LmdbStore::open(&url).unwrap(), fresh_namespace());
    put(&store, &key(namespace, 0), b"it stays").unwrap();
    for n in 1..20_000 {
        let key = key(namespace, n);
        put(&store, &key, b"value").unwrap();
        assert_eq!(store.remove(&[key], soon()).unwrap(), 1);
    }
    assert_eq!(store.stats().evictions, 0);
    assert_eq!(
        store.contains(&[key(namespace, 0)], soon()).unwrap(),
        [true]
    );
}

/// Not a test of its own: what `nobody_waits_for_a_writer_beyond_the_deadline` runs in another
/// process.
#[test]
#[ignore = "it never ends"]
fn is_stopped_while_it_writes() {
    if let Ok(url) = std::env::var("LMDB_TEST_URL") {
        let (store, namespace) = (LmdbStore::open(&url).unwrap(), fresh_namespace());
        let value = vec![7; 7 << 20];
        for n in 0.. {
            let _ = put(&store, &key(namespace, n), &value);
        }
    }
}

/// A process that writes, and is killed at the end.
struct Writer(Child);

impl Writer {
    fn start(url: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "is_stopped_while_it_writes"])
            .env("LMDB_TEST_URL", url)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        let done = Command::new("sh").args(["-c", &kill]).status();
        assert!(done.unwrap().success());
    }

    fn stop(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.0.id());
        while !fs::read_to_string(&stat).unwrap().contains(") T ") {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// What comes of something that must not take for ever.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(work()));
    let waited = receiver.recv_timeout(LONG);
    waited.expect("it still waits, long after its deadline")
}

#[test]
fn nobody_waits_for_a_writer_beyond_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=64MiB", folder.path().display());
    let namespace = fresh_namespace();
    let store = Arc::new(LmdbStore::open(&url).unwrap());
    put(&*store, &key(namespace, 0), b"value").unwrap();
    let writer = Writer::start(&url);
    let short = || within(Duration::from_millis(300));
    let put_shortly = |n| {
        let store = Arc::clone(&store);
        let value = b"other";
        in_time(move || store.put(&key(namespace, n), &[IoSlice::new(value)], short()))
    };
    let remove_shortly = || {
        let store = Arc::clone(&store);
        in_time(move || store.remove(&[key(namespace, 0)], short()))
    };
    // Once it is stopped in the middle of a write. Between two writes, it is in nobody's way.
    let mut n = 0;
    let errors = loop {
        writer.stop();
        n += 1;
        if let (Err(put), Err(removed)) = (put_shortly(n), remove_shortly()) {
            break [put, removed];
        }
        writer.signal("CONT");
        thread::sleep(Duration::from_millis(10));
        assert!(n < 1000, "it does not write");
    };
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
    // Who reads waits for nobody.
    store.contains(&[key(namespace, 0)], soon()).unwrap();
    store.list(Some(namespace), &mut |_| {}, soon()).unwrap();
    // A writer that was killed is in nobody's way either.
    drop(writer);
    let outcome = put(&*store, &key(namespace, n + 1), b"other");
    assert_eq!(outcome.unwrap(), PutOutcome::Stored);
}

/// Not a test of its own: what `goes_on_after_readers_that_were_killed` runs in other processes.
#[test]
#[ignore = "it ends its process"]
fn is_killed_while_it_reads() {
    if let Ok(url) = std::env::var("LMDB_TEST_URL") {
        let store = LmdbStore::open(&url).unwrap();
        let _ = store.list(None, &mut |_| std::process::abort(), soon());
    }
}

#[test]
fn goes_on_after_readers_that_were_killed() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("lmdb://{}?size=16MiB", folder.path().display());
    let (store, namespace) = (LmdbStore::open(&url).unwrap(), fresh_namespace());
    put(&store, &key(namespace, 1000), b"something to list").unwrap();
    let killed = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "is_killed_while_it_reads"])
        .env("LMDB_TEST_URL", &url)
        .output();
    assert_eq!(killed.unwrap().status.signal(), Some(6));
    for n in 0..100 {
        let outcome = put(&store, &key(namespace, n), &vec![n as u8; 1 << 20]);
        assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{n}");
    }
}

#[test]
fn refuses_what_is_no_url() {
    for url in [
        "lmdb://relative",
        "lmdb:///x?size=1",
        "lmdb:///x?bytes=1GiB",
        "x:///x",
    ] {
        let Err(error) = LmdbStore::open(url) else {
            panic!("{url}");
        };
        assert_eq!(error.kind(), ErrorKind::Config, "{url}");
    }
}
