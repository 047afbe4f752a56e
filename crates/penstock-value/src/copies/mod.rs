//! Copies of values that the standard library has no way for: between memory of this process and
//! memory that others use too, and with a checksum on the way.

#[cfg(target_arch = "x86_64")]
mod fused;
pub mod racing;
mod summed;

pub use summed::SummedCopy;

/// Copies bytes that this processor does not read soon. Large copies go past its caches: then it
/// need not read what it overwrites.
///
/// # Panics
///
/// If the lengths differ.
pub fn past_caches(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "a copy is as long as what it is of");
    // SAFETY: both are references, so nobody else writes there, and they do not overlap.
    #[allow(unsafe_code)]
    unsafe {
        racing::copy_in(from.as_ptr(), into.as_mut_ptr(), from.len());
    }
}
