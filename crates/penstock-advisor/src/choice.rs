//! The choice between loading and recomputing, and how long to wait for a load.

use crate::prefill::Prefill;

/// Share of the recomputation time by which a load may be late.
const SLACK: f64 = 0.03;

/// Seconds; threads are not woken much more exactly.
const LEAST_SLACK: f64 = 0.005;

/// Patience as a share. A load about which nothing is known gets this share of the recomputation
/// time. A load whose time is known may be late by at least this share of what it is expected to
/// save.
const FIRST_SHARE: f64 = 0.125;

/// What to do about a run of tokens that could be loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Load up to this token; the run's beginning if nothing is to be loaded.
    pub end: u64,
    /// Expected time of the load; none if it is not known.
    pub load: Option<f64>,
    /// Expected time to compute the rest of the prompt if nothing is loaded; none if it is not
    /// known.
    pub recompute: Option<f64>,
}

/// How much of a run of tokens to load, so that the prompt is computed soonest.
///
/// `ends` are the possible ends of a load, the nearest first, each with the expected time of a load
/// from `first` to that end. A load's time grows evenly with its length, and each further token
/// saves more than the one before (attention). So no end between the ends of two tiers is better
/// than both of them. If something is not known yet, loading is the way to find out.
///
/// ```
/// use penstock_advisor::{Prefill, choose};
///
/// let mut prefill = Prefill::new(1000);
/// prefill.observe(1000, 0, 1.0);
/// let two_tiers = [(400, Some(0.1)), (800, Some(0.7))];
/// assert_eq!(choose(0, two_tiers, 1000, &prefill).end, 400);
/// assert_eq!(choose(0, [(400, Some(0.5))], 1000, &prefill).end, 0);
/// ```
pub fn choose(
    first: u64,
    ends: impl IntoIterator<Item = (u64, Option<f64>)>,
    prompt: u64,
    prefill: &Prefill,
) -> Choice {
    let recompute = prefill.seconds(first, prompt);
    let nothing = Choice {
        end: first,
        load: None,
        recompute,
    };
    let (mut best, mut furthest) = (nothing, nothing);
    let mut least = recompute.unwrap_or_default();
    let mut is_known = recompute.is_some();
    for (end, load) in ends {
        furthest = Choice {
            end,
            load,
            recompute,
        };
        is_known &= load.is_some();
        let rest = prefill.seconds(end, prompt).unwrap_or_default();
        let total = load.unwrap_or_default() + rest;
        if total <= least {
            (best, least) = (furthest, total);
        }
    }
    if is_known { best } else { furthest }
}

/// How long to wait for the first bytes of a load before everything is recomputed. None if nothing
/// is known.
///
/// `first` is when the first bytes are expected, and `deviation` is how far off such expectations
/// are. As with TCP's retransmission timer (RFC 6298), four times the deviation is waited on top.
/// As bytes come, the engine gives the load more time in proportion. So the patience is what a load
/// costs that does not pay.
///
/// A load that saves much is worth waiting for, even if such loads were never late. Giving it up
/// loses what it saves. Waiting in vain costs a fraction of that, and only once, since the pool is
/// in doubt afterwards.
///
/// ```
/// use penstock_advisor::{Choice, patience};
///
/// let choice = |load| Choice { end: 100, load: Some(load), recompute: Some(2.0) };
/// let much = patience(&choice(0.5), Some(0.125), 0.01).unwrap();
/// assert!((much - 0.3125).abs() < 1e-9);
/// let little = patience(&choice(1.9), Some(0.125), 0.01).unwrap();
/// assert!((little - 0.225).abs() < 1e-9);
/// ```
pub fn patience(choice: &Choice, first: Option<f64>, deviation: f64) -> Option<f64> {
    let recompute = choice.recompute?;
    let Some(first) = first else {
        return Some((FIRST_SHARE * recompute).max(LEAST_SLACK));
    };
    let saved = recompute - choice.load.unwrap_or_default();
    let late = (SLACK * recompute).max(LEAST_SLACK) + (4.0 * deviation).min(recompute / 4.0);
    Some(first + late.max(FIRST_SHARE * saved))
}
