//! The store does what every store must do.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

use penstock_store_lmdb::LmdbStore;
use penstock_store_plugin::Open;
use penstock_store_plugin::contract::{ErrorKind, PutOutcome, Store};
use penstock_store_testing::{fresh_namespace, key, put, run_all, soon};

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
