//! What encryption costs: one thread that seals and opens payloads where they lie, beside the
//! checksum that values have without it.
//!
//! `encryption_throughput [--sizes 4096,65536,262144,1048576,4194304] [--passes 15] [--json]`: for
//! each size the medians of the passes in GiB/s, with `--json` as an object a line. What is opened
//! is compared with what was sealed.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use penstock_contract::{Key, Namespace};
use penstock_layout::Span;
use penstock_value::Keyring;
use penstock_value::header::Label;
use penstock_value::header::{Checksum, ENCRYPTED_HEADER_BYTES};

/// Bytes that each pass works through.
const PASS_BYTES: usize = 128 << 20;

struct Plan {
    sizes: Vec<usize>,
    passes: usize,
    as_json: bool,
}

fn plan() -> Option<Plan> {
    let (mut sizes, mut passes) = (vec![4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20], 15);
    let mut as_json = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--json" {
            as_json = true;
            continue;
        }
        let value = arguments.next()?;
        match argument.as_str() {
            "--sizes" => {
                let parsed: Result<_, _> = value.split(',').map(str::parse).collect();
                sizes = parsed.ok()?;
            }
            "--passes" => passes = value.parse().ok()?,
            _ => return None,
        }
    }
    let makes_sense = passes > 0 && sizes.iter().all(|size| (1..=PASS_BYTES).contains(size));
    makes_sense.then_some(Plan {
        sizes,
        passes,
        as_json,
    })
}

fn main() -> ExitCode {
    let Some(Plan {
        sizes,
        passes,
        as_json,
    }) = plan()
    else {
        eprintln!("encryption_throughput [--sizes BYTES,...] [--passes N] [--json]");
        return ExitCode::FAILURE;
    };
    let keys = Keyring::parse("bench:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
        .expect("a key of 32 bytes");
    let span = Span::new(0..1, 0..1).expect("not empty");
    let key = Key::new(Namespace(*b"encryption_bench"), b"chunk", span).expect("short enough");
    if !as_json {
        println!(
            "bytes        checksum  seal  open  seal+open (GiB/s, medians of {passes} passes)"
        );
    }
    for size in sizes {
        let [checksum, seal, open, both] = rates(&keys, &key, size, passes);
        if as_json {
            println!(
                "{{\"bytes\": {size}, \"checksum\": {checksum:.4}, \"seal\": {seal:.4}, \
                 \"open\": {open:.4}, \"both\": {both:.4}}}"
            );
        } else {
            println!("{size:<12} {checksum:8.2} {seal:5.2} {open:5.2} {both:10.2}");
        }
    }
    ExitCode::SUCCESS
}

/// GiB/s, as medians of the passes: of the checksum, of sealing, of opening, and of both together.
fn rates(keys: &Keyring, key: &Key, size: usize, passes: usize) -> [f64; 4] {
    let plain: Vec<u8> = (0..size).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut value = vec![0; ENCRYPTED_HEADER_BYTES + size];
    value[ENCRYPTED_HEADER_BYTES..].copy_from_slice(&plain);
    let rounds = PASS_BYTES / size;
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..passes {
        let start = Instant::now();
        for _ in 0..rounds {
            let payload = &value[ENCRYPTED_HEADER_BYTES..];
            std::hint::black_box(Checksum::of(std::hint::black_box(payload)));
        }
        times[0].push(start.elapsed());
        let (mut sealing, mut opening) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..rounds {
            let start = Instant::now();
            let (header, payload) = value.split_at_mut(ENCRYPTED_HEADER_BYTES);
            header.copy_from_slice(&keys.seal(Label::of(key), payload).expect("sealed"));
            let sealed = Instant::now();
            let opened = keys.open_value(&mut value, key, b"", size as u64);
            opening += sealed.elapsed();
            sealing += sealed - start;
            assert_eq!(opened, Ok(()));
        }
        assert!(value.ends_with(&plain), "another payload came back");
        times[1].push(sealing);
        times[2].push(opening);
        times[3].push(sealing + opening);
    }
    times.map(|mut times| {
        times.sort_unstable();
        (rounds * size) as f64 / times[passes / 2].as_secs_f64() / f64::from(1 << 30)
    })
}
