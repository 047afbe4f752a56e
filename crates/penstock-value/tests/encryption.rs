//! Encrypted values: what opens, and that nothing else does.

use penstock_contract::{Key, Namespace, testing};
use penstock_layout::Span;
use penstock_value::Keyring;
use penstock_value::header::Label;
use penstock_value::header::{
    self, Checksum, ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Rejection, Writer, verify_value,
};
use proptest::collection::vec;
use proptest::prelude::*;

const OLD: &str = "old:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const NEW: &str = "new://79/Pv6+fj39vX08/Lx8O/u7ezr6uno5+bl5OPi4eA=";

fn ring(lines: &[&str]) -> Keyring {
    Keyring::parse(&lines.join("\n")).unwrap()
}

fn key() -> Key {
    testing::key(Namespace([7; 16]), 3)
}

fn sealed(keys: &Keyring, context: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    let header = keys
        .seal(
            Label {
                context,
                ..Label::of(&key())
            },
            &mut payload,
        )
        .unwrap();
    [&header[..], &payload].concat()
}

fn opened(keys: &Keyring, key: &Key, context: &[u8], value: &[u8]) -> Result<Vec<u8>, Rejection> {
    let mut value = value.to_vec();
    let payload = value.len().saturating_sub(ENCRYPTED_HEADER_BYTES) as u64;
    keys.open_value(&mut value, key, context, payload)?;
    Ok(value.split_off(ENCRYPTED_HEADER_BYTES))
}

/// The value with other bytes in its header, whose checksums match again.
fn with_checksums(mut value: Vec<u8>) -> Vec<u8> {
    let extension = Checksum::of(&value[HEADER_BYTES..ENCRYPTED_HEADER_BYTES]);
    value[48..56].copy_from_slice(&extension.to_le_bytes());
    let header = Checksum::of(&value[..56]);
    value[56..64].copy_from_slice(&header.to_le_bytes());
    value
}

#[test]
fn each_value_has_a_key_of_its_own_and_shows_nothing() {
    let keys = ring(&[OLD]);
    let payload = [7; 4096];
    let (one, other) = (sealed(&keys, b"", &payload), sealed(&keys, b"", &payload));
    assert_ne!(one[80..112], other[80..112], "salts");
    assert_ne!(one[128..], other[128..], "ciphertexts");
    assert_eq!(one.len(), ENCRYPTED_HEADER_BYTES + payload.len());
    for value in [&one, &other] {
        assert!(!value[64..].windows(16).any(|bytes| bytes == &payload[..16]));
        // No checksum of the plaintext either, by which guesses could be tried.
        let tell_tale = Checksum::of(&payload).to_le_bytes();
        assert!(!value.windows(8).any(|bytes| bytes == tell_tale));
    }
}

#[test]
fn wrong_keys_wrong_places_and_wrong_tenants_are_rejected() {
    let keys = ring(&[OLD]);
    let payload = testing::bytes(1, 1000);
    let value = sealed(&keys, b"tenant", &payload);
    assert_eq!(
        opened(&keys, &key(), b"tenant", &value),
        Ok(payload.clone())
    );
    assert_eq!(
        opened(&ring(&[NEW]), &key(), b"tenant", &value),
        Err(Rejection::UnknownKey)
    );
    // Another key by the same name.
    let namesake = ring(&[&NEW.replace("new", "old")]);
    assert_eq!(
        opened(&namesake, &key(), b"tenant", &value),
        Err(Rejection::UnknownKey)
    );
    for context in [&b""[..], b"tenan", b"tenant2"] {
        assert_eq!(
            opened(&keys, &key(), context, &value),
            Err(Rejection::Authentication)
        );
    }
    let elsewhere = testing::key(Namespace([8; 16]), 3);
    assert_eq!(
        opened(&keys, &elsewhere, b"tenant", &value),
        Err(Rejection::Namespace)
    );
    let neighbour = testing::key(Namespace([7; 16]), 4);
    let other_span = Key {
        span: Span::new(0..4, 0..1).unwrap(),
        ..key()
    };
    for other in [neighbour, other_span] {
        assert_eq!(
            opened(&keys, &other, b"tenant", &value),
            Err(Rejection::Key)
        );
        // Who can write to the store can also make a header that names the other key.
        let mut forged = value.clone();
        forged[..64].copy_from_slice(&header::seal(&other, Writer::UNKNOWN, 1000, 0));
        forged[6] = 1;
        let forged = with_checksums(forged);
        assert_eq!(
            opened(&keys, &other, b"tenant", &forged),
            Err(Rejection::Authentication)
        );
    }
}

#[test]
fn other_lengths_are_rejected() {
    let keys = ring(&[OLD]);
    let value = sealed(&keys, b"", &testing::bytes(1, 1000));
    let open =
        |bytes: &[u8], payload: u64| keys.open_value(&mut bytes.to_vec(), &key(), b"", payload);
    assert_eq!(open(&value, 1000), Ok(()));
    for len in [0, 1, 63, 64, 127, 128, 1127] {
        let found = open(&value[..len], 1000).unwrap_err();
        assert_eq!(found.name(), "truncated", "{len}");
    }
    let longer = [&value[..], &[0]].concat();
    let length = |expected, found| Err(Rejection::Length { expected, found });
    assert_eq!(open(&longer, 1000), length(1000, 1001));
    assert_eq!(open(&value, 999), length(999, 1000));
    // Shortened, with a header that says so.
    let mut forged = value[..1127].to_vec();
    forged[8..16].copy_from_slice(&999_u64.to_le_bytes());
    assert_eq!(
        open(&with_checksums(forged), 999),
        Err(Rejection::Authentication)
    );
}

#[test]
fn readers_with_and_without_keys_leave_each_other_alone() {
    let keys = ring(&[OLD]);
    let payload = testing::bytes(2, 500);
    let encrypted = sealed(&keys, b"", &payload);
    assert_eq!(
        verify_value(&encrypted, &key(), 500),
        Err(Rejection::Encrypted)
    );
    let header = header::seal(&key(), Writer::UNKNOWN, 500, Checksum::of(&payload));
    let plain = [&header[..], &payload].concat();
    assert_eq!(
        keys.open_value(&mut plain.clone(), &key(), b"", 500),
        Err(Rejection::Unencrypted)
    );
    let short = [
        &header::seal(&key(), Writer::UNKNOWN, 2, Checksum::of(b"kv"))[..],
        b"kv",
    ]
    .concat();
    assert_eq!(
        keys.open_value(&mut short.clone(), &key(), b"", 2),
        Err(Rejection::Unencrypted)
    );
    // The flag taken away, to have the ciphertext or anything else taken for KV.
    let mut downgraded = encrypted.clone();
    downgraded[6] = 0;
    assert_eq!(
        opened(&keys, &key(), b"", &with_checksums(downgraded)),
        Err(Rejection::Unencrypted)
    );
    assert!(Rejection::Encrypted.is_foreign() && Rejection::UnknownKey.is_foreign());
    assert!(!Rejection::Unencrypted.is_foreign() && !Rejection::Authentication.is_foreign());
}

#[test]
fn keys_are_rotated() {
    let payload = testing::bytes(3, 100);
    let before = sealed(&ring(&[OLD]), b"", &payload);
    let prepared = ring(&[OLD, NEW]);
    let rotated = ring(&[NEW, OLD]);
    let after = sealed(&rotated, b"", &payload);
    for keys in [&prepared, &rotated] {
        for value in [&before, &after] {
            assert_eq!(opened(keys, &key(), b"", value), Ok(payload.clone()));
        }
    }
    let retired = ring(&[NEW]);
    assert_eq!(opened(&retired, &key(), b"", &after), Ok(payload));
    assert_eq!(
        opened(&retired, &key(), b"", &before),
        Err(Rejection::UnknownKey)
    );
}

#[test]
fn any_flipped_bit_is_rejected() {
    let keys = ring(&[OLD, NEW]);
    let value = sealed(&keys, b"", b"payload");
    for bit in 0..value.len() * 8 {
        let mut flipped = value.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(opened(&keys, &key(), b"", &flipped).is_err(), "bit {bit}");
        // The checksums are no secret: whoever flips bits on purpose mends them.
        if !(48..64).contains(&(bit / 8)) {
            let mended = with_checksums(flipped);
            assert!(opened(&keys, &key(), b"", &mended).is_err(), "bit {bit}");
        }
    }
}

proptest! {
    #[test]
    fn what_is_sealed_opens(
        payload in vec(any::<u8>(), 0..5000),
        context in vec(any::<u8>(), 0..100),
    ) {
        let keys = ring(&[NEW, OLD]);
        let value = sealed(&keys, &context, &payload);
        prop_assert_eq!(opened(&keys, &key(), &context, &value), Ok(payload));
    }

    #[test]
    fn changed_bytes_are_rejected(
        payload in vec(any::<u8>(), 1..3000),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let keys = ring(&[OLD]);
        let mut value = sealed(&keys, b"", &payload);
        let at = at.index(value.len());
        value[at] ^= flip;
        let verdict = opened(&keys, &key(), b"", &value);
        prop_assert!(verdict.is_err());
        if at >= ENCRYPTED_HEADER_BYTES {
            prop_assert_eq!(verdict, Err(Rejection::Authentication));
        }
    }

    #[test]
    fn halves_of_two_values_are_rejected(cut in 1usize..1000) {
        let keys = ring(&[OLD]);
        let (a, b) = (testing::bytes(4, 1000), testing::bytes(5, 1000));
        let (a, b) = (sealed(&keys, b"", &a), sealed(&keys, b"", &b));
        let cut = cut + ENCRYPTED_HEADER_BYTES - 1;
        let spliced = [&a[..cut], &b[cut..]].concat();
        prop_assert_eq!(opened(&keys, &key(), b"", &spliced), Err(Rejection::Authentication));
    }

    #[test]
    fn garbage_is_rejected(value in vec(any::<u8>(), 0..300), expected in any::<u64>()) {
        let keys = ring(&[OLD]);
        prop_assert!(keys.open_value(&mut value.clone(), &key(), b"", expected).is_err());
    }

    #[test]
    fn garbage_that_begins_well_is_rejected(
        known in 0usize..128,
        mut rest in vec(any::<u8>(), 128..300),
    ) {
        let keys = ring(&[OLD]);
        let value = sealed(&keys, b"", &[0; 200]);
        rest[..known].copy_from_slice(&value[..known]);
        prop_assert!(opened(&keys, &key(), b"", &rest).is_err());
    }
}
