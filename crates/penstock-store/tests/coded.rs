//! Coded values in the layer for sealed values: they come back bit for bit, or not at all.

use std::sync::Arc;

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{Key, PutOutcome, Store};
use penstock_store::layers::Tiered;
use penstock_value::compress::{CHUNK_ELEMENTS, Element};
use penstock_value::header::{Checksum, HEADER_BYTES, Label, Rejection};
use penstock_value::sealed::{Carried, Finding, Got, SealedStore};
use proptest::prelude::*;

use crate::behaviour::slots::*;
use crate::behaviour::{bytes, fresh_namespace, key, soon};

/// A store that takes coded values.
fn coding(store: &Arc<dyn Store>, keys: Option<&str>) -> SealedStore {
    over(store, keys).taking_coded()
}

/// A payload of so many bytes that shrinks, whatever its elements: nearly all exponents are alike,
/// and the rest is not.
fn payload(seed: u64, len: usize) -> Vec<u8> {
    let mut payload = bytes(seed, len);
    for (at, byte) in payload.iter_mut().enumerate() {
        let is_rare = at % 501 == 7;
        if !is_rare {
            *byte = *byte & 0x83 | 0x3c;
        }
    }
    payload
}

/// Puts a payload, coded if that makes it shorter. Says whether it is.
fn put_coded(store: &SealedStore, key: &Key, element: Element, payload: &[u8]) -> bool {
    let mut room = vec![0; store.header_bytes() + payload.len()];
    let mut rest = &mut room[..];
    let checksum = Checksum::of(payload);
    let coded = store
        .seal_coded(
            Label {
                context: CONTEXT,
                ..Label::of(key)
            },
            element,
            payload,
            checksum,
            &mut rest,
        )
        .unwrap();
    let Some(coded) = coded else {
        put(store, key, payload).unwrap();
        return false;
    };
    let value = coded.value(0);
    let shorter = value.bytes() < (store.header_bytes() + payload.len()) as u64;
    assert!(shorter, "{}", value.bytes());
    let outcome = store.put_many(&[value], soon()).remove(0).unwrap();
    assert_eq!(outcome, PutOutcome::Stored);
    true
}

#[test]
fn coded_values_arrive_in_slots_and_in_buffers() {
    for keys in [None, Some(OURS)] {
        for element in Element::ALL {
            let store = coding(&memory(), keys);
            let (key, payload) = (key(fresh_namespace(), 0), payload(1, 10_000));
            assert!(put_coded(&store, &key, element, &payload), "{element:?}");
            assert_payload(&store, key, &payload);
            // The code, the payload, or both in pieces; and more room than they need.
            for lens in [&[10_000][..], &[20_000], &[3000, 7000], &[0, 1, 9998, 1]] {
                let (into, got) = get(&store, Buffers::of(key, lens));
                let Got::Payload(verified) = got else {
                    panic!("{got:?}")
                };
                assert_eq!(into.payload(verified.bytes()), payload, "{lens:?}");
            }
            let (_, got) = get(&store, Buffers::of(key, &[9000, 999]));
            assert!(matches!(got, Got::TooLarge(10_000)), "{got:?}");
            assert_eq!((store.rejected(), store.mended()), (0, 0));
        }
    }
}

#[test]
fn what_does_not_shrink_lies_as_it_is() {
    let store = coding(&memory(), None);
    let (key, noise) = (key(fresh_namespace(), 0), bytes(1, 5000));
    assert!(!put_coded(&store, &key, Element::Bf16, &noise));
    assert!(raw(&**store.store(), &key).ends_with(&noise));
    assert_payload(&store, key, &noise);
}

#[test]
fn several_values_are_made_in_one_room() {
    let store = coding(&memory(), None);
    let namespace = fresh_namespace();
    let payloads = [payload(1, 3000), bytes(2, 900), payload(3, 5000)];
    let mut room = vec![0; payloads.iter().map(|each| HEADER_BYTES + each.len()).sum()];
    let mut rest = &mut room[..];
    let mut made = Vec::new();
    for (n, payload) in (0..).zip(&payloads) {
        let (key, checksum) = (key(namespace, n), Checksum::of(payload));
        made.extend(
            store
                .seal_coded(Label::of(&key), Element::Bf16, payload, checksum, &mut rest)
                .unwrap(),
        );
    }
    let values: Vec<_> = made.iter().map(|coded| coded.value(0)).collect();
    let outcomes = store.put_many(&values, soon());
    assert_eq!(outcomes.len(), 2, "noise is not coded");
    assert_payload(&store, key(namespace, 0), &payloads[0]);
    assert_payload(&store, key(namespace, 2), &payloads[2]);
}

#[test]
fn who_takes_no_coded_values_leaves_them_alone() {
    let below = memory();
    for keys in [None, Some(OURS)] {
        let (key, payload) = (key(fresh_namespace(), 0), payload(1, 4000));
        let store = coding(&below, keys);
        assert!(put_coded(&store, &key, Element::Bf16, &payload));
        let other = over(&below, keys);
        for room in [4000, 8000] {
            let (_, got) = get(&other, Buffers::of(key, &[room]));
            assert_eq!(rejection(&got), Rejection::Coded);
        }
        let (_, got) = get(&other, Slot::of(key, 4000));
        assert_eq!(rejection(&got), Rejection::Coded);
        assert_payload(&store, key, &payload);
    }
}

#[test]
fn of_coded_values_too_only_those_with_the_key_are_read() {
    let below = memory();
    let (ours, plain) = (coding(&below, Some(OURS)), coding(&below, None));
    let namespace = fresh_namespace();
    let (encrypted, open) = (key(namespace, 0), key(namespace, 1));
    let payload = payload(1, 4000);
    assert!(put_coded(&ours, &encrypted, Element::Bf16, &payload));
    assert!(put_coded(&plain, &open, Element::Bf16, &payload));
    let refused = |store: &SealedStore, key| rejection(&get(store, Slot::of(key, 4000)).1);
    let theirs = coding(&below, Some(THEIRS));
    assert_eq!(refused(&plain, encrypted), Rejection::Encrypted);
    assert_eq!(refused(&theirs, encrypted), Rejection::UnknownKey);
    assert!(has(&*below, &encrypted));
    assert_eq!(refused(&ours, open), Rejection::Unencrypted);
    assert!(!has(&*below, &open));
}

#[test]
fn a_code_of_another_length_or_type_is_rejected_and_removed() {
    let store = coding(&memory(), None);
    let (key, payload) = (key(fresh_namespace(), 0), payload(1, 4000));
    assert!(put_coded(&store, &key, Element::Bf16, &payload));
    let value = raw(&**store.store(), &key);
    let cut = |len: usize| value[..len].to_vec();
    let mut of_another_type = value.clone();
    of_another_type[6] ^= 1 << 2;
    let own = Checksum::of(&of_another_type[..56]).to_le_bytes();
    of_another_type[56..64].copy_from_slice(&own);
    let longer = |by: usize| [&value[..], &vec![0; by]].concat();
    for (why, bad) in [
        ("truncated", cut(0)),
        ("truncated", cut(63)),
        ("bad_code", cut(64)),
        ("bad_code", cut(65)),
        ("bad_code", cut(2063)),
        ("bad_code", cut(2500)),
        ("bad_code", cut(value.len() - 1)),
        ("bad_code", longer(1)),
        ("length", longer(4064 - value.len())),
        ("length", longer(9000)),
        ("bad_code", of_another_type),
    ] {
        plant(&**store.store(), &key, &bad);
        let (_, got) = get(&store, Slot::of(key, payload.len()));
        assert_eq!(rejection(&got).name(), why, "{} bytes", bad.len());
        assert!(!has(&**store.store(), &key));
        let found = over(&memory(), None).examine(&key, &bad);
        assert!(matches!(found, Finding::Damaged(_)), "{found:?}");
    }
}

/// A header cannot make a reader reserve memory.
#[test]
fn a_payload_is_not_much_longer_than_its_code() {
    let store = coding(&memory(), None);
    let key = key(fresh_namespace(), 0);
    assert!(put_coded(&store, &key, Element::Bf16, &payload(1, 4000)));
    let mut value = raw(&**store.store(), &key);
    value[8..16].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    let own = Checksum::of(&value[..56]).to_le_bytes();
    value[56..64].copy_from_slice(&own);
    assert_eq!(
        store.examine(&key, &value),
        Finding::Damaged(Rejection::BadCode)
    );
    plant(&**store.store(), &key, &value);
    let (_, got) = get(&store, Buffers::of(key, &[5000]));
    assert_eq!(rejection(&got), Rejection::BadCode);
}

#[test]
fn every_bit_of_a_coded_value_counts() {
    for element in Element::ALL {
        let store = coding(&memory(), None);
        let (key, payload) = (key(fresh_namespace(), 0), payload(1, 2 * 1300 + 1));
        assert!(put_coded(&store, &key, element, &payload));
        let value = raw(&**store.store(), &key);
        assert_eq!(store.examine(&key, &value), Finding::Sound);
        for bit in 0..8 * value.len() {
            let mut bad = value.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let found = store.examine(&key, &bad);
            assert!(found != Finding::Sound, "{element:?}: bit {bit}");
        }
    }
}

#[test]
fn a_far_tier_mends_coded_values() {
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
        let (store, namespace) = (coding(&both, keys), fresh_namespace());
        for n in 0..100 {
            let payload = payload(n, 2000);
            assert!(put_coded(
                &store,
                &key(namespace, n),
                Element::Fp16,
                &payload
            ));
        }
        for n in 0..100 {
            assert_payload(&store, key(namespace, n), &payload(n, 2000));
        }
        let injected = faulty.injected();
        assert!(injected.bit_flips > 25 && injected.truncations > 25);
        assert!(store.mended() > 25);
        assert_eq!(store.mended(), store.rejected());
    }
}

#[test]
fn coded_values_are_examined_and_carried_by_anybody() {
    for keys in [None, Some(OURS)] {
        let from = coding(&memory(), keys);
        let (key, payload) = (key(fresh_namespace(), 0), payload(1, 4000));
        let mut room = vec![0; from.header_bytes() + payload.len()];
        let checksum = Checksum::of(&payload);
        // Without a context, as operators know none.
        let coded = from
            .seal_coded(
                Label::of(&key),
                Element::Bf16,
                &payload,
                checksum,
                &mut &mut room[..],
            )
            .unwrap()
            .expect("shorter");
        from.put_many(&[coded.value(0)], soon()).remove(0).unwrap();
        let value = raw(&**from.store(), &key);
        assert_eq!(over(&memory(), keys).examine(&key, &value), Finding::Sound);
        let strangers = match keys {
            None => Finding::Sound,
            Some(_) => Finding::Unreadable(Rejection::Encrypted),
        };
        let into = over(&memory(), None);
        assert_eq!(into.examine(&key, &value), strangers);
        let mut damaged = value.clone();
        damaged[40] ^= 1;
        let batch = [(key, &value[..]), (key, &damaged[..])];
        let outcomes = into.put_whole(&batch, soon());
        assert!(
            matches!(outcomes[..], [Carried::Stored, Carried::Refused(_)]),
            "{outcomes:?}"
        );
        let mut slot = Slot::of(key, payload.len());
        slot.context = b"";
        let reader = coding(into.store(), keys);
        let (slot, got) = get(&reader, slot);
        assert!(matches!(got, Got::Payload(_)), "{got:?}");
        assert!(slot.payload(&reader) == payload);
    }
}

fn elements() -> impl Strategy<Value = Element> {
    prop::sample::select(Element::ALL.to_vec())
}

proptest! {
    #[test]
    fn payloads_come_back_bit_for_bit_or_not_at_all(
        element in elements(),
        len in prop_oneof![
            0..3000_usize,
            2 * CHUNK_ELEMENTS - 300..2 * CHUNK_ELEMENTS + 700,
        ],
        seed: u64,
        encrypted: bool,
        at: prop::sample::Index,
        bit in 0..8_u32,
        is_cut: bool,
    ) {
        let store = coding(&memory(), encrypted.then_some(OURS));
        let (key, payload) = (key(fresh_namespace(), 0), payload(seed, len));
        put_coded(&store, &key, element, &payload);
        let (slot, got) = get(&store, Slot::of(key, len));
        prop_assert!(matches!(got, Got::Payload(_)), "{:?}", got);
        prop_assert!(slot.payload(&store) == payload);

        let mut bad = raw(&**store.store(), &key);
        let at = at.index(bad.len());
        if is_cut {
            bad.truncate(at);
        } else {
            bad[at] ^= 1 << bit;
        }
        plant(&**store.store(), &key, &bad);
        let (_, got) = get(&store, Slot::of(key, len));
        prop_assert!(matches!(got, Got::Rejected(_)), "{}: {:?}", at, got);
    }
}
