//! Throughput of puts and gets on a Valkey or Redis server that is already running.
//!
//! `resp_throughput URL... [--threads 1,2,4] [--sizes 65536,1048576] [--batch 8] [--total 67108864]
//! [--passes 7]`: for each URL, thread count and value size, the median of the passes in MiB/s.
//! What is got is compared with what was put. The keys are removed at the end.

use std::io::{IoSlice, IoSliceMut};
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use penstock_contract::{GetOutcome, GetRequest, Key, Namespace, PutRequest, Store};
use penstock_layout::Span;
use penstock_store::{OpenOptions, open};

struct Plan {
    urls: Vec<String>,
    threads: Vec<usize>,
    sizes: Vec<usize>,
    batch: usize,
    total: usize,
    passes: usize,
}

fn plan() -> Option<Plan> {
    let mut plan = Plan {
        urls: Vec::new(),
        threads: vec![1, 2, 4],
        sizes: vec![64 << 10, 256 << 10, 1 << 20, 4 << 20],
        batch: 16,
        total: 64 << 20,
        passes: 7,
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
            "--threads" => plan.threads = numbers()?,
            "--sizes" => plan.sizes = numbers()?,
            "--batch" => plan.batch = numbers()?[0],
            "--total" => plan.total = numbers()?[0],
            "--passes" => plan.passes = numbers()?[0],
            url if url.contains("://") => plan.urls.push(argument),
            _ => return None,
        }
    }
    (!plan.urls.is_empty()).then_some(plan)
}

fn key(index: usize) -> Key {
    let span = Span::new(0..1, 0..1).expect("not empty");
    Key::new(Namespace(*b"resp_throughput\0"), &index.to_le_bytes(), span).expect("short enough")
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn put_all(store: &dyn Store, keys: &[Key], value: &[u8], batch: usize) {
    let slices = [IoSlice::new(value)];
    for keys in keys.chunks(batch) {
        let mut requests: Vec<_> = keys
            .iter()
            .map(|key| PutRequest::new(*key, &slices))
            .collect();
        store.put_many(&mut requests, deadline());
        for request in requests {
            request.outcome.expect("filled in").expect("put");
        }
    }
}

fn get_all(store: &dyn Store, keys: &[Key], buffers: &mut [Vec<u8>]) {
    for keys in keys.chunks(buffers.len()) {
        let mut slices: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| [IoSliceMut::new(buffer)])
            .collect();
        let mut requests: Vec<_> = keys
            .iter()
            .zip(&mut slices)
            .map(|(key, into)| GetRequest::new(*key, into))
            .collect();
        store.get_many(&mut requests, deadline());
        for request in requests {
            let outcome = request.outcome.expect("filled in").expect("get");
            assert!(matches!(outcome, GetOutcome::Hit(_)), "{outcome:?}");
        }
    }
}

/// MiB/s of one pass of puts and one of gets, from the first thread's start to the last one's end.
fn pass(store: &dyn Store, plan: &Plan, threads: usize, size: usize) -> (f64, f64) {
    let count = (plan.total / size / threads).max(1);
    let barrier = Barrier::new(threads);
    let run = |thread: usize| {
        let keys: Vec<_> = (0..count).map(|i| key(thread * count + i)).collect();
        let value: Vec<u8> = (0..size).map(|i| (i / 7 + thread) as u8).collect();
        let mut buffers = vec![vec![1; size]; plan.batch];
        barrier.wait();
        let start = Instant::now();
        put_all(store, &keys, &value, plan.batch);
        let put = Instant::now();
        barrier.wait();
        let middle = Instant::now();
        get_all(store, &keys, &mut buffers);
        let got = Instant::now();
        let filled = plan.batch.min(count);
        assert!(
            buffers[..filled].iter().all(|buffer| *buffer == value),
            "wrong bytes"
        );
        [start, put, middle, got]
    };
    let times: Vec<[Instant; 4]> = std::thread::scope(|scope| {
        let run = &run;
        let running: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || run(thread)))
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a pass"))
            .collect()
    });
    let mib = (count * threads * size) as f64 / f64::from(1 << 20);
    let rate = |from: usize, to: usize| {
        let start = times
            .iter()
            .map(|times| times[from])
            .min()
            .expect("a thread");
        let end = times.iter().map(|times| times[to]).max().expect("a thread");
        mib / (end - start).as_secs_f64()
    };
    (rate(0, 1), rate(2, 3))
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn main() -> ExitCode {
    let Some(plan) = plan() else {
        eprintln!(
            "usage: resp_throughput URL... [--threads N,N] [--sizes BYTES,BYTES] [--batch N] \
             [--total BYTES] [--passes N]"
        );
        return ExitCode::FAILURE;
    };
    println!(
        "{:<28} {:>7} {:>9} {:>9} {:>9}",
        "store", "threads", "bytes", "put", "get"
    );
    for url in &plan.urls {
        let store = match open(url, &OpenOptions::default()) {
            Ok(store) => store,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        };
        for &threads in &plan.threads {
            for &size in &plan.sizes {
                let (puts, gets) = (0..plan.passes)
                    .map(|_| pass(&*store, &plan, threads, size))
                    .unzip();
                let shown: String = store.url().chars().take(28).collect();
                println!(
                    "{shown:<28} {threads:>7} {size:>9} {:>9.0} {:>9.0}",
                    median(puts),
                    median(gets)
                );
                let most = plan.total / size + threads;
                let keys: Vec<_> = (0..most).map(key).collect();
                store.remove(&keys, deadline()).expect("remove");
            }
        }
    }
    ExitCode::SUCCESS
}
