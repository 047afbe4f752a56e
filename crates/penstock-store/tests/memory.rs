//! The memory store.

use std::sync::Arc;

use penstock_contract::Store;
use penstock_value::MemoryStore;

#[test]
fn behaves() {
    crate::behaviour::run_all(|| Arc::new(MemoryStore::new(32 << 20)) as Arc<dyn Store>);
}

#[test]
fn stays_within_its_bound() {
    crate::behaviour::stays_within_its_bound(|| Arc::new(MemoryStore::new(1 << 20)), 1 << 20);
}

#[test]
fn what_is_retired_goes_first() {
    crate::behaviour::retired_goes_first(|| Arc::new(MemoryStore::new(1 << 20)), 1 << 20);
}

#[test]
fn what_is_touched_stays() {
    crate::behaviour::touched_outlives_untouched(|| Arc::new(MemoryStore::new(1 << 20)), 1 << 20);
    let store = MemoryStore::new(80 * 101_000);
    crate::behaviour::prompt::put(&store, false);
    crate::behaviour::prompt::touch(&store);
    crate::behaviour::prompt::assert_the_beginning_stays(&store, 0);
}

#[test]
fn use_keeps_a_value_from_eviction() {
    let namespace = crate::behaviour::fresh_namespace();
    let key = |n| crate::behaviour::key(namespace, n);
    let store = MemoryStore::new(10_000);
    for n in 0..100 {
        crate::behaviour::put(&store, &key(n), &[0; 1000]).unwrap();
        assert!(
            crate::behaviour::get(&store, &key(0)).is_some(),
            "used every round, {n}"
        );
    }
    assert!(crate::behaviour::get(&store, &key(1)).is_none());
}
