//! The engine over a device and node memory: the device copies from there and to there by itself.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_contract::testing::{LONG, eventually, soon};
use penstock_contract::{Block, Store};
use penstock_cuda_standin::{Kind, Machine, Range};
use penstock_store::ShmStore;
use penstock_value::{MemoryStore, SealedStore};

use super::jobs::{cache, numbered, outcomes, register};
use super::{Cache, pattern};
use crate::arena::slot_stride;
use crate::{Engine, EngineConfig, Fence, Outcome, Owner};

/// More than a piece that is pinned at a time.
const SIZE: u64 = 5 << 20;

/// Node memory of a test's own, which is removed when the test ends.
struct Node {
    name: String,
    store: Arc<ShmStore>,
}

impl Node {
    fn new(machine: &Machine) -> Self {
        let name = format!("test-device-{}-{}", std::process::id(), machine.ordinal);
        let store = Arc::new(ShmStore::open(&name, Some(SIZE)).unwrap());
        Self { name, store }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let path = PathBuf::from(format!("/dev/shm/penstock-{}", self.name));
        let _ = std::fs::remove_file(path);
    }
}

fn engine(cache: &Cache, node: &Node, pool: &Arc<MemoryStore>) -> Engine {
    let block = cache.descriptor.block_bytes(&cache.whole()) as usize;
    let pool = Arc::clone(pool) as Arc<dyn Store>;
    // An engine of its own would map it for itself.
    let node = Arc::new(ShmStore::open(&node.name, None).unwrap());
    Engine::with_node_memory(pool, node, EngineConfig::new(block, 4)).unwrap()
}

/// What of node memory is pinned.
fn memory_bytes(node: &Node) -> u64 {
    let store = SealedStore::new(Arc::clone(&node.store) as Arc<dyn Store>, None);
    store.memory().unwrap().len() as u64
}

/// The engine, once its device reaches node memory.
fn reaching(cache: &Cache, node: &Node, pool: &Arc<MemoryStore>) -> Engine {
    let engine = engine(cache, node, pool);
    register(&engine, cache).unwrap();
    let arena = 4 * slot_stride(cache.descriptor.block_bytes(&cache.whole()) as usize);
    let all = memory_bytes(node) + arena as u64;
    eventually("all is pinned", || engine.stats().pinned_bytes == all);
    engine
}

fn pool() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(64 << 20))
}

fn store(engine: &Engine, job: u64, blocks: &[Block]) -> Vec<Outcome> {
    engine
        .submit_store(job, blocks, &Owner::default(), Fence::NONE)
        .unwrap();
    outcomes(engine, job)
}

fn load(engine: &Engine, job: u64, blocks: &[Block]) -> Vec<Outcome> {
    let (owner, deadline) = (Owner::default(), soon());
    engine
        .submit_load(job, blocks, &owner, deadline, true, Fence::NONE)
        .unwrap();
    outcomes(engine, job)
}

#[test]
fn what_a_device_stores_in_node_memory_another_loads_from_there() {
    // Blocks of 1 KiB, by the kernel; of 256 KiB, by the copy engines, across pinned pieces.
    for content in [64, 16 << 10] {
        let machine = Machine::new();
        let (node, pool, cache) = (Node::new(&machine), pool(), cache(&machine, content));
        let writer = reaching(&cache, &node, &pool);
        let blocks = [0, 1, 2, 3, 4, 5];
        for round in 0..4 {
            cache.memory.fill(round);
            let before = cache.memory.read();
            let mut named = numbered(&blocks);
            named
                .iter_mut()
                .for_each(|block| block.chunk[1] = round as u8);
            let stored = store(&writer, 1, &named);
            assert!(
                stored.iter().all(|o| matches!(o, Outcome::Stored(_))),
                "{stored:?}"
            );

            let reader = reaching(&cache, &node, &Arc::new(MemoryStore::new(1 << 20)));
            cache.memory.write(0, &pattern(before.len(), 77));
            let loaded = load(&reader, 2, &named);
            assert!(
                loaded.iter().all(|o| matches!(o, Outcome::Kept(_))),
                "{loaded:?}"
            );
            assert!(cache.memory.read() == before, "round {round}");
            assert_eq!(writer.stats().slots_peak, 0, "no slot was needed");
            assert!(reader.shutdown(LONG));
        }
        assert!(writer.shutdown(LONG));
        drop(writer);
        machine.assert_clean();
    }
}

#[test]
fn what_the_pool_gets_from_node_memory_is_what_a_slot_would_give() {
    let machine = Machine::new();
    let (node, pool, cache) = (Node::new(&machine), pool(), cache(&machine, 64));
    let writer = reaching(&cache, &node, &pool);
    let before = cache.memory.read();
    let blocks = numbered(&[0, 3, 5]);
    store(&writer, 1, &blocks);
    assert!(writer.shutdown(LONG));

    // Without node memory, from the pool.
    let config = EngineConfig::new(cache.descriptor.block_bytes(&cache.whole()) as usize, 4);
    let plain = Engine::new(Arc::clone(&pool) as Arc<dyn Store>, config).unwrap();
    register(&plain, &cache).unwrap();
    let noise = pattern(before.len(), 77);
    cache.memory.write(0, &noise);
    let loaded = load(&plain, 2, &blocks);
    assert!(loaded.iter().all(|o| matches!(o, Outcome::Loaded(_))));
    let mut expected = noise;
    for at in cache.places(&[0, 3, 5], &cache.whole()) {
        expected[at] = before[at];
    }
    assert!(cache.memory.read() == expected);
}

#[test]
fn a_value_that_is_given_up_while_a_device_copies_it_comes_from_the_pool() {
    for content in [64, 16 << 10] {
        let machine = Machine::new();
        let (node, pool, cache) = (Node::new(&machine), pool(), cache(&machine, content));
        let engine = reaching(&cache, &node, &pool);
        let before = cache.memory.read();
        let blocks = numbered(&[2]);
        assert!(store(&engine, 1, &blocks)[0].is_success());
        cache.memory.write(0, &pattern(before.len(), 77));
        let mut keys = Vec::new();
        let soon = soon();
        node.store
            .list(None, &mut |object| keys.push(object.key), soon)
            .unwrap();
        let shm = Arc::clone(&node.store);
        let give_up = move || assert_eq!(shm.remove(&keys, soon).unwrap(), 1);
        *machine.meanwhile.lock() = Some(Box::new(give_up));
        let loaded = load(&engine, 2, &blocks);
        assert!(matches!(loaded[0], Outcome::Loaded(_)), "{loaded:?}");
        let places = cache.places(&[2], &cache.whole());
        let after = cache.memory.read();
        assert!(places.iter().all(|&at| after[at] == before[at]));
    }
}

#[test]
fn a_damaged_value_in_node_memory_is_not_copied() {
    let machine = Machine::new();
    let (node, pool, cache) = (Node::new(&machine), pool(), cache(&machine, 64));
    let engine = reaching(&cache, &node, &pool);
    let before = cache.memory.read();
    let blocks = numbered(&[2]);
    assert!(store(&engine, 1, &blocks)[0].is_success());
    let path = format!("/dev/shm/penstock-{}", node.name);
    let places = cache.places(&[2], &cache.whole());
    let payload: Vec<u8> = places.iter().map(|&at| before[at]).collect();
    let memory = std::fs::read(&path).unwrap();
    let found = memory.windows(64).position(|w| w == &payload[..64]);
    let at = found.unwrap() as u64 + 100;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[!memory[at as usize]], at).unwrap();

    cache.memory.write(0, &pattern(before.len(), 77));
    let loaded = load(&engine, 2, &blocks);
    assert!(matches!(loaded[0], Outcome::Loaded(_)), "{loaded:?}");
    let after = cache.memory.read();
    assert!(places.iter().all(|&at| after[at] == before[at]));
    assert_eq!(engine.stats().mended_objects, 1);
}

#[test]
fn node_memory_that_cannot_be_pinned_is_reached_through_slots() {
    let machine = Machine::new();
    let (node, pool, cache) = (Node::new(&machine), pool(), cache(&machine, 64));
    let engine = engine(&cache, &node, &pool);
    // The arena is one piece.
    machine.fail("cuMemHostRegister", 2);
    register(&engine, &cache).unwrap();
    let mut faults = Vec::new();
    eventually("it has failed", || {
        faults.extend(engine.take_faults());
        !faults.is_empty()
    });
    let blocks = numbered(&[0, 3, 5]);
    assert!(store(&engine, 1, &blocks).iter().all(Outcome::is_success));
    let loaded = load(&engine, 2, &blocks);
    assert!(loaded.iter().all(|o| matches!(o, Outcome::Kept(_))));
    assert!(engine.stats().slots_peak > 0);
    let [fault] = &faults[..] else {
        panic!("one fault")
    };
    assert_eq!(fault.unpinned_bytes(), memory_bytes(&node));
    let of_nodes = |range: &&Range| range.kind == Kind::Registered && range.len >= 1 << 20;
    let ranges = machine.state.lock().ranges.clone();
    assert_eq!(
        ranges.iter().filter(of_nodes).count(),
        0,
        "none for nothing"
    );
    assert!(engine.shutdown(LONG));
    drop(engine);
    machine.assert_clean();
}
