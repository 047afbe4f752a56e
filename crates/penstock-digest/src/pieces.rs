//! Digests of bytes that many threads can make at once: piece by piece, then of the pieces' digests.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

/// The bytes that one thread digests at a time. Part of the definition of a digest.
pub const PIECE_BYTES: usize = 4 << 20;

/// 32 bytes that stand for a content and its length. Two contents with the same digest cannot be
/// made on purpose.
pub type Digest = [u8; 32];

const PIECE: &str = "penstock 2026-11 a piece of weights";
const WHOLE: &str = "penstock 2026-11 the pieces of weights";

/// Pieces of a content of this length. An empty content has none.
pub(crate) fn pieces(bytes: u64) -> usize {
    bytes.div_ceil(PIECE_BYTES as u64) as usize
}

pub(crate) fn digest_piece(bytes: &[u8]) -> Digest {
    *blake3::Hasher::new_derive_key(PIECE)
        .update(bytes)
        .finalize()
        .as_bytes()
}

pub(crate) fn digest_of_pieces(bytes: u64, pieces: &[Digest]) -> Digest {
    let mut whole = blake3::Hasher::new_derive_key(WHOLE);
    whole.update(&bytes.to_le_bytes());
    whole.update(pieces.as_flattened());
    *whole.finalize().as_bytes()
}

/// The digest of bytes in memory, made by up to `threads` threads, one of them the caller's. It is
/// that of a file with the same content.
pub fn digest_bytes(bytes: &[u8], threads: usize) -> Digest {
    let count = pieces(bytes.len() as u64);
    let digests = Mutex::new(vec![Digest::default(); count]);
    let next = AtomicUsize::new(0);
    let work = || {
        // Relaxed: the counter only gives each piece to one thread.
        while let piece = next.fetch_add(1, Ordering::Relaxed)
            && let Some(piece_bytes) = bytes.chunks(PIECE_BYTES).nth(piece)
        {
            let digest = digest_piece(piece_bytes);
            digests.lock()[piece] = digest;
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            // Without another thread, this one does all.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    digest_of_pieces(bytes.len() as u64, &digests.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_counted() {
        let piece = PIECE_BYTES as u64;
        for (bytes, count) in [(0, 0), (1, 1), (piece, 1), (piece + 1, 2)] {
            assert_eq!(pieces(bytes), count);
        }
    }

    #[test]
    fn the_definition_does_not_change() {
        // Pools hold namespaces that were made of such digests.
        let hex = |digest: Digest| digest.map(|byte| format!("{byte:02x}")).concat();
        let of_nothing = "e9046a014bf895f11be8181a24f9835d6fc7cfea8db52e3f06d797d91a737c90";
        assert_eq!(hex(digest_bytes(b"", 1)), of_nothing);
        let of_weights = "337f19338b76b92dc88d08364618cabac31a0bfcfac106b75ee51859859061ef";
        assert_eq!(hex(digest_bytes(b"weights", 1)), of_weights);
    }
}
