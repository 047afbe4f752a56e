//! Copies of payloads that are summed on the way.
//!
//! The checksum is that of the very bytes that were written, whoever else writes to the source. On
//! x86-64 with AVX2, [`Fused`] makes both in one pass. Elsewhere, pieces are copied and then summed
//! while they are in a core's own cache.

#[cfg(target_arch = "x86_64")]
use super::fused::Fused;
use super::racing;
use crate::header::Checksum;

/// Bytes copied before they are summed, where copy and sum are two steps.
const PIECE: usize = 64 << 10;

/// A copy of a payload, and its checksum in the making.
pub struct SummedCopy(Way);

enum Way {
    #[cfg(target_arch = "x86_64")]
    Fused(Fused),
    InTwoSteps(Checksum),
}

impl SummedCopy {
    /// Nothing yet of a payload of so many bytes. `past_caches` is for a payload that this processor
    /// does not read soon: otherwise it would read each line of the destination before it writes to
    /// it, one crossing of the memory bus in three.
    pub fn new(payload_bytes: u64, past_caches: bool) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(fused) = Fused::new(payload_bytes, past_caches) {
            return Self(Way::Fused(fused));
        }
        let _ = (payload_bytes, past_caches);
        Self(Way::InTwoSteps(Checksum::new()))
    }

    /// Copies the payload's next bytes.
    ///
    /// # Panics
    ///
    /// If the lengths differ, or if there are more bytes than the payload has.
    pub fn copy(&mut self, from: &[u8], into: &mut [u8]) {
        assert_eq!(from.len(), into.len(), "a copy is as long as what it is of");
        // SAFETY: both are references, so nobody else writes there.
        #[allow(unsafe_code)]
        unsafe {
            self.copy_out(from.as_ptr(), into);
        }
    }

    /// Copies the payload's next bytes out of shared memory.
    ///
    /// # Safety
    ///
    /// As for [`racing::copy_out`]. Nobody is told of the copy before this is finished or dropped.
    #[allow(unsafe_code, reason = "no safe copy may race")]
    pub unsafe fn copy_out(&mut self, from: *const u8, into: &mut [u8]) {
        match &mut self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Way::Fused(fused) => unsafe { fused.take(from, Some(into.as_mut_ptr()), into.len()) },
            Way::InTwoSteps(checksum) => {
                for (n, piece) in into.chunks_mut(PIECE).enumerate() {
                    // SAFETY: the caller's promise, for a part of the range.
                    unsafe {
                        racing::copy_out(from.add(n * PIECE), piece.as_mut_ptr(), piece.len());
                    }
                    checksum.update(piece);
                }
            }
        }
    }

    /// Copies the payload's next bytes into shared memory.
    ///
    /// # Safety
    ///
    /// As for [`racing::copy_in`]. Nobody is told of the copy before this is finished or dropped.
    #[allow(unsafe_code, reason = "no safe copy may race")]
    pub unsafe fn copy_in(&mut self, from: &[u8], to: *mut u8) {
        match &mut self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Way::Fused(fused) => unsafe { fused.take(from.as_ptr(), Some(to), from.len()) },
            Way::InTwoSteps(checksum) => {
                for (n, piece) in from.chunks(PIECE).enumerate() {
                    checksum.update(piece);
                    // SAFETY: the caller's promise, for a part of the range.
                    unsafe { racing::copy_in(piece.as_ptr(), to.add(n * PIECE), piece.len()) };
                }
            }
        }
    }

    /// Takes in the payload's next bytes, which stay where they are, in shared memory.
    ///
    /// # Safety
    ///
    /// The bytes are readable. Others may write there meanwhile.
    #[allow(unsafe_code, reason = "no safe read may race")]
    pub unsafe fn sum(&mut self, from: *const u8, len: usize) {
        match &mut self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Way::Fused(fused) => unsafe { fused.take(from, None, len) },
            Way::InTwoSteps(checksum) => {
                let mut room = vec![0; PIECE.min(len)];
                for start in (0..len).step_by(PIECE) {
                    let piece = &mut room[..PIECE.min(len - start)];
                    // SAFETY: the caller's promise, for a part of the range.
                    unsafe {
                        racing::copy_out(from.add(start), piece.as_mut_ptr(), piece.len());
                    }
                    checksum.update(piece);
                }
            }
        }
    }

    /// The checksum of what was taken in. It has a meaning only if that is the whole payload.
    pub fn finish(self) -> u64 {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Way::Fused(fused) => fused.finish(),
            Way::InTwoSteps(checksum) => checksum.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Each way to copy a payload of so many bytes.
    fn ways(bytes: usize) -> [SummedCopy; 3] {
        [
            SummedCopy::new(bytes as u64, false),
            SummedCopy::new(bytes as u64, true),
            // As on processors that cannot do it in one.
            SummedCopy(Way::InTwoSteps(Checksum::new())),
        ]
    }

    /// Copies a payload in pieces of these lengths, in turn, to a destination that begins so many
    /// bytes behind an aligned place: by one method, then by the other. Returns its checksum, of
    /// both and of the payload where it lies.
    fn copied(payload: &[u8], way: usize, pieces: &[usize], behind: usize) -> [u64; 3] {
        let mut room = vec![0xee; behind + payload.len() + 64];
        let start = room.as_ptr().align_offset(32) + behind;
        room.resize(start + payload.len() + 64, 0xee);
        let mut each = |take: fn(&mut SummedCopy, &[u8], &mut [u8])| {
            let mut copy = ways(payload.len()).into_iter().nth(way).unwrap();
            let mut done = 0;
            for &piece in pieces.iter().cycle() {
                let end = payload.len().min(done + piece);
                take(
                    &mut copy,
                    &payload[done..end],
                    &mut room[start..][done..end],
                );
                done = end;
                if done == payload.len() {
                    break;
                }
            }
            copy.finish()
        };
        // SAFETY: both ends are this thread's, and as long.
        #[allow(unsafe_code)]
        let (into, in_place) = unsafe {
            (
                each(|copy, from, to| copy.copy_in(from, to.as_mut_ptr())),
                each(|copy, from, _| copy.sum(from.as_ptr(), from.len())),
            )
        };
        let out = each(SummedCopy::copy);
        assert!(room[start..][..payload.len()] == *payload);
        assert!(room[..start].iter().all(|&byte| byte == 0xee));
        let behind = &room[start + payload.len()..];
        assert!(behind.iter().all(|&byte| byte == 0xee));
        [out, into, in_place]
    }

    fn payload(bytes: usize) -> Vec<u8> {
        (0..bytes as u64)
            .map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
            .collect()
    }

    #[test]
    fn every_length_has_its_checksum() {
        for bytes in (1..2500).chain([4096, 65_535, 65_536, 65_537, 200_000]) {
            let payload = payload(bytes);
            for way in 0..3 {
                let checksums = copied(&payload, way, &[bytes], 0);
                assert_eq!(checksums, [Checksum::of(&payload); 3], "{bytes}");
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_and_places_do_not_matter(
            bytes in 1..200_000_usize,
            way in 0..3_usize,
            pieces in prop::collection::vec(prop_oneof![1..200_usize, 1..90_000_usize], 1..8),
            behind in 0..96_usize,
        ) {
            let payload = payload(bytes);
            let checksums = copied(&payload, way, &pieces, behind);
            prop_assert_eq!(checksums, [Checksum::of(&payload); 3]);
        }
    }
}
