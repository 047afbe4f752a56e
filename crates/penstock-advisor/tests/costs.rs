//! What loads and recomputation are expected to take, and the choice between them.

use penstock_advisor::{Choice, Fit, Prefill, Tier, attended, choose, patience};
use proptest::collection::vec;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn near(found: Option<f64>, expected: f64, share: f64) {
    let found = found.expect("a time");
    assert!(
        (found - expected).abs() <= share * expected,
        "{found}, not {expected}"
    );
}

/// What is known of an engine that has computed some prompts of one step.
fn prefill(per_token: f64, per_pair: f64) -> Prefill {
    let mut made = Prefill::new(2048);
    for tokens in [100, 500, 1000, 1500, 2000] {
        let pairs = attended(0, tokens);
        let seconds = tokens as f64 * per_token + pairs as f64 * per_pair;
        made.observe(tokens, pairs, seconds);
    }
    made
}

#[test]
fn pairs_are_counted_one_by_one() {
    assert_eq!(attended(5, 9), (6..10).sum());
    assert_eq!(attended(9, 5), 0);
}

proptest! {
    #[test]
    fn a_fit_finds_what_made_the_times(
        step in 0.001..1.0,
        token in 1e-6..1e-3,
        pair in 1e-9..1e-7,
    ) {
        let features = |tokens: u64| [1.0, tokens as f64, attended(0, tokens) as f64];
        let seconds = |tokens| {
            let [_, tokens, pairs] = features(tokens);
            step + token * tokens + pair * pairs
        };
        let mut fit = Fit::new(0.9);
        for tokens in [100, 700, 1500, 2000, 300, 1100, 50, 1900] {
            fit.observe(features(tokens), seconds(tokens), tokens as f64);
        }
        for tokens in [200, 1000, 1800] {
            near(fit.predict(features(tokens)), seconds(tokens), 0.05);
        }
    }

    #[test]
    fn no_coefficient_is_negative_whatever_is_observed(
        seen in vec((0.0..1e12, 0.0..1e12, any::<f64>(), 1.0..1e12), 1..40),
    ) {
        let mut fit = Fit::new(0.5);
        for (a, b, seconds, size) in seen {
            fit.observe([a, b, 1.0], seconds, size);
            for c in fit.coefficients().into_iter().flatten() {
                prop_assert!(c.is_finite() && *c >= 0.0);
            }
        }
    }

    #[test]
    fn no_time_is_negative_and_more_bytes_take_no_less(
        loads in vec((0..1_000_000_000u64, 1e-6..100.0), 1..50),
    ) {
        let mut tier = Tier::default();
        for (bytes, seconds) in loads {
            tier.observe(bytes, seconds);
        }
        let times = [0, 1000, 1_000_000, 1_000_000_000].map(|n| tier.seconds(n).unwrap());
        prop_assert!(times[0] >= 0.0);
        prop_assert!(times.is_sorted());
    }

    /// Against trying every block.
    #[test]
    fn no_end_in_between_is_better(
        per_token in 1e-5..1e-2,
        per_pair in 0.0..1e-6,
        latency in 0.0..1.0,
        per_loaded in 1e-6..1e-2,
        blocks in 1..=60u64,
    ) {
        let (prompt, compute) = (blocks * 16 + 5, prefill(per_token, per_pair));
        let load = |end: u64| if end > 0 { latency + per_loaded * end as f64 } else { 0.0 };
        let total = |end| compute.seconds(end, prompt).unwrap() + load(end);
        let end = blocks * 16;
        let chosen = choose(0, [(end, Some(load(end)))], prompt, &compute).end;
        let best = (0..=blocks).map(|n| total(n * 16)).fold(f64::INFINITY, f64::min);
        prop_assert!(total(chosen) <= best * (1.0 + 1e-3));
    }

    #[test]
    fn what_is_chosen_is_never_expected_to_take_longer_than_recomputing(
        per_token in 1e-6..1e-2,
        first in 0..500u64,
        tiers in vec((1..500u64, prop_oneof![0.0..10.0, Just(f64::INFINITY)]), 1..4),
    ) {
        let compute = prefill(per_token, 0.0);
        let mut end = first;
        let ends = tiers.into_iter().map(|(tokens, load)| {
            end += tokens;
            (end, Some(load))
        });
        let ends: Vec<_> = ends.collect();
        let choice = choose(first, ends, 3000, &compute);
        let recompute = choice.recompute.unwrap();
        let total = choice.load.unwrap_or(0.0) + compute.seconds(choice.end, 3000).unwrap();
        prop_assert!(total <= recompute);
        prop_assert_eq!(choice.load.is_none(), choice.end == first);
    }
}

#[test]
fn a_fit_to_one_kind_of_step_predicts_that_kind() {
    let kind = [1.0, 512.0, attended(0, 512) as f64];
    let mut fit = Fit::new(0.9);
    for _ in 0..20 {
        fit.observe(kind, 0.25, 512.0);
    }
    near(fit.predict(kind), 0.25, 1e-3);
}

#[test]
fn a_tier_forgets() {
    let mut tier = Tier::default();
    for seconds in [[0.001; 30].as_slice(), &[0.5; 8]].concat() {
        tier.observe(MIB, seconds);
    }
    near(tier.seconds(MIB), 0.5, 0.1);
}

#[test]
fn loads_under_way_come_first() {
    let mut tier = Tier::default();
    for size in [MIB, 4 * MIB, 16 * MIB] {
        tier.observe(size, 0.01 + size as f64 / (100 * MIB) as f64);
    }
    near(tier.seconds(MIB), 0.02, 0.05);
    assert_eq!(tier.begin(50 * MIB), 50 * MIB);
    near(tier.seconds(MIB), 0.52, 0.05);
    tier.end(50 * MIB);
    near(tier.seconds(MIB), 0.02, 0.05);
}

#[test]
fn what_is_doubted_is_not_loaded() {
    let mut tier = Tier::default();
    tier.observe(MIB, 0.01);
    tier.doubt();
    assert_eq!(tier.seconds(MIB), Some(f64::INFINITY));
    let choice = choose(0, [(512, tier.seconds(MIB))], 600, &prefill(0.001, 0.0));
    assert_eq!(choice.end, 0);
    tier.observe(MIB, 0.02);
    near(tier.seconds(MIB), 0.02, 1e-6);
}

#[test]
fn a_tier_that_became_far_faster_is_known_at_once() {
    let mut tier = Tier::default();
    for _ in 0..30 {
        tier.observe(8 * MIB, 8.0);
    }
    tier.observe(MIB, 0.01);
    near(tier.seconds(8 * MIB), 0.08, 1e-6);
}

/// A probe before and one of half the size after took as long: nothing would follow of more.
#[test]
fn a_tier_that_became_slower_is_not_taken_for_one_with_latency() {
    let mut tier = Tier::default();
    for _ in 0..3 {
        tier.observe(4 * MIB, 0.1);
        tier.observe(8 * MIB, 0.2);
    }
    tier.observe(4 * MIB, 0.2);
    near(tier.seconds(24 * MIB), 1.2, 1e-6);
}

#[test]
fn times_that_vary_are_no_change() {
    let mut tier = Tier::default();
    for number in 0..200 {
        tier.observe(8 * MIB, if number * 7 % 13 % 2 == 0 { 0.1 } else { 0.3 });
    }
    let before = tier.seconds(8 * MIB).unwrap();
    tier.observe(8 * MIB, 0.4);
    near(tier.seconds(8 * MIB), (before + 0.4) / 2.0, 0.05);
}

#[test]
fn deviation_follows_the_errors() {
    let mut tier = Tier::default();
    for number in 0..200 {
        let error = if number * 7 % 13 % 2 == 0 {
            0.02
        } else {
            -0.02
        };
        tier.observe(MIB, 0.1 + error);
    }
    assert!((0.005..0.05).contains(&tier.deviation()));
}

#[test]
fn what_cannot_have_been_measured_teaches_nothing() {
    let mut tier = Tier::default();
    for seconds in [f64::NAN, f64::INFINITY, -1.0] {
        tier.observe(MIB, seconds);
    }
    assert_eq!((tier.seconds(MIB), tier.observed()), (None, 0));
}

#[test]
fn an_engine_that_has_warmed_up_is_believed_at_once() {
    let mut compute = Prefill::new(2048);
    for seconds in [10.0, 1.0] {
        compute.observe(1000, attended(0, 1000), seconds);
    }
    near(compute.seconds(0, 1000), 1.0, 1e-6);
}

#[test]
fn a_first_step_that_sets_things_up_keeps_nobody_from_loading() {
    // Of an engine that loads from its first request on only short steps are known.
    let mut prefill = Prefill::new(2048);
    prefill.observe(8, 14_372, 2.3);
    prefill.observe(8, 14_372, 0.023);
    prefill.observe(60, 232_230, 0.11);
    prefill.observe(60, 232_230, 0.10);
    // What takes a second to compute.
    assert_eq!(choose(0, [(1792, Some(0.006))], 1800, &prefill).end, 1792);
}

#[test]
fn what_is_saved_is_told_by_long_steps_alone() {
    let mut prefill = Prefill::new(2048);
    prefill.observe(8, attended(1792, 1800), 0.023);
    assert_eq!(prefill.saved_seconds(0, 1792, 1800), None);
    prefill.observe(1800, attended(0, 1800), 0.95);
    prefill.observe(8, attended(1792, 1800), 0.023);
    near(prefill.saved_seconds(0, 1792, 1800), 0.95, 0.02);
    near(prefill.saved_seconds(1792, 1792, 1800), 0.0, 1e-9);
}

#[test]
fn the_first_long_step_counts_for_savings_only_while_it_is_the_only_one() {
    let mut prefill = Prefill::new(8192);
    let pairs = attended(0, 1800);
    // It set something up, but not so much that all is forgotten for it.
    prefill.observe(1800, pairs, 1.7);
    near(prefill.saved_seconds(0, 1792, 1800), 1.7, 0.02);
    for _ in 0..3 {
        prefill.observe(1800, pairs, 0.95);
        near(prefill.saved_seconds(0, 1792, 1800), 0.95, 0.02);
    }
}

#[test]
fn what_is_not_known_is_found_out_by_loading() {
    assert_eq!(choose(0, [(512, None)], 600, &prefill(0.001, 0.0)).end, 512);
    let unknown = Prefill::new(2048);
    assert_eq!(choose(0, [(512, Some(99.0))], 600, &unknown).end, 512);
}

#[test]
fn a_slow_tier_is_left_out_and_a_near_one_is_not() {
    let compute = prefill(0.001, 0.0);
    let chosen = |first, near, far| {
        let ends = [(512, Some(near)), (1024, Some(far))];
        choose(first, ends, 1100, &compute).end
    };
    assert_eq!(chosen(0, 0.01, 2.0), 512);
    assert_eq!(chosen(0, 0.01, 0.1), 1024);
    assert_eq!(chosen(256, 0.5, 2.0), 256);
}

fn choice(load: Option<f64>, recompute: Option<f64>) -> Choice {
    let end = 100;
    Choice {
        end,
        load,
        recompute,
    }
}

#[test]
fn patience_is_for_the_first_of_a_load() {
    assert_eq!(patience(&choice(None, None), None, 0.0), None);
    assert_eq!(patience(&choice(Some(0.2), None), Some(0.1), 0.0), None);
    near(patience(&choice(None, Some(4.0)), None, 0.0), 0.5, 1e-6);
    let slow = choice(Some(2.8), Some(3.0));
    let sure = 0.1 + 0.03 * 3.0;
    near(patience(&slow, Some(0.1), 0.0), sure, 1e-6);
    near(patience(&slow, Some(0.1), 0.01), sure + 0.04, 1e-6);
    near(patience(&slow, Some(0.1), 99.0), sure + 0.75, 1e-6);
}

#[test]
fn a_load_that_saves_much_is_worth_waiting_for() {
    let much = choice(Some(0.2), Some(3.0));
    near(patience(&much, Some(0.1), 0.0), 0.1 + 2.8 / 8.0, 1e-6);
    // No less than one of which nothing is known, nor than its own unsteadiness asks for.
    let all = patience(&choice(Some(0.0), Some(3.0)), Some(0.0), 0.0);
    assert_eq!(all, patience(&choice(None, Some(3.0)), None, 0.0));
    near(patience(&much, Some(0.1), 0.1), 0.1 + 0.09 + 0.4, 1e-6);
}
