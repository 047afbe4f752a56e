//! A circuit breaker: a store that does not answer is left alone for a while.

use std::sync::Arc;
use std::time::Instant;

use penstock_contract::{
    Capabilities, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest, Result, Store,
    StoreStats,
};

use super::circuit::{BreakerCounters, BreakerSettings, Circuit, Pass, Verdict};

/// A store behind a circuit breaker.
///
/// After several calls in a row that failed with [`ErrorKind::Unreachable`] or
/// [`ErrorKind::TimedOut`], calls fail at once with [`ErrorKind::Unavailable`]. After a pause, one
/// call is let through as a probe. If it succeeds, everything is as before; if not, the pause
/// doubles. A call whose deadline had already passed when it was made says nothing about the store.
pub struct Breaker {
    inner: Arc<dyn Store>,
    circuit: Circuit,
}

impl Breaker {
    /// Puts a breaker in front of a store.
    pub fn new(inner: Arc<dyn Store>, settings: BreakerSettings) -> Self {
        Self {
            inner,
            circuit: Circuit::new(settings),
        }
    }

    /// What the breaker did since it was made.
    pub fn counters(&self) -> BreakerCounters {
        self.circuit.counters()
    }

    /// Whether calls now fail at once, except for a probe.
    pub fn is_open(&self) -> bool {
        self.circuit.is_open()
    }

    fn enter(&self) -> Result<Pass<'_>> {
        self.circuit.enter().ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                "the store did not answer lately and is left alone for a while",
            )
            .with("store", self.inner.url())
        })
    }

    fn call<T>(&self, deadline: Instant, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        let pass = self.enter()?;
        let had_time = Instant::now() < deadline;
        let outcome = operation();
        if had_time {
            pass.conclude(Verdict::of(&outcome));
        }
        outcome
    }
}

impl Store for Breaker {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.call(deadline, || self.inner.contains(keys, deadline))
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        match self.enter() {
            Ok(pass) => {
                let had_time = Instant::now() < deadline;
                self.inner.put_many(batch, deadline);
                if had_time {
                    pass.conclude(Verdict::of_batch(batch.iter().map(|r| r.outcome.as_ref())));
                }
            }
            Err(error) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
                }
            }
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        match self.enter() {
            Ok(pass) => {
                let had_time = Instant::now() < deadline;
                self.inner.get_many(batch, deadline);
                if had_time {
                    pass.conclude(Verdict::of_batch(batch.iter().map(|r| r.outcome.as_ref())));
                }
            }
            Err(error) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
                }
            }
        }
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        self.call(deadline, || self.inner.touch(values, deadline))
    }

    fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        self.call(deadline, || self.inner.retire(namespace, deadline))
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.call(deadline, || self.inner.remove(keys, deadline))
    }

    fn remove_damaged(&self, key: &Key, bytes: u64, deadline: Instant) -> Result<()> {
        self.call(deadline, || self.inner.remove_damaged(key, bytes, deadline))
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.call(deadline, || self.inner.list(namespace, visit, deadline))
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.call(deadline, || self.inner.describe(deadline))
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }

    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.inner)
    }
}
