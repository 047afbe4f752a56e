//! How the bits of each element type are split and joined.

/// Bytes of an element.
pub(super) trait Word: Copy {
    /// Whole elements, and the bytes behind them.
    fn cut(bytes: &[u8]) -> (&[Self], &[u8]);
    /// Whole elements, and the bytes behind them, to be written to.
    fn cut_mut(bytes: &mut [u8]) -> (&mut [Self], &mut [u8]);
    /// The bytes of elements.
    fn bytes(words: &[Self]) -> &[u8];
    /// The bytes of elements, to be written to.
    fn bytes_mut(words: &mut [Self]) -> &mut [u8];
}

impl<const N: usize> Word for [u8; N] {
    #[inline(always)]
    fn cut(bytes: &[u8]) -> (&[Self], &[u8]) {
        bytes.as_chunks()
    }

    #[inline(always)]
    fn cut_mut(bytes: &mut [u8]) -> (&mut [Self], &mut [u8]) {
        bytes.as_chunks_mut()
    }

    #[inline(always)]
    fn bytes(words: &[Self]) -> &[u8] {
        words.as_flattened()
    }

    #[inline(always)]
    fn bytes_mut(words: &mut [Self]) -> &mut [u8] {
        words.as_flattened_mut()
    }
}

/// An element type: where its exponent is, and what it is coded to.
///
/// Its exponent's place in the window has [`CODE_BITS`](Self::CODE_BITS). With what else goes into
/// the *field* of an element it has [`FIELD_BITS`](Self::FIELD_BITS). Types of 16 bits have a *low*
/// byte too.
pub(super) trait Form {
    /// The element's bytes, little endian.
    type Bytes: Word;
    /// Bytes of an element.
    const BYTES: usize = size_of::<Self::Bytes>();
    /// Bits of the exponent.
    const EXPONENT_BITS: u32;
    /// Bits of the exponent's place in the window.
    const CODE_BITS: u32;
    /// Bits of the field: 4, 6 or 7.
    const FIELD_BITS: usize;
    /// Whether there is a low byte.
    const HAS_LOW: bool = Self::BYTES == 2;

    /// The exponent.
    fn exponent(bytes: Self::Bytes) -> u8;
    /// Low byte and field, and how far the exponent is behind the window's begin.
    fn split(bytes: Self::Bytes, base: u8) -> (u8, u8, u8);
    /// What [`split`](Self::split) was given, if the exponent was in the window.
    fn join(low: u8, field: u8, base: u8) -> Self::Bytes;
    /// The element with another exponent.
    fn with_exponent(bytes: Self::Bytes, exponent: u8) -> Self::Bytes;
}

pub(super) struct Bf16;
pub(super) struct Fp16;
pub(super) struct Fp8E4M3;
pub(super) struct Fp8E5M2;

impl Form for Bf16 {
    type Bytes = [u8; 2];
    const EXPONENT_BITS: u32 = 8;
    const CODE_BITS: u32 = 4;
    const FIELD_BITS: usize = 4;

    #[inline(always)]
    fn exponent(bytes: Self::Bytes) -> u8 {
        (u16::from_le_bytes(bytes) >> 7) as u8
    }

    #[inline(always)]
    fn split(bytes: Self::Bytes, base: u8) -> (u8, u8, u8) {
        let bits = u16::from_le_bytes(bytes);
        let low = (bits & 0x7f) | (bits >> 8 & 0x80);
        let place = ((bits >> 7) as u8).wrapping_sub(base);
        (low as u8, place & 0xf, place)
    }

    #[inline(always)]
    fn join(low: u8, field: u8, base: u8) -> Self::Bytes {
        let (low, exponent) = (u16::from(low), u16::from(field.wrapping_add(base)));
        ((low & 0x80) << 8 | exponent << 7 | (low & 0x7f)).to_le_bytes()
    }

    #[inline(always)]
    fn with_exponent(bytes: Self::Bytes, exponent: u8) -> Self::Bytes {
        ((u16::from_le_bytes(bytes) & 0x807f) | u16::from(exponent) << 7).to_le_bytes()
    }
}

impl Form for Fp16 {
    type Bytes = [u8; 2];
    const EXPONENT_BITS: u32 = 5;
    const CODE_BITS: u32 = 3;
    const FIELD_BITS: usize = 6;

    #[inline(always)]
    fn exponent(bytes: Self::Bytes) -> u8 {
        bytes[1] >> 2 & 0x1f
    }

    // The field: sign, the mantissa's two highest bits, the place in the window.
    #[inline(always)]
    fn split(bytes: Self::Bytes, base: u8) -> (u8, u8, u8) {
        let bits = u16::from_le_bytes(bytes);
        let high = (bits >> 8) as u8;
        let place = (high >> 2 & 0x1f).wrapping_sub(base);
        let field = high >> 2 & 0x20 | high << 3 & 0x18 | place & 7;
        (bits as u8, field, place)
    }

    #[inline(always)]
    fn join(low: u8, field: u8, base: u8) -> Self::Bytes {
        let exponent = (field & 7).wrapping_add(base) & 0x1f;
        let high = field << 2 & 0x80 | exponent << 2 | field >> 3 & 3;
        (u16::from(high) << 8 | u16::from(low)).to_le_bytes()
    }

    #[inline(always)]
    fn with_exponent(bytes: Self::Bytes, exponent: u8) -> Self::Bytes {
        [bytes[0], bytes[1] & 0x83 | (exponent & 0x1f) << 2]
    }
}

impl Form for Fp8E4M3 {
    type Bytes = [u8; 1];
    const EXPONENT_BITS: u32 = 4;
    const CODE_BITS: u32 = 3;
    const FIELD_BITS: usize = 7;

    #[inline(always)]
    fn exponent(bytes: Self::Bytes) -> u8 {
        bytes[0] >> 3 & 0xf
    }

    #[inline(always)]
    fn split([bits]: Self::Bytes, base: u8) -> (u8, u8, u8) {
        let place = (bits >> 3 & 0xf).wrapping_sub(base);
        (0, bits >> 1 & 0x40 | (place & 7) << 3 | bits & 7, place)
    }

    #[inline(always)]
    fn join(_: u8, field: u8, base: u8) -> Self::Bytes {
        let exponent = (field >> 3 & 7).wrapping_add(base) & 0xf;
        [field << 1 & 0x80 | exponent << 3 | field & 7]
    }

    #[inline(always)]
    fn with_exponent([bits]: Self::Bytes, exponent: u8) -> Self::Bytes {
        [bits & 0x87 | (exponent & 0xf) << 3]
    }
}

impl Form for Fp8E5M2 {
    type Bytes = [u8; 1];
    const EXPONENT_BITS: u32 = 5;
    const CODE_BITS: u32 = 4;
    const FIELD_BITS: usize = 7;

    #[inline(always)]
    fn exponent(bytes: Self::Bytes) -> u8 {
        bytes[0] >> 2 & 0x1f
    }

    #[inline(always)]
    fn split([bits]: Self::Bytes, base: u8) -> (u8, u8, u8) {
        let place = (bits >> 2 & 0x1f).wrapping_sub(base);
        (0, bits >> 1 & 0x40 | (place & 0xf) << 2 | bits & 3, place)
    }

    #[inline(always)]
    fn join(_: u8, field: u8, base: u8) -> Self::Bytes {
        let exponent = (field >> 2 & 0xf).wrapping_add(base) & 0x1f;
        [field << 1 & 0x80 | exponent << 2 | field & 3]
    }

    #[inline(always)]
    fn with_exponent([bits]: Self::Bytes, exponent: u8) -> Self::Bytes {
        [bits & 0x83 | (exponent & 0x1f) << 2]
    }
}
