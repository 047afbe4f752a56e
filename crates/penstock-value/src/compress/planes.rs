//! Blocks of 256 elements: split into planes of low bytes and of packed fields, and joined again.
//!
//! Fields are packed without moving them sideways, so that a vector of the CPU holds many. A block's
//! fields lie in parts: with fields of 4 bits two, of 6 bits four, of 7 bits eight. The last part's
//! fields are cut into pieces of 4, 2 or 1 bits. These fill the bits that the others leave free: the
//! lowest piece those of the first part.
//!
//! All of this is plain code that compilers turn into vectors. [`super::speed`] has it compiled for
//! several instruction sets.

use super::forms::Form;

/// Elements of a block.
pub(super) const BLOCK: usize = 256;

/// Splits a block. Each byte of `places` becomes how far its element's exponent is behind the
/// window's begin. Returns whether a place is outside the window.
#[inline(always)]
pub(super) fn split<F: Form>(
    elements: &[F::Bytes; BLOCK],
    base: u8,
    low: &mut [u8],
    packed: &mut [u8],
    places: &mut [u8; BLOCK],
) -> bool {
    let mut fields = [0; BLOCK];
    if F::HAS_LOW {
        let low: &mut [u8; BLOCK] = low.try_into().expect("a block's low bytes");
        for (at, &element) in elements.iter().enumerate() {
            (low[at], fields[at], places[at]) = F::split(element, base);
        }
    } else {
        for (at, &element) in elements.iter().enumerate() {
            (_, fields[at], places[at]) = F::split(element, base);
        }
    }
    let all = places.iter().fold(0, |all, place| all | place);
    match F::FIELD_BITS {
        4 => pack::<4, 128, 1>(&fields, packed),
        6 => pack::<6, 64, 3>(&fields, packed),
        _ => pack::<7, 32, 7>(&fields, packed),
    }
    all >> F::CODE_BITS != 0
}

/// Joins a block of what [`split`] made. Elements with a place outside the window get a wrong
/// exponent.
#[inline(always)]
pub(super) fn join<F: Form>(low: &[u8], packed: &[u8], base: u8, elements: &mut [F::Bytes; BLOCK]) {
    let mut fields = [0; BLOCK];
    match F::FIELD_BITS {
        4 => unpack::<4, 128, 1>(packed, &mut fields),
        6 => unpack::<6, 64, 3>(packed, &mut fields),
        _ => unpack::<7, 32, 7>(packed, &mut fields),
    }
    if F::HAS_LOW {
        let low: &[u8; BLOCK] = low.try_into().expect("a block's low bytes");
        for (at, element) in elements.iter_mut().enumerate() {
            *element = F::join(low[at], fields[at], base);
        }
    } else {
        for (at, element) in elements.iter_mut().enumerate() {
            *element = F::join(0, fields[at], base);
        }
    }
}

/// Packs fields of `BITS` bits, in parts of `PART` fields: `PIECES` parts, and the last one.
#[inline(always)]
fn pack<const BITS: usize, const PART: usize, const PIECES: usize>(
    fields: &[u8; BLOCK],
    packed: &mut [u8],
) {
    let (parts, _) = fields.as_chunks::<PART>();
    let last = &parts[PIECES];
    let parts: &[[u8; PART]; PIECES] = parts[..PIECES].try_into().expect("a block's parts");
    let packed: &mut [[u8; PART]; PIECES] = packed
        .as_chunks_mut()
        .0
        .try_into()
        .expect("a block's packed fields");
    // The pieces are the inner loop: it is unrolled, and the outer one becomes vectors.
    for at in 0..PART {
        for piece in 0..PIECES {
            packed[piece][at] = parts[piece][at] | last[at] >> (piece * (8 - BITS)) << BITS;
        }
    }
}

/// The fields that [`pack`] packed.
#[inline(always)]
fn unpack<const BITS: usize, const PART: usize, const PIECES: usize>(
    packed: &[u8],
    fields: &mut [u8; BLOCK],
) {
    let packed: &[[u8; PART]; PIECES] = packed
        .as_chunks()
        .0
        .try_into()
        .expect("a block's packed fields");
    let (parts, last) = fields.as_chunks_mut::<PART>().0.split_at_mut(PIECES);
    let parts: &mut [[u8; PART]; PIECES] = parts.try_into().expect("a block's parts");
    let last = &mut last[0];
    for at in 0..PART {
        let mut joined = 0;
        for piece in 0..PIECES {
            let byte = packed[piece][at];
            parts[piece][at] = byte & ((1 << BITS) - 1);
            joined |= byte >> BITS << (piece * (8 - BITS));
        }
        last[at] = joined;
    }
}
