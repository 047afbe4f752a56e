//! The store does what every store must do.

use std::sync::Arc;

use penstock_store_lmdb::LmdbStore;
use penstock_store_plugin::Open;
use penstock_store_plugin::contract::{ErrorKind, PutOutcome, Store};
use penstock_store_testing::{fresh_namespace, key, put, run_all};

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
