//! Which exponents of a chunk get codes.

use super::forms::Form;

/// Every so many-th element is looked at. Looking at all would take longer than coding them. The
/// number is odd, so that no channel of a head is left out.
const STRIDE: usize = 13;

/// The first exponent of the window that holds most of a sample of the elements.
#[inline(always)]
pub(super) fn choose<F: Form>(elements: &[F::Bytes]) -> u8 {
    let mut seen = [0_u16; 256];
    for &element in elements.iter().step_by(STRIDE) {
        seen[usize::from(F::exponent(element))] += 1;
    }
    let (exponents, window) = (1 << F::EXPONENT_BITS, 1 << F::CODE_BITS);
    let mut inside: u16 = seen[..window].iter().sum();
    let (mut most, mut base) = (inside, 0);
    for first in 1..=exponents - window {
        inside = inside + seen[first + window - 1] - seen[first - 1];
        if inside > most {
            (most, base) = (inside, first);
        }
    }
    base as u8
}
