//! The order of jobs and the model's work, by fences: what waits for them, what does not, and which
//! clocks run meanwhile.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use penstock_contract::testing::{LONG, eventually, given_time, past, within};
use penstock_contract::{ErrorKind, Store};
use penstock_cuda_standin::{Machine, Stream, Thing, handle_of};
use penstock_layout::KvLayout;
use penstock_value::MemoryStore;

use super::super::CudaExecutor;
use super::jobs::{completions, is_ready, numbered, outcomes, register};
use super::{Cache, Sizes, pattern};
use crate::{Device, Engine, EngineConfig, Event, Fence, Outcome, Owner};

/// Small pieces, for the kernel, and large ones.
const CONTENTS: [u64; 2] = [256, 65_536];

/// Shut until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn wait(&self) {
        let mut is_open = self.0.0.lock();
        while !*is_open {
            self.0.1.wait(&mut is_open);
        }
    }

    fn open(&self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

/// The stream that the model computes on. It can be kept busy.
struct Model {
    stream: Arc<Stream>,
    handle: u64,
    gate: Gate,
}

impl Model {
    fn on(machine: &Machine) -> Self {
        let stream = Stream::new();
        machine.watch(&stream);
        let handle = handle_of(Thing::Stream(Arc::clone(&stream))) as u64;
        Self {
            stream,
            handle,
            gate: Gate::default(),
        }
    }

    /// Keeps the model computing until it is told to end.
    fn compute(&self) {
        let gate = self.gate.clone();
        self.stream.push(move |_| gate.wait());
    }

    fn end(&self) {
        self.gate.open();
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.end();
        self.stream.close();
    }
}

/// An engine over a device whose model computes.
struct Rig {
    // Before the cache whose memory it touches.
    engine: Engine,
    model: Model,
    cache: Arc<Cache>,
    machine: Arc<Machine>,
}

impl Rig {
    fn new(content: u64, change: impl FnOnce(&mut EngineConfig)) -> Self {
        let machine = Machine::new();
        let sizes = Sizes {
            layers: 2,
            blocks: 8,
            heads: 1,
            tokens: 1,
            content,
        };
        let cache = Arc::new(Cache::new(&machine, KvLayout::LBHNC, sizes, 1));
        // Measured first: a call that is made to fail is a call of a fence or a copy, not of
        // measuring.
        let executor = CudaExecutor::of(machine.ordinal).unwrap();
        executor.calibrate().unwrap();
        let mut config = EngineConfig::new(2 * content as usize, 8);
        config.keep = false;
        change(&mut config);
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new(64 << 20));
        let engine = Engine::new(store, config).unwrap();
        register(&engine, &cache).unwrap();
        eventually("pinned", || is_ready(&engine));
        Self {
            engine,
            model: Model::on(&machine),
            cache,
            machine,
        }
    }

    /// A fence behind the work that the model has been given.
    fn fence(&self) -> Fence {
        let device = Device::Cuda(self.machine.ordinal);
        // SAFETY: the stand-in's stream lives as long as the rig.
        #[allow(unsafe_code)]
        let fence = unsafe { self.engine.raise_fence(device, self.model.handle) };
        fence.unwrap()
    }

    fn store(&self, job: u64, blocks: &[u64], after: Fence) {
        let submitted = self
            .engine
            .submit_store(job, &numbered(blocks), &Owner::default(), after);
        submitted.unwrap();
    }

    fn load(&self, job: u64, blocks: &[u64], time: Duration, after: Fence) {
        let (blocks, deadline) = (numbered(blocks), within(time));
        let submitted =
            self.engine
                .submit_load(job, &blocks, &Owner::default(), deadline, true, after);
        submitted.unwrap();
    }

    fn bytes(&self) -> u64 {
        2 * self.cache.sizes.content
    }
}

#[test]
fn a_store_reads_what_the_model_wrote_before_the_fence() {
    for content in CONTENTS {
        let rig = Rig::new(content, |_| ());
        let writes = Arc::clone(&rig.cache);
        rig.model.compute();
        rig.model.stream.push(move |_| writes.memory.fill(2));
        rig.store(1, &[1], rig.fence());
        // Nothing comes of it before the fence is passed.
        assert!(!rig.engine.wait(Duration::from_millis(30)));
        rig.model.end();
        assert_eq!(outcomes(&rig.engine, 1), [Outcome::Stored(rig.bytes())]);
        rig.cache.memory.fill(3);
        rig.load(2, &[1], LONG, Fence::NONE);
        assert_eq!(outcomes(&rig.engine, 2), [Outcome::Loaded(rig.bytes())]);
        let (written, now) = (pattern(rig.cache.memory.len(), 2), rig.cache.memory.read());
        let places = rig.cache.places(&[1], &rig.cache.whole());
        assert!(places.iter().all(|&at| now[at] == written[at]));
    }
}

#[test]
fn a_load_writes_after_what_the_model_read_before_the_fence() {
    for content in CONTENTS {
        let rig = Rig::new(content, |_| ());
        rig.store(1, &[1, 3], Fence::NONE);
        outcomes(&rig.engine, 1);
        rig.cache.memory.fill(3);
        let before = rig.cache.memory.read();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (reads, into) = (Arc::clone(&rig.cache), Arc::clone(&seen));
        rig.model.compute();
        rig.model
            .stream
            .push(move |_| *into.lock() = reads.memory.read());
        rig.load(2, &[1], LONG, rig.fence());
        // By then the other would have been written too, if it did not wait.
        rig.load(3, &[3], LONG, Fence::NONE);
        assert_eq!(outcomes(&rig.engine, 3), [Outcome::Loaded(rig.bytes())]);
        rig.model.end();
        assert_eq!(outcomes(&rig.engine, 2), [Outcome::Loaded(rig.bytes())]);
        let places = rig.cache.places(&[1], &rig.cache.whole());
        let seen = seen.lock();
        assert!(
            places.iter().all(|&at| seen[at] == before[at]),
            "written while the model read"
        );
        let (stored, now) = (pattern(before.len(), 1), rig.cache.memory.read());
        assert!(places.iter().all(|&at| now[at] == stored[at]));
    }
}

#[test]
fn the_time_of_a_load_begins_when_its_fence_is_passed() {
    given_time("what begins after its deadline is loaded", |time| {
        let rig = Rig::new(64, |_| ());
        rig.store(1, &[1, 2], Fence::NONE);
        outcomes(&rig.engine, 1);
        rig.model.compute();
        rig.load(2, &[1, 2], time, rig.fence());
        let late = within(time);
        while past() < late {
            // Polling finds that a load is late.
            assert!(!rig.engine.wait(Duration::from_millis(20)));
            rig.engine.poll(&mut Vec::new());
        }
        assert!(!rig.engine.wait(Duration::ZERO));
        assert_eq!(rig.engine.stats().get_calls, 0);
        let passed = past();
        rig.model.end();
        let [done] = completions(&rig.engine, [2]);
        assert!(done.took <= passed.elapsed(), "{:?}", done.took);
        done.event.blocks() == [Outcome::Loaded(rig.bytes()); 2]
    });
}

#[test]
fn the_time_that_a_store_may_wait_for_a_slot_begins_when_its_fence_is_passed() {
    given_time("what begins after its time is stored", |time| {
        let rig = Rig::new(64, |config| {
            (config.slots, config.store_slots, config.prefetch_slots) = (2, 1, 0);
            config.store_wait = time;
        });
        rig.model.compute();
        rig.store(1, &[0, 1, 2, 3, 4, 5], rig.fence());
        // Nothing comes of it before the fence is passed.
        assert!(!rig.engine.wait(time));
        rig.model.end();
        // One slot for all of them: five wait for it.
        outcomes(&rig.engine, 1) == [Outcome::Stored(rig.bytes()); 6]
    });
}

/// No lane waits for the device, and no stream of ours does.
#[test]
fn what_waits_for_a_fence_holds_up_nothing_else() {
    let rig = Rig::new(64, |config| (config.get_lanes, config.copy_lanes) = (1, 1));
    rig.store(1, &[1, 2], Fence::NONE);
    outcomes(&rig.engine, 1);
    rig.model.compute();
    rig.load(2, &[1], LONG, rig.fence());
    rig.load(3, &[2], LONG, Fence::NONE);
    assert_eq!(outcomes(&rig.engine, 3), [Outcome::Loaded(rig.bytes())]);
    // A job that is given up is over at once.
    rig.load(4, &[2], LONG, rig.fence());
    rig.engine.cancel(4);
    assert_eq!(outcomes(&rig.engine, 4), [Outcome::Cancelled]);
    rig.store(5, &[3, 4], rig.fence());
    assert!(rig.engine.wait_released(&[5], Duration::ZERO));
    assert_eq!(outcomes(&rig.engine, 5), [Outcome::Dropped; 2]);
    rig.model.end();
    assert_eq!(outcomes(&rig.engine, 2), [Outcome::Loaded(rig.bytes())]);
}

#[test]
fn a_fence_that_is_never_passed_costs_its_jobs_and_a_shutdown_no_more_than_its_time() {
    let rig = Rig::new(64, |config| config.fence_wait = Duration::from_millis(100));
    let before = rig.cache.memory.read();
    rig.model.compute();
    rig.store(1, &[1], rig.fence());
    rig.load(2, &[2], LONG, rig.fence());
    let [stored, loaded] = completions(&rig.engine, [1, 2]);
    assert_eq!(stored.event.blocks(), [Outcome::Dropped]);
    assert_eq!(loaded.event.blocks(), [Outcome::TimedOut]);
    assert!(rig.cache.memory.read() == before);
    assert!(!rig.engine.shutdown(Duration::from_millis(50)));
    rig.model.end();
    assert!(rig.engine.shutdown(LONG));
}

/// A driver frees nothing before the device has done all that it was given.
#[test]
fn an_end_does_not_wait_for_a_busy_device_beyond_its_time() {
    let rig = Rig::new(64, |_| ());
    rig.store(1, &[1], Fence::NONE);
    outcomes(&rig.engine, 1);
    rig.model.compute();
    rig.load(2, &[1], LONG, rig.fence());
    assert!(!rig.engine.shutdown(Duration::from_millis(50)));
    assert!(!rig.engine.is_copying(), "no copy was under way");
    // Whoever polls does not wait either.
    assert_eq!(outcomes(&rig.engine, 2), [Outcome::Cancelled]);
    rig.model.end();
    assert!(rig.engine.shutdown(LONG));
}

#[test]
fn an_end_does_not_wait_for_a_copy_beyond_its_time_and_says_so() {
    let rig = Rig::new(64, |_| ());
    let (begun, gate) = (Gate::default(), Gate::default());
    let (begins, opens) = (begun.clone(), gate.clone());
    *rig.machine.meanwhile.lock() = Some(Box::new(move || {
        begins.open();
        opens.wait();
    }));
    rig.store(1, &[1], Fence::NONE);
    begun.wait();
    assert!(!rig.engine.unregister(Duration::from_millis(10)));
    assert!(!rig.engine.shutdown(Duration::from_millis(10)));
    assert!(rig.engine.is_copying(), "the memory must stay");
    gate.open();
    assert!(rig.engine.shutdown(LONG));
    assert!(!rig.engine.is_copying());
    // It was gathered, but the engine ended before the store had it.
    let [done] = completions(&rig.engine, [1]);
    assert!(matches!(
        done.event.blocks(),
        [Outcome::Dropped | Outcome::Stored(_)]
    ));
}

#[test]
fn a_fence_that_cannot_be_waited_for_fails_its_jobs() {
    let rig = Rig::new(64, |_| ());
    rig.model.compute();
    rig.machine.fail("cuEventSynchronize", 0);
    let fence = rig.fence();
    rig.store(1, &[1], fence.clone());
    rig.load(2, &[2], LONG, fence);
    rig.model.end();
    for done in completions(&rig.engine, [1, 2]) {
        assert_eq!(done.event.blocks(), [Outcome::Failed(ErrorKind::Io)]);
    }
    assert!(rig.machine.stop_failing());
    // The next one is in order.
    rig.store(3, &[1], rig.fence());
    assert_eq!(outcomes(&rig.engine, 3), [Outcome::Stored(rig.bytes())]);
}

#[test]
fn fences_are_made_once_and_used_again() {
    let rig = Rig::new(64, |_| ());
    let mut made = Vec::new();
    for job in 0..20 {
        rig.store(job, &[1], rig.fence());
        let [last] = completions(&rig.engine, [job]);
        assert!(matches!(last.event, Event::Stored { .. }));
        made.push(rig.machine.calls("cuEventCreate"));
    }
    // A copy may need one of its own the first time.
    assert_eq!(made[2], made[19], "{made:?}");
    let Rig {
        engine,
        model,
        cache,
        machine,
    } = rig;
    drop((engine, model, cache));
    machine.assert_clean();
}
