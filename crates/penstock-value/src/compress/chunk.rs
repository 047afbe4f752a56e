//! Chunks, one after the other.

use super::forms::{Form, Word};
use super::planes::{BLOCK, join, split};
use super::{CHUNK_ELEMENTS, Damaged, window};

const HEADER_BYTES: usize = 4;
const AS_IT_WAS: u8 = 0;
const CODED: u8 = 1;
/// Bytes of an escape: two of its place, one of its exponent.
const ESCAPE_BYTES: usize = 3;

/// Bytes of a chunk, at most.
const MOST_CHUNK_BYTES: usize = 2 * CHUNK_ELEMENTS;

/// Memory that is filled from its start.
pub(super) struct Room<'a> {
    memory: &'a mut [u8],
    used: usize,
}

impl<'a> Room<'a> {
    pub(super) fn new(memory: &'a mut [u8]) -> Self {
        Self { memory, used: 0 }
    }

    /// Bytes that were filled.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    fn push(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.used + bytes.len();
        self.memory.get_mut(self.used..end)?.copy_from_slice(bytes);
        self.used = end;
        Some(())
    }
}

/// Escapes of a chunk. They are too many if the chunk is smaller as it was.
struct Escapes {
    places: [u16; MOST_ESCAPES],
    exponents: [u8; MOST_ESCAPES],
    count: usize,
    most: usize,
}

/// No chunk with more escapes is smaller than it was: each costs three bytes, and no element saves
/// more than half a byte.
const MOST_ESCAPES: usize = CHUNK_ELEMENTS / 2 / ESCAPE_BYTES;

impl Escapes {
    /// Notes the escapes of a block, or says `None` if they are too many.
    #[inline(always)]
    fn note<F: Form>(
        &mut self,
        first: usize,
        elements: &[F::Bytes; BLOCK],
        places: &[u8; BLOCK],
    ) -> Option<()> {
        let window = 1_u64 << F::CODE_BITS;
        // The bits of eight bytes that are set if their place is outside the window.
        let outside = (0xff - (window - 1)) * 0x0101_0101_0101_0101;
        let (eights, _) = places.as_chunks::<8>();
        for (eight, bytes) in eights.iter().enumerate() {
            let mut left = u64::from_le_bytes(*bytes) & outside;
            while left != 0 {
                let byte = left.trailing_zeros() / 8;
                left &= !(0xff << (8 * byte));
                if self.count == self.most {
                    return None;
                }
                let at = 8 * eight + byte as usize;
                self.places[self.count] = (first + at) as u16;
                self.exponents[self.count] = F::exponent(elements[at]);
                self.count += 1;
            }
        }
        Some(())
    }
}

/// Encodes all chunks. `None` if there is no room.
#[inline(always)]
pub(super) fn encode<F: Form>(payload: &[u8], out: &mut Room<'_>) -> Option<()> {
    let (elements, tail) = F::Bytes::cut(payload);
    let mut escapes = Escapes {
        places: [0; MOST_ESCAPES],
        exponents: [0; MOST_ESCAPES],
        count: 0,
        most: 0,
    };
    for chunk in elements.chunks(CHUNK_ELEMENTS) {
        let before = out.used;
        if encode_chunk::<F>(chunk, &mut escapes, out).is_none() {
            out.used = before;
            out.push(&[AS_IT_WAS, 0, 0, 0])?;
            out.push(F::Bytes::bytes(chunk))?;
        }
    }
    out.push(tail)
}

/// Encodes a chunk. `None` if that has no room, or no use.
#[inline(always)]
fn encode_chunk<F: Form>(
    chunk: &[F::Bytes],
    escapes: &mut Escapes,
    out: &mut Room<'_>,
) -> Option<()> {
    let (blocks, rest) = chunk.as_chunks::<BLOCK>();
    let Planes { low, packed } = Planes::of::<F>(blocks.len());
    let saved = blocks.len() * BLOCK * F::BYTES - low - packed;
    escapes.count = 0;
    escapes.most = saved.saturating_sub(1) / ESCAPE_BYTES;
    if escapes.most == 0 {
        return None;
    }
    let base = window::choose::<F>(chunk);
    let (header, planes) = out
        .memory
        .get_mut(out.used..out.used + HEADER_BYTES + low + packed)?
        .split_at_mut(HEADER_BYTES);
    let (low_plane, packed_plane) = planes.split_at_mut(low);
    let mut places = [0; BLOCK];
    for (index, block) in blocks.iter().enumerate() {
        let one = Planes::of::<F>(1);
        let low = &mut low_plane[index * one.low..][..one.low];
        let packed = &mut packed_plane[index * one.packed..][..one.packed];
        if split::<F>(block, base, low, packed, &mut places) {
            escapes.note::<F>(index * BLOCK, block, &places)?;
        }
    }
    let count = escapes.count;
    let [few, many] = (count as u16).to_le_bytes();
    header.copy_from_slice(&[CODED, base, few, many]);
    out.used += HEADER_BYTES + low + packed;
    for place in &escapes.places[..count] {
        out.push(&place.to_le_bytes())?;
    }
    out.push(&escapes.exponents[..count])?;
    out.push(F::Bytes::bytes(rest))
}

/// Decodes all chunks, and returns the bytes that follow them.
#[inline(always)]
pub(super) fn decode<'c, F: Form>(
    mut coded: &'c [u8],
    out: &mut [u8],
) -> Result<&'c [u8], Damaged> {
    let (elements, tail) = F::Bytes::cut_mut(out);
    for chunk in elements.chunks_mut(CHUNK_ELEMENTS) {
        decode_chunk::<F>(&mut coded, chunk)?;
    }
    tail.copy_from_slice(take(&mut coded, tail.len())?);
    Ok(coded)
}

/// Decodes all chunks one after the other, each in memory that fits a core's own cache, and visits
/// them. Returns the bytes that follow them.
#[inline(always)]
pub(super) fn decode_each<'c, F: Form>(
    mut coded: &'c [u8],
    payload_bytes: usize,
    visit: &mut dyn FnMut(&[u8]),
) -> Result<&'c [u8], Damaged> {
    let mut memory = [0; MOST_CHUNK_BYTES];
    let (room, _) = F::Bytes::cut_mut(&mut memory);
    let mut elements = payload_bytes / F::BYTES;
    while elements > 0 {
        let chunk = &mut room[..elements.min(CHUNK_ELEMENTS)];
        decode_chunk::<F>(&mut coded, chunk)?;
        visit(F::Bytes::bytes(chunk));
        elements -= chunk.len();
    }
    visit(take(&mut coded, payload_bytes % F::BYTES)?);
    Ok(coded)
}

#[inline(always)]
fn decode_chunk<F: Form>(coded: &mut &[u8], chunk: &mut [F::Bytes]) -> Result<(), Damaged> {
    let &[kind, base, few, many] = take(coded, HEADER_BYTES)? else {
        return Err(Damaged("it ends early"));
    };
    let count = usize::from(u16::from_le_bytes([few, many]));
    match kind {
        AS_IT_WAS if base == 0 && count == 0 => {
            let bytes = F::Bytes::bytes_mut(chunk);
            bytes.copy_from_slice(take(coded, bytes.len())?);
            Ok(())
        }
        CODED => decode_coded::<F>(coded, base, count, chunk),
        _ => Err(Damaged("a chunk begins like none")),
    }
}

#[inline(always)]
fn decode_coded<F: Form>(
    coded: &mut &[u8],
    base: u8,
    count: usize,
    chunk: &mut [F::Bytes],
) -> Result<(), Damaged> {
    let (blocks, rest) = chunk.as_chunks_mut::<BLOCK>();
    let planes = Planes::of::<F>(blocks.len());
    let low = take(coded, planes.low)?;
    let packed = take(coded, planes.packed)?;
    if u32::from(base) >> F::EXPONENT_BITS != 0 {
        return Err(Damaged("a window begins outside the exponents"));
    }
    let (places, _) = take(coded, 2 * count)?.as_chunks::<2>();
    let exponents_of_escapes = take(coded, count)?;
    let rest = F::Bytes::bytes_mut(rest);
    rest.copy_from_slice(take(coded, rest.len())?);
    let one = Planes::of::<F>(1);
    for (index, block) in blocks.iter_mut().enumerate() {
        let low = &low[index * one.low..][..one.low];
        let packed = &packed[index * one.packed..][..one.packed];
        join::<F>(low, packed, base, block);
    }
    let elements = blocks.as_flattened_mut();
    // The field of an escape holds the low bits of its exponent too: so no bit of a code is without
    // meaning.
    let exponents = ((1_u16 << F::EXPONENT_BITS) - 1) as u8;
    let meant_twice = ((1_u8 << F::CODE_BITS) - 1) | !exponents;
    let mut wrong = 0;
    for (place, &exponent) in places.iter().zip(exponents_of_escapes) {
        let element = elements
            .get_mut(usize::from(u16::from_le_bytes(*place)))
            .ok_or(Damaged("an escape is outside its chunk"))?;
        wrong |= (F::exponent(*element) ^ exponent) & meant_twice;
        *element = F::with_exponent(*element, exponent);
    }
    if wrong != 0 {
        return Err(Damaged("an escape is not what its field says"));
    }
    Ok(())
}

/// Bytes of the planes of some blocks.
struct Planes {
    low: usize,
    packed: usize,
}

impl Planes {
    #[inline(always)]
    fn of<F: Form>(blocks: usize) -> Self {
        let elements = blocks * BLOCK;
        Self {
            low: if F::HAS_LOW { elements } else { 0 },
            packed: elements * F::FIELD_BITS / 8,
        }
    }
}

fn take<'c>(coded: &mut &'c [u8], len: usize) -> Result<&'c [u8], Damaged> {
    let (taken, rest) = coded
        .split_at_checked(len)
        .ok_or(Damaged("it ends early"))?;
    *coded = rest;
    Ok(taken)
}
