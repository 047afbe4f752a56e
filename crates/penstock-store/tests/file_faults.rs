//! The file store where others remove, hold or damage what it needs.

use std::fs::{self, File};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_contract::{ErrorKind, GetOutcome, PutOutcome, Store};
use penstock_store::{FileStore, OpenOptions, Trust};

use crate::behaviour::directory::{charged, open, path_of, used_bytes};
use crate::behaviour::sealed::{
    Process, SHARED, assert_whole, listed, put_sealed, put_sealed_by, whole_values,
};
use crate::behaviour::{eventually, get, key, past, soon, within};

const CAPACITY: u64 = 8 << 20;
/// Names the pool whose lock another process holds.
const HELD: &str = "PENSTOCK_TEST_HELD";

fn stores(store: &dyn Store, n: u64) {
    let stored = put_sealed(store, n, 1000).unwrap();
    assert_eq!(stored, PutOutcome::Stored);
    assert!(assert_whole(store, &key(SHARED, n)));
}

/// Removes a folder. A store may make something in it meanwhile.
fn gone(path: &Path) {
    let removed = || match fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => false,
        removed => {
            removed.unwrap();
            true
        }
    };
    eventually("removed", removed);
}

#[test]
fn what_is_removed_of_a_directory_in_use_is_made_anew() {
    type Remove<'a> = &'a dyn Fn(&Path);
    let removals: [(&str, Remove<'_>); 6] = [
        ("the directory", &|pool| gone(pool)),
        ("the folder above it", &|pool| {
            gone(pool.parent().unwrap());
        }),
        ("all that is in it", &|pool| {
            for entry in fs::read_dir(pool).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => gone(&path),
                    false => fs::remove_file(path).unwrap(),
                }
            }
        }),
        ("the folder of values in the making", &|pool| {
            gone(&pool.join("tmp"));
        }),
        ("a namespace", &|pool| {
            gone(&pool.join(SHARED.to_string()));
        }),
        ("a folder of values", &|pool| {
            gone(path_of(pool, 0).parent().unwrap());
        }),
    ];
    for (what, remove) in removals {
        eprintln!("{what}");
        let root = tempfile::tempdir().unwrap();
        let pool = root.path().join("above/pool");
        let (store, other, reader) = (
            open(&pool, CAPACITY),
            open(&pool, CAPACITY),
            open(&pool, CAPACITY),
        );
        stores(&*store, 0);
        stores(&*other, 1);
        remove(&pool);
        if !path_of(&pool, 0).exists() {
            assert_eq!(get(&*store, &key(SHARED, 0)), None);
            let there = store.contains(&[key(SHARED, 0)], soon()).unwrap();
            assert_eq!(there, [false]);
            assert_eq!(store.remove(&[key(SHARED, 0)], soon()).unwrap(), 0);
            stores(&*store, 0);
        }
        stores(&*store, 2);
        stores(&*other, 3);
        // Who only reads finds what the others put.
        assert!(assert_whole(&*reader, &key(SHARED, 2)));
        let keys = [key(SHARED, 0), key(SHARED, 3)];
        assert_eq!(reader.contains(&keys, soon()).unwrap(), [true, true]);
        assert_eq!(listed(&*reader), listed(&*other));
        // All count together again, and evict.
        for n in 10..130 {
            let store = if n % 2 == 0 { &store } else { &other };
            put_sealed(&**store, n, 100_000).unwrap();
        }
        let store = open(&pool, CAPACITY);
        eventually("the count is exact", || {
            used_bytes(&*store) == charged(&*store)
        });
        assert!(charged(&*store) <= CAPACITY);
    }
}

#[test]
fn a_count_that_is_removed_in_use_is_made_anew_by_all() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    stores(&*store, 0);
    fs::remove_file(root.path().join("usage")).unwrap();
    let other = open(root.path(), CAPACITY);
    for n in 10..130 {
        let store = if n % 2 == 0 { &store } else { &other };
        put_sealed(&**store, n, 100_000).unwrap();
        assert!(charged(&*other) <= CAPACITY);
    }
    eventually("the count is exact, and all have the same", || {
        let used = used_bytes(&*store);
        used == charged(&*store) && used == used_bytes(&*other)
    });
}

/// Holds the lock on a pool's count until it is killed; does nothing in a run of the tests themselves.
#[test]
#[ignore = "a role of other tests' processes"]
fn in_a_process_of_its_own() {
    let Some(root) = std::env::var_os(HELD).map(PathBuf::from) else {
        return;
    };
    let usage = File::options()
        .write(true)
        .open(root.join("usage"))
        .unwrap();
    usage.lock().unwrap();
    fs::write(root.join("held"), "").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_lock_that_a_process_keeps_holds_up_neither_open_nor_put_nor_close() {
    let root = tempfile::tempdir().unwrap();
    let used = {
        let store = open(root.path(), CAPACITY);
        stores(&*store, 0);
        used_bytes(&*store)
    };
    let mut holder = Process::start(
        "file_faults::in_a_process_of_its_own",
        &[(HELD, root.path().as_ref())],
    );
    eventually("it is held", || root.path().join("held").exists());
    let usage = File::options().write(true).open(root.path().join("usage"));
    let usage = usage.unwrap();
    let mut is_held = || usage.try_lock().is_err() && holder.is_running();
    assert!(is_held());
    let url = format!("file://{}", root.path().display());
    let store = penstock_store::open(&url, &OpenOptions::default()).unwrap();
    assert!(is_held(), "open did not wait for it");
    assert_eq!(used_bytes(&*store), used, "what is known is said");
    assert!(assert_whole(&*store, &key(SHARED, 0)));
    let error = put_sealed_by(&*store, 1, 1000, within(Duration::from_millis(20)));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::TimedOut);
    let error = store.remove(&[key(SHARED, 0)], past());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(store);
    assert!(is_held(), "close did not wait for it");
    let store = open(root.path(), CAPACITY);
    holder.kill();
    eventually("it catches up", || put_sealed(&*store, 2, 1000).is_ok());
    eventually("the count is exact", || {
        used_bytes(&*store) == charged(&*store)
    });
}

/// A value whose file somebody made longer: 4 TiB that take no room, or so much that the value could
/// be in a pool.
#[test]
fn a_value_of_a_wrong_length_is_a_miss_and_counts_for_nothing() {
    for length in [1 << 42, 3 << 20] {
        let root = tempfile::tempdir().unwrap();
        let grow = |n: u64| {
            let file = File::options().write(true).open(path_of(root.path(), n));
            file.unwrap().set_len(length).unwrap();
        };
        {
            let store = open(root.path(), CAPACITY);
            (0..60).for_each(|n| assert!(put_sealed(&*store, n, 100_000).is_ok()));
            grow(7);
            // Whoever has no room for it takes it away.
            let mut small = vec![0; 200_000];
            let into = &mut [IoSliceMut::new(&mut small)];
            let outcome = store.get(&key(SHARED, 7), into, soon()).unwrap();
            assert_eq!(outcome, GetOutcome::Miss);
            assert!(!path_of(root.path(), 7).exists());
            grow(8);
            grow(9);
            let keys = [8, 9, 10].map(|n| key(SHARED, n));
            assert_eq!(store.contains(&keys, soon()).unwrap(), [false, false, true]);
            assert_eq!(listed(&*store).len(), 57);
            // A put replaces it.
            let stored = put_sealed(&*store, 8, 100_000).unwrap();
            assert_eq!(stored, PutOutcome::Stored);
        }
        let store = open(root.path(), CAPACITY);
        eventually("the next scan takes it away", || {
            !path_of(root.path(), 9).exists() && used_bytes(&*store) == charged(&*store)
        });
        assert_eq!(whole_values(&*store), 58, "nobody went for it");
    }
}

#[test]
fn a_pool_of_another_size_keeps_what_is_longer_than_it_takes() {
    let root = tempfile::tempdir().unwrap();
    let large = open(root.path(), CAPACITY);
    put_sealed(&*large, 0, 3 << 20).unwrap();
    let small = FileStore::open(root.path(), Some(4 << 20), None, &Trust::default()).unwrap();
    let mut into = vec![0; 1000];
    let into = &mut [IoSliceMut::new(&mut into)];
    let outcome = small.get(&key(SHARED, 0), into, soon()).unwrap();
    assert!(matches!(outcome, GetOutcome::TooLarge(_)), "{outcome:?}");
    assert!(assert_whole(&*large, &key(SHARED, 0)));
}
