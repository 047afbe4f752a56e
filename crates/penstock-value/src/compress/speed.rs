//! The coders, compiled for several instruction sets. The CPU decides which one runs.
//!
//! No set has code of its own: compilers make other vectors of the same code. So all of them make
//! the same bytes.

use super::chunk::{self, Room};
use super::forms::{Bf16, Form, Fp8E4M3, Fp8E5M2, Fp16};
use super::{Damaged, Element};

/// A set of instructions that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// What every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// With vectors of 512 bits, and instructions that move single bytes within them.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Set {
    /// All sets, the fastest first.
    #[cfg(target_arch = "x86_64")]
    const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Baseline];
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: [Self; 1] = [Self::Baseline];

    fn is_here(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        use std::arch::is_x86_feature_detected as has;
        match self {
            Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => has!("avx512bw") && has!("avx512vl") && has!("avx512vbmi"),
        }
    }
}

impl Speed {
    /// What every CPU of this architecture has.
    pub const BASELINE: Self = Self(Set::Baseline);

    /// The sets that this CPU has, the fastest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Set::ALL.into_iter().filter(|set| set.is_here()).map(Self)
    }

    /// The fastest set that this CPU has.
    pub fn best() -> Self {
        Self::available().next().unwrap_or(Self::BASELINE)
    }

    /// Stable lower-case name.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
        }
    }

    /// Encodes a payload with these instructions, see [`super::encode`].
    pub(super) fn encode(self, element: Element, payload: &[u8], out: &mut Room<'_>) -> Option<()> {
        match element {
            Element::Bf16 => self.encode_as::<Bf16>(payload, out),
            Element::Fp16 => self.encode_as::<Fp16>(payload, out),
            Element::Fp8E4M3 => self.encode_as::<Fp8E4M3>(payload, out),
            Element::Fp8E5M2 => self.encode_as::<Fp8E5M2>(payload, out),
        }
    }

    /// Decodes a payload with these instructions, see [`super::decode`]. Returns the bytes that
    /// follow the code.
    pub(super) fn decode<'c>(
        self,
        element: Element,
        coded: &'c [u8],
        out: &mut [u8],
    ) -> Result<&'c [u8], Damaged> {
        match element {
            Element::Bf16 => self.decode_as::<Bf16>(coded, out),
            Element::Fp16 => self.decode_as::<Fp16>(coded, out),
            Element::Fp8E4M3 => self.decode_as::<Fp8E4M3>(coded, out),
            Element::Fp8E5M2 => self.decode_as::<Fp8E5M2>(coded, out),
        }
    }

    /// Decodes a payload piece by piece with these instructions, see [`super::decode_each`].
    /// Returns the bytes that follow the code.
    pub(super) fn decode_each<'c>(
        self,
        element: Element,
        coded: &'c [u8],
        payload_bytes: usize,
        visit: &mut dyn FnMut(&[u8]),
    ) -> Result<&'c [u8], Damaged> {
        match element {
            Element::Bf16 => self.decode_each_as::<Bf16>(coded, payload_bytes, visit),
            Element::Fp16 => self.decode_each_as::<Fp16>(coded, payload_bytes, visit),
            Element::Fp8E4M3 => self.decode_each_as::<Fp8E4M3>(coded, payload_bytes, visit),
            Element::Fp8E5M2 => self.decode_each_as::<Fp8E5M2>(coded, payload_bytes, visit),
        }
    }

    fn encode_as<F: Form>(self, payload: &[u8], out: &mut Room<'_>) -> Option<()> {
        match self.0 {
            Set::Baseline => chunk::encode::<F>(payload, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `best` makes an `Avx2`, after it has found that the CPU has AVX2.
            #[allow(unsafe_code)]
            Set::Avx2 => unsafe { encode_avx2::<F>(payload, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the same, of the features that it names.
            #[allow(unsafe_code)]
            Set::Avx512 => unsafe { encode_avx512::<F>(payload, out) },
        }
    }

    fn decode_as<'c, F: Form>(self, coded: &'c [u8], out: &mut [u8]) -> Result<&'c [u8], Damaged> {
        match self.0 {
            Set::Baseline => chunk::decode::<F>(coded, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `best` makes an `Avx2`, after it has found that the CPU has AVX2.
            #[allow(unsafe_code)]
            Set::Avx2 => unsafe { decode_avx2::<F>(coded, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the same, of the features that it names.
            #[allow(unsafe_code)]
            Set::Avx512 => unsafe { decode_avx512::<F>(coded, out) },
        }
    }

    fn decode_each_as<'c, F: Form>(
        self,
        coded: &'c [u8],
        payload_bytes: usize,
        visit: &mut dyn FnMut(&[u8]),
    ) -> Result<&'c [u8], Damaged> {
        match self.0 {
            Set::Baseline => chunk::decode_each::<F>(coded, payload_bytes, visit),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `best` makes an `Avx2`, after it has found that the CPU has AVX2.
            #[allow(unsafe_code)]
            Set::Avx2 => unsafe { decode_each_avx2::<F>(coded, payload_bytes, visit) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the same, of the features that it names.
            #[allow(unsafe_code)]
            Set::Avx512 => unsafe { decode_each_avx512::<F>(coded, payload_bytes, visit) },
        }
    }
}

/// Compiles the functions of [`chunk`] for a set of instructions.
macro_rules! compile_for {
    ($features:literal, $encode:ident, $decode:ident, $decode_each:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $encode<F: Form>(payload: &[u8], out: &mut Room<'_>) -> Option<()> {
            chunk::encode::<F>(payload, out)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $decode<'c, F: Form>(coded: &'c [u8], out: &mut [u8]) -> Result<&'c [u8], Damaged> {
            chunk::decode::<F>(coded, out)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $decode_each<'c, F: Form>(
            coded: &'c [u8],
            payload_bytes: usize,
            visit: &mut dyn FnMut(&[u8]),
        ) -> Result<&'c [u8], Damaged> {
            chunk::decode_each::<F>(coded, payload_bytes, visit)
        }
    };
}

compile_for!("avx2", encode_avx2, decode_avx2, decode_each_avx2);
compile_for!(
    "avx512bw,avx512vl,avx512vbmi",
    encode_avx512,
    decode_avx512,
    decode_each_avx512
);
