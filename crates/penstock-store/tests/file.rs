//! The file store.

mod behaviour;

use std::path::Path;
use std::sync::Arc;

use penstock_store::{FileStore, Store};

fn open(root: &Path, capacity: u64) -> Arc<dyn Store> {
    Arc::new(FileStore::open(root, Some(capacity)).unwrap())
}

#[test]
fn behaves() {
    let root = tempfile::tempdir().unwrap();
    behaviour::run_all(|| open(root.path(), 32 << 20));
}

#[test]
fn stays_within_its_bound() {
    let root = tempfile::tempdir().unwrap();
    behaviour::stays_within_its_bound(|| open(root.path(), 4 << 20), 4 << 20);
}
