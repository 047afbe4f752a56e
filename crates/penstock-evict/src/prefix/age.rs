//! Ages in buckets: half octaves of the policy's clock. The clock counts blocks used.

/// Number of buckets; the last has no end.
pub(super) const BUCKETS: usize = 56;

/// Ages below 2^6 are not told apart.
const SHIFT: u32 = 6;

/// The age at which a bucket starts.
pub(super) const fn start(bucket: usize) -> u64 {
    if bucket == 0 {
        return 0;
    }
    let octave = 1u64 << (SHIFT + (bucket as u32 - 1) / 2);
    if bucket % 2 == 1 {
        octave
    } else {
        octave + octave / 2
    }
}

/// How long an entry stays in a bucket if no use ends its stay.
#[expect(clippy::cast_precision_loss, reason = "an estimate is made of it")]
pub(super) fn width(bucket: usize) -> f64 {
    if bucket + 1 == BUCKETS {
        // An entry that got here is practically never used again.
        return 1e15;
    }
    (start(bucket + 1) - start(bucket)) as f64
}

#[cfg(test)]
mod tests {
    use super::{BUCKETS, start};

    #[test]
    fn buckets_are_half_octaves_without_gaps() {
        assert_eq!((start(0), start(1), start(2), start(3)), (0, 64, 96, 128));
        assert!((1..BUCKETS).all(|bucket| start(bucket) > start(bucket - 1)));
    }
}
