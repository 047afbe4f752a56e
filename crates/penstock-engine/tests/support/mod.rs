//! What the engine's tests share: KV memory with a naive oracle, and a store that can be slowed,
//! stopped, broken and watched.
#![allow(dead_code, unsafe_code, unreachable_pub, unused_imports)]

pub mod segment;

use std::collections::HashSet;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
pub use penstock_contract::testing::{LONG, eventually, given_time, past, soon, within};
use penstock_contract::{
    BatchBytes, Block, Capabilities, Error, ErrorKind, GetRequest, Key, Listed, Namespace, Parent,
    PutRequest, Result, Store, StoreStats, Tenancy, Tenant,
};
use penstock_engine::{
    Completion, Deadline, Device, Engine, EngineConfig, EngineError, Event, Fence, KvGroup,
    Outcome, Owner, Region,
};
use penstock_layout::{Axis, Descriptor, Interior, KvLayout, Span};
use penstock_value::MemoryStore;

pub const LAYERS: u16 = 3;
pub const HEADS: u16 = 2;
pub const TOKENS: u64 = 8;
pub const CONTENT: u64 = 48;
pub const BLOCKS: u64 = 24;
/// Bytes of one block of all layers and heads.
pub const BLOCK_BYTES: usize = (LAYERS as u64 * HEADS as u64 * TOKENS * CONTENT) as usize;

/// Asserts that a call contradicts what the engine knows, and what is said about it.
#[track_caller]
pub fn assert_refused(result: std::result::Result<(), EngineError>, text: &str) {
    match result {
        Err(EngineError::Refused(told)) => assert_eq!(told, text),
        other => panic!("not refused: {other:?}"),
    }
}

pub fn share() -> Span {
    Span::new(0..LAYERS, 0..HEADS).unwrap()
}

pub fn key(n: u64) -> Key {
    key_of(n, share())
}

pub fn key_of(n: u64, span: Span) -> Key {
    let mut chunk = [7; 32];
    chunk[..8].copy_from_slice(&n.to_le_bytes());
    Key {
        namespace: NAMESPACE,
        chunk,
        span,
    }
}

pub const NAMESPACE: Namespace = Namespace([3; 16]);

/// Who has a salt of this text.
pub fn salted(salt: &str) -> Owner {
    Owner {
        salt: Arc::from(salt.as_bytes()),
        tenant: None,
    }
}

/// The tenant of this name, with a salt.
pub fn tenant(name: &str) -> Owner {
    Owner {
        tenant: Some(Tenant::named(name).unwrap()),
        ..salted("salt")
    }
}

/// A tenant's key of this number.
pub fn key_for(owner: &Owner, n: u64) -> Key {
    Key {
        namespace: NAMESPACE.of_tenant(owner.tenant.unwrap()),
        ..key(n)
    }
}

/// A block that holds what the key of this number names.
pub fn block_of(n: u64, id: u64) -> Block {
    Block {
        group: 0,
        id,
        chunk: key(n).chunk,
        parent: None,
    }
}

/// Blocks that follow one another in a prompt, each in its own target.
pub fn chain(names: &[u64], parent: Option<u64>) -> Vec<Block> {
    let mut before = parent;
    let number = |(&n, target): (&u64, u64)| {
        let parent = before.replace(n).map(|n| Parent {
            chunk: key(n).chunk,
            tokens: 0,
        });
        Block {
            parent,
            ..block_of(n, target % BLOCKS)
        }
    };
    names.iter().zip(0..).map(number).collect()
}

/// Without a host tier: loads come from the store. A store that is held up is not given up before
/// the test lets it go, also where the machine stalls.
pub fn config(slots: usize) -> EngineConfig {
    let mut config = EngineConfig::new(2 * BLOCK_BYTES, slots);
    config.keep = false;
    config.store_wait = LONG;
    config.put_timeout = LONG;
    config.get_timeout = LONG;
    config
}

/// KV memory of one rank, in some layout. Touched through raw pointers only, as the engine does.
pub struct Kv {
    pub layout: KvLayout,
    pub descriptor: Descriptor,
    memory: *mut u8,
    len: usize,
}

// SAFETY: plain memory; tests touch a block only while no job of the engine does.
unsafe impl Send for Kv {}
// SAFETY: as above.
unsafe impl Sync for Kv {}

impl Drop for Kv {
    fn drop(&mut self) {
        // SAFETY: made by `Kv::new` from a boxed slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.memory, self.len)) });
    }
}

impl Kv {
    /// Segments in the order of heads before tokens, whatever the layout: what a namespace
    /// fixes.
    pub fn new(layout: KvLayout) -> Self {
        let descriptor = Descriptor::packed(layout, share(), BLOCKS, TOKENS, CONTENT)
            .unwrap()
            .with_interior(Interior::Hnc);
        let len = descriptor.region_lens()[0] as usize;
        let memory = Box::into_raw(vec![0_u8; len].into_boxed_slice()).cast();
        Self {
            layout,
            descriptor,
            memory,
            len,
        }
    }

    pub fn region(&self) -> Region {
        // SAFETY: tests drop engines before the memory they registered, and keep off the
        // blocks of jobs under way.
        unsafe { Region::new(self.memory.expose_provenance(), self.len as u64) }
    }

    /// The group of all of this memory, a block in one object.
    pub fn group(&self) -> KvGroup {
        KvGroup::new(Device::Host, self.descriptor.clone(), vec![self.region()])
    }

    /// Where an element lies, from the layout's name alone.
    fn offset(&self, layer: u64, block: u64, head: u64, token: u64, byte: u64) -> usize {
        let mut offset = 0;
        for axis in self.layout.order() {
            let (index, count) = match axis {
                Axis::Layer => (layer, u64::from(LAYERS)),
                Axis::Block => (block, BLOCKS),
                Axis::Head => (head, u64::from(HEADS)),
                Axis::Token => (token, TOKENS),
                Axis::Content => (byte, CONTENT),
            };
            offset = offset * count + index;
        }
        offset as usize
    }

    fn each(&self, block: u64, span: Span, mut visit: impl FnMut(*mut u8)) {
        for layer in span.layers() {
            for head in span.heads() {
                for token in 0..TOKENS {
                    for byte in 0..CONTENT {
                        let at = self.offset(layer.into(), block, head.into(), token, byte);
                        // SAFETY: offsets of a layout's elements lie in its memory.
                        visit(unsafe { self.memory.add(at) });
                    }
                }
            }
        }
    }

    /// A block's bytes in canonical order.
    pub fn read(&self, block: u64, span: Span) -> Vec<u8> {
        let mut bytes = Vec::new();
        // SAFETY: no job touches the block now.
        self.each(block, span, |at| bytes.push(unsafe { at.read() }));
        bytes
    }

    pub fn write(&self, block: u64, span: Span, bytes: &[u8]) {
        let mut bytes = bytes.iter();
        // SAFETY: no job touches the block now.
        self.each(block, span, |at| unsafe {
            at.write(*bytes.next().unwrap())
        });
        assert!(bytes.next().is_none());
    }

    /// Every byte of the memory.
    pub fn all(&self) -> Vec<u8> {
        // SAFETY: no job runs now.
        unsafe { std::slice::from_raw_parts(self.memory, self.len) }.to_vec()
    }

    pub fn fill(&self, block: u64, seed: u64) {
        self.write(block, share(), &pattern(seed));
    }
}

/// The bytes of a block, different for each seed.
pub fn pattern(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..BLOCK_BYTES)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// An engine on memory that outlives it, and the completions polled from it that no test has asked
/// for yet.
pub struct Rig<'kv> {
    engine: Engine,
    polled: Mutex<Vec<Completion>>,
    kv: PhantomData<&'kv Kv>,
}

impl std::ops::Deref for Rig<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

/// Calls of the engine, with blocks that are for everybody.
impl<'kv> Rig<'kv> {
    pub fn submit_store(
        &self,
        job: u64,
        blocks: Vec<Block>,
        after: Fence,
    ) -> std::result::Result<(), EngineError> {
        self.engine
            .submit_store(job, &blocks, &Owner::default(), after)
    }

    pub fn submit_load(
        &self,
        job: u64,
        blocks: Vec<Block>,
        deadline: impl Into<Deadline>,
        prefix: bool,
        after: Fence,
    ) -> std::result::Result<(), EngineError> {
        self.engine
            .submit_load(job, &blocks, &Owner::default(), deadline, prefix, after)
    }

    pub fn submit_prefetch(
        &self,
        job: u64,
        blocks: Vec<Block>,
        deadline: Instant,
    ) -> std::result::Result<(), EngineError> {
        self.engine
            .submit_prefetch(job, &blocks, &Owner::default(), deadline)
    }

    /// A store for one owner.
    pub fn store_for(&self, owner: &Owner, job: u64, blocks: Vec<Block>) {
        self.engine
            .submit_store(job, &blocks, owner, Fence::NONE)
            .unwrap();
    }

    /// A load for one owner.
    pub fn load_for(&self, owner: &Owner, job: u64, blocks: Vec<Block>) {
        self.engine
            .submit_load(job, &blocks, owner, soon(), true, Fence::NONE)
            .unwrap();
    }

    /// A prefetch for one owner.
    pub fn prefetch_for(&self, owner: &Owner, job: u64, blocks: Vec<Block>) {
        self.engine
            .submit_prefetch(job, &blocks, owner, soon())
            .unwrap();
    }

    /// Registers memory as the only group, a block in one object.
    pub fn register_kv(&self, kv: &'kv Kv) {
        self.register(0, kv.group()).unwrap();
        self.name(0, NAMESPACE).unwrap();
    }
}

pub fn engine<'kv>(
    store: &Arc<impl Store + 'static>,
    config: EngineConfig,
    kv: &'kv Kv,
) -> Rig<'kv> {
    let rig = unregistered(store, config);
    rig.register_kv(kv);
    rig
}

pub fn unregistered<'kv>(store: &Arc<impl Store + 'static>, config: EngineConfig) -> Rig<'kv> {
    Rig::from(Engine::new(Arc::clone(store) as Arc<dyn Store>, config).unwrap())
}

impl From<Engine> for Rig<'_> {
    fn from(engine: Engine) -> Self {
        Self {
            engine,
            polled: Mutex::default(),
            kv: PhantomData,
        }
    }
}

/// Polls until `job` has an event that `is_it`; takes the events of the job up to that one.
fn take(rig: &Rig, job: u64, is_it: impl Fn(&Event) -> bool) -> Vec<Event> {
    let end = soon();
    let mut polled = rig.polled.lock();
    while !polled.iter().any(|c| c.job == job && is_it(&c.event)) {
        assert!(
            Instant::now() < end,
            "job {job} never got there; polled: {polled:?}"
        );
        rig.wait(Duration::from_secs(1));
        rig.poll(&mut polled);
    }
    let mut taken: Vec<Event> = Vec::new();
    polled.retain(|c| {
        let mine = c.job == job && !taken.last().is_some_and(&is_it);
        if mine {
            taken.push(c.event.clone());
        }
        !mine
    });
    taken
}

/// All events of a job, the last one included.
pub fn events(rig: &Rig, job: u64) -> Vec<Event> {
    take(rig, job, Event::is_last)
}

/// The outcomes of a job.
pub fn outcomes(rig: &Rig, job: u64) -> Vec<Outcome> {
    events(rig, job).last().unwrap().blocks().to_vec()
}

/// Stores blocks as job 1, and waits for the outcomes.
pub fn store(rig: &Rig, blocks: Vec<Block>) -> Vec<Outcome> {
    rig.submit_store(1, blocks, Fence::NONE).unwrap();
    outcomes(rig, 1)
}

/// Loads blocks as job 2, and waits for the outcomes.
pub fn load(rig: &Rig, blocks: Vec<Block>) -> Vec<Outcome> {
    rig.submit_load(2, blocks, soon(), false, Fence::NONE)
        .unwrap();
    outcomes(rig, 2)
}

/// A value under the key of block 1 that is bad for this `reason`: its load is rejected and writes
/// nothing, and the value is removed. The load's slot has held the good value.
pub fn assert_rejected(
    rig: &Rig,
    probe: &Probe,
    kv: &Kv,
    (good, bad): (&[u8], &[u8]),
    reason: &str,
) {
    let load = |target| {
        let blocks = vec![block_of(1, target)];
        rig.submit_load(2, blocks, soon(), false, Fence::NONE)
            .unwrap();
        outcomes(rig, 2)
    };
    probe.plant(&key(1), good);
    assert_eq!(load(9), [Outcome::Loaded(BLOCK_BYTES as u64)]);
    probe.plant(&key(1), bad);
    let before = kv.all();
    let outcomes = load(1);
    let [Outcome::Rejected(why)] = outcomes[..] else {
        panic!("{reason}: {outcomes:?}")
    };
    assert_eq!(why.name(), reason);
    assert!(kv.all() == before, "{reason}: memory was written");
    eventually("the value is removed", || !probe.has(&key(1)));
}

/// Waits until `job` is released.
pub fn released(rig: &Rig, job: u64) {
    take(rig, job, |event| *event == Event::Released);
}

/// Names of this process's threads that begin with `prefix`.
pub fn threads(prefix: &str) -> Vec<String> {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with(prefix))
        .collect()
}

/// What a probe has been asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Get(Vec<Key>),
    Put(Vec<Key>),
    Contains(usize),
    Touch(Vec<(Key, u64)>),
    Remove(Vec<Key>),
}

/// A memory store that is watched, and can be held up, made to fail or to panic. It keeps the
/// contract: held up or not, it returns by the deadline.
pub struct Probe {
    pub inner: MemoryStore,
    control: Mutex<Control>,
    changed: Condvar,
}

#[derive(Default)]
struct Control {
    calls: Vec<Call>,
    hold_gets: bool,
    hold_puts: bool,
    hold_contains: bool,
    fail: Option<ErrorKind>,
    fail_puts: Option<ErrorKind>,
    panic_on: HashSet<Key>,
    deaf: bool,
    best: BatchBytes,
    /// How often what was held up ran out of time.
    late: u64,
    /// The last call's.
    deadline: Option<Instant>,
}

impl Probe {
    pub fn new() -> Arc<Self> {
        let inner = MemoryStore::new(1 << 30);
        Arc::new(Self {
            inner,
            control: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub fn calls(&self) -> Vec<Call> {
        self.control.lock().calls.clone()
    }

    pub fn hold_gets(&self, hold: bool) {
        self.set(|control| control.hold_gets = hold);
    }

    pub fn hold_puts(&self, hold: bool) {
        self.set(|control| control.hold_puts = hold);
    }

    pub fn hold_contains(&self, hold: bool) {
        self.set(|control| control.hold_contains = hold);
    }

    /// What is held up fails as if its deadline had come. What comes next is held up again.
    pub fn time_is_over(&self) {
        self.set(|control| control.late += 1);
    }

    /// The deadline of the last call.
    pub fn deadline(&self) -> Option<Instant> {
        self.control.lock().deadline
    }

    pub fn fail(&self, kind: Option<ErrorKind>) {
        self.set(|control| control.fail = kind);
    }

    /// Lets everything but puts through.
    pub fn fail_puts(&self, kind: Option<ErrorKind>) {
        self.set(|control| control.fail_puts = kind);
    }

    pub fn panic_on(&self, key: Key) {
        self.set(|control| {
            control.panic_on.insert(key);
        });
    }

    /// Says that batches of this size are best.
    pub fn wants_batches(&self, best: BatchBytes) {
        self.set(|control| control.best = best);
    }

    /// Leaves requests without an outcome, which the contract forbids.
    pub fn deaf(&self, deaf: bool) {
        self.set(|control| control.deaf = deaf);
    }

    fn set(&self, change: impl FnOnce(&mut Control)) {
        change(&mut self.control.lock());
        self.changed.notify_all();
    }

    fn enter(
        &self,
        call: Call,
        keys: &[Key],
        deadline: Instant,
        held: impl Fn(&Control) -> bool,
    ) -> std::result::Result<bool, ErrorKind> {
        let mut control = self.control.lock();
        let is_put = matches!(call, Call::Put(_));
        control.calls.push(call);
        control.deadline = Some(deadline);
        self.changed.notify_all();
        let late = control.late;
        while held(&control) {
            let wait = self.changed.wait_until(&mut control, deadline);
            if wait.timed_out() || control.late > late {
                return Err(ErrorKind::TimedOut);
            }
        }
        let bad = keys.iter().any(|key| control.panic_on.contains(key));
        let of_puts = control.fail_puts.filter(|_| is_put);
        let (fail, deaf) = (control.fail.or(of_puts), control.deaf);
        drop(control);
        assert!(!bad, "told to panic, on purpose");
        fail.map_or(Ok(deaf), Err)
    }

    /// Waits until some call satisfies `is_it`.
    pub fn until(&self, is_it: impl Fn(&Call) -> bool) {
        let end = soon();
        let mut control = self.control.lock();
        while !control.calls.iter().any(&is_it) {
            assert!(
                !self.changed.wait_until(&mut control, end).timed_out(),
                "no such call"
            );
        }
    }

    pub fn plant(&self, key: &Key, value: &[u8]) {
        self.inner.remove(&[*key], soon()).unwrap();
        self.inner
            .put(key, &[std::io::IoSlice::new(value)], soon())
            .unwrap();
    }

    pub fn value(&self, key: &Key) -> Vec<u8> {
        let mut value = vec![0; 1 << 16];
        let slices = &mut [std::io::IoSliceMut::new(&mut value)];
        match self.inner.get(key, slices, soon()).unwrap() {
            penstock_contract::GetOutcome::Hit(bytes) => value.truncate(bytes as usize),
            other => panic!("{other:?}"),
        }
        value
    }

    pub fn has(&self, key: &Key) -> bool {
        self.inner.contains(&[*key], soon()).unwrap()[0]
    }
}

impl Store for Probe {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn url(&self) -> String {
        "probe:".into()
    }

    fn batch_bytes(&self) -> BatchBytes {
        self.control.lock().best
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.enter(Call::Contains(keys.len()), keys, deadline, |control| {
            control.hold_contains
        })
        .map_err(|kind| Error::new(kind, "as told"))?;
        self.inner.contains(keys, deadline)
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let keys: Vec<Key> = batch.iter().map(|request| request.key).collect();
        match self.enter(Call::Put(keys.clone()), &keys, deadline, |control| {
            control.hold_puts
        }) {
            Ok(true) => {}
            Ok(false) => self.inner.put_many(batch, soon()),
            Err(kind) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(kind, "as told")));
                }
            }
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        let keys: Vec<Key> = batch.iter().map(|request| request.key).collect();
        match self.enter(Call::Get(keys.clone()), &keys, deadline, |control| {
            control.hold_gets
        }) {
            Ok(true) => {}
            Ok(false) => self.inner.get_many(batch, soon()),
            Err(kind) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(kind, "as told")));
                }
            }
        }
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        let keys: Vec<Key> = values.iter().map(|&(key, _)| key).collect();
        self.enter(Call::Touch(values.to_vec()), &keys, deadline, |_| false)
            .map_err(|kind| Error::new(kind, "as told"))?;
        self.inner.touch(values, deadline)
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.control.lock().calls.push(Call::Remove(keys.to_vec()));
        self.inner.remove(keys, deadline)
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.inner.list(namespace, visit, deadline)
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.inner.describe(deadline)
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
}
