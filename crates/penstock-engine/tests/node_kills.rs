//! Engines that share their host tier are killed at any moment, and others go on. No byte is ever
//! wrong, and no room is lost.
//!
//! `PENSTOCK_TEST_KILLS` says how many are killed.

use std::fs::{self, OpenOptions};
use std::io::{IoSlice, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{PutOutcome, Store};
use penstock_engine::{Engine, Fence, Outcome};
use penstock_layout::KvLayout;
use penstock_store::{FileStore, ShmStore, Trust};

use crate::support::segment::Pool;
use crate::support::*;

const NODE: &str = "PENSTOCK_TEST_NODE";
const FOLDER: &str = "PENSTOCK_TEST_FOLDER";
const SEED: &str = "PENSTOCK_TEST_SEED";
/// Room for a third of all blocks.
const SIZE: u64 = 3 << 19;
const NAMES: u64 = 480;
const ENGINES: usize = 4;

/// Small numbers that look random.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

/// The process that is killed; does nothing in a run of the tests themselves.
#[test]
#[ignore = "a process that the other test starts"]
fn an_engine() {
    let (Ok(node), Ok(folder), Ok(seed)) = (
        std::env::var(NODE),
        std::env::var(FOLDER),
        std::env::var(SEED),
    ) else {
        return;
    };
    let folder = Path::new(&folder);
    let mut dice = Dice::new(seed.parse().unwrap());
    let kv = Kv::new(KvLayout::BLHNC);
    let pool = FileStore::open(
        &folder.join("pool"),
        Some(64 << 20),
        None,
        &Trust::default(),
    )
    .unwrap();
    let node = ShmStore::open(&node, Some(SIZE)).unwrap();
    let engine = Engine::with_node_memory(Arc::new(pool), Arc::new(node), config(8)).unwrap();
    let rig = Rig::from(engine);
    rig.register_kv(&kv);
    let open = |name| {
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(folder.join(name))
    };
    let (mut kept, mut loaded) = (open("kept").unwrap(), open("loaded").unwrap());
    loop {
        let first = dice.roll(NAMES / 8) * 8;
        let names = first..first + 8;
        let blocks = || names.clone().map(|n| block_of(n, n % BLOCKS)).collect();
        if dice.roll(3) == 0 {
            names.clone().for_each(|n| kv.fill(n % BLOCKS, n));
            rig.submit_store(1, blocks(), Fence::NONE).unwrap();
            outcomes(&rig, 1);
            continue;
        }
        names.clone().for_each(|n| kv.fill(n % BLOCKS, u64::MAX));
        rig.submit_load(2, blocks(), soon(), false, Fence::NONE)
            .unwrap();
        for (n, outcome) in names.clone().zip(outcomes(&rig, 2)) {
            match outcome {
                Outcome::Kept(_) => kept.write_all(b"k").unwrap(),
                Outcome::Loaded(_) => loaded.write_all(b"l").unwrap(),
                Outcome::Miss => continue,
                other => panic!("block {n}: {other:?}"),
            }
            assert_eq!(
                kv.read(n % BLOCKS, share()),
                pattern(n),
                "block {n}: {outcome:?}"
            );
        }
    }
}

fn start(node: &Pool, folder: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([
            "node_kills::an_engine",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env(NODE, node.name())
        .env(FOLDER, folder)
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills the process. It must not have ended by itself, as it does at a wrong byte.
fn kill(mut process: Child) {
    let ended = process.try_wait().unwrap();
    assert_eq!(ended, None, "an engine found something wrong");
    process.kill().unwrap();
    process.wait().unwrap();
}

fn fact(store: &dyn Store, name: &str) -> u64 {
    let facts = store.describe(soon()).unwrap();
    let (_, value) = facts.iter().find(|(found, _)| found == name).unwrap();
    value.parse().unwrap()
}

/// Empties node memory and fills it to the last page, which takes that nothing of it is lost.
fn assert_all_room_is_usable(node: &Pool) {
    let store = node.open(SIZE);
    let mut keys = Vec::new();
    store
        .list(None, &mut |object| keys.push(object.key), soon())
        .unwrap();
    store.remove(&keys, soon()).unwrap();
    assert_eq!(fact(&*store, "objects"), 0);
    let (capacity, page) = (fact(&*store, "capacity_bytes"), fact(&*store, "page_bytes"));
    let pages = capacity / page;
    let (many, one) = (
        vec![0; (page * (pages / 20)) as usize],
        vec![0; page as usize],
    );
    for n in 0..20 + pages % 20 {
        let value = if n < 20 { &many } else { &one };
        let put = store.put(&key(1 << 40 | n), &[IoSlice::new(value)], soon());
        assert_eq!(put.unwrap(), PutOutcome::Stored);
    }
    assert_eq!(fact(&*store, "used_bytes"), capacity);
    assert_eq!(
        fact(&*store, "objects"),
        20 + pages % 20,
        "nothing was evicted"
    );
}

#[test]
fn killed_engines_leave_no_wrong_byte_and_no_lost_room() {
    let kills = std::env::var("PENSTOCK_TEST_KILLS").map_or(60, |text| text.parse().unwrap());
    let node = Pool::new();
    let folder = tempfile::tempdir().unwrap();
    let mut dice = Dice::new(0x6b11);
    let mut running: Vec<Child> = Vec::new();
    for number in 0..kills {
        while running.len() < ENGINES {
            running.push(start(
                &node,
                folder.path(),
                number * 10 + running.len() as u64,
            ));
        }
        std::thread::sleep(Duration::from_micros(dice.roll(120_000)));
        kill(running.swap_remove(dice.roll(ENGINES as u64) as usize));
    }
    // Those that are left go on.
    let count = |name| fs::metadata(folder.path().join(name)).map_or(0, |found| found.len());
    let before = (count("kept"), count("loaded"));
    eventually("the others load", || {
        count("kept") > before.0 + 100 && count("loaded") > before.1
    });
    running.into_iter().for_each(kill);
    eprintln!(
        "{kills} killed; {} blocks from node memory, {} from the pool",
        count("kept"),
        count("loaded")
    );
    assert_all_room_is_usable(&node);
}
