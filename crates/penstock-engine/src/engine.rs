//! The engine: the calls of its owner.

mod submit;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use penstock_contract::memory::Run;
use penstock_contract::{HostChange, Namespace, Store, Tenancy};
use penstock_threads::contain;
use penstock_value::header::Writer;
use penstock_value::{SealedStore, Trust, interrupt};

use crate::arena::{Arena, PIN_BYTES};
use crate::completion::Completions;
use crate::config::end_of;
use crate::copy::Executor;
use crate::copy::cuda::{CudaExecutor, Pins};
use crate::fence::Watch;
use crate::gauge::Gauge;
use crate::group::Group;
use crate::held::HeldBlocks;
use crate::lane::{self, Inner};
use crate::load_job::Aim;
use crate::signal::Signals;
use crate::table::{Job, Table};
use crate::{
    Completion, Counters, CudaError, Device, Direction, EngineConfig, EngineError, EngineStats,
    Fault, Fence, KvGroup, Outcome,
};

/// Name of the thread that waits for fences.
const WATCH: &str = "penstock-fence";

/// Moves blocks between registered memory and a store, on its own threads.
///
/// Submitting checks, queues and returns. No call waits for anything, except [`wait`](Self::wait),
/// [`wait_released`](Self::wait_released), [`drain`](Self::drain), [`shutdown`](Self::shutdown) and
/// [`unregister`](Self::unregister). The caller chooses job ids. An id may be used again once the
/// last completion of its job has been polled.
///
/// Dropping the engine shuts it down and waits for its threads, provided that the store returns by
/// its deadlines.
///
/// In this example, block 0 is stored, and then loaded into block 1:
///
/// ```
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
///
/// use penstock_contract::{Block, Namespace};
/// use penstock_engine::{
///     Completion, Device, Engine, EngineConfig, Event, Fence, KvGroup, Outcome, Owner, Region,
/// };
/// use penstock_layout::{Descriptor, KvLayout, Span};
/// use penstock_value::MemoryStore;
///
/// const BYTES: usize = 2 * 16 * 256;
/// let mut memory = vec![0_u8; 2 * BYTES];
/// memory[..BYTES].fill(7);
///
/// let engine = Engine::new(Arc::new(MemoryStore::new(1 << 20)), EngineConfig::new(BYTES, 4))?;
/// let descriptor = Descriptor::packed(KvLayout::BLHNC, Span::new(0..2, 0..1)?, 2, 16, 256)?;
/// // SAFETY: the memory outlives the engine, and is not touched while a job runs.
/// let region = unsafe { Region::new(memory.as_mut_ptr().expose_provenance(), 2 * BYTES as u64) };
/// engine.register(0, KvGroup::new(Device::Host, descriptor, vec![region]))?;
/// engine.name(0, Namespace([1; 16]))?;
///
/// let last_event = || {
///     let mut completions: Vec<Completion> = Vec::new();
///     while completions.last().is_none_or(|last| !last.event.is_last()) {
///         engine.wait(Duration::from_secs(1));
///         engine.poll(&mut completions);
///     }
///     completions.pop().unwrap().event
/// };
/// let block = |id| Block { group: 0, id, chunk: [5; 32], parent: None };
/// engine.submit_store(1, &[block(0)], &Owner::default(), Fence::NONE)?;
/// assert_eq!(last_event().blocks(), [Outcome::Stored(BYTES as u64)]);
///
/// let soon = Instant::now() + Duration::from_secs(10);
/// engine.submit_load(2, &[block(1)], &Owner::default(), soon, true, Fence::NONE)?;
/// // The arena still had it: the host tier.
/// assert_eq!(last_event().blocks(), [Outcome::Kept(BYTES as u64)]);
/// drop(engine);
/// assert!(memory[BYTES..].iter().all(|&byte| byte == 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine {
    inner: Arc<Inner>,
    table: Table,
    completions: Arc<Completions>,
    stores_in_flight: Arc<Gauge>,
    groups: RwLock<BTreeMap<u16, Group>>,
    held: Mutex<HeldBlocks>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    retired: Mutex<Retired>,
    writer: AtomicU64,
}

/// What is not registered any more.
#[derive(Default)]
struct Retired {
    /// Groups with a copy that is still under way.
    copying: Vec<Group>,
    /// Who copied. Giving back what they have of a device waits for all that it computes.
    executors: Vec<Arc<dyn Executor>>,
}

impl Retired {
    /// Waits for the copies under way (true), or until the time is over (false).
    fn close(&mut self, end: Instant) -> bool {
        let Self { copying, executors } = self;
        copying.retain(|group| {
            let registration = group.registration();
            registration.is_some_and(|registration| !registration.close(end, executors))
        });
        copying.is_empty()
    }
}

impl Engine {
    /// Reserves the arena and starts the lanes.
    pub fn new(store: Arc<dyn Store>, config: EngineConfig) -> Result<Self, EngineError> {
        Self::start(store, None, config)
    }

    /// An engine that shares its host tier with the other engines of the machine.
    ///
    /// Every value that it stores goes into `node` first, and then into the store. Loads take from
    /// `node` what is there, straight into the blocks where these are host memory. What comes from
    /// the store is put into `node` too. If several engines want it at once, one of them fetches it,
    /// and the others wait for it.
    ///
    /// Refused if `node` is not memory of this machine (`shm://`).
    pub fn with_node_memory(
        store: Arc<dyn Store>,
        node: Arc<dyn Store>,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        let node = SealedStore::new(node, config.keys.clone());
        if !node.is_in_memory() {
            return Err(EngineError::Config("node memory must be shared memory"));
        }
        Self::start(store, Some(node), config)
    }

    fn start(
        store: Arc<dyn Store>,
        node: Option<SealedStore>,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        config.check()?;
        let signals = Arc::new(Signals::default());
        let counters = Arc::new(Counters::default());
        let arena = Arc::new(Arena::new(
            &config,
            Arc::clone(&signals),
            Arc::clone(&counters),
        )?);
        let queues = crate::queue::Queues::new(
            config.clone(),
            config.batches(store.batch_bytes()),
            node.is_some(),
            arena,
            Arc::clone(&signals),
        );
        let table = Table::new(config.max_outstanding_objects);
        let running = Gauge::default();
        let trust = config
            .trusts
            .then(|| Arc::new(Trust::new(&store, config.keys.as_ref())));
        let trusting = |sealed: SealedStore| match &trust {
            Some(trust) => sealed.trusting(Arc::clone(trust)),
            None => sealed,
        };
        let node = node.map(trusting);
        let sealed = || {
            let sealed = SealedStore::new(Arc::clone(&store), config.keys.clone());
            match config.compress {
                true => sealed.taking_coded(),
                false => sealed,
            }
        };
        let inner = Arc::new(Inner {
            store: trusting(sealed()),
            evidence: sealed(),
            node_pins: Mutex::default(),
            node,
            config,
            queues,
            signals,
            watch: Watch::default(),
            faults: Mutex::default(),
            told_of_batches: AtomicBool::new(false),
            told_of_distrust: AtomicU64::new(Writer::UNKNOWN.0),
            counters,
            lanes: lane::Lanes::default(),
            running,
        });
        let threads = lane::start(&inner)?;
        Ok(Self {
            inner,
            table,
            completions: Arc::default(),
            stores_in_flight: Arc::default(),
            groups: RwLock::default(),
            held: Mutex::default(),
            threads: Mutex::new(threads),
            retired: Mutex::default(),
            writer: AtomicU64::new(Writer::UNKNOWN.0),
        })
    }

    /// Registers a group of layers: its memory, and how its blocks are stored. Groups may lie over
    /// each other, as long as no two of them use the same block at the same time.
    ///
    /// With the first group, the arena's pages begin to come into being, in the background. For a
    /// CUDA device, they are pinned, and the device's copies are measured.
    pub fn register(&self, group: u16, held: KvGroup) -> Result<(), EngineError> {
        let device = held.device;
        let new = Group::new(group, held, &self.inner.config)?;
        let mut groups = self.groups.write();
        self.check_new(&groups, group)?;
        let is_first = groups.values().all(|group| group.registration().is_none());
        if is_first || device != Device::Host {
            self.prepare(device)?;
        }
        if device != Device::Host {
            self.watch()?;
        }
        groups.insert(group, new);
        Ok(())
    }

    /// Registers a group of which this engine holds nothing. Jobs may have blocks of it; they count
    /// as already there.
    pub fn register_elsewhere(&self, group: u16) -> Result<(), EngineError> {
        let mut groups = self.groups.write();
        self.check_new(&groups, group)?;
        groups.insert(group, Group::elsewhere(group));
        Ok(())
    }

    fn check_new(&self, groups: &BTreeMap<u16, Group>, group: u16) -> Result<(), EngineError> {
        if self.inner.queues.is_closed() {
            return Err(EngineError::Closed);
        }
        if groups.contains_key(&group) {
            return Err(EngineError::Refused(format!(
                "KV memory of group {group} is registered with this engine already"
            )));
        }
        Ok(())
    }

    /// Sets the namespace under which a group's objects are stored, and from which tenants'
    /// namespaces are made. Jobs of a group without a namespace are refused.
    ///
    /// It may be set again, once other weights compute. Jobs under way go on in the namespace that
    /// they began in. The host tier gives up what it has of that one, and no change of it is
    /// reported any more.
    pub fn name(&self, group: u16, namespace: Namespace) -> Result<(), EngineError> {
        let mut groups = self.groups.write();
        if !groups.contains_key(&group) {
            return Err(EngineError::not_registered(group));
        }
        let others = groups.values().filter(|other| other.number() != group);
        for other in others {
            // Tenants' namespaces keep only the family.
            if other.namespace().map(Namespace::family) == Some(namespace.family()) {
                let other = other.number();
                return Err(EngineError::Refused(format!(
                    "the namespace of group {group} is that of group {other} already"
                )));
            }
        }
        let before = groups
            .get_mut(&group)
            .and_then(|known| known.name(namespace));
        if let Some(before) = before {
            self.held.lock().forget(group);
            self.inner.queues.host_tier().forget(before);
        }
        Ok(())
    }

    /// Says who computes what jobs store from now on: this engine, until its weights change. With it,
    /// others can say whose KV they have found to be wrong.
    pub fn set_writer(&self, writer: Writer) {
        self.writer.store(writer.0, Ordering::Relaxed);
    }

    fn writer(&self) -> Writer {
        Writer(self.writer.load(Ordering::Relaxed))
    }

    /// Starts the thread that waits for fences, unless it already runs.
    fn watch(&self) -> Result<(), EngineError> {
        let mut threads = self.threads.lock();
        let is_watch = |thread: &JoinHandle<()>| thread.thread().name() == Some(WATCH);
        if !threads.iter().any(is_watch) {
            let inner = Arc::clone(&self.inner);
            let thread = lane::spawn(WATCH.to_owned(), inner, |inner| {
                inner.watch.serve(WATCH, &inner.signals)
            });
            threads.push(thread.map_err(EngineError::Thread)?);
        }
        Ok(())
    }

    /// Gets the arena ready in the background: its pages come into being. For a device, they are
    /// pinned, and the device's copies are measured. Copies go on meanwhile. If this fails, they
    /// also go on, but slower, as [`take_faults`](Self::take_faults) says. Memory that is shared
    /// with other processes is mapped then.
    fn prepare(&self, device: Device) -> Result<(), EngineError> {
        let inner = Arc::clone(&self.inner);
        let thread = lane::spawn("penstock-prep".to_owned(), inner, move |inner| {
            prepare(inner, device);
        });
        self.threads
            .lock()
            .push(thread.map_err(EngineError::Thread)?);
        Ok(())
    }

    /// Gives up all loads, and every object that was not gathered yet. Waits for the copies under
    /// way, but not for the store, and forgets the registered memory. Returns true once that is not
    /// touched any more. Returns false if a copy is still under way when the time is over: then the
    /// memory must stay. This may be called again.
    pub fn unregister(&self, timeout: Duration) -> bool {
        self.unregister_by(end_of(timeout))
    }

    fn unregister_by(&self, end: Instant) -> bool {
        let Some(mut retired) = self.retired.try_lock_until(end) else {
            return false;
        };
        let groups = std::mem::take(&mut *self.groups.write());
        retired.copying.extend(groups.into_values());
        self.inner.queues.drop_gathers();
        for job in self.table.loads() {
            job.abandon(Outcome::Cancelled);
        }
        self.inner.queues.prune_loads();
        retired.close(end)
    }

    /// Raises a fence behind all work that a stream of a device has been given until now, for jobs
    /// to wait for. Host memory needs no fence. Memory must have been registered for the device.
    ///
    /// # Safety
    ///
    /// `stream` is the handle of a stream of that device, which is alive; zero stands for the
    /// default stream.
    #[allow(unsafe_code)]
    pub unsafe fn raise_fence(&self, device: Device, stream: u64) -> Result<Fence, EngineError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.watch.raise(device, stream) }
    }

    /// Notes that nobody waits any more for what a prefetch brings, or has brought: it may be given
    /// up. To be called once for each prefetch, before or after its end.
    pub fn release(&self, job: u64) {
        if let Some(Job::Load(prefetch)) = self.table.get(job)
            && prefetch.aim() == Aim::HostTier
        {
            prefetch.abandon(Outcome::Cancelled);
            self.inner.queues.prune_loads();
        }
        self.inner.queues.host_tier().release(job);
    }

    /// Which blocks changed in the host tier since the last call: blocks that came, with every
    /// object that this engine keeps of them, and blocks that are no longer whole there. The first
    /// call returns all blocks that are there. Before the first call, nothing is remembered.
    pub fn take_host_changes(&self) -> Vec<HostChange> {
        let groups = self.groups.read();
        let by_family: HashMap<_, &Group> = groups
            .values()
            .filter_map(|group| Some((group.namespace()?.family(), group)))
            .collect();
        let mut held = self.held.lock();
        let changes = self.inner.queues.host_tier().take_changes().into_iter();
        changes
            .filter_map(|(key, came)| {
                let group = by_family.get(&key.namespace.family())?;
                let is_shared = group.namespace() == Some(key.namespace);
                let change = HostChange {
                    group: group.number(),
                    tenant: key.namespace.tenant().filter(|_| !is_shared),
                    chunk: key.chunk,
                    came,
                };
                held.note(change, group.objects())
            })
            .collect()
    }

    /// Appends what happened since the last poll. Does not wait.
    pub fn poll(&self, out: &mut Vec<Completion>) {
        self.expire();
        let first = out.len();
        self.completions.drain(out);
        for completion in out[first..]
            .iter()
            .filter(|completion| completion.event.is_last())
        {
            if let Some(job) = self.table.remove(completion.job) {
                self.forgo(&job);
            }
        }
    }

    /// Tells the host tier not to wait for what a job did not bring.
    fn forgo(&self, job: &Job) {
        let host_tier = self.inner.queues.host_tier();
        match job {
            Job::Load(load) if load.aim() == Aim::Blocks => {
                host_tier.forgo(load.objects(), load.failed());
            }
            Job::Store(store) => host_tier.forgo(store.objects(), store.failed()),
            Job::Load(_) | Job::Over => {}
        }
    }

    /// Waits until there is something to poll (true), or until the time is over (false).
    pub fn wait(&self, timeout: Duration) -> bool {
        let end = end_of(timeout);
        loop {
            let next_deadline = self.expire();
            if self
                .completions
                .wait(next_deadline.map_or(end, |next| next.min(end)))
            {
                return true;
            }
            if Instant::now() >= end || interrupt::is_interrupted() {
                return false;
            }
        }
    }

    fn expire(&self) -> Option<Instant> {
        let (expired, next) = self.table.expire(Instant::now());
        if expired {
            self.inner.queues.prune_loads();
        }
        next
    }

    /// Drops what these store jobs have not gathered yet, and waits until none of their blocks is
    /// being read (true), or until the time is over (false). Ids of other jobs, or of none, are
    /// ignored.
    pub fn wait_released(&self, jobs: &[u64], timeout: Duration) -> bool {
        let end = end_of(timeout);
        let of_store = |job: &u64| match self.table.get(*job) {
            Some(Job::Store(job)) => Some(job),
            Some(Job::Load(_) | Job::Over) | None => None,
        };
        let jobs: Vec<_> = jobs.iter().filter_map(of_store).collect();
        self.inner.queues.give_up_gathers(&jobs);
        jobs.iter().all(|job| job.wait_released(end))
    }

    /// Gives up what can be given up of a job: everything that is not being gathered, put, or
    /// written into blocks right now. The job completes all the same: a load at once, unless a
    /// write is under way.
    pub fn cancel(&self, job: u64) {
        match self.table.get(job) {
            Some(Job::Load(load)) => {
                load.abandon(Outcome::Cancelled);
                self.inner.queues.prune_loads();
            }
            Some(Job::Store(store)) => self.inner.queues.cancel_store(&store),
            Some(Job::Over) | None => {}
        }
    }

    /// Waits until every object of every store job has an outcome (true). When the time is over,
    /// drops the objects that no lane is working on (false). Stores submitted meanwhile are
    /// dropped.
    pub fn drain(&self, timeout: Duration) -> bool {
        let _refusing = self.inner.queues.refuse_stores();
        let drained = self.stores_in_flight.wait_zero(end_of(timeout));
        if !drained {
            self.inner.queues.drop_stores();
        }
        drained
    }

    /// Gives up all jobs, waits for the copies under way, and ends the lanes. Returns true once no
    /// thread is left.
    ///
    /// Returns false if one is still inside the store or waits for a device when the time is over.
    /// It ends by the deadline of its operation, or when the device has done what it was given. It
    /// touches no registered memory any more, unless [`is_copying`](Self::is_copying). Jobs that were
    /// given up can still be polled. This may be called again.
    pub fn shutdown(&self, timeout: Duration) -> bool {
        let end = end_of(timeout);
        self.inner.queues.close();
        self.inner.watch.close();
        if !self.unregister_by(end) {
            return false;
        }
        if !self.inner.running.wait_zero(end) || !self.give_back(end) {
            return false;
        }
        for thread in self.threads.lock().drain(..) {
            // A lane contains panics. If one escaped all the same, the thread is gone.
            let _ = thread.join();
        }
        true
    }

    /// Whether memory that was registered is still copied from or to, since it took longer than the
    /// time of [`unregister`](Self::unregister) or [`shutdown`](Self::shutdown). It must stay until
    /// this is false.
    pub fn is_copying(&self) -> bool {
        // Who has the lock waits for a copy.
        (self.retired.try_lock()).is_none_or(|mut retired| !retired.close(Instant::now()))
    }

    /// Gives back what was had of devices, on a thread of its own: a driver may wait for all that its
    /// device computes. True once that is done, false if it is not when the time is over.
    fn give_back(&self, end: Instant) -> bool {
        let executors = std::mem::take(&mut self.retired.lock().executors);
        if executors.iter().all(|executor| executor.is_host()) {
            return true;
        }
        const PLACE: &str = "penstock-end";
        let thread = lane::spawn(PLACE.to_owned(), Arc::clone(&self.inner), |inner| {
            contain(PLACE, || {
                drop(executors);
                inner.queues.arena().unpin();
                *inner.node_pins.lock() = None;
            });
        });
        // Without a thread, all was dropped here.
        if let Ok(thread) = thread {
            self.threads.lock().push(thread);
        }
        self.inner.running.wait_zero(end)
    }

    /// Counters since the engine was made.
    pub fn stats(&self) -> EngineStats {
        self.inner.counters.snapshot()
    }

    /// What failed in the background since the last call. Jobs go on all the same, but slower.
    pub fn take_faults(&self) -> Vec<Fault> {
        let mut faults = std::mem::take(&mut *self.inner.faults.lock());
        let told = &self.inner.told_of_batches;
        if !told.load(Ordering::Relaxed) {
            let groups = self.groups.read();
            let mut registered = groups.values().filter_map(Group::registration);
            let refusal = registered.find_map(|each| each.refusal());
            told.store(refusal.is_some(), Ordering::Relaxed);
            faults.extend(refusal.map(|error| Fault::Unbatched { error }));
        }
        faults
    }

    /// The settings that the engine was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }
}

/// Gets the arena ready, and what is shared with other processes. Each part that panics is left out:
/// what it would have made ready only costs more when it is first used.
fn prepare(inner: &Inner, device: Device) {
    const PLACE: &str = "penstock-prep";
    let is_closed = || inner.queues.is_closed();
    contain(PLACE, || match device {
        Device::Host => {
            lane::give_way();
            inner.queues.arena().populate(is_closed);
        }
        Device::Cuda(ordinal) => prepare_cuda(inner, ordinal),
    });
    if let Some(node) = &inner.node {
        // Before it is pinned: the driver would bring its pages into being itself, many at a time,
        // and other threads could map no memory meanwhile.
        contain(PLACE, || node.warm_up(&is_closed));
    }
    if let Device::Cuda(ordinal) = device
        && let Some(Err((bytes, error))) = contain(PLACE, || pin_node_memory(inner, ordinal))
    {
        inner.unpinned(ordinal, bytes, error);
    }
    contain(PLACE, || inner.store.warm_up(&is_closed));
}

/// Measures a device's copies, and pins the arena for it.
fn prepare_cuda(inner: &Inner, ordinal: i32) {
    let (queues, counters) = (&inner.queues, &inner.counters);
    let executor = CudaExecutor::of(ordinal);
    match executor
        .as_deref()
        .map_err(Clone::clone)
        .and_then(|e| e.calibrate())
    {
        Ok(found) => {
            let note = |counter: &AtomicU64, direction: &Direction| {
                counter.store(direction.copy_engine_from as u64, Ordering::Relaxed);
            };
            note(&counters.gather_copy_engine_from, &found.gather);
            note(&counters.scatter_copy_engine_from, &found.scatter);
        }
        Err(error) => inner
            .faults
            .lock()
            .push(Fault::Unmeasured { ordinal, error }),
    }
    if let Err(error) = queues.arena().pin(ordinal, || queues.is_closed()) {
        let bytes = counters.unpinned_bytes.load(Ordering::Relaxed);
        inner.unpinned(ordinal, bytes, error);
    }
}

/// Pins node memory, some at a time. Once all is pinned, the device copies from there and to there
/// by itself. If it fails, nothing of it stays pinned, all is copied through slots, and the
/// error comes with the bytes that it has.
fn pin_node_memory(inner: &Inner, ordinal: i32) -> Result<(), (u64, CudaError)> {
    let mut pins = inner.node_pins.lock();
    let node = inner.node.as_ref().filter(|node| node.is_put_in_place());
    let (None, Some(memory)) = (&*pins, node.and_then(SealedStore::memory)) else {
        return Ok(());
    };
    let unpinned = |error| (memory.len() as u64, error);
    let pins = pins.insert(Pins::new(ordinal).map_err(unpinned)?);
    let pinned = pin_pieces(inner, memory, pins);
    match pinned {
        Ok(true) => {
            inner.queues.node_is_pinned();
            let pinned = &inner.counters.pinned_bytes;
            pinned.fetch_add(memory.len() as u64, Ordering::Relaxed);
        }
        Ok(false) => {}
        Err(_) => pins.clear(),
    }
    pinned.map(drop).map_err(unpinned)
}

/// Pins the pieces of node memory. False if the engine was closed before all were pinned.
#[allow(unsafe_code)]
fn pin_pieces(inner: &Inner, memory: Run, pins: &mut Pins) -> Result<bool, CudaError> {
    for start in (0..memory.len()).step_by(PIN_BYTES) {
        if inner.queues.is_closed() {
            return Ok(false);
        }
        let left = memory.len() - start;
        let piece = memory.start().wrapping_add(start);
        // SAFETY: the piece lies in the mapping of `inner.node`, which is dropped after the pins.
        // Copies are under way only while the lanes live, which share `inner`.
        unsafe { pins.add(piece, PIN_BYTES.min(left)) }?;
    }
    Ok(true)
}

impl Drop for Engine {
    fn drop(&mut self) {
        let operation = self
            .inner
            .config
            .put_timeout
            .max(self.inner.config.get_timeout);
        let limit = operation + Duration::from_secs(2);
        self.shutdown(limit);
        // Whoever drops the engine may give the registered memory back at once.
        while self.is_copying() {
            self.shutdown(limit);
        }
    }
}
