//! Fuzz tests of values: their headers, codes and encryption. Each test goes on with random inputs for
//! a second, or for as long as `BOLERO_RANDOM_TEST_TIME_MS` says. `cargo bolero test` drives the same
//! tests by coverage.

use std::sync::Arc;

use bolero::check;
use penstock_contract::testing::{Change, changed};
use penstock_contract::{Key, Namespace};
use penstock_layout::Span;

use crate::compress::{self, Element, Speed};
use crate::header::{self, Checksum, ENCRYPTED_HEADER_BYTES, HEADER_BYTES, Label, Writer};
use crate::sealed::Finding;
use crate::{Keyring, MemoryStore, SealedStore};

/// Any bytes in place of a value are accepted only if they are what sealing makes of their payload.
#[test]
fn values() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    check!().for_each(|bytes: &[u8]| {
        let expected = bytes.len().saturating_sub(HEADER_BYTES) as u64;
        if header::verify_value(bytes, &key, expected).is_ok() {
            let (header, payload) = bytes.split_first_chunk().expect("a header");
            let writer = header::writer_of(header);
            let mut checksum = Checksum::new();
            checksum.update(payload);
            assert_eq!(
                *header,
                header::seal(&key, writer, expected, checksum.finish())
            );
        }
    });
}

/// Any change to a sealed value is found out.
#[test]
fn changed_values() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    check!()
        .with_type::<(Vec<u8>, usize, u8)>()
        .for_each(|(payload, at, change)| {
            let mut checksum = Checksum::new();
            checksum.update(payload);
            let length = payload.len() as u64;
            let header = header::seal(&key, Writer(*at as u64), length, checksum.finish());
            let mut bytes = [&header[..], payload].concat();
            let at = at % bytes.len();
            bytes[at] ^= change;
            let accepted = header::verify_value(&bytes, &key, length).is_ok();
            assert_eq!(accepted, *change == 0);
        });
}

/// Any change to an encrypted value is found out by who has the key, and by others if it is in the
/// header. Any bytes in place of a value are looked at without harm.
#[test]
fn whole_values() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    let line = "ours:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let over = |line: Option<&str>| {
        let keys = line.map(|line| Arc::new(Keyring::parse(line).unwrap()));
        SealedStore::new(Arc::new(MemoryStore::new(1 << 20)), keys)
    };
    check!()
        .with_type::<(Vec<u8>, usize, u8)>()
        .for_each(|(payload, at, change)| {
            let (ours, others) = (over(Some(line)), over(None));
            ours.examine(&key, payload);
            others.examine(&key, payload);
            let mut sealed = payload.clone();
            let keys = ours.keys().unwrap();
            let header = keys.seal(Label::of(&key), &mut sealed).unwrap();
            let mut bytes = [&header[..], &sealed].concat();
            let at = at % bytes.len();
            bytes[at] ^= change;
            let is_sound = ours.examine(&key, &bytes) == Finding::Sound;
            assert_eq!(is_sound, *change == 0);
            // Another version's value is not damaged, as far as this one can say.
            let is_in_header = at < ENCRYPTED_HEADER_BYTES && !(4..6).contains(&at);
            let is_damaged = matches!(others.examine(&key, &bytes), Finding::Damaged(_));
            assert_eq!(is_damaged, *change != 0 && is_in_header, "{at}");
        });
}

/// Any change to a coded value is found out, encrypted or not. So are any bytes behind a header that
/// says they are a code.
#[test]
fn coded_values() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    let line = "ours:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let keys = Arc::new(Keyring::parse(line).unwrap());
    // Whatever the elements, few exponents are unlike the others.
    let payload: Vec<u8> = (0..6000_u32)
        .map(|at| (at * 7) as u8 & 0x83 | if at % 97 == 0 { 0x0c } else { 0x3c })
        .collect();
    check!()
        .with_type::<(usize, u8, bool, Vec<u8>)>()
        .for_each(|(at, change, encrypted, code)| {
            let keys = encrypted.then(|| Arc::clone(&keys));
            let store = SealedStore::new(Arc::new(MemoryStore::new(1 << 20)), keys).taking_coded();
            let checksum = Checksum::of(&payload);
            for element in Element::ALL {
                let mut room = vec![0; store.header_bytes() + payload.len()];
                let value = store
                    .seal_coded(
                        Label::of(&key),
                        element,
                        &payload,
                        checksum,
                        &mut &mut room[..],
                    )
                    .unwrap()
                    .expect("shorter");
                let bytes = value.value(0).bytes() as usize;
                room.truncate(bytes);
                let at = at % bytes;
                room[at] ^= change;
                let is_sound = store.examine(&key, &room) == Finding::Sound;
                assert_eq!(is_sound, *change == 0, "{element:?}: {at}");
                room[at] ^= change;
                room.truncate(store.header_bytes());
                room.extend_from_slice(code);
                assert_ne!(store.examine(&key, &room), Finding::Sound);
            }
        });
}

/// Whatever bytes are decoded, nothing panics, and all instructions say the same of them. They are a
/// code's bytes with some changed, or any.
#[test]
fn codes() {
    let payload: Vec<u8> = (0..3000_u32)
        .flat_map(|at| [(at * 7) as u8, 0x3f - (at % 97 == 0) as u8 * 0x30])
        .collect();
    check!()
        .with_type::<(Change, Vec<u8>, u16)>()
        .for_each(|(change, bytes, length)| {
            for element in Element::ALL {
                let mut code = vec![0; payload.len()];
                let used = compress::encode(element, &payload, &mut code).unwrap_or(code.len());
                code.truncate(used);
                for (coded, length) in [
                    (&changed(&[code], change), payload.len()),
                    (bytes, usize::from(*length)),
                ] {
                    let decoded = |speed| {
                        let mut out = vec![0; length];
                        compress::decode_at(speed, element, coded, &mut out).map(|()| out)
                    };
                    let fastest = decoded(Speed::best());
                    assert!(Speed::available().all(|speed| decoded(speed) == fastest));
                }
            }
        });
}
