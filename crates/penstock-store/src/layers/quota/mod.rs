//! Quotas: what each tenant or namespace may have of a bounded store.

mod keeper;
mod ledger;
mod rules;

pub use rules::{Account, Quotas};

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use keeper::Keeper;
use ledger::Refusal;
use penstock_contract::memory::{Claim, Lent, Reserved, Run, SharedMemory};
use penstock_contract::{
    Capabilities, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest, Result, Store,
    StoreStats, deadline, slices,
};

/// Longest time that a put waits for a census or an eviction, unless whoever opens the store says
/// another.
const PATIENCE: Duration = Duration::from_millis(200);
/// Longest time that opening waits for the first census.
const FIRST_CENSUS_WAIT: Duration = Duration::from_secs(2);
/// A description rests on a census no older than this, if one can be had in time.
const FRESH: Duration = Duration::from_secs(5);
/// Longest time that a description waits for a census.
const CENSUS_WAIT: Duration = Duration::from_secs(2);

/// A bounded store that keeps each tenant or namespace within its quota.
///
/// A value counts with what the store itself charges for it ([`Store::charge`]). It counts for its
/// namespace and for its tenant ([`Namespace::tenant`]), if they have a quota.
///
/// A thread takes a census now and then: it lists what is there. When an account has more than 95 %
/// of its quota, the thread evicts the account's least recently used values down to 90 %. Other
/// accounts' values stay. A put that would pass the quota meanwhile waits up to 200 ms for the
/// thread, but never if the thread has been behind for longer than that. It then fails with
/// [`ErrorKind::OverQuota`], also if what the account has is not counted yet. A value larger than its quota fails with [`ErrorKind::Config`].
///
/// The bound is exact as long as one handle puts. Each further handle, of this process or another,
/// may bring an account 5 % of its quota above it, or one value if that is more, until the next
/// census. Each handle applies the quotas that it was opened with; handles without quotas apply
/// none.
///
/// Look-ups, gets, touches, listings and removals pass straight through.
pub struct Quota {
    keeper: Keeper,
    patience: Duration,
}

impl Quota {
    /// Puts quotas on a store. Waits a little for the first census, because puts fail before it.
    ///
    /// Fails with [`ErrorKind::Io`] if no thread can be had.
    pub fn new(inner: Arc<dyn Store>, quotas: Quotas) -> Result<Self> {
        let keeper = Keeper::start(inner, quotas)?;
        let give_up = Instant::now() + FIRST_CENSUS_WAIT;
        let mut books = keeper.shared.books();
        while books.ledger.censuses == 0 && keeper.shared.wait(&mut books, give_up) {}
        drop(books);
        Ok(Self {
            keeper,
            patience: PATIENCE,
        })
    }

    /// Lets a put wait for the thread for so long before it fails with [`ErrorKind::OverQuota`], and no
    /// longer than its deadline. By default this is 200 ms.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    fn store(&self) -> &dyn Store {
        &*self.keeper.shared.inner
    }

    /// The memory of the store, for whoever has this one's.
    fn beneath(&self) -> &dyn SharedMemory {
        let memory = self.store().memory();
        memory.expect("a quota's memory is that of its store")
    }

    /// Takes room for requests from the batch's first on, until there is one that has to wait.
    /// Returns how many have room. If the first has none, waits for it until `give_up`; if it still
    /// has none, fails.
    fn take(&self, batch: &[PutRequest<'_>], give_up: Instant) -> Result<usize> {
        let shared = &self.keeper.shared;
        let mut books = shared.books();
        loop {
            let mut taken = 0;
            let refusal = batch.iter().find_map(|request| {
                let accounts = shared.quotas.accounts_of(request.key.namespace);
                let charge = self.store().charge(slices::len_of(request.value));
                let refusal = books.ledger.take(accounts, charge).err();
                taken += usize::from(refusal.is_none());
                refusal.map(|refusal| (refusal, charge))
            });
            if books.ledger.needs_a_census() {
                shared.ask(&mut books);
            }
            let Some(((account, quota, refusal), charge)) = refusal.filter(|_| taken == 0) else {
                return Ok(taken);
            };
            let late = books.behind_since.map(|since| since + self.patience);
            let give_up = late.map_or(give_up, |late| late.min(give_up));
            if refusal == Refusal::TooLarge || !shared.wait(&mut books, give_up) {
                let name = shared.quotas.name_of(account);
                return Err(refused(&name, quota, charge, refusal));
            }
        }
    }

    fn end_put(&self, request: &PutRequest<'_>, books: &mut keeper::Books) {
        // A put that failed may have stored its value, unless the store refused it.
        let may_be_there = match &request.outcome {
            Some(Ok(outcome)) => *outcome == penstock_contract::PutOutcome::Stored,
            Some(Err(error)) => !matches!(
                error.kind(),
                ErrorKind::Full | ErrorKind::OverQuota | ErrorKind::Config
            ),
            None => true,
        };
        let accounts = self.keeper.shared.quotas.accounts_of(request.key.namespace);
        let charge = self.store().charge(slices::len_of(request.value));
        books.ledger.end_put(accounts, charge, may_be_there);
    }

    /// What the accounts have, by a census that is fresh if one can be had in time.
    fn facts(&self, deadline: Instant) -> Vec<(String, String)> {
        let shared = &self.keeper.shared;
        let give_up = deadline.min(Instant::now() + CENSUS_WAIT);
        let mut books = shared.books();
        let is_old =
            |books: &keeper::Books| books.last_census.is_none_or(|at| at.elapsed() > FRESH);
        while is_old(&books) {
            shared.ask(&mut books);
            if !shared.wait(&mut books, give_up) {
                break;
            }
        }
        let is_counted = books.ledger.censuses > 0;
        let all = books.ledger.all();
        drop(books);
        let facts = all.into_iter().flat_map(|(account, standing)| {
            let name = shared.quotas.name_of(account);
            let used = if is_counted {
                standing.used().to_string()
            } else {
                "unknown".to_owned()
            };
            [
                (format!("quota_bytes:{name}"), standing.quota.to_string()),
                (format!("quota_used_bytes:{name}"), used),
            ]
        });
        let others = shared.quotas.each_other_tenant();
        let others = others.map(|bytes| ("quota_bytes:tenant/*".to_owned(), bytes.to_string()));
        facts.chain(others).collect()
    }
}

fn refused(name: &str, quota: u64, charge: u64, refusal: Refusal) -> Error {
    let (kind, message) = match refusal {
        Refusal::TooLarge => (
            ErrorKind::Config,
            format!("a value that takes {charge} bytes is larger than its quota of {quota}"),
        ),
        Refusal::NoRoom => (
            ErrorKind::OverQuota,
            format!("the quota of {quota} bytes is used up until old values are evicted"),
        ),
        Refusal::NotCounted => (
            ErrorKind::OverQuota,
            format!("what there is of the quota of {quota} bytes is being counted"),
        ),
    };
    Error::new(kind, message).with("account", name)
}

impl Store for Quota {
    fn capabilities(&self) -> Capabilities {
        self.store().capabilities()
    }

    /// The store's, with the quotas as parameters behind its own.
    fn url(&self) -> String {
        // The URL of a bounded store has its size as its first parameter.
        format!("{}&{}", self.store().url(), self.keeper.shared.quotas)
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.store().contains(keys, deadline)
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let shared = &self.keeper.shared;
        let is_bounded = |request: &PutRequest<'_>| shared.quotas.concern(request.key.namespace);
        if !batch.iter().any(is_bounded) {
            return self.store().put_many(batch, deadline);
        }
        let give_up = deadline.min(Instant::now() + self.patience);
        let mut rest = batch;
        while !rest.is_empty() {
            let taken = deadline::check(deadline).and_then(|()| self.take(rest, give_up));
            let done = match taken {
                Ok(taken) => {
                    self.store().put_many(&mut rest[..taken], deadline);
                    let mut books = shared.books();
                    for request in &rest[..taken] {
                        self.end_put(request, &mut books);
                    }
                    taken
                }
                Err(error) => {
                    shared.errors.fetch_add(1, Relaxed);
                    rest[0].outcome = Some(Err(error
                        .with("store", self.store().url())
                        .with("key", rest[0].key)));
                    1
                }
            };
            rest = &mut rest[done..];
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.store().get_many(batch, deadline);
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        self.store().touch(values, deadline)
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.store().remove(keys, deadline)
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.store().list(namespace, visit, deadline)
    }

    /// The store's facts, and for each account its quota and what it has of it.
    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let mut facts = self.store().describe(deadline)?;
        facts.extend(self.facts(deadline));
        Ok(facts)
    }

    fn stats(&self) -> StoreStats {
        let inner = self.store().stats();
        let shared = &self.keeper.shared;
        StoreStats {
            evictions: inner.evictions + shared.evictions.load(Relaxed),
            errors: inner.errors + shared.errors.load(Relaxed),
            ..inner
        }
    }

    fn inner(&self) -> Option<&dyn Store> {
        Some(self.store())
    }

    fn memory(&self) -> Option<&dyn SharedMemory> {
        self.store().memory().map(|_| self as _)
    }
}

/// The memory of the store beneath. Values of accounts with a quota are put the usual way.
// SAFETY: it is the region of the store beneath, which this one owns.
#[allow(unsafe_code)]
unsafe impl SharedMemory for Quota {
    fn region(&self) -> Run {
        self.beneath().region()
    }

    fn warm_up(&self, stop: &dyn Fn() -> bool) {
        self.beneath().warm_up(stop);
    }

    fn lend(&self, key: &Key, position: u64, deadline: Instant) -> Option<Box<dyn Lent + '_>> {
        self.beneath().lend(key, position, deadline)
    }

    fn reserve(
        &self,
        key: &Key,
        payload_bytes: u64,
        position: u64,
        deadline: Instant,
    ) -> Result<Option<Box<dyn Reserved + '_>>> {
        if self.keeper.shared.quotas.concern(key.namespace) {
            let problem = "values of tenants with quotas cannot be put in place";
            return Err(Error::new(ErrorKind::Unsupported, problem));
        }
        self.beneath()
            .reserve(key, payload_bytes, position, deadline)
    }

    fn claim(&self, key: &Key) -> Option<Claim<'_>> {
        self.beneath().claim(key)
    }
}
