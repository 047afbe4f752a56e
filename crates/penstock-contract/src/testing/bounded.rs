//! What a store that keeps within a bound gives up, and what stays. Each check fills a store.

use std::sync::Arc;

use crate::{Key, PutOutcome, Store};

use super::values::{bytes, fresh_namespace, get, key, put, soon};

/// Fills a store of so many bytes with ten times as much; it stays within its bound, keeps the
/// newest, and evicts rather than refuses.
pub fn stays_within_its_bound(open: impl Fn() -> Arc<dyn Store>, capacity: u64) {
    let (store, namespace) = (open(), fresh_namespace());
    let size = (capacity / 40) as usize;
    for n in 0..400 {
        let outcome = put(&*store, &key(namespace, n), &bytes(n, size));
        assert_eq!(outcome.unwrap(), PutOutcome::Stored, "{n}");
        let mut held = 0;
        store
            .list(None, &mut |object| held += object.bytes, soon())
            .unwrap();
        assert!(held <= capacity, "{held} bytes after {n} puts");
    }
    let keys: Vec<Key> = (0..400).map(|n| key(namespace, n)).collect();
    let held = store.contains(&keys, soon()).unwrap();
    assert!(held[399], "the newest is there");
    assert!(
        held.iter().filter(|&&held| held).count() >= 20,
        "not emptied for room"
    );
    assert!(!held[..300].contains(&true), "the oldest went first");
    assert!(store.stats().evictions >= 350);
}

/// Puts ten times as much as fits into a store of so many bytes. What is touched now and then stays;
/// what was put with it and is not touched goes.
pub fn touched_outlives_untouched(open: impl Fn() -> Arc<dyn Store>, capacity: u64) {
    let (store, namespace) = (open(), fresh_namespace());
    let size = (capacity / 40) as usize;
    let touched: Vec<(Key, u64)> = (0..16).step_by(2).map(|n| (key(namespace, n), 0)).collect();
    for n in 0..400 {
        put(&*store, &key(namespace, n), &bytes(n, size)).unwrap();
        if n % 5 == 4 {
            let there = store.touch(&touched, soon()).unwrap();
            let put = touched.len().min(n as usize / 2 + 1);
            assert_eq!(there[..put], vec![true; put], "after {n} puts");
        }
    }
    let keys: Vec<Key> = (0..16).map(|n| key(namespace, n)).collect();
    let expected: Vec<bool> = (0..16).map(|n| n % 2 == 0).collect();
    assert_eq!(store.contains(&keys, soon()).unwrap(), expected);
}

/// Fills a store of so many bytes with values of two namespaces, uses those of the first, then
/// retires it and puts a third. What was retired goes before anything else does, however lately it
/// was used before that. What is used afterwards stays, in each of the ways to use a value.
pub fn retired_goes_first(open: impl Fn() -> Arc<dyn Store>, capacity: u64) {
    let store = open();
    let [retired, other, new] = [(); 3].map(|()| fresh_namespace());
    let size = (capacity / 40) as usize;
    let keys = |namespace, count| {
        (0..count)
            .map(move |n| key(namespace, n))
            .collect::<Vec<_>>()
    };
    let has = |keys: &[Key]| store.contains(keys, soon()).unwrap();
    for n in 0..16 {
        for namespace in [other, retired] {
            put(&*store, &key(namespace, n), &bytes(n, size)).unwrap();
        }
    }
    let touched: Vec<(Key, u64)> = keys(retired, 16).into_iter().map(|key| (key, 0)).collect();
    assert_eq!(store.touch(&touched, soon()).unwrap(), [true; 16]);
    // Who retires need not be who puts.
    let by = if store.capabilities().shared {
        open()
    } else {
        Arc::clone(&store)
    };
    by.retire(retired, soon()).unwrap();
    // The first three are used again, each in another way.
    assert!(get(&*store, &key(retired, 0)).is_some());
    store.touch(&[(key(retired, 1), 0)], soon()).unwrap();
    put(&*store, &key(retired, 2), &bytes(2, size)).unwrap();
    let staying = [keys(other, 16), keys(retired, 3)].concat();
    let going = &keys(retired, 16)[3..];
    let mut left = going.len();
    for n in 0..40 {
        put(&*store, &key(new, n), &bytes(n, size)).unwrap();
        // In this order: the store may evict meanwhile.
        let all_stay = !has(&staying).contains(&false);
        left = has(going).iter().filter(|&&held| held).count();
        assert!(
            all_stay || left == 0,
            "others went before {left} that were retired"
        );
    }
    assert_eq!(left, 0, "some that were retired are still there");
}
