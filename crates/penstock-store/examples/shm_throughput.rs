//! Throughput of a pool in shared memory against memcpy of the same bytes in the same pass.
//!
//! `shm_throughput shm://NAME?size=200MiB [--sizes 65536,1048576] [--total 67108864] [--passes 15]
//! [--json]`: for each value size, the medians of the passes in GiB/s of one thread, and of a
//! look-up of 1,000 keys; with `--json` as an object a line. Memory that no process has touched
//! before is slower, so all passes but the first few should find the pool filled once: choose it
//! small. What is got is compared with what was put. The keys are removed at the end.

use std::io::{IoSlice, IoSliceMut};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use penstock_contract::{GetOutcome, Key, Namespace, PutOutcome, Store};
use penstock_layout::Span;
use penstock_store::{OpenOptions, open};

const LOOKED_UP: usize = 1000;

struct Plan {
    url: String,
    sizes: Vec<usize>,
    total: usize,
    passes: usize,
    as_json: bool,
}

fn plan() -> Option<Plan> {
    let mut plan = Plan {
        as_json: false,
        url: String::new(),
        sizes: vec![64 << 10, 256 << 10, 1 << 20, 4 << 20],
        total: 64 << 20,
        passes: 15,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut numbers = || -> Option<Vec<usize>> {
            arguments
                .next()?
                .split(',')
                .map(|number| number.parse().ok())
                .collect()
        };
        match argument.as_str() {
            "--sizes" => plan.sizes = numbers()?,
            "--total" => plan.total = numbers()?[0],
            "--passes" => plan.passes = numbers()?[0],
            "--json" => plan.as_json = true,
            url if url.contains("://") => plan.url = argument,
            _ => return None,
        }
    }
    (!plan.url.is_empty()).then_some(plan)
}

fn key(index: usize) -> Key {
    let span = Span::new(0..1, 0..1).expect("not empty");
    let index = index.to_le_bytes();
    Key::new(Namespace(*b"shm_throughput\0\0"), &index, span).expect("short enough")
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// How many times as fast the second is, pass by pass.
fn ratio(of: &[f64], to: &[f64]) -> f64 {
    median(
        &mut of
            .iter()
            .zip(to)
            .map(|(of, to)| of / to)
            .collect::<Vec<_>>(),
    )
}

/// Seconds of each pass: memcpy, puts and gets of so many bytes, taking turns.
fn measure(store: &dyn Store, size: usize, plan: &Plan, source: &[u8]) -> [Vec<f64>; 3] {
    let keys: Vec<Key> = (0..source.len() / size).map(key).collect();
    let mut into = vec![0; source.len()];
    let mut seconds = [const { Vec::new() }; 3];
    for pass in 0..=plan.passes {
        // Before each of the three alike: it leaves the caches full of what must be written back.
        into.fill(1);
        let copied = timed(|| {
            for (to, from) in into.chunks_mut(size).zip(source.chunks(size)) {
                to.copy_from_slice(from);
                std::hint::black_box(to);
            }
        });
        into.fill(2);
        let put = timed(|| {
            for (key, value) in keys.iter().zip(source.chunks(size)) {
                let outcome = store.put(key, &[IoSlice::new(value)], deadline());
                assert_eq!(outcome.expect("put"), PutOutcome::Stored);
            }
        });
        into.fill(3);
        let got = timed(|| {
            for (key, value) in keys.iter().zip(into.chunks_mut(size)) {
                let outcome = store.get(key, &mut [IoSliceMut::new(value)], deadline());
                assert_eq!(outcome.expect("got"), GetOutcome::Hit(size as u64));
            }
        });
        assert!(into == source, "what came back is something else");
        store.remove(&keys, deadline()).expect("removed");
        if pass > 0 {
            for (seconds, now) in seconds.iter_mut().zip([copied, put, got]) {
                seconds.push(now);
            }
        }
    }
    seconds
}

fn look_up(store: &dyn Store, passes: usize) -> f64 {
    let keys: Vec<Key> = (0..2 * LOOKED_UP).map(key).collect();
    for key in keys.iter().step_by(2) {
        let outcome = store.put(key, &[IoSlice::new(b"value")], deadline());
        outcome.expect("put");
    }
    let mut seconds: Vec<f64> = (0..passes * 10)
        .map(|_| {
            timed(|| {
                let found = store.contains(&keys[..LOOKED_UP], deadline());
                let found = found.expect("looked up").into_iter().filter(|&f| f);
                assert!(found.count() > LOOKED_UP / 3);
            })
        })
        .collect();
    store.remove(&keys, deadline()).expect("removed");
    median(&mut seconds)
}

fn main() -> ExitCode {
    let Some(plan) = plan() else {
        eprintln!("shm_throughput URL [--sizes N,...] [--total BYTES] [--passes N] [--json]");
        return ExitCode::FAILURE;
    };
    let store = open(&plan.url, &OpenOptions::default()).expect("a pool");
    let mut state = 1_u64;
    let source: Vec<u8> = (0..plan.total)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    if !plan.as_json {
        println!("    bytes  memcpy     put     get  GiB/s   put/memcpy  get/memcpy");
    }
    for &size in &plan.sizes {
        let source = &source[..plan.total / size * size];
        let gib = source.len() as f64 / f64::from(1 << 30);
        let seconds = measure(&*store, size, &plan, source);
        let [put_to_memcpy, get_to_memcpy] = [1, 2].map(|way| ratio(&seconds[0], &seconds[way]));
        let [copied, put, got] = seconds.map(|mut seconds| gib / median(&mut seconds));
        if plan.as_json {
            println!(
                "{{\"bytes\": {size}, \"memcpy\": {copied:.4}, \"put\": {put:.4}, \
                 \"get\": {got:.4}, \"put_to_memcpy\": {put_to_memcpy:.4}, \
                 \"get_to_memcpy\": {get_to_memcpy:.4}}}"
            );
        } else {
            println!(
                "{size:>9}  {copied:6.2}  {put:6.2}  {got:6.2}          \
                 {put_to_memcpy:10.2}  {get_to_memcpy:10.2}"
            );
        }
    }
    let seconds = look_up(&*store, plan.passes);
    let milliseconds = seconds * 1e3;
    if plan.as_json {
        println!("{{\"keys\": {LOOKED_UP}, \"lookup_ms\": {milliseconds:.4}}}");
    } else {
        println!("look-up of {LOOKED_UP} keys: {milliseconds:.3} ms");
    }
    ExitCode::SUCCESS
}
