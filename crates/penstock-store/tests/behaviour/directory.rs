//! What tests of directories share.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_contract::Store;
use penstock_store::{FileStore, Trust};

use super::sealed::{SHARED, listed};
use super::{LONG, key, soon};

/// A store that finds room also on a machine that stands still for seconds.
pub fn open(root: &Path, capacity: u64) -> Arc<dyn Store> {
    let store = FileStore::open(root, Some(capacity), None, &Trust::default()).unwrap();
    Arc::new(store.with_room_wait(LONG))
}

pub fn used_bytes(store: &dyn Store) -> u64 {
    let facts = store.describe(soon()).unwrap();
    let (_, used) = facts.iter().find(|(name, _)| name == "used_bytes").unwrap();
    used.parse().unwrap()
}

/// What the values there are charged with.
pub fn charged(store: &dyn Store) -> u64 {
    listed(store)
        .iter()
        .map(|object| object.bytes.max(1).next_multiple_of(4096))
        .sum()
}

pub fn path_of(root: &Path, n: u64) -> PathBuf {
    let text = key(SHARED, n).to_string();
    let parts: Vec<&str> = text.split(':').collect();
    root.join(parts[1])
        .join(&parts[2][..2])
        .join(format!("{}.{}", parts[2], parts[3]))
}
