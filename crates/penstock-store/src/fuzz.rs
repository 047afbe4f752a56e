//! Fuzz tests of everything that reads bytes which somebody else wrote.
//!
//! Each test first replays its corpus (`__fuzz__/`, for the most part what real servers said). Then
//! it goes on with random inputs, or with random changes to the corpus: for a second, or for as
//! long as `BOLERO_RANDOM_TEST_TIME_MS` says. `cargo bolero test` drives the same tests by
//! coverage.

use std::sync::Arc;

use bolero::check;
use penstock_layout::Span;

use crate::compress::{self, Element, Speed};
use crate::object::fuzz as object;
use crate::registered::fuzz as registered;
use crate::resp::fuzz as resp;
use crate::sealed::Finding;
use crate::value::{self, Checksum, ENCRYPTED_HEADER_BYTES, HEADER_BYTES};
use crate::{Key, Keyring, MemoryStore, Namespace, OpenOptions, SealedStore, file, open};

/// The corpus of a test.
fn corpus(test: &str) -> Vec<Vec<u8>> {
    let folder = format!(
        "{}/src/__fuzz__/fuzz__{test}/corpus",
        env!("CARGO_MANIFEST_DIR")
    );
    let files = std::fs::read_dir(folder).expect("a corpus");
    let mut seeds: Vec<_> = files
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .collect();
    seeds.sort();
    seeds
}

/// A random change: the number of a seed, which of its bytes become what, and where it is cut off.
type Change = (usize, Vec<(u16, u8)>, Option<u16>);

fn changed(seeds: &[Vec<u8>], (which, edits, end): &Change) -> Vec<u8> {
    let mut bytes = seeds[which % seeds.len()].clone();
    for &(at, byte) in edits {
        let at = usize::from(at) % bytes.len();
        bytes[at] = byte;
    }
    if let Some(end) = *end {
        bytes.truncate(usize::from(end));
    }
    bytes
}

/// Whatever a server says, and in whatever pieces, nothing panics. The pieces make no difference.
#[test]
fn replies() {
    check!().for_each(|bytes: &[u8]| {
        for piece in [1, 7, 64] {
            assert_eq!(
                resp::replies(bytes, bytes.len().max(1)),
                resp::replies(bytes, piece)
            );
        }
    });
}

/// Whatever bytes of real servers' replies are changed, nothing panics, and the pieces make no
/// difference.
#[test]
fn replies_that_are_nearly_right() {
    let seeds = corpus("replies");
    check!()
        .with_type::<(Change, u8)>()
        .for_each(|(change, piece)| {
            let bytes = changed(&seeds, change);
            let piece = usize::from(*piece).max(1);
            assert_eq!(
                resp::replies(&bytes, bytes.len().max(1)),
                resp::replies(&bytes, piece)
            );
        });
}

/// Whatever a node says about its cluster, nothing panics, and no slot is out of range.
#[test]
fn cluster_maps() {
    let seeds = corpus("cluster_maps");
    seeds.iter().for_each(|seed| resp::cluster_map(seed));
    check!()
        .with_type::<Change>()
        .for_each(|change| resp::cluster_map(&changed(&seeds, change)));
}

/// Whatever a refusal says, nothing panics, and the result is one printable line.
#[test]
fn refusals() {
    check!().for_each(|line: &[u8]| {
        let text = resp::refusal(line);
        assert!(!text.chars().any(char::is_control), "{text:?}");
    });
}

/// Whatever a store's program says, nothing panics, and nothing is written but where it may be.
#[test]
fn programs() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    check!().for_each(|bytes: &[u8]| registered::replies(bytes, key, [0, 64]));
}

/// Whatever is wrong with replies that are nearly right, nothing panics, and nothing is written but
/// where it may be.
#[test]
fn programs_that_are_nearly_right() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    check!()
        .with_type::<(bool, [(u8, u8, Vec<u8>); 2], i8)>()
        .for_each(|(has_failed, items, off)| {
            let mut body = Vec::new();
            for (outcome, error, value) in items {
                body.extend(u32::from(*outcome % 6).to_le_bytes());
                body.extend(u32::from(*error).to_le_bytes());
                body.extend((value.len() as u64).to_le_bytes());
                body.extend(value);
            }
            let mut said = u32::from(*has_failed).to_le_bytes().to_vec();
            said.extend(2_u32.to_le_bytes());
            said.extend(
                (body.len() as u64)
                    .wrapping_add_signed((*off).into())
                    .to_le_bytes(),
            );
            said.extend(body);
            registered::replies(&said, key, [16, 64]);
        });
}

/// Whatever a program's messages are, they do not repeat the password of its URL.
#[test]
fn messages_that_repeat_a_password() {
    check!()
        .with_type::<(String, Vec<u8>, String, String)>()
        .for_each(|(password, ways, before, after)| {
            registered::repeated_password(password, ways, before, after);
        });
}

/// Any bytes in place of a value are accepted only if they are what sealing makes of their payload.
#[test]
fn values() {
    let key = Key::new(Namespace([7; 16]), &[9; 32], Span::new(0..4, 0..2).unwrap()).unwrap();
    check!().for_each(|bytes: &[u8]| {
        let expected = bytes.len().saturating_sub(HEADER_BYTES) as u64;
        if value::verify_value(bytes, &key, expected).is_ok() {
            let (header, payload) = bytes.split_at(HEADER_BYTES);
            let mut checksum = Checksum::new();
            checksum.update(payload);
            assert_eq!(header, value::seal(&key, expected, checksum.finish()));
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
            let header = value::seal(&key, length, checksum.finish());
            let mut bytes = [&header[..], payload].concat();
            let at = at % bytes.len();
            bytes[at] ^= change;
            let accepted = value::verify_value(&bytes, &key, length).is_ok();
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
            let header = keys.seal(&key, b"", &mut sealed).unwrap();
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
                    .seal_coded(&key, b"", element, &payload, checksum, &mut &mut room[..])
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

/// Any text in place of a key, or a key with some bytes changed: a text that is read as a key is
/// written the same way.
#[test]
fn keys() {
    let seeds = corpus("keys");
    let read = |bytes: &[u8]| {
        let key = Key::parse(std::str::from_utf8(bytes).ok()?).ok()?;
        assert_eq!(Key::parse(&key.to_string()), Ok(key));
        Some(key)
    };
    assert!(seeds.iter().all(|seed| read(seed).is_some()));
    check!()
        .with_type::<(Change, Vec<u8>)>()
        .for_each(|(change, bytes)| {
            read(&changed(&seeds, change));
            read(bytes);
        });
}

/// Any name of a file in a pool's directory, or one with some bytes changed, and any record of its
/// use.
#[test]
fn directories() {
    let seeds = corpus("directories");
    let ours = Namespace([3; 16]);
    let read = |bytes: &[u8]| {
        // Names that are no text are passed over before they come here.
        let key = file::fuzz::key_of(ours, std::str::from_utf8(bytes).ok()?);
        assert!(key.is_none_or(|key| key.namespace == ours));
        key
    };
    assert!(seeds.iter().all(|seed| read(seed).is_some()));
    check!()
        .with_type::<(Change, Vec<u8>)>()
        .for_each(|(change, bytes)| {
            read(&changed(&seeds, change));
            read(bytes);
            file::fuzz::record(bytes);
        });
}

/// Any bytes in place of a pack's head or a note in a bucket, or one with some bytes changed: nothing
/// panics, and what is read lies within the object. Whatever a refusal says is one printable line.
#[test]
fn objects() {
    let seeds = object::objects();
    let bodies: Vec<Vec<u8>> = seeds.iter().map(|(_, body, _)| body.clone()).collect();
    check!()
        .with_type::<(Change, Change, u64)>()
        .for_each(|(body, name, bytes)| {
            let (right, _, right_bytes) = &seeds[body.0 % seeds.len()];
            let changed_name = changed(&[right.clone().into_bytes()], name);
            let changed_name = String::from_utf8_lossy(&changed_name).into_owned();
            let body = changed(&bodies, body);
            object::object(right, &body, *right_bytes);
            object::object(&changed_name, &body, *bytes);
            let refusal = format!(
                "status code: 503 <Code>{}</Code>",
                String::from_utf8_lossy(&body)
            );
            let text = object::refusal(&refusal);
            assert!(!text.chars().any(char::is_control), "{text:?}");
        });
}

/// Any text in place of a server's URL: nothing panics, and a store that opens gives a URL that
/// opens too.
#[test]
fn urls() {
    let seeds = corpus("urls");
    check!().with_type::<Change>().for_each(|change| {
        let bytes = changed(&seeds, change);
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return;
        };
        object::url(&format!("s3{text}"));
        // Test only servers: another URL could make a directory when it is opened.
        let text = format!("redis{text}");
        if let Ok(store) = open(&text, &OpenOptions::default()) {
            assert!(
                open(&store.url(), &OpenOptions::default()).is_ok(),
                "{}",
                store.url()
            );
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
