//! Fuzz tests of everything that reads bytes which somebody else wrote.
//!
//! Each test first replays its corpus (`__fuzz__/`, for the most part what real servers said). Then
//! it goes on with random inputs, or with random changes to the corpus: for a second, or for as
//! long as `BOLERO_RANDOM_TEST_TIME_MS` says. `cargo bolero test` drives the same tests by
//! coverage.

use bolero::check;
use penstock_contract::testing::{Change, changed};
use penstock_contract::{Key, Namespace, Span};

use crate::object::fuzz as object;
use crate::registered::fuzz as registered;
use crate::resp::fuzz as resp;
use crate::{OpenOptions, file, open};

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
