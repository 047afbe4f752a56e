//! Parsing of replies of RESP versions 2 and 3. Of version 3, it knows what answers to our commands
//! contain. It does not know push messages, which nobody asks for.
//!
//! Bytes from a peer are believed only as far as they were checked. Neither function here panics.
//! Neither allocates more than the bytes that have really arrived ask for (plus a constant).

/// Longest line accepted (status, error, number or length), with its end, in bytes.
pub(super) const MAX_LINE: usize = 4096;
/// Longest string accepted, in bytes: the servers' own limit.
pub(super) const MAX_STRING: u64 = 512 << 20;

/// Most elements accepted in one array.
const MAX_ELEMENTS: u64 = 1 << 20;
/// Most bytes accepted in one whole reply.
const MAX_REPLY: u64 = 64 << 20;
/// Bytes of a verbatim string before its text: three letters and a colon.
const VERBATIM_PREFIX: u64 = 4;
/// Deepest nesting accepted.
const MAX_DEPTH: usize = 4;

/// What the peer did that the protocol does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error("the reply does not begin with a type that we know")]
    Type,
    #[error("a line of the reply is longer than {MAX_LINE} bytes")]
    LongLine,
    #[error("a line of the reply does not end in CR LF")]
    LineEnd,
    #[error("a number in the reply is not one")]
    Number,
    #[error("a length in the reply is out of bounds")]
    Length,
    #[error("a string of the reply does not end in CR LF")]
    StringEnd,
    #[error("the reply is nested too deep")]
    Depth,
}

/// The first line of a reply, or of an element of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head<'a> {
    Status(&'a [u8]),
    Error(&'a [u8]),
    Integer(i64),
    /// A string of this many bytes follows, then CR LF.
    String(u64),
    /// A verbatim string of this many bytes follows, then CR LF. The string's first
    /// [`VERBATIM_PREFIX`] bytes say what it is.
    Verbatim(u64),
    /// An array of this many elements follows.
    Array(u64),
    Nil,
}

/// Reads a head from the start of `bytes`: the head and its length with the line's end, or `None`
/// if more bytes are needed to tell.
pub(super) fn head(bytes: &[u8]) -> Result<Option<(Head<'_>, usize)>, Violation> {
    let Some(&kind) = bytes.first() else {
        return Ok(None);
    };
    const KINDS: &[u8] = b"+-:$*_#,(=%~";
    if !KINDS.contains(&kind) {
        return Err(Violation::Type);
    }
    let seen = &bytes[..bytes.len().min(MAX_LINE)];
    let Some(end) = seen.iter().position(|&byte| matches!(byte, b'\r' | b'\n')) else {
        return if bytes.len() < MAX_LINE {
            Ok(None)
        } else {
            Err(Violation::LongLine)
        };
    };
    match (bytes[end], bytes.get(end + 1)) {
        (b'\r', Some(b'\n')) => {}
        (b'\r', None) => return Ok(None),
        _ => return Err(Violation::LineEnd),
    }
    let line = &bytes[1..end];
    let head = match kind {
        // A number that is no integer is of no use here, but a reply all the same.
        b'+' | b',' | b'(' => Head::Status(line),
        b'-' => Head::Error(line),
        b':' => Head::Integer(number(line)?),
        b'_' if line.is_empty() => Head::Nil,
        b'#' if line == b"t" => Head::Integer(1),
        b'#' if line == b"f" => Head::Integer(0),
        b'_' | b'#' => return Err(Violation::Number),
        b'$' | b'*' if line == b"-1" => Head::Nil,
        b'$' => Head::String(length(line, MAX_STRING)?),
        b'=' => match length(line, MAX_STRING)? {
            bytes @ VERBATIM_PREFIX.. => Head::Verbatim(bytes),
            _ => return Err(Violation::Length),
        },
        // Keys and values in turn.
        b'%' => Head::Array(2 * length(line, MAX_ELEMENTS / 2)?),
        _ => Head::Array(length(line, MAX_ELEMENTS)?),
    };
    Ok(Some((head, end + 2)))
}

fn number(digits: &[u8]) -> Result<i64, Violation> {
    // `parse` alone would let a leading plus sign through.
    match digits.first() {
        Some(b'-' | b'0'..=b'9') => {}
        _ => return Err(Violation::Number),
    }
    std::str::from_utf8(digits)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or(Violation::Number)
}

fn length(digits: &[u8], most: u64) -> Result<u64, Violation> {
    match u64::try_from(number(digits)?) {
        Ok(length) if length <= most => Ok(length),
        _ => Err(Violation::Length),
    }
}

/// A whole reply, held in memory: for everything but values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Status(Vec<u8>),
    Error(Vec<u8>),
    Integer(i64),
    String(Vec<u8>),
    Array(Vec<Reply>),
    Nil,
}

/// Assembles whole replies from bytes that come in pieces.
#[derive(Debug, Default)]
pub(super) struct ReplyReader {
    /// Arrays that are not complete: what they hold so far, and how many elements they will.
    open: Vec<(Vec<Reply>, u64)>,
    /// A string that is not complete: its bytes so far, and how many bytes of it and of the CR LF
    /// after it are missing.
    string: Option<(Vec<u8>, u64)>,
    /// The string that is not complete is a verbatim one.
    is_verbatim: bool,
    /// Bytes of the reply so far.
    taken: u64,
}

impl ReplyReader {
    /// Takes bytes from the front of `bytes`. Returns how many, and the reply if they complete one.
    /// The bytes not taken are the beginning of what comes next. After a violation, neither the
    /// reader nor the connection is of any more use.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Option<Reply>), Violation> {
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            let element = if let Some((mut held, missing)) = self.string.take() {
                let take = missing.min(rest.len() as u64);
                at += take as usize;
                self.count(take)?;
                held.extend_from_slice(&rest[..take as usize]);
                if take < missing {
                    self.string = Some((held, missing - take));
                    return Ok((at, None));
                }
                if !held.ends_with(b"\r\n") {
                    return Err(Violation::StringEnd);
                }
                held.truncate(held.len() - 2);
                if std::mem::take(&mut self.is_verbatim) {
                    held.drain(..VERBATIM_PREFIX as usize);
                }
                Reply::String(held)
            } else {
                let Some((head, bytes)) = head(rest)? else {
                    return Ok((at, None));
                };
                at += bytes;
                self.count(bytes as u64)?;
                match head {
                    Head::Status(line) => Reply::Status(line.to_vec()),
                    Head::Error(line) => Reply::Error(line.to_vec()),
                    Head::Integer(number) => Reply::Integer(number),
                    Head::Nil => Reply::Nil,
                    Head::String(bytes) | Head::Verbatim(bytes) => {
                        self.is_verbatim = matches!(head, Head::Verbatim(_));
                        self.string = Some((Vec::new(), bytes + 2));
                        continue;
                    }
                    Head::Array(0) => Reply::Array(Vec::new()),
                    Head::Array(_) if self.open.len() == MAX_DEPTH => {
                        return Err(Violation::Depth);
                    }
                    Head::Array(elements) => {
                        self.open.push((Vec::new(), elements));
                        continue;
                    }
                }
            };
            if let Some(reply) = self.place(element) {
                self.taken = 0;
                return Ok((at, Some(reply)));
            }
        }
    }

    /// Puts an element where it belongs; returns the whole reply if it was the last one.
    fn place(&mut self, mut element: Reply) -> Option<Reply> {
        while let Some((mut elements, wanted)) = self.open.pop() {
            elements.push(element);
            if (elements.len() as u64) < wanted {
                self.open.push((elements, wanted));
                return None;
            }
            element = Reply::Array(elements);
        }
        Some(element)
    }

    fn count(&mut self, bytes: u64) -> Result<(), Violation> {
        self.taken += bytes;
        if self.taken > MAX_REPLY {
            Err(Violation::Length)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All replies in `bytes`, fed in pieces of the given sizes, and what was left over.
    fn read(bytes: &[u8], pieces: &[usize]) -> Result<(Vec<Reply>, Vec<u8>), Violation> {
        let mut reader = ReplyReader::default();
        let (mut held, mut replies) = (Vec::new(), Vec::new());
        let (mut at, mut sizes) = (0, pieces.iter().copied().cycle());
        while at < bytes.len() {
            let piece = sizes
                .next()
                .unwrap_or(bytes.len())
                .clamp(1, bytes.len() - at);
            held.extend_from_slice(&bytes[at..at + piece]);
            at += piece;
            loop {
                let (taken, reply) = reader.feed(&held)?;
                held.drain(..taken);
                match reply {
                    Some(reply) => replies.push(reply),
                    None => break,
                }
            }
        }
        Ok((replies, held))
    }

    fn encode(reply: &Reply, out: &mut Vec<u8>) {
        let mut line = |kind: u8, line: &[u8]| {
            out.push(kind);
            out.extend_from_slice(line);
            out.extend_from_slice(b"\r\n");
        };
        match reply {
            Reply::Status(text) => line(b'+', text),
            Reply::Error(text) => line(b'-', text),
            Reply::Integer(number) => line(b':', number.to_string().as_bytes()),
            Reply::Nil => line(b'$', b"-1"),
            Reply::String(bytes) => {
                line(b'$', bytes.len().to_string().as_bytes());
                out.extend_from_slice(bytes);
                out.extend_from_slice(b"\r\n");
            }
            Reply::Array(elements) => {
                line(b'*', elements.len().to_string().as_bytes());
                elements.iter().for_each(|element| encode(element, out));
            }
        }
    }

    fn replies() -> impl Strategy<Value = Reply> {
        let text = || "[ -~]{0,40}".prop_map(String::into_bytes);
        let leaf = prop_oneof![
            text().prop_map(Reply::Status),
            text().prop_map(Reply::Error),
            any::<i64>().prop_map(Reply::Integer),
            Just(Reply::Nil),
            proptest::collection::vec(any::<u8>(), 0..80).prop_map(Reply::String),
        ];
        leaf.prop_recursive(MAX_DEPTH as u32, 32, 6, |inner| {
            proptest::collection::vec(inner, 0..6).prop_map(Reply::Array)
        })
    }

    /// Bytes made of what replies are made of, so that parsing gets past the first byte.
    fn nearly_resp() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            Just(b"\r\n".to_vec()),
            Just(b"*2\r\n".to_vec()),
            Just(b"*-1\r\n".to_vec()),
            Just(b"$3\r\nabc\r\n".to_vec()),
            Just(b"$-1\r\n".to_vec()),
            "[+\\-:$*_#,(=%~>][0-9tf]{0,20}".prop_map(String::into_bytes),
            proptest::collection::vec(any::<u8>(), 0..6),
        ];
        proptest::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_read(
            sent in proptest::collection::vec(replies(), 0..6),
            pieces in proptest::collection::vec(1usize..50, 1..20),
        ) {
            let mut bytes = Vec::new();
            sent.iter().for_each(|reply| encode(reply, &mut bytes));
            prop_assert_eq!(read(&bytes, &pieces), Ok((sent, Vec::new())));
        }

        #[test]
        fn pieces_do_not_matter(
            bytes in prop_oneof![nearly_resp(), proptest::collection::vec(any::<u8>(), 0..300)],
            pieces in proptest::collection::vec(1usize..20, 1..20),
        ) {
            prop_assert_eq!(read(&bytes, &[]), read(&bytes, &pieces));
        }

        #[test]
        fn a_head_lies_within_its_bytes(bytes in nearly_resp()) {
            if let Ok(Some((_, length))) = head(&bytes) {
                prop_assert!((3..=bytes.len()).contains(&length));
                prop_assert_eq!(&bytes[length - 2..length], b"\r\n");
                for cut in 0..length {
                    prop_assert_eq!(head(&bytes[..cut]), Ok(None));
                }
            }
        }
    }

    #[test]
    fn violations() {
        for (bytes, violation) in [
            (b"hello\r\n".as_slice(), Violation::Type),
            (b"\r\n", Violation::Type),
            (b"+a\n", Violation::LineEnd),
            (b"+a\rb", Violation::LineEnd),
            (b":\r\n", Violation::Number),
            (b":+1\r\n", Violation::Number),
            (b": 1\r\n", Violation::Number),
            (b":9223372036854775808\r\n", Violation::Number),
            (b"$x\r\n", Violation::Number),
            (b"$-2\r\n", Violation::Length),
            (b"$536870913\r\n", Violation::Length),
            (b"*1048577\r\n", Violation::Length),
            (b"$3\r\nabcd\r\n", Violation::StringEnd),
            (b"$0\r\n\n\r", Violation::StringEnd),
            (b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n", Violation::Depth),
        ] {
            assert_eq!(read(bytes, &[]), Err(violation), "{}", bytes.escape_ascii());
        }
        assert_eq!(head(&[b'+'; MAX_LINE - 1]), Ok(None));
        assert_eq!(head(&[b'+'; MAX_LINE]), Err(Violation::LongLine));
    }

    #[test]
    fn version_3() {
        let text = |text: &str| Reply::String(text.into());
        let map = vec![text("a"), Reply::Integer(1), text("b"), Reply::Nil];
        for (bytes, reply) in [
            ("_\r\n", Reply::Nil),
            ("#t\r\n", Reply::Integer(1)),
            ("#f\r\n", Reply::Integer(0)),
            (",3.14\r\n", Reply::Status(b"3.14".to_vec())),
            (
                "(123456789012345678901\r\n",
                Reply::Status(b"123456789012345678901".to_vec()),
            ),
            ("=8\r\ntxt:some\r\n", text("some")),
            ("%2\r\n$1\r\na\r\n:1\r\n$1\r\nb\r\n_\r\n", Reply::Array(map)),
            ("~1\r\n:7\r\n", Reply::Array(vec![Reply::Integer(7)])),
        ] {
            assert_eq!(
                read(bytes.as_bytes(), &[1]),
                Ok((vec![reply], vec![])),
                "{bytes}"
            );
        }
        for (bytes, violation) in [
            (">1\r\n:1\r\n", Violation::Type),
            ("|1\r\n", Violation::Type),
            ("_1\r\n", Violation::Number),
            ("#x\r\n", Violation::Number),
            ("=3\r\n", Violation::Length),
            ("%524289\r\n", Violation::Length),
            ("%-1\r\n", Violation::Length),
        ] {
            assert_eq!(read(bytes.as_bytes(), &[]), Err(violation), "{bytes}");
        }
    }

    #[test]
    fn a_reply_has_a_most() {
        let mut reader = ReplyReader::default();
        let start = format!("*3\r\n${}\r\n", MAX_REPLY);
        assert_eq!(reader.feed(start.as_bytes()), Ok((start.len(), None)));
        let piece = vec![0; 1 << 20];
        let mut taken = 0;
        let end = loop {
            match reader.feed(&piece) {
                Ok((bytes, None)) => taken += bytes as u64,
                other => break other,
            }
            assert!(taken <= MAX_REPLY);
        };
        assert_eq!(end, Err(Violation::Length));
    }

    #[test]
    fn a_promise_of_many_elements_allocates_nothing() {
        let mut reader = ReplyReader::default();
        assert_eq!(reader.feed(b"*1048576\r\n"), Ok((10, None)));
        assert_eq!(reader.open[0].0.capacity(), 0);
        reader = ReplyReader::default();
        assert_eq!(reader.feed(b"$536870912\r\n"), Ok((12, None)));
        assert_eq!(
            reader.string.as_ref().map(|(held, _)| held.capacity()),
            Some(0)
        );
    }
}
