//! How fast jobs move blocks: stores, then loads, of a whole set of blocks through a store.
//!
//! `jobs URL [block KiB=1024] [total MiB=128] [get lanes=2] [batch=8] [copy lanes=1] [rounds=5]
//! [compress=0]`
//!
//! Values are encrypted if `PENSTOCK_ENCRYPTION_KEYS` is set, and compressed if `compress` is 1.
//!
//! Blocks lie in 16 layers: each layer its own run (`LBHNC`), or all layers together (`BLHNC`). For
//! each layout it prints the MiB/s of the best round, with whole jobs timed, and the seconds of
//! this process's CPU time for a GiB stored and for a GiB loaded.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::{Block, Key, Namespace};
use penstock_engine::{
    Device, Engine, EngineConfig, Event, Fence, KvGroup, Outcome, Owner, Region,
};
use penstock_layout::{Descriptor, KvLayout, Span};
use penstock_store::{OpenOptions, open};
use penstock_value::Keyring;
use penstock_value::compress::Element;

const LAYERS: u16 = 16;
const TOKENS: u64 = 128;
const NAMESPACE: Namespace = Namespace([0xbe; 16]);

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let url = args.next().ok_or("a pool URL, please")?;
    let mut number = |default: u64| args.next().map_or(Ok(default), |text| text.parse());
    let block_bytes = number(1024)? << 10;
    let blocks = (number(128)? << 20) / block_bytes;
    let (get_lanes, batch, copy_lanes) = (number(2)?, number(8)?, number(1)?);
    let (rounds, compress) = (number(5)?, number(0)? == 1);
    let keys = Keyring::load(None)?.map(Arc::new);
    for layout in [KvLayout::LBHNC, KvLayout::BLHNC] {
        let content = block_bytes / u64::from(LAYERS) / TOKENS;
        let share = Span::new(0..LAYERS, 0..1)?;
        let descriptor = Descriptor::packed(layout, share, blocks, TOKENS, content)?;
        let mut memory = numbers(descriptor.region_lens()[0] as usize);
        let mut config = EngineConfig::new(block_bytes as usize, 64);
        config.keep = false;
        config.get_lanes = get_lanes as usize;
        config.batch = batch as usize;
        config.copy_lanes = copy_lanes as usize;
        config.keys.clone_from(&keys);
        config.compress = compress;
        config.store_wait = Duration::from_secs(60);
        let engine = Engine::new(open(&url, &OpenOptions::default())?, config)?;
        // SAFETY: `memory` outlives the engine and is only touched again when no job runs.
        #[allow(unsafe_code)]
        let region =
            unsafe { Region::new(memory.as_mut_ptr().expose_provenance(), memory.len() as u64) };
        let group = KvGroup {
            element: Some(Element::Bf16),
            ..KvGroup::new(Device::Host, descriptor, vec![region])
        };
        engine.register(0, group)?;
        engine.name(0, NAMESPACE)?;
        let (mut stores, mut releases, mut loads) = (f64::MAX, f64::MAX, f64::MAX);
        let (mut store_cpu, mut load_cpu) = (0.0, 0.0);
        for round in 0..rounds {
            let all: Vec<Block> = (0..blocks)
                .map(|block| {
                    let mut chunk = [layout as u8; 32];
                    chunk[..8].copy_from_slice(&block.to_le_bytes());
                    chunk[8..16].copy_from_slice(&round.to_le_bytes());
                    Block {
                        group: 0,
                        id: block,
                        chunk,
                        parent: None,
                    }
                })
                .collect();
            let key = |block: &Block| Key {
                namespace: NAMESPACE,
                chunk: block.chunk,
                span: share,
            };
            let keys: Vec<Key> = all.iter().map(key).collect();
            let cpu = cpu_seconds()?;
            let start = Instant::now();
            engine.submit_store(1, &all, &Owner::default(), Fence::NONE)?;
            let (over, released) = finish(&engine, start)?;
            (stores, releases) = (stores.min(over), releases.min(released));
            store_cpu += cpu_seconds()? - cpu;
            let cpu = cpu_seconds()?;
            let start = Instant::now();
            engine.submit_load(
                1,
                &all,
                &Owner::default(),
                start + Duration::from_secs(60),
                true,
                Fence::NONE,
            )?;
            loads = loads.min(finish(&engine, start)?.0);
            load_cpu += cpu_seconds()? - cpu;
            open(&url, &OpenOptions::default())?
                .remove(&keys, Instant::now() + Duration::from_secs(60))?;
        }
        let gib = (blocks * block_bytes) as f64 / f64::from(1 << 30);
        println!(
            "{layout}: store {:5.0} MiB/s (released {:5.0}), {:.2} CPU s/GiB; load {:5.0} MiB/s, {:.2} CPU s/GiB",
            1024.0 * gib / stores,
            1024.0 * gib / releases,
            store_cpu / gib / rounds as f64,
            1024.0 * gib / loads,
            load_cpu / gib / rounds as f64,
        );
        drop(engine);
        drop(memory);
    }
    Ok(())
}

/// Bytes of random numbers of bf16. Their exponents are spread as those of KV are.
fn numbers(bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let number = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Half of all numbers have one exponent, half of the others the next one below, and so on.
        let below = (state >> 16).trailing_zeros() as u16;
        let bits = (state as u16 & 0x807f) | (0x7f - below.min(0x7f)) << 7;
        bits.to_le_bytes()
    };
    (0..bytes / 2).flat_map(number).collect()
}

/// The CPU time of all threads so far, from the kernel's nanosecond clock of each thread.
fn cpu_seconds() -> Result<f64, Box<dyn Error>> {
    let mut nanos = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanos += text.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(nanos as f64 / 1e9)
}

/// Seconds from `start` until the job is over, and until it was released.
fn finish(engine: &Engine, start: Instant) -> Result<(f64, f64), Box<dyn Error>> {
    let mut completions = Vec::new();
    let mut released = 0.0;
    loop {
        engine.wait(Duration::from_secs(1));
        engine.poll(&mut completions);
        let now = start.elapsed().as_secs_f64();
        for completion in completions.drain(..) {
            let good = |o: &Outcome| matches!(o, Outcome::Stored(_) | Outcome::Loaded(_));
            if !completion.event.blocks().iter().all(good) {
                return Err(format!("{:?}", completion.event).into());
            }
            if completion.event == Event::Released {
                released = now;
            } else {
                return Ok((now, released));
            }
        }
    }
}
