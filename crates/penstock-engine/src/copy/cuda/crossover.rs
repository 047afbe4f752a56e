//! From which size of a piece on the copy engines are used, as decided by the times of both ways.

/// The times of a copy of pieces of one size, both ways.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Bytes of each piece.
    pub piece_bytes: usize,
    /// Seconds by the copy engines.
    pub copy_engine: f64,
    /// Seconds by the kernel.
    pub kernel: f64,
}

/// The kernel takes multiprocessors from the model, so it is used only where the copy engines take
/// at least this many times as long.
const KERNEL_WINS_BY: f64 = 1.05;

impl Timing {
    /// Above zero where the kernel is the better choice. The value is a logarithm of how much
    /// better it is.
    fn for_kernel(&self) -> f64 {
        (self.copy_engine / (self.kernel * KERNEL_WINS_BY)).ln()
    }
}

/// Mean bytes of a piece from which on the copy engines are the better choice. None if no
/// measurement says anything.
///
/// The sizes are cut in two: smaller ones go to the kernel, larger ones to the copy engines. Of all
/// cuts, the one is taken that loses least where the measurements disagree with it. Between two
/// sizes, the limit is where the ratio turns, if the ratio changes evenly between them on
/// logarithmic scales. Pieces smaller than all measured ones go to the kernel, larger ones to the
/// copy engines.
pub(super) fn copy_engine_from(timings: &[Timing]) -> Option<usize> {
    let mut sizes: Vec<(usize, f64)> = timings
        .iter()
        .map(|timing| (timing.piece_bytes, timing.for_kernel()))
        .filter(|(_, for_kernel)| for_kernel.is_finite())
        .collect();
    sizes.sort_by_key(|&(bytes, _)| bytes);
    let loss = |cut: usize| {
        let to_kernel = sizes[..cut].iter().map(|(_, it)| (-it).max(0.0));
        let to_engine = sizes[cut..].iter().map(|(_, it)| it.max(0.0));
        to_kernel.chain(to_engine).sum::<f64>()
    };
    let cut = (0..=sizes.len()).min_by(|&a, &b| loss(a).total_cmp(&loss(b)))?;
    let (&(first, _), &(last, _)) = (sizes.first()?, sizes.last()?);
    if cut == 0 {
        return Some(first);
    }
    if cut == sizes.len() {
        return Some(last + 1);
    }
    let ((below, before), (above, after)) = (sizes[cut - 1], sizes[cut]);
    // With the cut that loses least, the kernel is ahead just below the cut and not just above it.
    let share = before / (before - after);
    let turn = (below as f64 * (above as f64 / below as f64).powf(share)).round() as usize;
    // Rounding must not move the size below the cut to the other side.
    Some(turn.max(below + 1))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn timings(of: impl Fn(f64) -> (f64, f64)) -> Vec<Timing> {
        [4, 8, 16, 32, 64, 128, 256]
            .map(|kib: u32| {
                let (copy_engine, kernel) = of(f64::from(kib << 10));
                Timing {
                    piece_bytes: (kib << 10) as usize,
                    copy_engine,
                    kernel,
                }
            })
            .to_vec()
    }

    /// A fixed time for each piece, and a time for each byte.
    fn affine(engine_piece: f64, engine_byte: f64, kernel_byte: f64) -> Vec<Timing> {
        timings(|bytes| (engine_piece / bytes + engine_byte, kernel_byte))
    }

    #[test]
    fn between_two_sizes_it_is_where_the_ratio_turns() {
        // Equal, with the kernel's handicap, where 1e-6 / s + 18e-12 = 1.05 * 50e-12: s = 28986.
        let from = copy_engine_from(&affine(1e-6, 18e-12, 50e-12)).unwrap();
        assert!((27_000..31_000).contains(&from), "{from}");
    }

    #[test]
    fn one_way_that_always_wins_is_taken_for_all_sizes_measured() {
        assert_eq!(
            copy_engine_from(&affine(0.0, 18e-12, 50e-12)),
            Some(4 << 10)
        );
        let never = copy_engine_from(&affine(1e-3, 18e-12, 18e-12));
        assert_eq!(never, Some((256 << 10) + 1));
    }

    #[test]
    fn a_tie_goes_to_the_copy_engines() {
        assert_eq!(copy_engine_from(&timings(|_| (1.0, 1.0))), Some(4 << 10));
    }

    #[test]
    fn one_disturbed_measurement_does_not_decide() {
        let undisturbed = affine(1e-6, 18e-12, 50e-12);
        let expected = copy_engine_from(&undisturbed);
        for disturbed in [0, 1, 4, 5, 6] {
            let mut timings = undisturbed.clone();
            let timing = &mut timings[disturbed];
            if disturbed < 2 {
                timing.kernel = timing.copy_engine * 1.2;
            } else {
                timing.copy_engine = timing.kernel * 1.1;
            }
            assert_eq!(copy_engine_from(&timings), expected, "{disturbed}");
        }
    }

    #[test]
    fn a_size_at_which_the_kernel_is_hardly_ahead_stays_with_it() {
        let hardly = timings(|bytes| match bytes {
            4096.0 => (1.05 * 1.000_1, 1.0),
            _ => (1.0, 1000.0),
        });
        assert_eq!(copy_engine_from(&hardly), Some(4097));
    }

    #[test]
    fn nothing_measured_says_nothing() {
        assert_eq!(copy_engine_from(&[]), None);
        for (copy_engine, kernel) in [(0.0, 0.0), (f64::NAN, 1.0), (1.0, 0.0)] {
            let timing = Timing {
                piece_bytes: 4096,
                copy_engine,
                kernel,
            };
            assert_eq!(copy_engine_from(&[timing]), None, "{timing:?}");
        }
    }

    proptest! {
        #[test]
        fn it_always_lies_within_what_was_measured_and_loses_least(
            times in proptest::collection::vec((1e-6..1e-3_f64, 1e-6..1e-3_f64), 7)
        ) {
            let measured: Vec<Timing> = timings(|bytes| {
                let index = (bytes as usize >> 12).ilog2() as usize;
                times[index]
            });
            let from = copy_engine_from(&measured).unwrap();
            prop_assert!((4 << 10..=(256 << 10) + 1).contains(&from));
            let loss = |from: usize| -> f64 {
                measured
                    .iter()
                    .map(|timing| {
                        let it = timing.for_kernel();
                        if timing.piece_bytes < from { (-it).max(0.0) } else { it.max(0.0) }
                    })
                    .sum()
            };
            for other in [0, 5 << 10, 9 << 10, 17 << 10, 33 << 10, 65 << 10, 129 << 10, 1 << 20] {
                prop_assert!(loss(from) <= loss(other) + 1e-9);
            }
        }
    }
}
