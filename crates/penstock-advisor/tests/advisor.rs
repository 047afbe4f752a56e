//! What holds of an advisor whatever it is told. What it makes of networks is shown in Python, on
//! the same code: `tests/connector/test_advisor.py`.

use penstock_advisor::{Advisor, LoadPolicy, Reach, Transfer};
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Call {
    Step {
        tokens: u64,
        seconds: f64,
    },
    Load {
        bytes: (u64, u64),
        seconds: f64,
        missing: u64,
        is_probe: bool,
    },
    Ask {
        reach: Reach,
        latency: Option<f64>,
    },
}

fn seconds() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.0..20.0, 1 => any::<f64>()]
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0..1u64 << 30, any::<u64>()]
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let step = (0..5000u64, seconds()).prop_map(|(tokens, seconds)| Call::Step { tokens, seconds });
    let load = ((bytes(), bytes()), seconds(), bytes(), any::<bool>()).prop_map(
        |(bytes, seconds, missing, is_probe)| Call::Load {
            bytes,
            seconds,
            missing,
            is_probe,
        },
    );
    let latency = proptest::option::of(prop_oneof![0.0..1.0, Just(f64::INFINITY)]);
    let ask = (1..1900u64, bytes(), bytes(), latency).prop_map(
        |(end, host_bytes, pool_bytes, latency)| Call::Ask {
            reach: Reach {
                end,
                host_bytes,
                pool_bytes,
            },
            latency,
        },
    );
    vec(prop_oneof![step, load, ask], 1..60)
}

proptest! {
    #[test]
    fn what_is_answered_is_a_time_and_no_worse_than_recomputing(calls in calls()) {
        let (mut advisor, mut now) = (Advisor::new(2048, 2), 0.0);
        for (number, call) in (0..).zip(calls) {
            now += 1.0;
            match call {
                Call::Step { tokens, seconds } => {
                    advisor.on_step(Some(now), number, tokens, tokens * tokens);
                    advisor.on_output(now + seconds, &[number]);
                }
                Call::Load { bytes: (host_bytes, pool_bytes), seconds, missing, is_probe } => {
                    let patience = (missing % 2 == 0).then_some(1.0);
                    let load = Transfer { host_bytes, pool_bytes, patience, is_probe };
                    advisor.on_begin(now, number, load);
                    let came = advisor.on_end(number, seconds, missing);
                    prop_assert!(came.is_none() || is_probe);
                }
                Call::Ask { reach, latency } => {
                    advisor.awaits_lookup(0, &reach, 2000, latency, LoadPolicy::Auto);
                    let choice = advisor.advise(0, &[reach], 2000, LoadPolicy::Auto, true);
                    prop_assert!(choice.end == 0 || choice.end == reach.end);
                    if let (Some(load), Some(recompute)) = (choice.load, choice.recompute) {
                        prop_assert!(recompute.is_finite() && (0.0..=recompute).contains(&load));
                    }
                    let patience = advisor.patience(&choice, reach.host_bytes, reach.pool_bytes, 9);
                    prop_assert!(patience.is_none_or(|most| most.is_finite() && most > 0.0));
                    advisor.wants_probe(now, 0, &reach, 2000, (1 << 20, 1));
                }
            }
        }
    }
}

#[test]
fn what_is_over_twice_or_never_began_teaches_nothing() {
    let mut advisor = Advisor::new(2048, 2);
    advisor.on_output(1.0, &[7]);
    assert_eq!(advisor.on_end(7, 1.0, 0), None);
    let load = Transfer {
        pool_bytes: 1 << 20,
        ..Transfer::default()
    };
    advisor.on_begin(2.0, 8, load);
    for seconds in [0.5, 0.001] {
        advisor.on_end(8, seconds, 0);
    }
    let reach = Reach {
        end: 100,
        host_bytes: 0,
        pool_bytes: 1 << 20,
    };
    let expected = advisor.load_seconds(&reach).unwrap();
    assert!((expected - 0.5).abs() < 1e-6);
}

#[test]
fn of_a_probe_it_is_told_what_came() {
    let mut advisor = Advisor::new(2048, 2);
    let probe = Transfer {
        pool_bytes: 5,
        is_probe: true,
        ..Transfer::default()
    };
    for (number, (missing, came)) in (0..).zip([(0, 5), (2, 3), (5, 0)]) {
        advisor.on_begin(0.0, number, probe);
        assert_eq!(advisor.on_end(number, 0.1, missing), Some(came));
    }
}
