//! Lossless compression of KV: elements of one floating-point type, whose exponents lie close
//! together.
//!
//! Sign and mantissa of KV look random, and exponents do not: in a stretch of KV nearly all of them
//! lie in a window of sixteen. So a bf16 element becomes a byte (sign and mantissa) and four bits
//! (the exponent's place in the window). The few exponents outside the window are *escapes*, in a
//! list behind. Every type has its own [`Form`](forms::Form).
//!
//! | element | bits | bits coded | window | bound of the ratio |
//! |---------|------|------------|--------|--------------------|
//! | bf16    | 16   | 12         | 16     | 1.333 |
//! | fp16    | 16   | 14         | 8      | 1.143 |
//! | fp8 E4M3 | 8   | 7          | 8      | 1.143 |
//! | fp8 E5M2 | 8   | 7          | 16     | 1.143 |
//!
//! A payload is coded in chunks of [`CHUNK_ELEMENTS`] elements. Each has a window of its own, and
//! needs no other chunk to be decoded. A chunk is, integers little endian:
//!
//! | bytes | content |
//! |-------|---------|
//! | 0     | 0: the chunk's bytes follow as they were. 1: it is coded |
//! | 1     | the window's first exponent; 0 where not coded |
//! | 2..4  | number of escapes; 0 where not coded |
//! | then, of types of 16 bits | a byte for each element |
//! | then  | 4, 6 or 7 bits for each element, as [`planes`] packs them |
//! | then  | for each escape its place in the chunk, 2 bytes |
//! | then  | for each escape its exponent, 1 byte |
//! | then  | elements behind the last whole block of 256, as they were |
//!
//! Nothing here says whether what was decoded is what was encoded: that is the value's checksum.

mod chunk;
mod forms;
mod planes;
mod speed;
mod window;

use chunk::Room;
pub use speed::Speed;

/// Elements of a chunk, except for the last one.
pub const CHUNK_ELEMENTS: usize = 1 << 14;

/// No payload has more bytes than so many times those of its code.
pub const MOST_SHRINKING: usize = 2;

/// The type of a payload's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Element {
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE 754 half precision: 5 bits of exponent, 10 of mantissa.
    Fp16,
    /// 8 bits, 4 of exponent and 3 of mantissa, whatever the bits of infinities and NaN are.
    Fp8E4M3,
    /// 8 bits, 5 of exponent and 2 of mantissa.
    Fp8E5M2,
}

impl Element {
    /// All types that have a coder.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Fp16, Self::Fp8E4M3, Self::Fp8E5M2];

    /// The type of this name, if it has a coder.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.name() == name)
    }

    /// Stable lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8E4M3 => "fp8_e4m3",
            Self::Fp8E5M2 => "fp8_e5m2",
        }
    }
}

/// Coded bytes that do not decode to a payload of the expected length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("coded payload is damaged: {0}")]
pub struct Damaged(&'static str);

/// Encodes a payload into the beginning of `out`, and returns how many bytes the code has.
///
/// `None` if the code would have as many bytes as the payload, or more than there is room for. Then
/// what `out` holds has no meaning. Room for the payload's length is always enough.
///
/// A payload of any length is taken. Bytes behind its last whole element are kept as they are.
pub fn encode(element: Element, payload: &[u8], out: &mut [u8]) -> Option<usize> {
    encode_at(Speed::best(), element, payload, out)
}

/// Encodes a payload with instructions of the caller's choice, see [`encode`]. The code is the same
/// with all of them.
pub fn encode_at(speed: Speed, element: Element, payload: &[u8], out: &mut [u8]) -> Option<usize> {
    let room = out.len().min(payload.len().checked_sub(1)?);
    let mut out = Room::new(&mut out[..room]);
    speed.encode(element, payload, &mut out)?;
    Some(out.used())
}

/// Decodes a payload, which fills `out`.
///
/// Any bytes may be given for `coded`. If they are no code of a payload of this length, this says
/// [`Damaged`], and what `out` holds has no meaning. Changed bits may decode to another payload:
/// compare its checksum.
pub fn decode(element: Element, coded: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
    decode_at(Speed::best(), element, coded, out)
}

/// Decodes a payload with instructions of the caller's choice, see [`decode`]. The result is the
/// same with all of them.
pub fn decode_at(
    speed: Speed,
    element: Element,
    coded: &[u8],
    out: &mut [u8],
) -> Result<(), Damaged> {
    end(speed.decode(element, coded, out)?)
}

/// Decodes a payload of `payload_bytes`, and visits its pieces, one after the other. Each lies in a
/// core's own cache. Otherwise as [`decode`].
pub fn decode_each(
    element: Element,
    coded: &[u8],
    payload_bytes: usize,
    visit: &mut dyn FnMut(&[u8]),
) -> Result<(), Damaged> {
    end(Speed::best().decode_each(element, coded, payload_bytes, visit)?)
}

/// Nothing may follow a code.
fn end(rest: &[u8]) -> Result<(), Damaged> {
    match rest {
        [] => Ok(()),
        _ => Err(Damaged("bytes follow its end")),
    }
}
