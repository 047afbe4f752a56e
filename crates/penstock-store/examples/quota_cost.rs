//! What quotas cost puts: pools in shared memory and in a directory, each without a quota, with one
//! that is never reached, and with one that is always used up.
//!
//! `quota_cost [--sizes 262144,2097152] [--passes 15] [--json]`: for each size the medians of the
//! passes in GiB/s that one thread stores, with `--json` as an object a line. The three take turns
//! in each pass. The first two pools are full, so they evict as much as the one whose quota is used
//! up. `refused` is the share of puts that found no room there.

use std::io::IoSlice;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::{Key, Namespace, Store, Tenancy, Tenant};
use penstock_layout::Span;
use penstock_store::{OpenOptions, open};

/// What is put in a pass, and what a pool without a quota has room for, or the quota of the others.
const PASS_BYTES: usize = 64 << 20;
const BOUND: &str = "512MiB";
const ROOM: &str = "4GiB";

struct Plan {
    sizes: Vec<usize>,
    passes: usize,
    as_json: bool,
}

fn plan() -> Option<Plan> {
    let mut plan = Plan {
        sizes: vec![256 << 10, 2 << 20],
        passes: 15,
        as_json: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => plan.as_json = true,
            "--sizes" => {
                let sizes = arguments.next()?;
                plan.sizes = sizes
                    .split(',')
                    .map(str::parse)
                    .collect::<Result<_, _>>()
                    .ok()?;
            }
            "--passes" => plan.passes = arguments.next()?.parse().ok()?,
            _ => return None,
        }
    }
    let makes_sense = plan.passes > 0 && plan.sizes.iter().all(|s| (1..=PASS_BYTES).contains(s));
    makes_sense.then_some(plan)
}

/// Where the pools of a run lie. They are removed with it.
struct Places {
    folder: PathBuf,
    name: String,
}

impl Places {
    fn new() -> Self {
        let name = format!("quota-cost-{}", std::process::id());
        Self {
            folder: std::env::temp_dir().join(&name),
            name,
        }
    }

    /// The pools of a kind: without a quota and full, with room below its quota, and at its quota.
    fn pools(&self, kind: &str) -> [Arc<dyn Store>; 3] {
        let pool = |which: &str, size: &str, quota: &str| {
            let place = match kind {
                "shm" => format!("{}-{which}", self.name),
                _ => format!("{}/{which}", self.folder.display()),
            };
            let url = format!("{kind}://{place}?size={size}{quota}");
            open(&url, &OpenOptions::default()).expect("a pool")
        };
        [
            pool("none", BOUND, ""),
            pool("room", BOUND, &format!("&quota=tenant/*:{ROOM}")),
            pool("bound", "1GiB", &format!("&quota=tenant/*:{BOUND}")),
        ]
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
        for which in ["none", "room", "bound"] {
            let segment = format!("/dev/shm/penstock-{}-{which}", self.name);
            let _ = std::fs::remove_file(segment);
        }
    }
}

/// For each of the three pools the median in GiB/s, and the share of puts that the last refused.
fn measure(pools: &[Arc<dyn Store>; 3], size: usize, passes: usize) -> [f64; 4] {
    let tenant = Tenant::named("bench").expect("a name");
    let namespace = Namespace(*b"quota_cost bench").of_tenant(tenant);
    let span = Span::new(0..1, 0..1).expect("not empty");
    let value: Vec<u8> = (0..size).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut rates = [const { Vec::new() }; 3];
    let (mut number, mut tried, mut refused) = (0_u64, 0, 0);
    // The first passes fill the pools. What has never been written is slower.
    let warm_up = (1 << 30) / PASS_BYTES + 1;
    for pass in 0..warm_up + passes {
        for (which, pool) in pools.iter().enumerate() {
            let start = Instant::now();
            let mut stored = 0;
            for _ in 0..PASS_BYTES / size {
                number += 1;
                let chunk = [&size.to_le_bytes()[..], &number.to_le_bytes()].concat();
                let key = Key::new(namespace, &chunk, span).expect("short enough");
                let deadline = Instant::now() + Duration::from_secs(5);
                stored += usize::from(pool.put(&key, &[IoSlice::new(&value)], deadline).is_ok());
            }
            if pass >= warm_up {
                let rate = (stored * size) as f64 / start.elapsed().as_secs_f64();
                rates[which].push(rate / f64::from(1 << 30));
                if which == 2 {
                    tried += PASS_BYTES / size;
                    refused += PASS_BYTES / size - stored;
                }
            }
        }
    }
    let [none, room, bound] = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    [none, room, bound, refused as f64 / tried as f64]
}

fn main() -> ExitCode {
    let Some(plan) = plan() else {
        eprintln!("quota_cost [--sizes BYTES,...] [--passes N] [--json]");
        return ExitCode::FAILURE;
    };
    let places = Places::new();
    for size in plan.sizes {
        let [shm, file] =
            ["shm", "file"].map(|kind| measure(&places.pools(kind), size, plan.passes));
        let columns = [("shm", shm), ("file", file)].map(|(kind, [none, room, bound, refused])| {
            if plan.as_json {
                format!(
                    "\"{kind}\": {none:.4}, \"{kind}, not reached\": {room:.4}, \
                     \"{kind}, used up\": {bound:.4}, \"{kind}, refused\": {refused:.4}"
                )
            } else {
                format!(
                    "{kind}: {none:.2} GiB/s without a quota, {room:.2} with one that is not \
                     reached, {bound:.2} with one that is used up ({refused:.2} refused)"
                )
            }
        });
        if plan.as_json {
            println!("{{\"bytes\": {size}, {}}}", columns.join(", "));
        } else {
            println!("{size} bytes\n  {}", columns.join("\n  "));
        }
    }
    ExitCode::SUCCESS
}
