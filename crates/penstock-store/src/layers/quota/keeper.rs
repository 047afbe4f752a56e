//! The thread that counts what accounts have, and evicts what is too much.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use penstock_contract::{Error, ErrorKind, Key, Result, Store};

use super::ledger::Ledger;
use super::rules::Quotas;

/// How much the thread gives way to others that want the processor.
const NICE: i32 = 10;
/// The longest that a census takes at first. Where that is too short, it grows to the longest.
const FIRST_CENSUS: Duration = Duration::from_secs(1);
const LONGEST_CENSUS: Duration = Duration::from_secs(60);
/// Values evicted at once, and how long that may take.
const REMOVED_AT_ONCE: usize = 16;
const REMOVAL: Duration = Duration::from_secs(1);
/// The pause after a census or an eviction that failed. It doubles each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What the thread and its handle share.
pub(super) struct Shared {
    pub(super) inner: Arc<dyn Store>,
    pub(super) quotas: Quotas,
    pub(super) evictions: AtomicU64,
    pub(super) errors: AtomicU64,
    books: Mutex<Books>,
    /// The thread has something to do.
    asked: Condvar,
    /// A census or an eviction has ended.
    changed: Condvar,
}

pub(super) struct Books {
    pub(super) ledger: Ledger,
    /// Since when the thread has had something to do without a break.
    pub(super) behind_since: Option<Instant>,
    pub(super) last_census: Option<Instant>,
    is_closed: bool,
}

impl Shared {
    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock()
    }

    /// Has the thread take a census soon.
    pub(super) fn ask(&self, books: &mut Books) {
        if books.behind_since.is_none() {
            books.behind_since = Some(Instant::now());
            self.asked.notify_one();
        }
    }

    /// Waits until the thread has done something, or until `give_up`. False if it was that late.
    pub(super) fn wait(&self, books: &mut MutexGuard<'_, Books>, give_up: Instant) -> bool {
        !self.changed.wait_until(books, give_up).timed_out()
    }

    fn serve(&self) {
        let (mut patience, mut pause) = (FIRST_CENSUS, FIRST_PAUSE);
        loop {
            let mut books = self.books();
            while books.behind_since.is_none() && !books.is_closed {
                self.asked.wait(&mut books);
            }
            if books.is_closed {
                return;
            }
            books.ledger.begin_census();
            drop(books);
            let begun = Instant::now();
            let outcome = self.keep(begun + patience);
            let mut books = self.books();
            match outcome {
                Ok(()) => {
                    (patience, pause) = (FIRST_CENSUS, FIRST_PAUSE);
                    let is_behind = books.ledger.needs_a_census();
                    books.behind_since = is_behind.then(Instant::now);
                    self.changed.notify_all();
                }
                Err(error) => {
                    self.errors.fetch_add(1, Relaxed);
                    if error.kind() == ErrorKind::TimedOut {
                        patience = (4 * patience).min(LONGEST_CENSUS);
                    }
                    self.changed.notify_all();
                    if !books.is_closed {
                        self.asked.wait_for(&mut books, pause);
                    }
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Takes a census, and evicts what is too much.
    fn keep(&self, deadline: Instant) -> Result<()> {
        let begun = Instant::now();
        let mut values = self.census(deadline)?;
        let mut found = HashMap::new();
        for value in &values {
            for (account, quota) in self.quotas.accounts_of(value.key.namespace) {
                found.entry(account).or_insert((quota, 0)).1 += value.charge;
            }
        }
        let mut excess = {
            let mut books = self.books();
            books.last_census = Some(begun);
            let excess = books.ledger.end_census(&self.quotas, &found);
            self.changed.notify_all();
            excess
        };
        if excess.is_empty() {
            return Ok(());
        }
        values.sort_unstable_by_key(|value| (value.last_use, value.key));
        values.retain(|value| {
            let accounts = || self.quotas.accounts_of(value.key.namespace);
            let is_victim = accounts().any(|(a, _)| excess.get(&a).is_some_and(|&left| left > 0));
            if is_victim {
                for (account, _) in accounts() {
                    if let Some(left) = excess.get_mut(&account) {
                        *left = left.saturating_sub(value.charge);
                    }
                }
            }
            is_victim
        });
        values
            .chunks(REMOVED_AT_ONCE)
            .try_for_each(|batch| self.evict(batch))
    }

    /// Every value of an account.
    fn census(&self, deadline: Instant) -> Result<Vec<Value>> {
        let mut values = Vec::new();
        let mut visit = |listed: penstock_contract::Listed| {
            if self.quotas.concern(listed.key.namespace) {
                values.push(Value {
                    key: listed.key,
                    last_use: listed.last_use,
                    charge: self.inner.charge(listed.bytes),
                });
            }
        };
        match self.quotas.namespaces() {
            Some(mut namespaces) => namespaces
                .try_for_each(|namespace| self.inner.list(Some(namespace), &mut visit, deadline))?,
            None => self.inner.list(None, &mut visit, deadline)?,
        }
        Ok(values)
    }

    fn evict(&self, batch: &[Value]) -> Result<()> {
        if self.books().is_closed {
            return Ok(());
        }
        let keys: Vec<Key> = batch.iter().map(|value| value.key).collect();
        let removed = self.inner.remove(&keys, Instant::now() + REMOVAL)?;
        self.evictions.fetch_add(removed, Relaxed);
        let mut books = self.books();
        for value in batch {
            let accounts = self.quotas.accounts_of(value.key.namespace);
            books.ledger.is_gone(accounts, value.charge);
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// A value as the census found it.
struct Value {
    key: Key,
    last_use: u64,
    charge: u64,
}

/// The thread. When it is dropped, the thread ends.
pub(super) struct Keeper {
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread, which begins with a census.
    pub(super) fn start(inner: Arc<dyn Store>, quotas: Quotas) -> Result<Self> {
        let shared = Arc::new(Shared {
            inner,
            evictions: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            books: Mutex::new(Books {
                ledger: Ledger::new(&quotas),
                behind_since: Some(Instant::now()),
                last_census: None,
                is_closed: false,
            }),
            quotas,
            asked: Condvar::new(),
            changed: Condvar::new(),
        });
        let thread = thread::Builder::new()
            .name("penstock-quota".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || {
                    // On Linux, this concerns this thread alone. If it is refused, the thread is
                    // only more in the way.
                    #[cfg(target_os = "linux")]
                    let _ = rustix::process::nice(NICE);
                    let rest = |pause| {
                        let mut books = shared.books();
                        if !books.is_closed {
                            shared.asked.wait_for(&mut books, pause);
                        }
                        !books.is_closed
                    };
                    penstock_threads::serve("penstock-quota", rest, || shared.serve());
                }
            })
            .map_err(|e| Error::new(ErrorKind::Io, "cannot start a thread").caused_by(e))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.books().is_closed = true;
        self.shared.asked.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread contains panics. If one escaped all the same, the thread is gone.
            let _ = thread.join();
        }
    }
}
