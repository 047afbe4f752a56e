//! Copies between memory of this process and memory that others may be writing or reading.
//!
//! To the compiler, such a copy would be a data race: it may assume that the bytes it copies do not
//! change. So it must not see the copy. The copies are `asm!` blocks. All that the compiler knows
//! about them is that they read and write memory, as code would that accesses each byte atomically
//! and relaxed. That is also what the processor does, and what the pool's protocol counts on: any
//! mixture of old and new bytes may arrive, and whoever copied finds out.
//!
//! `rep movsb` would be shorter. But on some processors it falls to a quarter of its speed if the
//! destination lies a little above the source, modulo 4096.
#![allow(unsafe_code, reason = "no safe copy may race")]

/// Bytes copied at a time; destinations are aligned to it.
const LINE: usize = 64;
/// From this size on, values are worth writing past the caches.
#[cfg(target_arch = "x86_64")]
const PAST_CACHES: usize = 4096;

/// Copies out of shared memory.
///
/// # Safety
///
/// As for [`std::ptr::copy_nonoverlapping`], except that others may write to the source meanwhile.
pub unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { in_lines(from, to, len, lines) }
}

/// Copies into shared memory. The bytes are on their way to other processes, so large copies go
/// past this processor's caches. This saves reading what is overwritten.
///
/// # Safety
///
/// As for [`std::ptr::copy_nonoverlapping`], except that others may read the destination meanwhile.
pub unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= PAST_CACHES {
        // SAFETY: the caller's promise.
        return unsafe { in_lines(from, to, len, lines_past_caches) };
    }
    // SAFETY: the caller's promise.
    unsafe { in_lines(from, to, len, lines) }
}

/// Copies whole lines of the destination with `lines`, and the ends byte by byte.
///
/// # Safety
///
/// As for a copy; `lines` copies so many lines, at least one, to an aligned destination.
#[inline]
unsafe fn in_lines(
    from: *const u8,
    to: *mut u8,
    len: usize,
    lines: unsafe fn(*const u8, *mut u8, usize),
) {
    let head = to.align_offset(LINE).min(len);
    let middle = (len - head) / LINE * LINE;
    // SAFETY: the three pieces follow each other and end where the ranges do, and the caller
    // vouches for the ranges. The destination of the second piece is aligned, if that piece has any
    // bytes.
    unsafe {
        bytes(from, to, head);
        if middle > 0 {
            lines(from.add(head), to.add(head), middle / LINE);
        }
        let done = head + middle;
        bytes(from.add(done), to.add(done), len - done);
    }
}

/// # Safety
///
/// As for a copy.
#[cfg(target_arch = "x86_64")]
unsafe fn bytes(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear in every block.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies `$count` lines, stores with the instruction `$store`, and ends with the instruction
/// `$end`.
#[cfg(target_arch = "x86_64")]
macro_rules! copy_lines {
    ($from:ident, $to:ident, $count:ident, $store:literal $(, $end:literal)?) => {
        std::arch::asm!(
            "2:",
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            concat!($store, " [{to}], {a}"),
            concat!($store, " [{to} + 16], {b}"),
            concat!($store, " [{to} + 32], {c}"),
            concat!($store, " [{to} + 48], {d}"),
            "add {from}, 64",
            "add {to}, 64",
            "dec {count}",
            "jnz 2b",
            $($end,)?
            from = inout(reg) $from => _,
            to = inout(reg) $to => _,
            count = inout(reg) $count => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack)
        )
    };
}

/// # Safety
///
/// As for a copy of so many lines, of which there is at least one, to an aligned destination.
#[cfg(target_arch = "x86_64")]
unsafe fn lines(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: the caller vouches for both ranges; each round copies the next line of them.
    unsafe { copy_lines!(from, to, count, "movdqa") }
}

/// # Safety
///
/// As for [`lines`].
#[cfg(target_arch = "x86_64")]
unsafe fn lines_past_caches(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: as above. These stores are not ordered with later ones. All other stores are, and
    // releases need that. The fence at the end makes up for it.
    unsafe { copy_lines!(from, to, count, "movntdq", "sfence") }
}

/// Copies bytes on other processors than x86-64, with volatile accesses. The compiler neither
/// merges nor repeats them, and assumes nothing about their bytes.
///
/// # Safety
///
/// As for a copy.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn bytes(from: *const u8, to: *mut u8, len: usize) {
    for at in 0..len {
        // SAFETY: both bytes lie within the ranges, which the caller vouches for.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}

/// # Safety
///
/// As for a copy of so many lines.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn lines(from: *const u8, to: *mut u8, count: usize) {
    let (from, to) = (from.cast::<[u8; LINE]>(), to.cast::<[u8; LINE]>());
    for at in 0..count {
        // SAFETY: both arrays lie within the ranges, which the caller vouches for. Arrays of bytes
        // are aligned everywhere.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_arrive_whole_and_touch_nothing_else() {
        let source: Vec<u8> = (0..10_000_u32).map(|n| (n * 7 + n / 256) as u8).collect();
        for copy in [copy_in, copy_out] {
            for len in [0, 1, 2, 63, 64, 65, 127, 128, 4095, 4096, 4097, 9000] {
                for (from, to) in [
                    (0, 0),
                    (0, 1),
                    (1, 0),
                    (7, 15),
                    (64, 16),
                    (63, 65),
                    (17, 17),
                ] {
                    let mut into = vec![0xee; to + len + 64];
                    let (source, before) = (&source[from..from + len], into.clone());
                    // SAFETY: both vectors are long enough, and nobody else uses them.
                    unsafe { copy(source.as_ptr(), into.as_mut_ptr().add(to), len) };
                    assert!(into[to..to + len] == *source, "{len} from {from} to {to}");
                    assert!(into[..to] == before[..to] && into[to + len..] == before[to + len..]);
                }
            }
        }
    }
}
