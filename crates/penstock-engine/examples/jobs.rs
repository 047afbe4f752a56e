//! How fast jobs move blocks: stores, then loads, of a whole set of blocks through a store.
//!
//! `jobs URL [block KiB=1024] [total MiB=128] [io lanes=4] [batch=4] [copy lanes=1] [rounds=5]`
//!
//! Blocks lie in 16 layers, each its own run (`LBHNC`) or all together (`BLHNC`). Prints for each
//! layout MiB/s of the best round, whole jobs timed, and what lanes spent their time on.

use std::error::Error;
use std::time::{Duration, Instant};

use penstock_engine::{Engine, EngineConfig, Event, Object, Outcome, Region};
use penstock_layout::{Descriptor, KvLayout, Span};
use penstock_store::{Key, Namespace, OpenOptions, open};

const LAYERS: u16 = 16;
const TOKENS: u64 = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let url = args.next().ok_or("a pool URL, please")?;
    let mut number = |default: u64| args.next().map_or(Ok(default), |text| text.parse());
    let block_bytes = number(1024)? << 10;
    let blocks = (number(128)? << 20) / block_bytes;
    let (io_lanes, batch, copy_lanes) = (number(4)?, number(4)?, number(1)?);
    let rounds = number(5)?;
    for layout in [KvLayout::LBHNC, KvLayout::BLHNC] {
        let content = block_bytes / u64::from(LAYERS) / TOKENS;
        let share = Span::new(0..LAYERS, 0..1)?;
        let descriptor = Descriptor::packed(layout, share, blocks, TOKENS, content)?;
        let mut memory = vec![0_u8; descriptor.region_lens()[0] as usize];
        let mut config = EngineConfig::new(block_bytes as usize, 64);
        config.io_lanes = io_lanes as usize;
        config.batch = batch as usize;
        config.copy_lanes = copy_lanes as usize;
        config.store_wait = Duration::from_secs(60);
        let engine = Engine::new(open(&url, &OpenOptions::default())?, config)?;
        // SAFETY: `memory` outlives the engine and is only touched again when no job runs.
        #[allow(unsafe_code)]
        let region =
            unsafe { Region::new(memory.as_mut_ptr().expose_provenance(), memory.len() as u64) };
        engine.register(descriptor, vec![region])?;
        let (mut stores, mut releases, mut loads) = (f64::MAX, f64::MAX, f64::MAX);
        for round in 0..rounds {
            let objects: Vec<Object> = (0..blocks)
                .map(|block| {
                    let mut chunk = [layout as u8; 32];
                    chunk[..8].copy_from_slice(&block.to_le_bytes());
                    chunk[8..16].copy_from_slice(&round.to_le_bytes());
                    let key = Key {
                        namespace: Namespace([0xbe; 16]),
                        chunk,
                        span: share,
                    };
                    Object {
                        key,
                        blocks: vec![block],
                    }
                })
                .collect();
            let keys: Vec<Key> = objects.iter().map(|object| object.key).collect();
            let start = Instant::now();
            engine.submit_store(1, objects.clone())?;
            let (over, released) = finish(&engine, start)?;
            (stores, releases) = (stores.min(over), releases.min(released));
            let start = Instant::now();
            engine.submit_load(1, objects, start + Duration::from_secs(60), true)?;
            loads = loads.min(finish(&engine, start)?.0);
            open(&url, &OpenOptions::default())?
                .remove(&keys, Instant::now() + Duration::from_secs(60))?;
        }
        let rate = |seconds: f64| (blocks * block_bytes) as f64 / f64::from(1 << 20) / seconds;
        let stats = engine.stats();
        let seconds = |nanos: u64| nanos as f64 / 1e9 / rounds as f64;
        println!(
            "{layout}: store {:5.0} MiB/s (released {:5.0}), load {:5.0} MiB/s; seconds a round: \
             gather {:.3}, put {:.3}, get {:.3}, verify {:.3}, scatter {:.3}",
            rate(stores),
            rate(releases),
            rate(loads),
            seconds(stats.gather_nanos),
            seconds(stats.put_nanos),
            seconds(stats.get_nanos),
            seconds(stats.verify_nanos),
            seconds(stats.scatter_nanos),
        );
        drop(engine);
        drop(memory);
    }
    Ok(())
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
            if !completion.event.outcomes().iter().all(good) {
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
