//! Least squares that forget old observations.

use std::sync::OnceLock;

/// Coefficients are preferred over earlier ones only if they explain this share more of the
/// observations' squares: more than rounding does.
const EXPLAINS: f64 = 1e-7;

/// Keeps fits to observations that are all alike from being ill-conditioned.
const RIDGE: f64 = 1e-9;

/// A system counts as singular if less than this is left of a row, with the diagonal scaled to
/// ones.
const SINGULAR: f64 = 1e-12;

/// The longest time in seconds that can have been measured. A time that is longer, or negative, was
/// not measured.
const LONGEST: f64 = 1e9;

/// Whether a step or a load can have taken so many seconds.
pub(crate) fn is_measured(seconds: f64) -> bool {
    (0.0..=LONGEST).contains(&seconds)
}

/// A weighted least-squares fit of non-negative coefficients to up to three features.
///
/// The fit tries all subsets of the features: at most seven, for three features. Among the subsets
/// without a negative coefficient, it takes the one that fits best. So observations that are all
/// alike still predict themselves. Where several subsets fit equally well, earlier features explain
/// more.
///
/// ```
/// use penstock_advisor::Fit;
///
/// let mut fit = Fit::new(0.9);
/// assert_eq!(fit.predict([100.0, 1.0]), None);
/// for tokens in [100.0, 300.0, 500.0] {
///     fit.observe([tokens, 1.0], 0.002 * tokens + 0.1, tokens);
/// }
/// let expected = fit.predict([1000.0, 1.0]).unwrap();
/// assert!((expected - 2.1).abs() < 1e-6);
/// ```
#[derive(Clone, Debug)]
pub struct Fit<const N: usize> {
    decay: f64,
    products: [[f64; N]; N],
    targets: [f64; N],
    square: f64,
    is_empty: bool,
    /// Found when they are first asked for.
    coefficients: OnceLock<[f64; N]>,
}

impl<const N: usize> Fit<N> {
    /// A fit that weighs an observation `decay` times as much as the one after it.
    pub fn new(decay: f64) -> Self {
        const {
            assert!(
                0 < N && N <= 3,
                "subsets are tried in the order of up to three"
            )
        };
        Self {
            decay,
            products: [[0.0; N]; N],
            targets: [0.0; N],
            square: 0.0,
            is_empty: true,
            coefficients: OnceLock::new(),
        }
    }

    /// The coefficients: seconds for one unit of each feature. None before the first observation.
    pub fn coefficients(&self) -> Option<&[f64; N]> {
        (!self.is_empty).then(|| self.coefficients.get_or_init(|| self.solve()))
    }

    /// Takes in how long something with these features took. The error counts relative to `size`,
    /// which must be greater than zero, so that large observations do not drown out small ones. A
    /// time that cannot have been measured (negative, not finite, decades) is left out.
    pub fn observe(&mut self, features: [f64; N], seconds: f64, size: f64) {
        if !is_measured(seconds) {
            return;
        }
        let weight = 1.0 / (size * size);
        for (i, left) in features.iter().enumerate() {
            self.targets[i] = self.decay * self.targets[i] + weight * left * seconds;
            for (j, right) in features.iter().enumerate() {
                self.products[i][j] = self.decay * self.products[i][j] + weight * left * right;
            }
        }
        self.square = self.decay * self.square + weight * seconds * seconds;
        self.is_empty = false;
        self.coefficients = OnceLock::new();
    }

    /// Forgets all observations.
    pub fn forget(&mut self) {
        *self = Self::new(self.decay);
    }

    /// Seconds to expect; none before the first observation.
    pub fn predict(&self, features: [f64; N]) -> Option<f64> {
        let coefficients = self.coefficients()?;
        let terms = coefficients.iter().zip(&features);
        Some(terms.fold(0.0, |sum, (c, f)| sum + c * f))
    }

    fn solve(&self) -> [f64; N] {
        let system = Scaled::of(self);
        let (mut best, mut best_error) = ([0.0; N], self.square);
        for size in 1..=N {
            // With up to three features, rising numbers list the subsets of one size in the order
            // of their features.
            for subset in (1u32..1 << N).filter(|subset| subset.count_ones() as usize == size) {
                // Other features, or more of them, must explain something more. No error is below
                // zero.
                if best_error <= EXPLAINS * self.square {
                    return best;
                }
                let Some(solution) = system.solve_for(subset) else {
                    continue;
                };
                if solution.iter().any(|&c| c < 0.0) {
                    continue;
                }
                let explained = solution.iter().zip(&self.targets);
                let error = self.square - explained.fold(0.0, |sum, (c, t)| sum + c * t);
                if error < best_error - EXPLAINS * self.square {
                    (best, best_error) = (solution, error);
                }
            }
        }
        best
    }
}

/// The equations of a fit, scaled to ones on the diagonal, so that the same ridge suits tokens and
/// bytes.
struct Scaled<const N: usize> {
    scale: [f64; N],
    matrix: [[f64; N]; N],
    right: [f64; N],
}

impl<const N: usize> Scaled<N> {
    fn of(fit: &Fit<N>) -> Self {
        let scale: [f64; N] = std::array::from_fn(|i| fit.products[i][i].sqrt());
        let entry = |i: usize, j: usize| {
            let ridge = if i == j { RIDGE } else { 0.0 };
            fit.products[i][j] / (scale[i] * scale[j]) + ridge
        };
        Self {
            scale,
            matrix: std::array::from_fn(|i| std::array::from_fn(|j| entry(i, j))),
            right: std::array::from_fn(|i| fit.targets[i] / scale[i]),
        }
    }

    /// The coefficients of the features in `subset`; the others' are zero. None if the observations
    /// do not tell these features apart.
    fn solve_for(&self, subset: u32) -> Option<[f64; N]> {
        let mut chosen = [0; N];
        let mut count = 0;
        for feature in (0..N).filter(|feature| subset & (1 << feature) != 0) {
            chosen[count] = feature;
            count += 1;
        }
        let chosen = &chosen[..count];
        if chosen.iter().any(|&i| self.scale[i] <= 0.0) {
            return None;
        }
        let mut rows = [([0.0; N], 0.0); N];
        for (row, &i) in chosen.iter().enumerate() {
            for (column, &j) in chosen.iter().enumerate() {
                rows[row].0[column] = self.matrix[i][j];
            }
            rows[row].1 = self.right[i];
        }
        eliminate(&mut rows[..count])?;
        let mut solution = [0.0; N];
        for (row, &i) in chosen.iter().enumerate() {
            solution[i] = rows[row].1 / rows[row].0[row] / self.scale[i];
        }
        Some(solution)
    }
}

/// Brings a small system, its matrix and its right side, into diagonal form. None if it is
/// singular.
fn eliminate<const N: usize>(rows: &mut [([f64; N], f64)]) -> Option<()> {
    for i in 0..rows.len() {
        let mut pivot = i;
        for row in i + 1..rows.len() {
            if rows[row].0[i].abs() > rows[pivot].0[i].abs() {
                pivot = row;
            }
        }
        rows.swap(i, pivot);
        let (matrix, right) = rows[i];
        if matrix[i].abs() < SINGULAR {
            return None;
        }
        for (_, row) in rows.iter_mut().enumerate().filter(|(row, _)| *row != i) {
            let factor = row.0[i] / matrix[i];
            for (value, above) in row.0.iter_mut().zip(&matrix) {
                *value -= factor * above;
            }
            row.1 -= factor * right;
        }
    }
    Some(())
}
