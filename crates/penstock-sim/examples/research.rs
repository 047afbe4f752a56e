use penstock_evict::*;
use penstock_sim::*;
use rustc_hash::FxBuildHasher;
use std::collections::HashMap;
type P = Box<dyn Policy<u32>>;
fn replay(t: &Trace, mut p: P, cap: u64) -> f64 {
    let mut hits = 0u64;
    let mut chain = vec![];
    for r in t.requests() {
        let b = t.blocks(r);
        hits += b.iter().take_while(|k| p.contains(k)).count() as u64;
        chain.clear();
        chain.extend(b.iter().map(|&k| (k, 1)));
        p.use_chain(None, &chain);
        while p.weight() > cap { p.evict(); }
    }
    hits as f64 / t.block_count() as f64
}
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let mut kv: HashMap<String, f64> = HashMap::new();
    let mut files = vec![];
    for a in &args[1..] { if let Some((k, v)) = a.split_once('=') { kv.insert(k.into(), v.parse().unwrap()); } else { files.push(a.clone()); } }
    let g = |k: &str, d: f64| kv.get(k).copied().unwrap_or(d);
    for f in &files {
        let tr = read(f.as_ref(), &ReadOptions::default()).unwrap().trace;
        let n = tr.block_count() as f64;
        let mut parts = vec![("all", tr.clone())];
        if g("split", 0.0) > 0.0 { let m = tr.requests().len(); parts.push(("1st", tr.part(0, m / 2))); parts.push(("2nd", tr.part(m / 2, m))); }
        for (name, tr) in parts {
            let n = if name == "all" { n } else { tr.block_count() as f64 };
            println!("{f} {name}: {} requests {} blocks {} unique, infinite {:.4}", tr.requests().len(), tr.block_count(), tr.unique_blocks(), bounds::infinite(&tr) as f64 / n);
            for pct in [1u64, 5, 10, 20] {
                let cap = u64::from(tr.unique_blocks()) * pct / 100;
                let s = std::time::Instant::now();
                let ours = replay(&tr, Box::new(Prefix::<u32, FxBuildHasher>::default()), cap);
                let speed = n / s.elapsed().as_secs_f64() / 1e6;
                if g("base", 1.0) > 0.0 {
                    let lru = replay(&tr, Box::new(Lru::<u32, FxBuildHasher>::default()), cap);
                    let s3 = replay(&tr, Box::new(S3Fifo::<u32, FxBuildHasher>::default()), cap);
                    let bel = bounds::belady(&tr, cap) as f64 / n;
                    println!("  {pct:2}% cap {cap:8} lru {lru:.4} s3 {s3:.4} ours {ours:.4} belady {bel:.4}  gap closed {:.2}  {speed:.1} M/s", (ours - lru) / (bel - lru));
                } else { println!("  {pct:2}% ours {ours:.4} {speed:.1} M/s"); }
            }
        }
    }
}
