//! A copy that sums its bytes in the registers on their way, so that they cross the memory bus once
//! for both. The checksum is XXH3-64 without a seed, as its specification defines it for inputs of
//! more than 240 bytes (github.com/Cyan4973/xxHash, `doc/xxhash_spec.md`).
#![allow(unsafe_code, reason = "no safe copy may race, or go past the caches")]

use std::arch::asm;
use std::arch::x86_64::{
    __m256i, _mm_sfence, _mm256_add_epi64, _mm256_load_si256, _mm256_loadu_si256, _mm256_mul_epu32,
    _mm256_set1_epi64x, _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64,
    _mm256_store_si256, _mm256_xor_si256,
};

use super::racing;

/// Bytes that the algorithm takes in at a time.
const STRIPE: usize = 64;
/// Stripes of a block. After each block the accumulators are scrambled.
const BLOCK: usize = 16;
/// The shortest payload that is summed here. Up to 240 bytes the algorithm is another one.
const LEAST_BYTES: u64 = 1024;
/// Alignment of what is written past the caches.
const PAST_CACHES: usize = 32;

const PRIME32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];
/// Where the secret's part for the last stripe begins, and its parts for scrambling and for the
/// end.
const LAST_AT: usize = 192 - STRIPE - 7;
const SCRAMBLE_AT: usize = 192 - STRIPE;
const MERGE_AT: usize = 11;
/// The algorithm's own secret.
#[rustfmt::skip]
static SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// The algorithm's eight accumulators.
#[repr(align(32))]
struct Accumulators([u64; 8]);

/// A copy that sums in registers. Stripes that lie in one piece at both ends go through the
/// kernel. The others, and the last two, are put together here.
pub(super) struct Fused {
    sums: Accumulators,
    /// Payload bytes in all: the algorithm wants to know.
    bytes: u64,
    past_caches: bool,
    /// Stripes summed so far.
    summed: u64,
    /// The stripe that is being put together, and how much of it is here.
    stripe: [u8; STRIPE],
    filled: usize,
    /// The stripe before it, if that was put together too.
    before: [u8; STRIPE],
}

impl Fused {
    /// Begins the copy of a payload. None if this processor cannot do it, or if the payload is too
    /// short.
    pub(super) fn new(payload_bytes: u64, past_caches: bool) -> Option<Self> {
        let can = std::arch::is_x86_feature_detected!("avx2") && payload_bytes >= LEAST_BYTES;
        can.then(|| Self {
            sums: Accumulators([
                PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4],
                PRIME32[0],
            ]),
            bytes: payload_bytes,
            past_caches,
            summed: 0,
            stripe: [0; STRIPE],
            filled: 0,
            before: [0; STRIPE],
        })
    }

    /// Stripes that are summed one after the other. What is left is 1 to 64 bytes. The last 64
    /// bytes of all are summed in the end, once more if they are in other stripes too.
    fn stripes(&self) -> u64 {
        (self.bytes - 1) / STRIPE as u64
    }

    /// Takes in the payload's next bytes, and copies them if there is a place to copy them to.
    ///
    /// # Safety
    ///
    /// As for [`std::ptr::copy_nonoverlapping`], except that others may write to the source or read
    /// the destination meanwhile. Nobody is told of the copy before this is finished or dropped.
    pub(super) unsafe fn take(&mut self, from: *const u8, to: Option<*mut u8>, len: usize) {
        let mut done = 0;
        while done < len {
            // SAFETY: within both ranges.
            let (from, to) = unsafe { (from.add(done), to.map(|to| to.add(done))) };
            let left = len - done;
            // The end needs the last one of them once more.
            let whole = (self.stripes() - 1).saturating_sub(self.summed);
            let whole = whole.min((left / STRIPE) as u64) as usize;
            if self.filled == 0 && whole > 0 {
                // SAFETY: so many stripes are left at both ends, and the caller vouches for both.
                unsafe { self.take_stripes(from, to, whole) };
                done += whole * STRIPE;
                continue;
            }
            assert!(self.filled < STRIPE, "no more bytes than the payload has");
            let now = left.min(STRIPE - self.filled);
            let place = &mut self.stripe[self.filled..][..now];
            // SAFETY: so much is left at both ends, and the caller vouches for both. The second
            // copy is of what the first one has brought.
            unsafe {
                racing::copy_out(from, place.as_mut_ptr(), now);
                if let Some(to) = to {
                    racing::copy_out(place.as_ptr(), to, now);
                }
            }
            self.filled += now;
            self.sum_filled();
            done += now;
        }
    }

    /// # Safety
    ///
    /// As for [`take`](Self::take), of so many stripes.
    unsafe fn take_stripes(&mut self, from: *const u8, to: Option<*mut u8>, count: usize) {
        let first = (self.summed % BLOCK as u64) as usize;
        let sums = &mut self.sums;
        // SAFETY: `new` has looked for AVX2; the rest is the caller's promise.
        unsafe {
            match to {
                None => take_stripes::<STAY>(sums, from, std::ptr::null_mut(), first, count),
                Some(to) if self.past_caches && to.align_offset(PAST_CACHES) == 0 => {
                    take_stripes::<GO_PAST>(sums, from, to, first, count);
                }
                Some(to) => take_stripes::<GO>(sums, from, to, first, count),
            }
        }
        self.summed += count as u64;
    }

    /// Sums the stripe that was put together, if it is full and not the last bytes of all.
    fn sum_filled(&mut self) {
        if self.filled == STRIPE && self.summed < self.stripes() {
            let at = 8 * (self.summed % BLOCK as u64) as usize;
            self.sums.take_in(&self.stripe, at);
            self.summed += 1;
            if self.summed.is_multiple_of(BLOCK as u64) {
                self.sums.scramble();
            }
            self.before = self.stripe;
            self.filled = 0;
        }
    }

    pub(super) fn finish(mut self) -> u64 {
        let mut last = [0; STRIPE];
        let (before, end) = last.split_at_mut(STRIPE - self.filled);
        before.copy_from_slice(&self.before[self.filled..]);
        end.copy_from_slice(&self.stripe[..self.filled]);
        self.sums.take_in(&last, LAST_AT);
        self.sums.merged(self.bytes)
    }
}

impl Drop for Fused {
    fn drop(&mut self) {
        // What was written past the caches is not ordered with other writes. Whoever learns
        // that the copy is over must find it, so it is made visible here.
        // SAFETY: every x86-64 processor has SSE.
        unsafe { _mm_sfence() };
    }
}

fn secret(at: usize) -> u64 {
    let bytes = SECRET[at..].first_chunk().expect("a place in the secret");
    u64::from_le_bytes(*bytes)
}

impl Accumulators {
    /// Takes in a stripe, with the secret's part that begins at `at`.
    fn take_in(&mut self, stripe: &[u8; STRIPE], at: usize) {
        for (n, bytes) in stripe.as_chunks::<8>().0.iter().enumerate() {
            let value = u64::from_le_bytes(*bytes);
            let keyed = value ^ secret(at + 8 * n);
            let product = (keyed & 0xFFFF_FFFF) * (keyed >> 32);
            self.0[n ^ 1] = self.0[n ^ 1].wrapping_add(value);
            self.0[n] = self.0[n].wrapping_add(product);
        }
    }

    fn scramble(&mut self) {
        for (n, sum) in self.0.iter_mut().enumerate() {
            let mixed = *sum ^ *sum >> 47 ^ secret(SCRAMBLE_AT + 8 * n);
            *sum = mixed.wrapping_mul(PRIME32[0]);
        }
    }

    /// The checksum of so many bytes.
    fn merged(&self, bytes: u64) -> u64 {
        let mut hash = bytes.wrapping_mul(PRIME64[0]);
        for (n, pair) in self.0.as_chunks::<2>().0.iter().enumerate() {
            let [one, other] = [0, 1].map(|k| pair[k] ^ secret(MERGE_AT + 16 * n + 8 * k));
            let product = u128::from(one) * u128::from(other);
            hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        hash ^= hash >> 37;
        hash = hash.wrapping_mul(0x1656_6791_9E37_79F9);
        hash ^ hash >> 32
    }
}

/// Writes a stripe by an instruction.
macro_rules! write_stripe {
    ($write:literal, $to:ident, $low:ident, $high:ident) => {
        asm!(
            concat!($write, " [{to}], {low}"),
            concat!($write, " [{to} + 32], {high}"),
            to = in(reg) $to,
            low = in(ymm_reg) $low,
            high = in(ymm_reg) $high,
            options(nostack, preserves_flags)
        )
    };
}

/// Where stripes go: nowhere, to memory, or there past the caches.
const STAY: u8 = 0;
const GO: u8 = 1;
const GO_PAST: u8 = 2;

/// Takes in whole stripes, and writes them where they go. `first` is the first one's place in its
/// block.
///
/// # Safety
///
/// The processor has AVX2. Both ranges have so many stripes, or they stay. As for [`Fused::take`];
/// if they go past the caches, the destination is aligned to [`PAST_CACHES`], and `_mm_sfence` comes
/// before anybody is told of it.
#[target_feature(enable = "avx2")]
unsafe fn take_stripes<const TO: u8>(
    sums: &mut Accumulators,
    mut from: *const u8,
    mut to: *mut u8,
    first: usize,
    count: usize,
) {
    let sums = sums.0.as_mut_ptr().cast::<__m256i>();
    // SAFETY: the accumulators are two aligned vectors.
    let mut sum = unsafe { [_mm256_load_si256(sums), _mm256_load_si256(sums.add(1))] };
    let mut place = first;
    for _ in 0..count {
        let (low, high): (__m256i, __m256i);
        // SAFETY: the caller vouches for the source. The compiler sees no access to memory that
        // others use too (see `racing`), here and below: only vectors of unknown content.
        unsafe {
            asm!(
                "vmovdqu {low}, [{from}]",
                "vmovdqu {high}, [{from} + 32]",
                from = in(reg) from,
                low = out(ymm_reg) low,
                high = out(ymm_reg) high,
                options(nostack, preserves_flags, readonly)
            );
        }
        // SAFETY: the caller vouches for the destination, and for its alignment if that is needed.
        unsafe {
            match TO {
                GO => write_stripe!("vmovdqu", to, low, high),
                GO_PAST => write_stripe!("vmovntdq", to, low, high),
                _ => {}
            }
            from = from.add(STRIPE);
        }
        to = to.wrapping_add(STRIPE);
        for (half, value) in [low, high].into_iter().enumerate() {
            // SAFETY: 64 bytes from `8 * place` on are in the secret, as `place < BLOCK`.
            let keys = unsafe {
                let keys = SECRET.as_ptr().add(8 * place).cast::<__m256i>();
                _mm256_loadu_si256(keys.add(half))
            };
            let keyed = _mm256_xor_si256(value, keys);
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(value);
            sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, swapped));
        }
        place += 1;
        if place == BLOCK {
            place = 0;
            sum = scrambled(sum);
        }
    }
    // SAFETY: as above.
    unsafe {
        _mm256_store_si256(sums, sum[0]);
        _mm256_store_si256(sums.add(1), sum[1]);
    }
}

/// Scrambles the sums as [`Accumulators::scramble`] does.
#[target_feature(enable = "avx2")]
fn scrambled(sum: [__m256i; 2]) -> [__m256i; 2] {
    let prime = _mm256_set1_epi64x(PRIME32[0] as i64);
    [0, 1].map(|half| {
        let at = SCRAMBLE_AT + 32 * half;
        // SAFETY: 32 bytes from there on are in the secret.
        let keys = unsafe { _mm256_loadu_si256(SECRET.as_ptr().add(at).cast()) };
        let mixed = _mm256_xor_si256(sum[half], _mm256_srli_epi64::<47>(sum[half]));
        let mixed = _mm256_xor_si256(mixed, keys);
        let low = _mm256_mul_epu32(mixed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
    })
}
