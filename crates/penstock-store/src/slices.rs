//! Values scattered over slices.

use std::io::{IoSlice, IoSliceMut};

/// Bytes of all slices together.
pub(crate) fn len_of(slices: &[IoSlice<'_>]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// Bytes that all slices together have room for.
pub(crate) fn room_of(slices: &[IoSliceMut<'_>]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// The slices' bytes in one piece.
pub(crate) fn gather(slices: &[IoSlice<'_>]) -> Vec<u8> {
    let mut value = Vec::with_capacity(len_of(slices) as usize);
    slices
        .iter()
        .for_each(|slice| value.extend_from_slice(slice));
    value
}

/// Copies a value, which fits, into the slices from their start.
pub(crate) fn scatter(mut value: &[u8], into: &mut [IoSliceMut<'_>]) {
    for slice in into {
        let (now, later) = value.split_at(value.len().min(slice.len()));
        slice[..now.len()].copy_from_slice(now);
        value = later;
    }
}

/// What is left of the slices after so many bytes.
pub(crate) fn remaining<'a>(slices: &'a [IoSlice<'_>], mut done: usize) -> Vec<IoSlice<'a>> {
    let rest = slices.iter().filter_map(|slice| {
        let skip = done.min(slice.len());
        done -= skip;
        (skip < slice.len()).then(|| IoSlice::new(&slice[skip..]))
    });
    rest.collect()
}

/// What is left to fill of the slices after so many bytes.
pub(crate) fn remaining_mut<'a>(
    slices: &'a mut [IoSliceMut<'_>],
    mut done: usize,
) -> Vec<IoSliceMut<'a>> {
    let rest = slices.iter_mut().filter_map(|slice| {
        let skip = done.min(slice.len());
        done -= skip;
        (skip < slice.len()).then(|| IoSliceMut::new(&mut slice[skip..]))
    });
    rest.collect()
}
