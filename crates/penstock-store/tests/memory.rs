//! The memory store.

mod behaviour;

use std::sync::Arc;

use penstock_store::{MemoryStore, Store};

#[test]
fn behaves() {
    behaviour::run_all(|| Arc::new(MemoryStore::new(32 << 20)) as Arc<dyn Store>);
}

#[test]
fn stays_within_its_bound() {
    behaviour::stays_within_its_bound(|| Arc::new(MemoryStore::new(1 << 20)), 1 << 20);
}

#[test]
fn use_keeps_a_value_from_eviction() {
    let namespace = behaviour::fresh_namespace();
    let key = |n| behaviour::key(namespace, n);
    let store = MemoryStore::new(10_000);
    for n in 0..100 {
        behaviour::put(&store, &key(n), &[0; 1000]).unwrap();
        assert!(
            behaviour::get(&store, &key(0)).is_some(),
            "used every round, {n}"
        );
    }
    assert!(behaviour::get(&store, &key(1)).is_none());
}
