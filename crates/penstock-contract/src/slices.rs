//! Values that lie scattered over slices.

use std::io::{IoSlice, IoSliceMut};
use std::ops::{Deref, Range};

/// Bytes of all slices together.
pub fn len_of(slices: &[IoSlice<'_>]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// Bytes that all slices together have room for.
pub fn room_of(slices: &[IoSliceMut<'_>]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// The slices' bytes in one piece.
pub fn gather(slices: &[IoSlice<'_>]) -> Vec<u8> {
    let mut value = Vec::with_capacity(len_of(slices) as usize);
    slices
        .iter()
        .for_each(|slice| value.extend_from_slice(slice));
    value
}

/// The first `len` bytes of the slices in one piece.
pub fn first_bytes(slices: &[IoSliceMut<'_>], len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for slice in slices {
        let left = len - bytes.len();
        bytes.extend_from_slice(&slice[..left.min(slice.len())]);
    }
    bytes
}

/// Copies a value into the slices, from their start. The value must fit.
pub fn scatter(mut value: &[u8], into: &mut [IoSliceMut<'_>]) {
    for slice in into {
        let (now, later) = value.split_at(value.len().min(slice.len()));
        slice[..now.len()].copy_from_slice(now);
        value = later;
    }
}

/// The slices without their first `done` bytes.
pub fn remaining<'a>(slices: &'a [IoSlice<'_>], mut done: usize) -> Vec<IoSlice<'a>> {
    let rest = slices.iter().filter_map(|slice| {
        let skip = done.min(slice.len());
        done -= skip;
        (skip < slice.len()).then(|| IoSlice::new(&slice[skip..]))
    });
    rest.collect()
}

/// The slices without their first `done` bytes, to be filled.
pub fn remaining_mut<'a>(slices: &'a mut [IoSliceMut<'_>], mut done: usize) -> Vec<IoSliceMut<'a>> {
    let rest = slices.iter_mut().filter_map(|slice| {
        let skip = done.min(slice.len());
        done -= skip;
        (skip < slice.len()).then(|| IoSliceMut::new(&mut slice[skip..]))
    });
    rest.collect()
}

/// If a range of the concatenated slices lies in one slice: the slice's index, and the range inside
/// it.
pub fn one_piece(
    slices: &[impl Deref<Target = [u8]>],
    range: Range<usize>,
) -> Option<(usize, Range<usize>)> {
    let mut start = range.start;
    let len = range.end.checked_sub(range.start)?;
    for (index, slice) in slices.iter().enumerate() {
        if start < slice.len() {
            let end = start + len;
            return (end <= slice.len()).then_some((index, start..end));
        }
        start -= slice.len();
    }
    None
}
