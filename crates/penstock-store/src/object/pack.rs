//! What lies in a bucket: packs of values, and notes of values that were removed from packs.
//!
//! A pack is one object: a head that lists its values, and then the values one after the other. Its
//! name says how many values it has, so the head is read by one request of the right length. A
//! *note* lists values of packs that count no more. Names begin with the time at which they were
//! made, so that a listing after a name shows what came later.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_contract::{KEY_BYTES, Key, NAMESPACE_BYTES, Namespace};
use ring::rand::{SecureRandom, SystemRandom};
use twox_hash::XxHash3_64;

const PACK_MAGIC: &[u8; 8] = b"PNSTKPK1";
const NOTE_MAGIC: &[u8; 8] = b"PNSTKNT1";
/// Magic, number of values, namespace.
const PACK_START: usize = 8 + 4 + NAMESPACE_BYTES;
/// Magic, number of places.
const NOTE_START: usize = 8 + 4;
const CHECKSUM: usize = 8;
/// A key in its namespace, and the value's length.
const ENTRY: usize = LOCAL_BYTES + 4;
/// A pack, and a value's number in it.
const PLACE: usize = 16 + 4;
/// The most values in one pack, and places in one note.
pub(super) const MOST_VALUES: u32 = 1 << 16;

const LOCAL_BYTES: usize = KEY_BYTES - NAMESPACE_BYTES;

/// A key without its namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Local([u8; LOCAL_BYTES]);

impl Local {
    pub(super) fn of(key: &Key) -> Self {
        let mut local = [0; LOCAL_BYTES];
        local.copy_from_slice(&key.to_bytes()[NAMESPACE_BYTES..]);
        Self(local)
    }

    /// The key, if the bytes are those of one.
    pub(super) fn in_namespace(&self, namespace: Namespace) -> Option<Key> {
        let mut bytes = [0; KEY_BYTES];
        bytes[..NAMESPACE_BYTES].copy_from_slice(&namespace.0);
        bytes[NAMESPACE_BYTES..].copy_from_slice(&self.0);
        Key::from_bytes(&bytes).ok()
    }
}

/// What tells objects in a bucket apart: when they were named, and a random number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Id {
    /// Milliseconds since 1970 by the clock of whoever named it; 48 bits.
    pub(super) millis: u64,
    pub(super) random: u64,
}

const MILLIS_MASK: u64 = (1 << 48) - 1;

impl Id {
    /// An identity that no other object has.
    pub(super) fn fresh() -> Self {
        let mut random = [0; 8];
        // Without randomness, two processes would have to name objects in one millisecond to clash.
        let _ = SystemRandom::new().fill(&mut random);
        Self {
            millis: now_millis(),
            random: u64::from_le_bytes(random),
        }
    }

    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.millis.to_le_bytes());
        bytes[8..].copy_from_slice(&self.random.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        Self {
            millis: u64_at(bytes, 0),
            random: u64_at(bytes, 8),
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:012x}{:016x}", self.millis & MILLIS_MASK, self.random)
    }
}

/// Now, in milliseconds since 1970.
pub(super) fn now_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64) & MILLIS_MASK
}

/// The kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pack,
    Note,
}

/// The last part of an object's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) id: Id,
    pub(super) kind: Kind,
    /// How many values a pack has, or places a note.
    pub(super) count: u32,
}

impl Name {
    /// Reads a name. None if it is none of ours.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (stem, ending) = text.split_once('.')?;
        let kind = match ending {
            "pack" => Kind::Pack,
            "note" => Kind::Note,
            _ => return None,
        };
        let (id, count) = stem.split_once('-')?;
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if id.len() != 28 || !is_hex(id) || !is_hex(count) {
            return None;
        }
        let id = Id {
            millis: u64::from_str_radix(&id[..12], 16).ok()?,
            random: u64::from_str_radix(&id[12..], 16).ok()?,
        };
        let count = u32::from_str_radix(count, 16).ok()?;
        (1..=MOST_VALUES)
            .contains(&count)
            .then_some(Self { id, kind, count })
    }

    /// How many bytes at the object's start say what is in it: of a note, all.
    pub(super) fn head_bytes(&self) -> u64 {
        let count = self.count as usize;
        let bytes = match self.kind {
            Kind::Pack => PACK_START + count * ENTRY + CHECKSUM,
            Kind::Note => NOTE_START + count * PLACE + CHECKSUM,
        };
        bytes as u64
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ending = match self.kind {
            Kind::Pack => "pack",
            Kind::Note => "note",
        };
        write!(f, "{}-{:x}.{ending}", self.id, self.count)
    }
}

/// One value of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: Local,
    /// Where the value begins in the object.
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

/// One value of a pack, by its number.
pub(super) type Place = (Id, u32);

/// The head of a pack of these values, in this order, and where they lie.
pub(super) fn pack_head(namespace: Namespace, values: &[(Local, u32)]) -> (Vec<u8>, Vec<Entry>) {
    let mut head = Vec::with_capacity(PACK_START + values.len() * ENTRY + CHECKSUM);
    head.extend_from_slice(PACK_MAGIC);
    head.extend_from_slice(&(values.len() as u32).to_le_bytes());
    head.extend_from_slice(&namespace.0);
    for (key, bytes) in values {
        head.extend_from_slice(&key.0);
        head.extend_from_slice(&bytes.to_le_bytes());
    }
    seal(&mut head);
    let entries = laid_out(head.len() as u64, values.iter().copied());
    (head, entries)
}

/// Reads the head of a pack. None unless it is whole, of this namespace, with as many values as its
/// name says, and the object is exactly as long as they are.
pub(super) fn parse_pack(
    head: &[u8],
    namespace: Namespace,
    count: u32,
    object_bytes: u64,
) -> Option<Vec<Entry>> {
    let body = unseal(head, PACK_MAGIC, count)?;
    let (named, rest) = body.split_at_checked(NAMESPACE_BYTES)?;
    if named != namespace.0 || rest.len() != count as usize * ENTRY {
        return None;
    }
    let values = rest.chunks_exact(ENTRY).map(|entry| {
        let (key, bytes) = entry.split_at(LOCAL_BYTES);
        let mut local = [0; LOCAL_BYTES];
        local.copy_from_slice(key);
        (Local(local), u32_at(bytes, 0))
    });
    let entries = laid_out(head.len() as u64, values);
    let end = entries.last()?;
    let are_keys = |entry: &Entry| entry.key.in_namespace(namespace).is_some();
    (end.offset + u64::from(end.bytes) == object_bytes && entries.iter().all(are_keys))
        .then_some(entries)
}

fn laid_out(start: u64, values: impl Iterator<Item = (Local, u32)>) -> Vec<Entry> {
    let mut offset = start;
    values
        .map(|(key, bytes)| {
            let entry = Entry { key, offset, bytes };
            offset += u64::from(bytes);
            entry
        })
        .collect()
}

/// A note that these values count no more.
pub(super) fn note(places: &[Place]) -> Vec<u8> {
    let mut note = Vec::with_capacity(NOTE_START + places.len() * PLACE + CHECKSUM);
    note.extend_from_slice(NOTE_MAGIC);
    note.extend_from_slice(&(places.len() as u32).to_le_bytes());
    for (pack, number) in places {
        note.extend_from_slice(&pack.to_bytes());
        note.extend_from_slice(&number.to_le_bytes());
    }
    seal(&mut note);
    note
}

/// Reads a note. None unless it is whole and has as many places as its name says.
pub(super) fn parse_note(note: &[u8], count: u32) -> Option<Vec<Place>> {
    let places = unseal(note, NOTE_MAGIC, count)?;
    if places.len() != count as usize * PLACE {
        return None;
    }
    let place = |place: &[u8]| (Id::from_bytes(place), u32_at(place, 16));
    Some(places.chunks_exact(PLACE).map(place).collect())
}

fn seal(bytes: &mut Vec<u8>) {
    let checksum = XxHash3_64::oneshot(bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
}

/// What lies between the number of things and the checksum.
fn unseal<'a>(bytes: &'a [u8], magic: &[u8; 8], count: u32) -> Option<&'a [u8]> {
    let (sealed, checksum) = bytes.split_at_checked(bytes.len().checked_sub(CHECKSUM)?)?;
    let rest = sealed.strip_prefix(magic)?;
    let (counted, body) = rest.split_at_checked(4)?;
    (u32_at(counted, 0) == count && XxHash3_64::oneshot(sealed) == u64_at(checksum, 0))
        .then_some(body)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use penstock_layout::Span;
    use proptest::prelude::*;

    use super::*;

    const NAMESPACE: Namespace = Namespace(*b"0123456789abcdef");

    fn local(n: u32) -> Local {
        let span = Span::new(0..4, 0..2).unwrap();
        Local::of(&Key::new(NAMESPACE, &n.to_be_bytes(), span).unwrap())
    }

    fn id() -> impl Strategy<Value = Id> {
        (0..=MILLIS_MASK, any::<u64>()).prop_map(|(millis, random)| Id { millis, random })
    }

    proptest! {
        #[test]
        fn packs_read_back(lengths in prop::collection::vec(any::<u32>(), 1..50)) {
            let values: Vec<_> = lengths.iter().enumerate().map(|(n, len)| (local(n as u32), *len)).collect();
            let (head, entries) = pack_head(NAMESPACE, &values);
            let all: u64 = lengths.iter().map(|&len| u64::from(len)).sum();
            let size = head.len() as u64 + all;
            let count = values.len() as u32;
            let name = Name { id: Id::fresh(), kind: Kind::Pack, count };
            prop_assert_eq!(name.head_bytes(), head.len() as u64);
            prop_assert_eq!(parse_pack(&head, NAMESPACE, count, size), Some(entries.clone()));
            let mut offset = head.len() as u64;
            for (entry, (key, len)) in entries.iter().zip(&values) {
                prop_assert_eq!((entry.key, entry.offset, entry.bytes), (*key, offset, *len));
                offset += u64::from(*len);
            }
            prop_assert_eq!(parse_pack(&head, NAMESPACE, count, size + 1), None);
            prop_assert_eq!(parse_pack(&head, NAMESPACE, count + 1, size), None);
            prop_assert_eq!(parse_pack(&head, Namespace([0; 16]), count, size), None);
        }

        #[test]
        fn any_changed_bit_is_noticed(count in 1_u32..20, at in any::<prop::sample::Index>(), bit in 0_u8..8) {
            let values: Vec<_> = (0..count).map(|n| (local(n), 7)).collect();
            let (mut head, _) = pack_head(NAMESPACE, &values);
            let size = head.len() as u64 + 7 * u64::from(count);
            let at = at.index(head.len());
            head[at] ^= 1 << bit;
            prop_assert_eq!(parse_pack(&head, NAMESPACE, count, size), None);
            prop_assert_eq!(parse_pack(&head[..at], NAMESPACE, count, size), None);
        }

        #[test]
        fn notes_read_back(places in prop::collection::vec((id(), any::<u32>()), 1..50)) {
            let bytes = note(&places);
            let count = places.len() as u32;
            let name = Name { id: Id::fresh(), kind: Kind::Note, count };
            prop_assert_eq!(name.head_bytes(), bytes.len() as u64);
            prop_assert_eq!(parse_note(&bytes, count), Some(places));
            prop_assert_eq!(parse_note(&bytes, count + 1), None);
            prop_assert_eq!(parse_note(&bytes[1..], count), None);
        }

        #[test]
        fn names_read_back_and_sort_by_time(a in id(), b in id(), count in 1..=MOST_VALUES) {
            for kind in [Kind::Pack, Kind::Note] {
                let name = Name { id: a, kind, count };
                prop_assert_eq!(Name::parse(&name.to_string()), Some(name));
            }
            prop_assert_eq!(a.cmp(&b), a.to_string().cmp(&b.to_string()));
        }
    }

    #[test]
    fn other_names_are_not_ours() {
        let name = Name {
            id: Id::fresh(),
            kind: Kind::Pack,
            count: 1,
        };
        let text = name.to_string();
        for other in [
            "",
            "readme.txt",
            &text[1..],
            &text.replace("-1", "-0"),
            &text.replace("-1", "-10001"),
            &text.replace(".pack", ".pack.tmp"),
            &text.replace('-', "+"),
        ] {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }
}
