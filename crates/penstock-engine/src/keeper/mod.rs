//! Keeping and letting go: what a client knows of its next requests, told to a store.
//!
//! All that a store knows of a value is when it was used last. So a block that will be asked for
//! again is touched again and again, until its time is over. Blocks that will not be asked for are
//! removed.
//!
//! One thread does this, with a clock of its own: a serving engine that has nothing to do makes no
//! steps, and that is when its agents wait for their tools.

mod book;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use book::{Book, Bounds, Candidate, Name};
use parking_lot::{Condvar, Mutex};
use penstock_contract::{Chunk, ErrorKind, Key, Namespace, Store, Tenancy, Tenant};
use penstock_layout::Span;
use penstock_threads::contain;
use penstock_value::header::HEADER_BYTES;

use crate::EngineError;
use crate::config::end_of;
use crate::gauge::Gauge;

/// Where panics of this thread are counted.
const PLACE: &str = "penstock-keep";
/// Keys in one call to the store.
const KEYS_A_CALL: usize = 1024;
/// Longest time that a call to the store may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// The thread rests for so many times what a touch took: it is in the store's way for a tenth of
/// the time at most.
const RESTS: u32 = 9;
/// The most blocks that wait for the thread. Further ones are refused.
const MOST_QUEUED: usize = 1 << 18;
/// How a store's description names its bound in bytes. Tiers have a prefix.
const CAPACITIES: [&str; 2] = ["capacity_bytes", "maxmemory"];

/// Bounds of a [`Keeper`].
#[derive(Clone, Debug, PartialEq)]
pub struct KeeperConfig {
    /// The share of the store that kept blocks may take, from 0 to 1.
    pub share: f64,
    /// The share of the store that kept blocks of one account may take.
    pub account_share: f64,
    /// The bytes of a store that does not tell its bound. If several tiers tell theirs, the
    /// smallest counts.
    pub assumed_bytes: u64,
    /// How often a kept block is touched, unless there are too many.
    pub every: Duration,
}

/// How blocks of one group of layers are stored.
#[derive(Clone, Debug)]
pub struct KeptGroup {
    /// The namespace of objects that no tenant owns.
    pub namespace: Namespace,
    /// The spans of the objects that make up a block.
    pub spans: Vec<Span>,
    /// Payload bytes of a block, over all its objects.
    pub block_bytes: u64,
}

/// What a keeper did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeeperStats {
    /// Touches of blocks that the store had.
    pub touched: u64,
    /// Blocks that were not kept, since others have the room.
    pub refused: u64,
    /// Blocks removed from the store.
    pub removed: u64,
    /// Calls to the store that failed.
    pub failed: u64,
    /// Blocks that are kept now.
    pub kept: u64,
}

/// Touches kept blocks of a store, and removes others, on a thread of its own.
///
/// Dropping it ends the thread, once the call that it is in has returned.
pub struct Keeper {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    store: Arc<dyn Store>,
    groups: Vec<Group>,
    config: KeeperConfig,
    inbox: Mutex<Inbox>,
    wake: Condvar,
    running: Gauge,
    touched: AtomicU64,
    refused: AtomicU64,
    removed: AtomicU64,
    failed: AtomicU64,
    kept: AtomicU64,
}

#[derive(Default)]
struct Inbox {
    tasks: VecDeque<Task>,
    /// Blocks in `tasks`.
    blocks: usize,
    closed: bool,
}

struct Group {
    namespace: Namespace,
    spans: Arc<[Span]>,
    /// What a block takes up of the store's bound, in bytes.
    charge: u64,
}

struct Task {
    tenant: Option<Tenant>,
    /// Group, chunk, and tokens before it in its prompt, in the prompt's order.
    blocks: Vec<(usize, Chunk, u64)>,
    wish: Wish,
}

enum Wish {
    Keep { account: Vec<u8>, until: Instant },
    LetGo,
}

impl Keeper {
    /// Starts the thread. Blocks name their group by its position in `groups`.
    ///
    /// # Errors
    /// A share is not between 0 and 1, a group has no span, or no thread can be had.
    pub fn new(
        store: Arc<dyn Store>,
        groups: Vec<KeptGroup>,
        config: KeeperConfig,
    ) -> Result<Self, EngineError> {
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        if !is_share(config.share) || !is_share(config.account_share) {
            return Err(EngineError::Config("a share must be between 0 and 1"));
        }
        if groups.iter().any(|group| group.spans.is_empty()) {
            return Err(EngineError::Config("a group needs at least one span"));
        }
        let group = |group: KeptGroup| {
            let count = group.spans.len() as u64;
            let value = group.block_bytes.div_ceil(count) + HEADER_BYTES as u64;
            Group {
                namespace: group.namespace,
                spans: group.spans.into(),
                charge: count * store.charge(value),
            }
        };
        let inner = Arc::new(Inner {
            groups: groups.into_iter().map(group).collect(),
            store,
            config,
            inbox: Mutex::default(),
            wake: Condvar::new(),
            running: Gauge::default(),
            touched: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            kept: AtomicU64::new(0),
        });
        inner.running.add(1);
        // A failed spawn drops the closure, and the guard with it.
        let running = Running(Arc::clone(&inner));
        let thread = Builder::new()
            .name("penstock-keep".to_owned())
            .spawn(move || {
                let inner = &running.0;
                penstock_threads::serve(PLACE, |pause| inner.rest(pause), || inner.serve());
            })
            .map_err(EngineError::Thread)?;
        Ok(Self {
            inner,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Keeps blocks of one prompt for so long. `blocks` has the position of its group, the chunk and
    /// the tokens before it of each block, in the prompt's order. What has no room is refused, the
    /// end of the prompt first. Does not wait.
    ///
    /// # Errors
    /// A block is in no group.
    pub fn keep(
        &self,
        account: &[u8],
        tenant: Option<Tenant>,
        blocks: Vec<(usize, Chunk, u64)>,
        time: Duration,
    ) -> Result<(), EngineError> {
        let wish = Wish::Keep {
            account: account.to_vec(),
            until: end_of(time),
        };
        self.inner.put(Task {
            tenant,
            blocks,
            wish,
        })
    }

    /// Removes blocks from the store, and keeps them no more. Does not wait.
    ///
    /// # Errors
    /// A block is in no group.
    pub fn let_go(
        &self,
        tenant: Option<Tenant>,
        blocks: Vec<(usize, Chunk, u64)>,
    ) -> Result<(), EngineError> {
        self.inner.put(Task {
            tenant,
            blocks,
            wish: Wish::LetGo,
        })
    }

    /// What the keeper did since it was made.
    pub fn stats(&self) -> KeeperStats {
        let inner = &self.inner;
        KeeperStats {
            touched: inner.touched.load(Relaxed),
            refused: inner.refused.load(Relaxed),
            removed: inner.removed.load(Relaxed),
            failed: inner.failed.load(Relaxed),
            kept: inner.kept.load(Relaxed),
        }
    }

    /// Ends the thread: nothing is kept any more. True once it is gone, and false if it is still
    /// inside the store when the time is over. This may be called again.
    pub fn shutdown(&self, timeout: Duration) -> bool {
        let end = end_of(timeout);
        self.inner.inbox.lock().closed = true;
        self.inner.wake.notify_all();
        if !self.inner.running.wait_zero(end) {
            return false;
        }
        if let Some(thread) = self.thread.lock().take() {
            // Panics of the store are contained. If one escaped all the same, the thread is gone.
            let _ = thread.join();
        }
        true
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shutdown(Duration::from_secs(10));
    }
}

struct Running(Arc<Inner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.sub(1);
    }
}

/// The thread's own knowledge.
struct Rounds {
    book: Book,
    /// The store's bound, once it has told it.
    capacity: Option<u64>,
    /// Blocks that this round has yet to touch.
    left: VecDeque<Name>,
    /// When the next round begins.
    next_round: Instant,
    /// When the store may be touched again.
    rests_until: Instant,
}

impl Inner {
    fn put(&self, task: Task) -> Result<(), EngineError> {
        let is_known = |&(group, ..): &(usize, Chunk, u64)| group < self.groups.len();
        if !task.blocks.iter().all(is_known) {
            return Err(EngineError::Config("a block of no group"));
        }
        if task.blocks.is_empty() {
            return Ok(());
        }
        let mut inbox = self.inbox.lock();
        if inbox.closed || inbox.blocks + task.blocks.len() > MOST_QUEUED {
            self.refused.fetch_add(task.blocks.len() as u64, Relaxed);
            return Ok(());
        }
        inbox.blocks += task.blocks.len();
        inbox.tasks.push_back(task);
        drop(inbox);
        self.wake.notify_one();
        Ok(())
    }

    /// Waits for so long, unless this is the end. Whether it is not.
    fn rest(&self, pause: Duration) -> bool {
        let mut inbox = self.inbox.lock();
        if !inbox.closed {
            self.wake.wait_for(&mut inbox, pause);
        }
        !inbox.closed
    }

    /// What was kept before a panic is kept no more: nobody knows what of it still holds.
    fn serve(&self) {
        let now = Instant::now();
        let mut rounds = Rounds {
            book: Book::default(),
            capacity: None,
            left: VecDeque::new(),
            next_round: now,
            rests_until: now,
        };
        while let Some(tasks) = self.next(&rounds) {
            for task in tasks {
                self.carry_out(task, &mut rounds);
            }
            self.touch_some(&mut rounds);
            self.kept.store(rounds.book.len() as u64, Relaxed);
        }
    }

    /// Waits for tasks, or until there is something to touch. `None` if this is the end.
    fn next(&self, rounds: &Rounds) -> Option<VecDeque<Task>> {
        let due = match (rounds.book.len(), rounds.left.is_empty()) {
            (0, _) => None,
            (_, true) => Some(rounds.next_round.max(rounds.rests_until)),
            (_, false) => Some(rounds.rests_until),
        };
        let mut inbox = self.inbox.lock();
        loop {
            if inbox.closed {
                return None;
            }
            if !inbox.tasks.is_empty() {
                inbox.blocks = 0;
                return Some(std::mem::take(&mut inbox.tasks));
            }
            match due {
                None => self.wake.wait(&mut inbox),
                Some(due) if Instant::now() >= due => return Some(VecDeque::new()),
                Some(due) => {
                    self.wake.wait_until(&mut inbox, due);
                }
            }
        }
    }

    fn carry_out(&self, task: Task, rounds: &mut Rounds) {
        let Task {
            tenant,
            blocks,
            wish,
        } = task;
        let candidate = |(group, chunk, position): (usize, Chunk, u64)| {
            let group = &self.groups[group];
            let shared = group.namespace;
            let name = Name {
                namespace: tenant.map_or(shared, |tenant| shared.of_tenant(tenant)),
                chunk,
            };
            Candidate {
                name,
                spans: Arc::clone(&group.spans),
                position,
                charge: group.charge,
            }
        };
        let candidates: Vec<Candidate> = blocks.into_iter().map(candidate).collect();
        match wish {
            Wish::LetGo => self.remove(&candidates, &mut rounds.book),
            Wish::Keep { account, until } => {
                let bounds = self.bounds(&mut rounds.capacity);
                let refused = rounds.book.keep(&account, candidates, until, bounds);
                self.refused.fetch_add(refused as u64, Relaxed);
            }
        }
    }

    /// What may be kept. Asks the store for its bound as long as it has not told.
    fn bounds(&self, capacity: &mut Option<u64>) -> Bounds {
        if capacity.is_none() {
            let facts = self.guarded(|deadline| match self.store.describe(deadline) {
                // Servers often let nobody but operators ask.
                Err(error) if error.kind() == ErrorKind::Denied => Ok(Vec::new()),
                facts => facts,
            });
            *capacity = facts.map(|facts| {
                let is_capacity = |name: &str| {
                    let plain = name.rsplit_once(':').map_or(name, |(_, plain)| plain);
                    CAPACITIES.contains(&plain)
                };
                let told = facts.iter().filter(|(name, _)| is_capacity(name));
                // Zero stands for no bound.
                let told = told.filter_map(|(_, value)| value.parse().ok().filter(|&n| n > 0));
                told.min().unwrap_or(self.config.assumed_bytes)
            });
        }
        let capacity = capacity.unwrap_or(self.config.assumed_bytes) as f64;
        Bounds {
            all: (capacity * self.config.share) as u64,
            account: (capacity * self.config.account_share) as u64,
        }
    }

    fn remove(&self, blocks: &[Candidate], book: &mut Book) {
        let spans = blocks.iter().map(|block| block.spans.len()).max();
        let at_once = (KEYS_A_CALL / spans.unwrap_or(1)).max(1);
        // The end of a prompt goes first: a reader in between finds a beginning.
        for some in blocks.rchunks(at_once) {
            if self.inbox.lock().closed {
                return;
            }
            some.iter().for_each(|block| book.forget(&block.name));
            let keys: Vec<Key> = some.iter().flat_map(Candidate::keys).collect();
            let removed = self.guarded(|deadline| self.store.remove(&keys, deadline));
            if removed.is_some() {
                self.removed.fetch_add(some.len() as u64, Relaxed);
            }
        }
    }

    /// Touches as many blocks as go into one call, if it is time.
    fn touch_some(&self, rounds: &mut Rounds) {
        let began = Instant::now();
        if began < rounds.rests_until {
            return;
        }
        if rounds.left.is_empty() {
            if began < rounds.next_round {
                return;
            }
            rounds.left = rounds.book.expire(began).into();
            rounds.next_round = began + self.config.every;
        }
        let (mut names, mut values) = (Vec::new(), Vec::new());
        while values.len() < KEYS_A_CALL
            && let Some(name) = rounds.left.pop_front()
        {
            let before = values.len();
            values.extend(rounds.book.values(&name));
            names.push((name, values.len() - before));
        }
        if values.is_empty() {
            return;
        }
        let touched = self.guarded(|deadline| self.store.touch(&values, deadline));
        rounds.rests_until = Instant::now() + RESTS * began.elapsed();
        // A store that does not answer says nothing about its blocks.
        let Some(there) = touched.filter(|there| there.len() == values.len()) else {
            return;
        };
        let mut there = there.as_slice();
        for (name, count) in names {
            let (own, rest) = there.split_at(count);
            there = rest;
            let is_there = own.iter().all(|&is_there| is_there);
            rounds.book.note(&name, is_there);
            self.touched
                .fetch_add(u64::from(is_there && count > 0), Relaxed);
        }
    }

    /// Calls the store. `None` if that failed, which is counted.
    fn guarded<T>(&self, call: impl FnOnce(Instant) -> penstock_contract::Result<T>) -> Option<T> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let outcome = contain(PLACE, || call(deadline)).and_then(Result::ok);
        self.failed.fetch_add(u64::from(outcome.is_none()), Relaxed);
        outcome
    }
}
