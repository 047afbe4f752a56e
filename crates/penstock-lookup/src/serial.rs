//! What vLLM hashes of a block, as bytes.
//!
//! vLLM serializes a tuple of three: the parent's hash, a tuple of the block's tokens, and a tuple
//! of extra keys or None. An extra key is a tuple of strings, the first of which says its kind.
//! Both forms here are what CPython's `pickle` (protocol 5) and `cbor2` (canonical) write.

/// An extra key: its kind and its values.
pub(crate) type ExtraKey<'a> = Vec<&'a str>;

/// The most tokens of a block, and bytes of all extra keys: what pickle writes in one frame.
pub(crate) const MOST_TOKENS: usize = 8192;
pub(crate) const MOST_EXTRA_BYTES: usize = 16 << 10;

const FRAME_AT: usize = 2;
const FRAME_HEAD: usize = 9;

/// Writes the tuple as `pickle.dumps(…, protocol=5)` does.
pub(crate) fn pickle(parent: &[u8], tokens: &[u32], extra: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    out.clear();
    // PROTO 5, then FRAME with its length, which is known at the end.
    out.extend_from_slice(&[0x80, 5, 0x95, 0, 0, 0, 0, 0, 0, 0, 0]);
    // SHORT_BINBYTES, then MEMOIZE, as behind every object that may come again.
    out.extend_from_slice(&[b'C', parent.len() as u8]);
    out.extend_from_slice(parent);
    out.push(MEMOIZE);
    tuple(tokens, out, |&token, out| match token {
        0..=0xff => out.extend_from_slice(&[b'K', token as u8]),
        0x100..=0xffff => {
            out.push(b'M');
            out.extend_from_slice(&(token as u16).to_le_bytes());
        }
        _ => {
            out.push(b'J');
            out.extend_from_slice(&token.to_le_bytes());
        }
    });
    if extra.is_empty() {
        out.push(b'N');
    } else {
        tuple(extra, out, |key, out| {
            tuple(key, out, |text, out| {
                match u8::try_from(text.len()) {
                    Ok(len) => out.extend_from_slice(&[0x8c, len]),
                    Err(_) => {
                        out.push(b'X');
                        out.extend_from_slice(&(text.len() as u32).to_le_bytes());
                    }
                }
                out.extend_from_slice(text.as_bytes());
                out.push(MEMOIZE);
            });
        });
    }
    // TUPLE3, MEMOIZE, STOP.
    out.extend_from_slice(&[0x87, MEMOIZE, b'.']);
    let framed = (out.len() - FRAME_AT - FRAME_HEAD) as u64;
    out[FRAME_AT + 1..FRAME_AT + FRAME_HEAD].copy_from_slice(&framed.to_le_bytes());
}

const MEMOIZE: u8 = 0x94;

fn tuple<T>(items: &[T], out: &mut Vec<u8>, write: impl Fn(&T, &mut Vec<u8>)) {
    if items.is_empty() {
        out.push(b')');
        return;
    }
    if items.len() > 3 {
        out.push(b'(');
    }
    for item in items {
        write(item, out);
    }
    out.push(match items.len() {
        short @ 1..=3 => 0x84 + short as u8,
        _ => b't',
    });
    out.push(MEMOIZE);
}

/// Writes the tuple as `cbor2.dumps(…, canonical=True)` does.
pub(crate) fn cbor(parent: &[u8], tokens: &[u32], extra: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    const BYTES: u8 = 2;
    const TEXT: u8 = 3;
    const ARRAY: u8 = 4;
    const NULL: u8 = 0xf6;
    out.clear();
    head(ARRAY, 3, out);
    head(BYTES, parent.len(), out);
    out.extend_from_slice(parent);
    head(ARRAY, tokens.len(), out);
    for &token in tokens {
        head(0, token as usize, out);
    }
    if extra.is_empty() {
        out.push(NULL);
        return;
    }
    head(ARRAY, extra.len(), out);
    for key in extra {
        head(ARRAY, key.len(), out);
        for text in key {
            head(TEXT, text.len(), out);
            out.extend_from_slice(text.as_bytes());
        }
    }
}

/// A major type and its number, in the fewest bytes.
fn head(major: u8, number: usize, out: &mut Vec<u8>) {
    let major = major << 5;
    match number {
        0..24 => out.push(major | number as u8),
        24..0x100 => out.extend_from_slice(&[major | 24, number as u8]),
        0x100..0x1_0000 => {
            out.push(major | 25);
            out.extend_from_slice(&(number as u16).to_be_bytes());
        }
        _ => {
            out.push(major | 26);
            out.extend_from_slice(&(number as u32).to_be_bytes());
        }
    }
}
