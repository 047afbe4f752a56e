//! What Penstock and a store's program say to each other. `python/penstock/pool/host.py` is the other
//! side. All numbers are little endian.
//!
//! Over the program's standard input, a socket: Penstock sends the URL, the program answers with a
//! [`Greeting`]. Both have their length in front, as a `u32`. Then Penstock sends sockets, each with
//! one byte. The end of the stream is the end of the program.
//!
//! Over each of those sockets, one request after the other, and a reply to each:
//!
//! | request | |
//! |---|---|
//! | 0..4 | operation |
//! | 4..8 | number of items |
//! | 8..16 | microseconds left |
//! | 16..24 | bytes that follow: one item after the other, then what they carry |
//!
//! | reply | |
//! |---|---|
//! | 0..4 | 0 if done, 1 if failed: a text follows, the error's kind and message, with a line break between |
//! | 4..8 | number of items |
//! | 8..16 | bytes that follow |

use penstock_contract::{Capabilities, KEY_BYTES, Key, Listed};

/// The version of all this. A program of another version is not used.
const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"PNSKHOST";
/// Longest greeting, error or description that is read.
pub(super) const LONGEST_TEXT: u64 = 1 << 20;

pub(super) const REQUEST_BYTES: usize = 24;
pub(super) const REPLY_BYTES: usize = 16;
/// An item of a reply to a get: outcome and length of its error, each a `u32`; bytes of its value.
pub(super) const GOT_BYTES: usize = 16;
/// An item of a reply to a put: outcome and length of its error, each a `u32`.
pub(super) const PUT_BYTES: usize = 8;
/// An item of a listing: key, bytes and last use.
pub(super) const LISTED_BYTES: usize = KEY_BYTES + 16;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Operation {
    /// Items: keys. Reply: a byte for each.
    Contains = 1,
    /// Items: key and position. Reply: a byte for each.
    Touch = 2,
    /// Items: key, position and length; then the values. Reply: [`PUT_BYTES`] for each, then errors.
    Put = 3,
    /// Items: key, position and room. Reply: for each [`GOT_BYTES`], then its value or its error.
    Get = 4,
    /// Items: keys. Reply: how many there were, as the number of items.
    Remove = 5,
    /// Items: a namespace, or none. Reply: [`LISTED_BYTES`] for each.
    List = 6,
    /// Reply: lines of name, tabulator and fact.
    Describe = 7,
}

/// Outcomes of puts and gets in a reply.
pub(super) const YES: u32 = 1;
pub(super) const NO: u32 = 2;
pub(super) const TOO_LARGE: u32 = 3;
pub(super) const WENT_WRONG: u32 = 4;

/// The head of a request.
pub(super) fn request(
    operation: Operation,
    items: usize,
    left: std::time::Duration,
    bytes: u64,
) -> [u8; REQUEST_BYTES] {
    let mut head = [0; REQUEST_BYTES];
    head[..4].copy_from_slice(&(operation as u32).to_le_bytes());
    head[4..8].copy_from_slice(&(items as u32).to_le_bytes());
    let left = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
    head[8..16].copy_from_slice(&left.to_le_bytes());
    head[16..].copy_from_slice(&bytes.to_le_bytes());
    head
}

/// The head of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) has_failed: bool,
    pub(super) items: u32,
    pub(super) bytes: u64,
}

impl Reply {
    /// Reads the head of a reply. None if the program says something that is no reply.
    pub(super) fn parse(head: &[u8; REPLY_BYTES]) -> Option<Self> {
        let has_failed = match number(&head[..4]) {
            0 => false,
            1 => true,
            _ => return None,
        };
        Some(Self {
            has_failed,
            items: number(&head[4..8]) as u32,
            bytes: number(&head[8..]),
        })
    }
}

/// A number of up to eight bytes.
pub(super) fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Outcome and two lengths of an item in a reply to a get: of the error, of the value.
pub(super) fn got(item: &[u8; GOT_BYTES]) -> (u32, u64, u64) {
    let (outcome, error) = (number(&item[..4]) as u32, number(&item[4..8]));
    (outcome, error, number(&item[8..]))
}

/// An item of a listing. None if it is no object.
pub(super) fn listed(item: &[u8; LISTED_BYTES]) -> Option<Listed> {
    let (key, rest) = item.split_first_chunk::<KEY_BYTES>()?;
    Some(Listed {
        key: Key::from_bytes(key).ok()?,
        bytes: number(&rest[..8]),
        last_use: number(&rest[8..]),
    })
}

/// Kind and message of an error.
pub(super) fn error(text: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(text);
    let (kind, message) = text.split_once('\n').unwrap_or(("", &text));
    (kind.to_owned(), message.to_owned())
}

/// Names and facts of a description.
pub(super) fn facts(text: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(text);
    text.lines()
        .filter_map(|line| line.split_once('\t'))
        .filter(|(name, _)| !name.is_empty())
        .map(|(name, fact)| (name.to_owned(), fact.to_owned()))
        .collect()
}

/// What a program says of its store when it is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Ready {
        capabilities: Capabilities,
        /// How many requests it serves at once.
        concurrency: usize,
        /// The URL for people; empty if the program leaves that to us.
        url: String,
    },
    /// The store does not open: kind and message.
    Refused(String, String),
}

impl Greeting {
    /// Err says why it is none.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let strange = || "it does not greet as a store's program does".to_owned();
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(strange)?;
        let (version, rest) = rest.split_first_chunk::<4>().ok_or_else(strange)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(format!(
                "it speaks version {version} of the protocol, and this Penstock speaks {VERSION}"
            ));
        }
        let (status, rest) = rest.split_first().ok_or_else(strange)?;
        if *status != 0 {
            let (kind, message) = error(rest);
            return Ok(Self::Refused(kind, message));
        }
        let (facts, url) = rest.split_first_chunk::<13>().ok_or_else(strange)?;
        let can = |bit: u8| facts[0] & 1 << bit != 0;
        Ok(Self::Ready {
            capabilities: Capabilities {
                shared: can(0),
                persistent: can(1),
                bounded: can(2),
                pipelined: can(3),
                max_value_bytes: number(&facts[5..]),
            },
            concurrency: (number(&facts[1..5]) as usize).clamp(1, 64),
            url: String::from_utf8_lossy(url).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_of_every_sort() {
        let ready = |version: u8| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend([version, 0, 0, 0, 0, 0b0101, 3, 0, 0, 0]);
            bytes.extend(99_u64.to_le_bytes());
            bytes.extend(b"x://y");
            bytes
        };
        let Ok(Greeting::Ready {
            capabilities,
            concurrency,
            url,
        }) = Greeting::parse(&ready(1))
        else {
            panic!("a greeting");
        };
        assert!(capabilities.shared && !capabilities.persistent && capabilities.bounded);
        assert_eq!((capabilities.max_value_bytes, concurrency), (99, 3));
        assert_eq!(url, "x://y");
        assert!(
            Greeting::parse(&ready(2))
                .unwrap_err()
                .contains("version 2")
        );
        assert!(Greeting::parse(&ready(1)[..20]).is_err());
        assert!(Greeting::parse(b"hello").is_err());
    }
}
