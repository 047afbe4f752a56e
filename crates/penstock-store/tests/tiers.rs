//! Several stores as one.

use std::io::IoSliceMut;
use std::sync::Arc;

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{ErrorKind, GetOutcome, Key, Listed, PutOutcome, Store};
use penstock_store::layers::Tiered;
use penstock_store::{OpenOptions, open};
use penstock_value::MemoryStore;

use crate::behaviour::{bytes, eventually, fresh_namespace, get, key, put, soon};

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(256 << 20))
}

/// Two tiers, and both by themselves.
fn pair() -> (Tiered, Arc<dyn Store>, Arc<dyn Store>) {
    let (near, far) = (memory(), memory());
    let tiers = Tiered::new(vec![Arc::clone(&near), Arc::clone(&far)]);
    (tiers, near, far)
}

/// A server that is not there.
fn broken() -> Arc<dyn Store> {
    // No test can be given this port meanwhile.
    open("redis://127.0.0.1:1", &OpenOptions::default()).unwrap()
}

fn has(store: &dyn Store, key: &Key) -> bool {
    store.contains(&[*key], soon()).unwrap()[0]
}

fn wait_for(store: &dyn Store, key: &Key) {
    eventually("it is promoted", || has(store, key));
}

#[test]
fn tiers_behave_as_a_store() {
    crate::behaviour::run_all(|| Arc::new(pair().0));
}

#[test]
fn urls_with_spaces_between_are_tiers() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!(
        " memory://?size=64MiB  file://{}?size=1GiB ",
        folder.path().display()
    );
    crate::behaviour::run_all(|| open(&url, &OpenOptions::default()).unwrap());
    let store = open(&url, &OpenOptions::default()).unwrap();
    assert!(
        store.url().starts_with("memory://?size=67108864 file:///"),
        "{}",
        store.url()
    );
    let error = open("memory://?size=1MiB nonsense", &OpenOptions::default());
    assert_eq!(error.err().unwrap().kind(), ErrorKind::Config);
}

#[test]
fn puts_go_to_all_and_gets_come_from_the_nearest() {
    let (tiers, near, far) = pair();
    let key = key(fresh_namespace(), 0);
    assert_eq!(put(&tiers, &key, b"value").unwrap(), PutOutcome::Stored);
    assert!(has(&*near, &key) && has(&*far, &key));
    assert_eq!(
        put(&tiers, &key, b"value").unwrap(),
        PutOutcome::AlreadyPresent
    );
    assert_eq!(get(&tiers, &key), Some(b"value".to_vec()));
    assert_eq!((near.stats().gets, far.stats().gets), (1, 0));
    near.remove(&[key], soon()).unwrap();
    assert_eq!(put(&tiers, &key, b"value").unwrap(), PutOutcome::Stored);
    assert!(has(&*near, &key));
    assert_eq!(tiers.remove(&[key], soon()).unwrap(), 1);
    assert!(!has(&*near, &key) && !has(&*far, &key));
}

#[test]
fn what_is_retired_goes_first_in_each_tier() {
    let pair = || {
        let [near, far] = [(); 2].map(|()| Arc::new(MemoryStore::new(1 << 20)) as Arc<dyn Store>);
        (
            Tiered::new(vec![Arc::clone(&near), Arc::clone(&far)]),
            near,
            far,
        )
    };
    crate::behaviour::retired_goes_first(|| Arc::new(pair().0), 1 << 20);
    let (tiers, near, far) = pair();
    let (old, other) = (fresh_namespace(), fresh_namespace());
    for namespace in [other, old] {
        put(&tiers, &key(namespace, 0), &bytes(0, 100_000)).unwrap();
    }
    tiers.retire(old, soon()).unwrap();
    for n in 1..1000 {
        put(&tiers, &key(other, n), &bytes(n, 100_000)).unwrap();
        if !has(&*near, &key(old, 0)) {
            break;
        }
    }
    for tier in [&near, &far] {
        assert!(!has(&**tier, &key(old, 0)) && has(&**tier, &key(other, 0)));
    }
}

#[test]
fn the_time_of_a_use_is_that_of_a_tier_that_knows_it() {
    let folder = tempfile::tempdir().unwrap();
    let directory = format!("file://{}?size=1GiB", folder.path().display());
    let open = |url: &str| open(url, &OpenOptions::default()).unwrap();
    let [alone, both] = [
        directory.clone(),
        format!("memory://?size=1MiB {directory}"),
    ];
    let [alone, both] = [&alone, &both].map(|url| open(url));
    let used_at = |store: &Arc<dyn Store>, namespace| {
        let mut found = Vec::new();
        let mut visit = |listed: Listed| found.push((listed.key, store.used_at(listed.last_use)));
        store.list(Some(namespace), &mut visit, soon()).unwrap();
        found.sort_unstable_by_key(|(key, _)| *key);
        found
    };
    let namespace = fresh_namespace();
    put(&*both, &key(namespace, 0), b"in both").unwrap();
    put(&*alone, &key(namespace, 1), b"in one").unwrap();
    let found = used_at(&both, namespace);
    assert_eq!(found, used_at(&alone, namespace));
    assert!(found.len() == 2 && found.iter().all(|(_, time)| time.is_some()));
    both.retire(namespace, soon()).unwrap();
    assert!(
        used_at(&both, namespace)
            .iter()
            .all(|(_, time)| time.is_none())
    );
}

#[test]
fn what_a_far_tier_had_is_near_the_next_time() {
    let (tiers, near, far) = pair();
    let namespace = fresh_namespace();
    let keys: Vec<Key> = (0..20).map(|n| key(namespace, n)).collect();
    for (n, key) in keys.iter().enumerate() {
        put(
            if n % 2 == 0 { &*near } else { &*far },
            key,
            &bytes(n as u64, 5000 + n),
        )
        .unwrap();
    }
    assert_eq!(tiers.contains(&keys, soon()).unwrap(), [true; 20]);
    // Into more room than they need.
    for (n, key) in keys.iter().enumerate() {
        assert!(get(&tiers, key) == Some(bytes(n as u64, 5000 + n)));
    }
    keys.iter().for_each(|key| wait_for(&*near, key));
    // As it was got, not as long as the room for it was.
    for (n, key) in keys.iter().enumerate() {
        assert!(get(&*near, key) == Some(bytes(n as u64, 5000 + n)));
    }
}

#[test]
fn a_dead_tier_is_passed_over() {
    for dead_is_near in [true, false] {
        let alive = memory();
        let mut stores = vec![broken(), Arc::clone(&alive)];
        if !dead_is_near {
            stores.reverse();
        }
        let tiers = Tiered::new(stores);
        let namespace = fresh_namespace();
        let (present, absent) = (key(namespace, 0), key(namespace, 1));
        assert_eq!(put(&tiers, &present, b"value").unwrap(), PutOutcome::Stored);
        assert_eq!(
            tiers.contains(&[present, absent], soon()).unwrap(),
            [true, false]
        );
        assert_eq!(get(&tiers, &present), Some(b"value".to_vec()));
        // It may have been there.
        let missing = tiers.get(&absent, &mut [], soon());
        assert_eq!(missing.unwrap_err().kind(), ErrorKind::Unreachable);
        let mut listed = 0;
        tiers.list(None, &mut |_| listed += 1, soon()).unwrap();
        assert_eq!(listed, 1);
        assert_eq!(tiers.remove(&[present], soon()).unwrap(), 1);
    }
    let tiers = Tiered::new(vec![broken(), broken()]);
    let key = key(fresh_namespace(), 0);
    assert_eq!(
        put(&tiers, &key, b"v").unwrap_err().kind(),
        ErrorKind::Unreachable
    );
    assert!(tiers.contains(&[key], soon()).is_err());
    assert!(tiers.list(None, &mut |_| (), soon()).is_err());
}

#[test]
fn a_value_too_large_in_one_tier_is_not_the_last_word() {
    let (tiers, near, far) = pair();
    let key = key(fresh_namespace(), 0);
    put(&*near, &key, &[1; 100]).unwrap();
    put(&*far, &key, &[2; 10]).unwrap();
    let mut into = [0; 50];
    let outcome = tiers.get(&key, &mut [std::io::IoSliceMut::new(&mut into)], soon());
    assert_eq!(outcome.unwrap(), GetOutcome::Hit(10));
    assert_eq!(into[..10], [2; 10]);
}

/// Nothing is asked of the object store: it need not be there.
#[test]
fn gets_are_large_behind_this_machines_memory_alone() {
    let url = "s3://bucket/p?endpoint=http://127.0.0.1:1&region=nowhere";
    let opened = |url: &str| open(url, &OpenOptions::default()).unwrap();
    let far = opened(url).batch_bytes();
    assert!(far.get > 0 && far.put > 0);
    let name = format!("test-tiers-{}", std::process::id());
    let behind_memory = opened(&format!("shm://{name}?size=64MiB {url}")).batch_bytes();
    std::fs::remove_file(format!("/dev/shm/penstock-{name}")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let near = format!("file://{}?size=1GiB", folder.path().display());
    let behind_files = opened(&format!("{near} {url}")).batch_bytes();
    assert_eq!((behind_memory.get, behind_memory.put), (far.get, far.put));
    let alone = opened(&near).batch_bytes();
    assert_eq!((behind_files.get, behind_files.put), (alone.get, far.put));
}

#[test]
fn a_tier_that_breaks_the_contract_is_passed_over() {
    let namespace = fresh_namespace();
    for (fault, kind) in [
        (
            Faults {
                silences: 1.0,
                ..Faults::default()
            },
            ErrorKind::Protocol,
        ),
        (
            Faults {
                errors: vec![(ErrorKind::Io, 1.0)],
                ..Faults::default()
            },
            ErrorKind::Io,
        ),
    ] {
        let faulty: Arc<dyn Store> = Arc::new(Faulty::new(memory(), fault));
        let lone = Tiered::new(vec![Arc::clone(&faulty)]);
        let key = key(namespace, 0);
        assert_eq!(put(&lone, &key, b"value").unwrap_err().kind(), kind);
        let mut room = [0; 5];
        let got = lone.get(&key, &mut [IoSliceMut::new(&mut room)], soon());
        assert_eq!(got.unwrap_err().kind(), kind);

        let tiers = Tiered::new(vec![faulty, memory()]);
        assert_eq!(put(&tiers, &key, b"value").unwrap(), PutOutcome::Stored);
        assert!(has(&tiers, &key));
        assert_eq!(get(&tiers, &key), Some(b"value".to_vec()), "{kind:?}");
    }
}
