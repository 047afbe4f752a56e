//! Which exponents of a chunk get codes.

use super::forms::Form;

/// Every so many-th element is looked at. Looking at all would take longer than coding them. The
/// number is odd, so that no channel of a head is left out.
const STRIDE: usize = 59;

/// The first exponent of the window that holds most of a sample of the elements.
#[inline(always)]
pub(super) fn choose<F: Form>(elements: &[F::Bytes]) -> u8 {
    // Two samples in turn: equal exponents would wait for each other's count.
    let (mut seen, mut others) = ([0_u16; 256], [0_u16; 256]);
    for pair in elements.chunks(2 * STRIDE) {
        seen[usize::from(F::exponent(pair[0]))] += 1;
        if let Some(&other) = pair.get(STRIDE) {
            others[usize::from(F::exponent(other))] += 1;
        }
    }
    seen.iter_mut()
        .zip(others)
        .for_each(|(seen, other)| *seen += other);
    let (exponents, window) = (1 << F::EXPONENT_BITS, 1 << F::CODE_BITS);
    let mut inside: u16 = seen[..window].iter().sum();
    let (mut most, mut base) = (inside, 0);
    // A window that begins before the first exponent seen holds no more than the one that begins
    // there, and one that ends behind the last no more than the one that ends there.
    let last = seen.iter().rposition(|&count| count > 0).unwrap_or(0);
    for first in 1..=(exponents - window).min((last + 1).saturating_sub(window)) {
        inside = inside + seen[first + window - 1] - seen[first - 1];
        if inside > most {
            (most, base) = (inside, first);
        }
    }
    base as u8
}
