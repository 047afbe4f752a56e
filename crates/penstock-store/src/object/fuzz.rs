//! The parts of the object store that read foreign bytes, for [`crate::fuzz`].

use penstock_contract::Namespace;

use super::address::Address;
use super::failure::Failure;
use super::index::Index;
use super::pack::{Id, Kind, Name, parse_note, parse_pack};

/// Reads what may be a pack's head and what may be a note, and learns from them what it can.
pub(crate) fn object(name: &str, bytes: &[u8], object_bytes: u64) {
    let Some(name) = Name::parse(name) else {
        return;
    };
    let mut index = Index::default();
    match name.kind {
        Kind::Pack => {
            let namespace = Namespace(*b"0123456789abcdef");
            let Some(entries) = parse_pack(bytes, namespace, name.count, object_bytes) else {
                return;
            };
            assert_eq!(entries.len(), name.count as usize);
            for entry in &entries {
                assert!(entry.offset >= name.head_bytes());
                assert!(entry.offset + u64::from(entry.bytes) <= object_bytes);
            }
            index.add_pack(name, &entries);
        }
        Kind::Note => {
            if let Some(places) = parse_note(bytes, name.count) {
                assert_eq!(places.len(), name.count as usize);
                index.add_note(name.id, places);
            }
        }
    }
}

/// A pack of two values, and a note of one: what there is to change bytes of.
pub(crate) fn objects() -> Vec<(String, Vec<u8>, u64)> {
    use super::pack::{Local, note, pack_head};
    let namespace = Namespace(*b"0123456789abcdef");
    let span = penstock_layout::Span::new(0..4, 0..2).expect("a span");
    let key = penstock_contract::Key::new(namespace, b"chunk", span).expect("a key");
    let (head, entries) = pack_head(namespace, &[(Local::of(&key), 100), (Local::of(&key), 7)]);
    let size = entries[1].offset + u64::from(entries[1].bytes);
    let id = Id::fresh();
    let name = |kind, count| Name { id, kind, count }.to_string();
    vec![
        (name(Kind::Pack, 2), head, size),
        (name(Kind::Note, 1), note(&[(id, 1)]), 0),
    ]
}

/// Reads a URL. One that is right gives a URL that opens the same.
pub(crate) fn url(text: &str) {
    if let Ok(address) = Address::parse(text) {
        let url = address.url();
        let again = Address::parse(&url).expect("the URL of a store opens it");
        assert_eq!(again.url(), url);
        assert!(!url.contains(char::is_whitespace), "{url:?}");
    }
}

/// What is shown of a server's refusal.
pub(crate) fn refusal(body: &str) -> String {
    let failure = Failure::of(&object_store::Error::Generic {
        store: "S3",
        source: body.into(),
    });
    failure.to_string()
}
