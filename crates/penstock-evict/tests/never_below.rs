//! What the policy for prefixes finds where least recently used is best, or useless: scans, loops,
//! skewed uses, and one after the other.

use penstock_evict::{Lru, Policy, Prefix};

/// A number from a seed: SplitMix64.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *seed;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A prompt of `len` blocks of its own.
fn prompt(name: u64, len: u64) -> Vec<u64> {
    (0..len).map(|block| name * 1000 + block).collect()
}

fn scan(count: u64) -> Vec<Vec<u64>> {
    (0..count).map(|name| prompt(name, 6)).collect()
}

fn repeated(count: u64, names: u64) -> Vec<Vec<u64>> {
    (0..count).map(|number| prompt(number % names, 6)).collect()
}

/// Prompts of which the nth is asked for in proportion to 1/n, which change a little all the time.
fn skewed(count: u64, names: u64, drift: u64) -> Vec<Vec<u64>> {
    let mut seed = 1;
    (0..count)
        .map(|number| {
            let at = random(&mut seed) as f64 / u64::MAX as f64;
            let name = (names as f64).powf(at) as u64 + number / drift;
            prompt(name, 3 + name % 7)
        })
        .collect()
}

/// Conversations that go on at random times, the last used the likeliest.
fn conversations(count: u64) -> Vec<Vec<u64>> {
    let (mut seed, mut open) = (2, Vec::<(u64, u64)>::new());
    (0..count)
        .map(|number| {
            let back = (random(&mut seed) % 64).min(random(&mut seed) % 64) as usize;
            if random(&mut seed).is_multiple_of(3) || back >= open.len() {
                open.push((number, 4));
            } else {
                let (name, len) = open.remove(open.len() - 1 - back);
                open.push((name, len + 2));
            }
            let (name, len) = open[open.len() - 1];
            prompt(name, len.min(900))
        })
        .collect()
}

fn hit_ratio(policy: &mut impl Policy<u64>, prompts: &[Vec<u64>], bound: u64) -> f64 {
    let (mut hits, mut asked) = (0, 0);
    for prompt in prompts {
        hits += prompt.iter().take_while(|key| policy.contains(key)).count();
        asked += prompt.len();
        let chain: Vec<_> = prompt.iter().map(|&key| (key, 1)).collect();
        policy.use_chain(None, &chain);
        while policy.weight() > bound {
            policy.evict().expect("something to evict");
        }
    }
    hits as f64 / asked as f64
}

#[test]
fn prefix_finds_no_less_than_least_recently_used() {
    let mut mixed = scan(2000);
    mixed.extend(repeated(4000, 60));
    mixed.extend(skewed(4000, 800, 40));
    mixed.extend(conversations(4000));
    let traces = [
        ("scan", scan(4000)),
        ("loop", repeated(8000, 100)),
        ("skewed", skewed(12000, 2000, u64::MAX)),
        ("skewed, changing", skewed(12000, 400, 20)),
        ("conversations", conversations(12000)),
        ("one after the other", mixed),
    ];
    for (name, prompts) in traces {
        for bound in [30, 120, 480, 1500] {
            let ours = hit_ratio(&mut Prefix::new(), &prompts, bound);
            let lru = hit_ratio(&mut Lru::new(), &prompts, bound);
            println!("{name} in {bound}: {ours:.4}, LRU {lru:.4}");
            assert!(ours > lru - 0.001, "{name} in {bound}: {ours}, LRU {lru}");
        }
    }
}
