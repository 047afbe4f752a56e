//! A node loads or recomputes as an engine does: by what its own steps and loads took.

use std::path::Path;

use penstock_advisor::LoadPolicy;
use penstock_sim::{
    EngineSettings, Fleet, Outcome, PolicyKind, ReadOptions, Routing, Speed, Trace, parse,
};

const GIB: u64 = 1 << 30;
/// Tokens of a prompt: three blocks of 512.
const TOKENS: u64 = 1536;
/// Seconds to compute one.
const RECOMPUTE: f64 = 1.536;

/// A trace of one prompt, asked so many times, five seconds apart.
fn again(count: u64) -> Trace {
    let lines = (0..count).map(|number| {
        let at = number * 5000;
        format!(r#"{{"timestamp": {at}, "input_length": {TOKENS}, "hash_ids": [1, 2, 3]}}"#)
    });
    let text: Vec<String> = lines.collect();
    let options = ReadOptions::default();
    parse(
        text.join("\n").as_bytes(),
        Path::new("made.jsonl"),
        &options,
    )
    .unwrap()
    .trace
}

/// One node over a pool from which the prompt takes so many seconds; a block is half a GiB.
fn fleet(load_seconds: f64) -> Fleet {
    let engine = EngineSettings {
        load_policy: LoadPolicy::Auto,
        tokens_per_step: 8192,
        get_lanes: 2,
        lookup_timeout: 0.25,
        load_timeout: 0.5,
        load_floor: 64.0 * 1024.0 * 1024.0,
    };
    let speed = |bandwidth| Speed {
        bandwidth,
        latency: 0.001,
    };
    Fleet {
        nodes: 1,
        host_bytes: 0,
        pool_bytes: 100 * GIB,
        bytes_per_token: 1 << 20,
        policy: PolicyKind::Prefix,
        pool_policy: PolicyKind::Lru,
        routing: Routing::Random,
        prefill_speed: 1000.0,
        engine,
        host: speed(20.0 * GIB as f64),
        pool: speed(1.5 * GIB as f64 / load_seconds),
        windows: 1,
    }
}

fn replay(fleet: &Fleet, trace: &Trace) -> Outcome {
    fleet.replay(trace, |_| true).unwrap().unwrap()
}

#[test]
fn a_pool_that_is_too_slow_costs_its_first_tries_alone() {
    for load_seconds in [2.0, 5.0, 20.0, 200.0] {
        let found = replay(&fleet(load_seconds), &again(100));
        let ttft: Vec<f64> = found.ttft.iter().map(|&seconds| seconds.into()).collect();
        assert!(ttft[94] <= 1.03 * RECOMPUTE, "{load_seconds}: {ttft:?}");
        assert!(ttft[99] <= 1.3 * RECOMPUTE, "{load_seconds}: {ttft:?}");
        let loaded = found.total.pool_blocks as f64 / found.total.blocks as f64;
        assert!(loaded < 0.05, "{load_seconds}: {loaded}");
        // Nobody loads, but whether that pays is measured; nothing comes below the load floor.
        let measured = found.total.read_bytes - found.total.pool_blocks * GIB / 2;
        assert_eq!(measured > 0, load_seconds < 24.0);
    }
}

#[test]
fn a_pool_that_is_fast_enough_is_loaded_from() {
    let found = replay(&fleet(0.2), &again(100));
    assert_eq!(found.total.pool_blocks, 99 * 3);
    assert_eq!(found.total.read_bytes, 99 * 3 * GIB / 2);
    // A look-up, a load, and the last token.
    let expected = 0.001 + 0.201 + 0.001;
    assert!((f64::from(found.ttft[50]) - expected).abs() < 1e-3);
}

#[test]
fn where_loads_pay_but_not_clearly_a_prompt_is_recomputed_ever_more_rarely_to_know() {
    let found = replay(&fleet(1.2), &again(100));
    // The first is given up before anything of it comes, and the next meets a pool in doubt. Then
    // come a prompt after 4, 8, 16 and 32 loads in a row.
    assert_eq!(found.total.pool_blocks, (99 - 2 - 4) * 3);
    assert_eq!(
        replay(&fleet(0.5), &again(100)).total.pool_blocks,
        99 * 3,
        "clearly worth it"
    );
}

#[test]
fn a_look_up_is_not_waited_for_where_it_takes_too_long() {
    // A short prompt, a far pool.
    let mut far = fleet(0.001);
    far.prefill_speed = 20_000.0;
    far.pool.latency = 0.1;
    let found = replay(&far, &again(50));
    let recompute = RECOMPUTE / 20.0;
    assert!(f64::from(found.ttft[45]) <= 1.03 * recompute);
    // Beyond the time that a look-up has, nothing is found.
    far.pool.latency = 0.3;
    let found = replay(&far, &again(50));
    assert_eq!((found.total.pool_blocks, found.total.read_bytes), (0, 0));
    assert!(f64::from(found.ttft[48]) <= 1.03 * recompute);
}

#[test]
fn host_memory_is_loaded_from_where_the_pool_is_not_worth_it() {
    let mut slow = fleet(50.0);
    slow.host_bytes = 2 * slow.bytes_per_token * 512;
    let found = replay(&slow, &again(60));
    assert_eq!(found.total.host_blocks, 59 * 2);
    assert!(found.total.pool_blocks <= 2);
}

#[test]
fn always_and_never_are_what_they_say() {
    let trace = again(40);
    let with = |load_policy, load_seconds| {
        let mut fleet = fleet(load_seconds);
        fleet.engine.load_policy = load_policy;
        replay(&fleet, &trace).total
    };
    assert_eq!(with(LoadPolicy::Always, 5.0).pool_blocks, 39 * 3);
    let never = with(LoadPolicy::Never, 0.01);
    assert_eq!((never.pool_blocks, never.read_bytes), (0, 0));
    assert_eq!(never.computed_tokens, 40 * TOKENS);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let trace = again(2);
    let mut odd = fleet(1.0);
    odd.engine.tokens_per_step = 0;
    let error = odd.replay(&trace, |_| true).unwrap_err().to_string();
    assert!(error.contains("tokens per step"), "{error}");
    odd = fleet(1.0);
    odd.engine.load_timeout = f64::NAN;
    let error = odd.replay(&trace, |_| true).unwrap_err().to_string();
    assert!(error.contains("a load timeout of NaN s"), "{error}");
}
