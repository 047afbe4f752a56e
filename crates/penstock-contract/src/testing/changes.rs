//! Random changes to bytes that are right, for fuzz tests.

/// A random change: the number of a seed, which of its bytes become what, and where it is cut off.
pub type Change = (usize, Vec<(u16, u8)>, Option<u16>);

/// A seed with a change made to it.
pub fn changed(seeds: &[Vec<u8>], (which, edits, end): &Change) -> Vec<u8> {
    let mut bytes = seeds[which % seeds.len()].clone();
    for &(at, byte) in edits {
        let at = usize::from(at) % bytes.len();
        bytes[at] = byte;
    }
    if let Some(end) = *end {
        bytes.truncate(usize::from(end));
    }
    bytes
}
