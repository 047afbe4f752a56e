//! The layer for sealed values: what it accepts, what it removes, and where it looks for a whole copy.

use std::sync::Arc;
use std::time::Instant;

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{
    Capabilities, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace, PutOutcome,
    PutRequest, Result, Store, StoreStats,
};
use penstock_store::layers::{Breaker, BreakerSettings, Tiered};
use penstock_store::{OpenOptions, open};
use penstock_value::header::{Checksum, Label, Rejection};
use penstock_value::sealed::{Carried, Finding, Got, SealedStore};
use proptest::prelude::*;

use crate::behaviour::slots::*;
use crate::behaviour::{bytes, fresh_namespace, key, soon};

#[test]
fn however_it_was_sealed_it_arrives_in_a_slot_and_in_buffers() {
    for keys in [None, Some(OURS)] {
        let store = over(&memory(), keys);
        let payload = bytes(1, 10_000);
        let namespace = fresh_namespace();
        let (pieces, in_place) = (key(namespace, 0), key(namespace, 1));

        let parts = || payload.chunks(3000);
        let seal = store.seal(&pieces, b"tenant", parts()).unwrap();
        let mut slot = vec![0; store.header_bytes() + payload.len()];
        slot[store.header_bytes()..].copy_from_slice(&payload);
        let checksum = Checksum::of(&payload);
        let sealed = store
            .seal_in_place(
                Label {
                    context: b"tenant",
                    ..Label::of(&in_place)
                },
                &mut slot,
                checksum,
            )
            .unwrap();
        assert_eq!(sealed.is_encrypted(), keys.is_some());
        assert_eq!(slot.ends_with(&payload), keys.is_none());
        let batch = [seal.value(parts(), 0), sealed.value(&slot, 0)];
        for outcome in store.put_many(&batch, soon()) {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored);
        }
        assert_eq!(raw(&**store.store(), &in_place), slot);

        let exact = [3000, 3000, 4000];
        for key in [pieces, in_place] {
            assert_payload(&store, key, &payload);
            for lens in [&exact[..], &[10_000], &[20_000], &[0, 1, 9998, 1, 70]] {
                let (into, got) = get(&store, Buffers::of(key, lens));
                let Got::Payload(verified) = got else {
                    panic!("{got:?}")
                };
                assert!(!verified.is_mended());
                assert_eq!(into.payload(verified.bytes()), payload, "{lens:?}");
            }
        }
        let (_, got) = get(&store, Slot::of(key(namespace, 2), 5));
        assert!(matches!(got, Got::Miss), "{got:?}");
        assert_eq!((store.rejected(), store.mended()), (0, 0));
    }
}

#[test]
fn a_batch_is_fetched_at_once_and_in_order() {
    let store = over(&memory(), None);
    let namespace = fresh_namespace();
    for n in [0, 1, 3] {
        put(&store, &key(namespace, n), &bytes(n, 100)).unwrap();
    }
    let wanted = (0..4).map(|n| Slot::of(key(namespace, n), 100)).collect();
    let arrivals = store.fetch(wanted, soon());
    for (n, arrival) in (0..).zip(arrivals) {
        assert_eq!(arrival.destination().key, key(namespace, n));
        let Ok((slot, got)) = store.verify(arrival) else {
            panic!("{n} is rejected")
        };
        assert_eq!(matches!(got, Got::Payload(_)), n != 2);
        assert_eq!(slot.payload(&store) == bytes(n, 100), n != 2);
    }
}

#[test]
fn of_a_value_only_damaged_copies_are_removed() {
    let payload = bytes(1, 1000);
    for (copies, mended, left) in [
        (["whole", "whole"], None, [true, true]),
        (["damaged", "whole"], Some(true), [false, true]),
        (["cut", "whole"], Some(true), [false, true]),
        (["long", "whole"], Some(true), [false, true]),
        (["damaged", "cut"], Some(false), [false, false]),
        (["damaged", "absent"], Some(false), [false, false]),
        // The far one is not asked for.
        (["whole", "damaged"], None, [true, true]),
        // Whoever has the keys finds these good.
        (["foreign", "whole"], Some(true), [true, true]),
        (["foreign", "damaged"], Some(false), [true, false]),
        (["damaged", "foreign"], Some(false), [false, true]),
    ] {
        let tiers = [memory(), memory()];
        // As they are made: a breaker around each, and one around all.
        let guarded = |store: Arc<dyn Store>| -> Arc<dyn Store> {
            Arc::new(Breaker::new(store, BreakerSettings::default()))
        };
        let both = Tiered::new(tiers.iter().cloned().map(guarded).collect());
        let store = over(&guarded(Arc::new(both)), None);
        let key = key(fresh_namespace(), 0);
        for (tier, copy) in tiers.iter().zip(copies) {
            let writer = over(tier, (copy == "foreign").then_some(THEIRS));
            put(&writer, &key, &payload).unwrap();
            let mut value = raw(&**tier, &key);
            match copy {
                "damaged" => value[500] ^= 1,
                "cut" => value.truncate(500),
                "long" => value.push(0),
                _ => continue,
            }
            plant(&**tier, &key, &value);
        }
        if copies[1] == "absent" {
            tiers[1].remove(&[key], soon()).unwrap();
        }
        let (slot, got) = get(&store, Slot::of(key, payload.len()));
        match (got, mended) {
            (Got::Payload(verified), None | Some(true)) => {
                assert_eq!(verified.is_mended(), mended.is_some(), "{copies:?}");
                assert!(slot.payload(&store) == payload, "{copies:?}");
            }
            (Got::Rejected(_), Some(false)) => {}
            (got, _) => panic!("{copies:?}: {got:?}"),
        }
        let counted = (store.rejected(), store.mended());
        let expected = (mended.is_some(), mended == Some(true));
        assert_eq!(counted, (expected.0.into(), expected.1.into()));
        assert_eq!([has(&*tiers[0], &key), has(&*tiers[1], &key)], left);
    }
}

#[test]
fn whole_values_are_verified_before_another_tier_is_asked() {
    let (near, far) = (memory(), memory());
    let both: Arc<dyn Store> = Arc::new(Tiered::new(vec![Arc::clone(&near), Arc::clone(&far)]));
    let store = over(&both, None);
    let namespace = fresh_namespace();
    let keys = [0, 1, 2].map(|n| key(namespace, n));
    for key in &keys {
        put(&store, key, &[7; 100]).unwrap();
    }
    let mut damaged = raw(&*near, &keys[0]);
    damaged[64] ^= 1;
    plant(&*near, &keys[0], &damaged);
    let calls = far.stats();
    let wanted = keys.map(|key| Slot::of(key, 100)).into();
    let mut whole = 0;
    let mut rejected = Vec::new();
    for arrival in store.fetch(wanted, soon()) {
        match store.verify(arrival) {
            Ok((_, Got::Payload(_))) => whole += 1,
            Ok((_, got)) => panic!("{got:?}"),
            Err(damaged) => rejected.push(damaged),
        }
    }
    assert_eq!((whole, rejected.len()), (2, 1));
    assert_eq!(far.stats(), calls, "nobody waited for the far tier");
    assert!(has(&*near, &keys[0]), "nor for a removal");
    let damaged = rejected.remove(0);
    assert_eq!(damaged.rejection(), Rejection::PayloadChecksum);
    let (_, got) = store.mend(damaged, soon(), soon());
    assert!(matches!(got, Got::Payload(v) if v.is_mended()), "{got:?}");
    assert!(!has(&*near, &keys[0]));
}

#[test]
fn without_tiers_what_is_damaged_is_removed_and_what_is_foreign_stays() {
    let store = memory();
    let namespace = fresh_namespace();
    let (plain, ours, theirs) = (
        over(&store, None),
        over(&store, Some(OURS)),
        over(&store, Some(THEIRS)),
    );
    let keys = [0, 1, 2].map(|n| key(namespace, n));
    put(&plain, &keys[0], b"payload").unwrap();
    put(&ours, &keys[1], b"payload").unwrap();
    put(&theirs, &keys[2], b"payload").unwrap();

    let reason = |store: &SealedStore, n: usize| {
        let in_slot = rejection(&get(store, Slot::of(keys[n], 7)).1);
        if has(&**store.store(), &keys[n]) {
            // Where there is room to see it.
            for room in [7, 500] {
                let (_, got) = get(store, Buffers::of(keys[n], &[room]));
                assert_eq!(rejection(&got), in_slot, "room for {room}");
            }
        }
        in_slot
    };
    assert_eq!(reason(&plain, 1), Rejection::Encrypted);
    assert_eq!(reason(&ours, 2), Rejection::UnknownKey);
    assert!(keys.iter().all(|key| has(&*store, key)));
    assert_payload(&ours, keys[1], b"payload");
    // Anybody could have written it.
    assert_eq!(reason(&ours, 0), Rejection::Unencrypted);
    assert!(!has(&*store, &keys[0]));
    // Another tenant's means no more to this one than a damaged one.
    let mut slot = Slot::of(keys[1], 7);
    slot.context = b"another";
    let (_, got) = get(&ours, slot);
    assert_eq!(rejection(&got), Rejection::Authentication);
    assert!(!has(&*store, &keys[1]));
}

#[test]
fn what_is_too_large_tells_how_large_and_stays_unless_the_length_was_known() {
    for keys in [None, Some(OURS)] {
        let store = over(&memory(), keys);
        let key = key(fresh_namespace(), 0);
        put(&store, &key, &bytes(1, 1000)).unwrap();
        // By a byte, so that it arrives; and by so much that the store says so.
        for room in [999, 500, 0] {
            let (_, got) = get(&store, Buffers::of(key, &[room / 2, room - room / 2]));
            assert!(matches!(got, Got::TooLarge(1000)), "{got:?}");
        }
        assert!(has(&**store.store(), &key));
        let (_, got) = get(&store, Slot::of(key, 500));
        let (expected, found) = (500, 1000);
        assert_eq!(rejection(&got), Rejection::Length { expected, found });
        assert!(!has(&**store.store(), &key));
        assert_eq!(store.rejected(), 1);
    }
}

#[test]
fn a_far_tier_mends_whatever_a_near_one_does_to_values() {
    for keys in [None, Some(OURS)] {
        let (near, far) = (memory(), memory());
        let faults = Faults {
            seed: 5,
            bit_flips: 0.5,
            truncations: 0.5,
            ..Faults::default()
        };
        let faulty = Arc::new(Faulty::new(Arc::clone(&near), faults));
        let both: Arc<dyn Store> = Arc::new(Tiered::new(vec![faulty.clone(), Arc::clone(&far)]));
        let (store, namespace) = (over(&both, keys), fresh_namespace());
        for n in 0..200 {
            put(&store, &key(namespace, n), &bytes(n, 300)).unwrap();
        }
        for n in 0..200 {
            assert_payload(&store, key(namespace, n), &bytes(n, 300));
            let (into, got) = get(&store, Buffers::of(key(namespace, n), &[100, 200]));
            let Got::Payload(verified) = got else {
                panic!("{got:?}")
            };
            assert_eq!(into.payload(verified.bytes()), bytes(n, 300));
        }
        let injected = faulty.injected();
        assert!(injected.bit_flips > 50 && injected.truncations > 50);
        assert!(store.mended() > 50);
        assert_eq!(store.mended(), store.rejected());
    }
}

#[test]
fn without_another_tier_a_faulty_store_never_gives_what_was_not_put() {
    for keys in [None, Some(OURS)] {
        let inner = memory();
        let faults = Faults {
            seed: 6,
            bit_flips: 0.3,
            truncations: 0.3,
            misses: 0.1,
            errors: vec![(ErrorKind::Io, 0.1)],
            ..Faults::default()
        };
        let faulty: Arc<dyn Store> = Arc::new(Faulty::new(Arc::clone(&inner), faults));
        let (store, namespace) = (over(&faulty, keys), fresh_namespace());
        let mut whole = 0;
        for n in 0..500 {
            put(&over(&inner, keys), &key(namespace, n), &bytes(n, 300)).unwrap();
            let (slot, got) = get(&store, Slot::of(key(namespace, n), 300));
            match got {
                Got::Payload(_) => {
                    whole += 1;
                    assert_eq!(slot.payload(&store), bytes(n, 300));
                }
                Got::Failed(error) => assert_eq!(error.kind(), ErrorKind::Io),
                Got::Miss | Got::Rejected(_) => {}
                Got::TooLarge(_) => panic!("{got:?}"),
            }
        }
        assert!((100..400).contains(&whole), "{whole}");
        assert!(store.rejected() > 100);
    }
}

#[test]
fn a_dead_tier_does_not_keep_the_whole_copy_from_being_found() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .unwrap()
        .port();
    let url = format!("redis://127.0.0.1:{port}");
    let dead = open(&url, &OpenOptions::default()).unwrap();
    let (near, far) = (memory(), memory());
    let key = key(fresh_namespace(), 0);
    put(&over(&far, None), &key, b"whole").unwrap();
    plant(&*near, &key, b"damaged");
    let tiers: Arc<dyn Store> = Arc::new(Tiered::new(vec![near, Arc::clone(&dead), far]));
    assert_payload(&over(&tiers, None), key, b"whole");
    let (_, got) = get(&over(&dead, None), Slot::of(key, 5));
    assert!(
        matches!(&got, Got::Failed(error) if error.kind() == ErrorKind::Unreachable),
        "{got:?}"
    );
}

/// A store of another crate that breaks its contract: it answers nothing, or counts more bytes than
/// there is room for.
struct Broken(Option<u64>);

impl Store for Broken {
    fn capabilities(&self) -> Capabilities {
        memory().capabilities()
    }
    fn url(&self) -> String {
        "broken:".into()
    }
    fn contains(&self, keys: &[Key], _: Instant) -> Result<Vec<bool>> {
        Ok(vec![false; keys.len()])
    }
    fn put_many(&self, _: &mut [PutRequest<'_>], _: Instant) {}
    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], _: Instant) {
        for request in batch {
            request.outcome = self.0.map(|bytes| Ok(GetOutcome::Hit(bytes)));
        }
    }
    fn touch(&self, values: &[(Key, u64)], _: Instant) -> Result<Vec<bool>> {
        Ok(vec![false; values.len()])
    }
    fn remove(&self, _: &[Key], _: Instant) -> Result<u64> {
        Ok(0)
    }
    fn list(&self, _: Option<Namespace>, _: &mut dyn FnMut(Listed), _: Instant) -> Result<()> {
        Ok(())
    }
    fn describe(&self, _: Instant) -> Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }
    fn stats(&self) -> StoreStats {
        StoreStats::default()
    }
}

#[test]
fn a_store_that_breaks_its_contract_has_failed_or_is_rejected() {
    let key = key(fresh_namespace(), 0);
    for keys in [None, Some(OURS)] {
        let silent: Arc<dyn Store> = Arc::new(Broken(None));
        let store = over(&silent, keys);
        let (_, got) = get(&store, Slot::of(key, 5));
        assert!(
            matches!(&got, Got::Failed(error) if error.kind() == ErrorKind::Protocol),
            "{got:?}"
        );
        let refused = put(&store, &key, b"value").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Protocol);
        for bytes in [0, 5, 64, 100, 133, 134, u64::MAX] {
            let liar: Arc<dyn Store> = Arc::new(Broken(Some(bytes)));
            let store = over(&liar, keys);
            rejection(&get(&store, Slot::of(key, 5)).1);
            rejection(&get(&store, Buffers::of(key, &[2, 3])).1);
        }
    }
}

proptest! {
    #[test]
    fn payloads_arrive_whole_however_they_are_cut(
        payload in prop::collection::vec(any::<u8>(), 0..2000),
        cuts in prop::collection::vec(0usize..700, 0..6),
        encrypted: bool,
    ) {
        let store = over(&memory(), encrypted.then_some(OURS));
        let key = key(fresh_namespace(), 0);
        put(&store, &key, &payload).unwrap();
        let room: usize = cuts.iter().sum();
        let (into, got) = get(&store, Buffers::of(key, &cuts));
        match got {
            Got::Payload(verified) => prop_assert_eq!(into.payload(verified.bytes()), payload),
            Got::TooLarge(found) => {
                prop_assert!(room < payload.len());
                prop_assert_eq!(found, payload.len() as u64);
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }
}

/// The value as it lies there.
fn whole(store: &SealedStore, key: &Key, expected: u64) -> Option<Vec<u8>> {
    let mut values = store.get_whole(&[(*key, expected)], soon());
    values.remove(0).unwrap()
}

#[test]
fn a_whole_value_comes_as_it_lies_however_long_it_was_expected_to_be() {
    let below = memory();
    let store = over(&below, Some(OURS));
    let (there, absent) = (key(fresh_namespace(), 0), key(fresh_namespace(), 1));
    put(&store, &there, &bytes(1, 1000)).unwrap();
    let lies = raw(&*below, &there);
    for expected in [0, 1, lies.len() as u64, 1 << 20, u64::MAX] {
        assert_eq!(whole(&store, &there, expected).as_ref(), Some(&lies));
    }
    assert_eq!(whole(&store, &absent, 100), None);
    assert_eq!(store.get_whole(&[], soon()).len(), 0);
}

#[test]
fn what_is_found_of_a_whole_value_depends_on_who_looks() {
    let key = key(fresh_namespace(), 0);
    let payload = bytes(1, 1000);
    let made = |keys, context| {
        let store = over(&memory(), keys);
        let seal = store
            .seal(&key, context, std::iter::once(&payload[..]))
            .unwrap();
        let value = seal.value(std::iter::once(&payload[..]), 0);
        store.put_many(&[value], soon()).remove(0).unwrap();
        raw(&**store.store(), &key)
    };
    let found = |keys, value: &[u8]| over(&memory(), keys).examine(&key, value);
    let plain = made(None, &b""[..]);
    let (ours, tenants) = (made(Some(OURS), &b""[..]), made(Some(OURS), b"tenant"));
    let unreadable = Finding::Unreadable;
    assert_eq!(found(None, &plain), Finding::Sound);
    assert_eq!(found(Some(OURS), &ours), Finding::Sound);
    for (keys, value, why) in [
        (Some(OURS), &plain, Rejection::Unencrypted),
        (None, &ours, Rejection::Encrypted),
        (Some(THEIRS), &ours, Rejection::UnknownKey),
        (Some(OURS), &tenants, Rejection::Authentication),
    ] {
        assert_eq!(found(keys, value), unreadable(why));
    }
    let mut later = plain.clone();
    later[4] = 9;
    assert_eq!(
        found(None, &later),
        unreadable(Rejection::Version { found: 9 })
    );
    // Without the key, all but the payload of an encrypted value is checked.
    for (value, from) in [(&plain, plain.len()), (&ours, 128)] {
        for at in (0..from).filter(|at| !(4..6).contains(at)) {
            let mut changed = value.clone();
            changed[at] ^= 1;
            let found = found(None, &changed);
            assert!(matches!(found, Finding::Damaged(_)), "{at}: {found:?}");
        }
        for end in [0, 63, 64, 127, 128, value.len() - 1] {
            let found = found(None, &value[..end]);
            assert!(matches!(found, Finding::Damaged(_)), "{end}: {found:?}");
        }
    }
}

#[test]
fn whole_values_are_put_as_they_are_and_damaged_ones_are_not() {
    let namespace = fresh_namespace();
    let keys: Vec<Key> = (0..3).map(|n| key(namespace, n)).collect();
    let from = over(&memory(), Some(OURS));
    let mut values: Vec<Vec<u8>> = Vec::new();
    for (n, key) in (0..).zip(&keys) {
        put(&from, key, &bytes(n, 500)).unwrap();
        values.push(raw(&**from.store(), key));
    }
    values[1].truncate(400);
    let into = over(&memory(), None);
    let batch: Vec<(Key, &[u8])> = keys
        .iter()
        .zip(&values)
        .map(|(key, value)| (*key, &value[..]))
        .collect();
    let outcomes = into.put_whole(&batch, soon());
    assert!(
        matches!(
            outcomes[..],
            [Carried::Stored, Carried::Refused(_), Carried::Stored]
        ),
        "{outcomes:?}"
    );
    assert!(matches!(
        into.put_whole(&batch[..1], soon())[0],
        Carried::AlreadyPresent
    ));
    assert!(!has(&**into.store(), &keys[1]));
    for n in [0, 2] {
        assert_eq!(raw(&**into.store(), &keys[n]), values[n]);
    }
    // Whoever has the key reads what was carried.
    let reader = over(into.store(), Some(OURS));
    assert_payload(&reader, keys[2], &bytes(2, 500));
}

#[test]
fn a_look_at_a_whole_value_is_no_use_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}?size=16MiB", folder.path().display());
    let below = open(&url, &OpenOptions::default()).unwrap();
    let store = over(&below, None);
    let key = key(fresh_namespace(), 0);
    put(&store, &key, &bytes(1, 1000)).unwrap();
    let path = walk(folder.path());
    let year = std::time::Duration::from_secs(365 * 86_400);
    let before = std::time::SystemTime::now() - year;
    std::fs::File::open(&path)
        .unwrap()
        .set_modified(before)
        .unwrap();
    let used_at = || std::fs::metadata(&path).unwrap().modified().unwrap();
    assert!(whole(&store, &key, 1064).is_some());
    assert_eq!(used_at(), before);
    assert_payload(&store, key, &bytes(1, 1000));
    assert!(used_at() > before);
}

/// The file of the one value in a directory.
fn walk(folder: &std::path::Path) -> std::path::PathBuf {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else if entry.metadata().unwrap().len() == 1064 {
                return entry.path();
            }
        }
    }
    panic!("no value");
}
