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
        4 => pack::<4, 128>(&fields, packed),
        6 => pack::<6, 64>(&fields, packed),
        _ => pack::<7, 32>(&fields, packed),
    }
    all >> F::CODE_BITS != 0
}

/// Joins a block of what [`split`] made. Elements with a place outside the window get a wrong
/// exponent.
#[inline(always)]
pub(super) fn join<F: Form>(low: &[u8], packed: &[u8], base: u8, elements: &mut [F::Bytes; BLOCK]) {
    let mut fields = [0; BLOCK];
    match F::FIELD_BITS {
        4 => unpack::<4, 128>(packed, &mut fields),
        6 => unpack::<6, 64>(packed, &mut fields),
        _ => unpack::<7, 32>(packed, &mut fields),
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

/// Packs fields of `BITS` bits, in parts of `PART` fields.
#[inline(always)]
fn pack<const BITS: usize, const PART: usize>(fields: &[u8; BLOCK], packed: &mut [u8]) {
    let (parts, _) = fields.as_chunks::<PART>();
    let (packed, _) = packed.as_chunks_mut::<PART>();
    let free = 8 - BITS;
    let last = &parts[parts.len() - 1];
    for (which, (into, part)) in packed.iter_mut().zip(parts).enumerate() {
        for at in 0..PART {
            into[at] = part[at] | last[at] >> (which * free) << BITS;
        }
    }
}

/// The fields that [`pack`] packed.
#[inline(always)]
fn unpack<const BITS: usize, const PART: usize>(packed: &[u8], fields: &mut [u8; BLOCK]) {
    let (packed, _) = packed.as_chunks::<PART>();
    let (parts, _) = fields.as_chunks_mut::<PART>();
    let free = 8 - BITS;
    let mut last = [0; PART];
    for (which, (part, from)) in parts.iter_mut().zip(packed).enumerate() {
        for at in 0..PART {
            part[at] = from[at] & ((1 << BITS) - 1);
            last[at] |= from[at] >> BITS << (which * free);
        }
    }
    if let Some(part) = parts.last_mut() {
        *part = last;
    }
}
