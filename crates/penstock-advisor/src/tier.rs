//! How long loading from a tier takes.

use crate::fit::{Fit, is_measured};

/// Weight of a load's time, relative to the load after it: a network changes faster than a model.
const LOAD_DECAY: f64 = 0.5;

/// Bytes of a small load. For a smaller load, the error of the time counts as it is; for a larger
/// load, the error per byte.
const SMALL_LOAD: f64 = (1 << 20) as f64;

/// Weight of the newest load's error in the average error.
const DEVIATION_SHARE: f64 = 0.25;

/// A load that is so many times faster or slower than expected, and off by several times the
/// deviation, shows that what was known no longer holds.
const CHANGED: f64 = 1.5;

/// How long loads from one tier take, queueing included.
///
/// ```
/// use penstock_advisor::Tier;
///
/// let mut tier = Tier::default();
/// assert_eq!(tier.seconds(1 << 20), None);
/// tier.observe(1 << 20, 0.01);
/// assert!((tier.seconds(2 << 20).unwrap() - 0.02).abs() < 1e-6);
/// tier.doubt();
/// assert_eq!(tier.seconds(1 << 20), Some(f64::INFINITY));
/// ```
#[derive(Clone, Debug)]
pub struct Tier {
    fit: Fit<2>,
    /// How many loads the fit is made of.
    fitted: u32,
    queued: u64,
    observed: u32,
    is_doubted: bool,
    deviation: f64,
}

impl Default for Tier {
    fn default() -> Self {
        Self {
            fit: Fit::new(LOAD_DECAY),
            fitted: 0,
            queued: 0,
            observed: 0,
            is_doubted: false,
            deviation: 0.0,
        }
    }
}

impl Tier {
    /// Notes that a load of so many bytes begins. Returns the bytes under way, its own included;
    /// they come in the order in which their loads began.
    pub fn begin(&mut self, bytes: u64) -> u64 {
        self.queued = self.queued.saturating_add(bytes);
        self.queued
    }

    /// Notes that a load of so many bytes is over, whatever became of it.
    pub fn end(&mut self, bytes: u64) {
        self.queued = self.queued.saturating_sub(bytes);
    }

    /// Takes in that so many bytes took so long. Without any bytes, this is the time that each load
    /// takes at least.
    pub fn observe(&mut self, bytes: u64, seconds: f64) {
        if !is_measured(seconds) {
            return;
        }
        let features = features(bytes);
        if let Some(expected) = self.fit.predict(features) {
            if self.is_changed(expected, seconds) {
                // Together, the earlier loads and this one would look like a latency: loads of
                // other sizes would be expected to take as long as this one.
                self.forget();
                if seconds < expected {
                    // The tier may have recovered: its speed is measured at once.
                    self.observed = 0;
                }
            }
            self.deviation += DEVIATION_SHARE * ((seconds - expected).abs() - self.deviation);
        }
        self.fit
            .observe(features, seconds, features[0] + SMALL_LOAD);
        self.fitted = self.fitted.saturating_add(1);
        self.observed = self.observed.saturating_add(1);
        self.is_doubted = false;
    }

    fn is_changed(&self, expected: f64, seconds: f64) -> bool {
        // At least two loads must be known. After one alone, a latency may have been taken for
        // bandwidth.
        let is_near = self.fitted < 2 || (seconds - expected).abs() <= 4.0 * self.deviation;
        !is_near && !(expected / CHANGED..=expected * CHANGED).contains(&seconds)
    }

    fn forget(&mut self) {
        self.fit.forget();
        self.fitted = 0;
    }

    /// Forgets what is known, because it has proved wrong.
    pub fn doubt(&mut self) {
        self.forget();
        (self.observed, self.is_doubted, self.deviation) = (0, true, 0.0);
    }

    /// How many loads are known since the tier was last doubted.
    pub fn observed(&self) -> u32 {
        self.observed
    }

    /// How many seconds loads are off from their expected time, on average.
    pub fn deviation(&self) -> f64 {
        self.deviation
    }

    /// Time until a load of so many bytes ends, if it begins now, behind the loads under way. None
    /// if nothing is known yet; infinite if the tier is doubted and was not measured since.
    pub fn seconds(&self, bytes: u64) -> Option<f64> {
        if self.is_doubted {
            return Some(f64::INFINITY);
        }
        self.fit
            .predict(features(self.queued.saturating_add(bytes)))
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes, to estimate times with")]
fn features(bytes: u64) -> [f64; 2] {
    [bytes as f64, 1.0]
}
