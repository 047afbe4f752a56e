//! Faults on purpose, for tests: the same seed gives the same faults.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::memory::SharedMemory;
use crate::{
    Capabilities, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace, PutRequest,
    Result, Store, StoreStats,
};

/// What goes wrong, and how often: probabilities from 0 to 1 for each request.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Chooses the requests that suffer.
    pub seed: u64,
    /// Kinds of failure. The operation may still have taken place, as with real failures.
    pub errors: Vec<(ErrorKind, f64)>,
    /// How long a call is held up; it fails with [`ErrorKind::TimedOut`] if its deadline passes
    /// meanwhile.
    pub delay: Duration,
    /// Calls that are held up.
    pub delays: f64,
    /// Puts and gets that are left without an outcome, and look-ups that lack their last answer,
    /// against the contract.
    pub silences: f64,
    /// Gets and look-ups that find nothing.
    pub misses: f64,
    /// Gets that return only a beginning of the value.
    pub truncations: f64,
    /// Gets that return the value with one bit changed.
    pub bit_flips: f64,
}

/// Faults brought about so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// Failures, except those of delays that outlasted the deadline.
    pub errors: u64,
    /// Calls held up.
    pub delays: u64,
    /// Requests left without an outcome.
    pub silences: u64,
    /// Values not found.
    pub misses: u64,
    /// Values cut short.
    pub truncations: u64,
    /// Values with a bit changed.
    pub bit_flips: u64,
}

/// A store with faults.
pub struct Faulty {
    inner: Arc<dyn Store>,
    faults: Faults,
    drawn: AtomicU64,
    errors: AtomicU64,
    delays: AtomicU64,
    silences: AtomicU64,
    misses: AtomicU64,
    truncations: AtomicU64,
    bit_flips: AtomicU64,
}

impl Faulty {
    /// Makes a store faulty.
    pub fn new(inner: Arc<dyn Store>, faults: Faults) -> Self {
        Self {
            inner,
            faults,
            drawn: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            delays: AtomicU64::new(0),
            silences: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            truncations: AtomicU64::new(0),
            bit_flips: AtomicU64::new(0),
        }
    }

    /// The faults brought about so far.
    pub fn injected(&self) -> FaultCounters {
        FaultCounters {
            errors: self.errors.load(Relaxed),
            delays: self.delays.load(Relaxed),
            silences: self.silences.load(Relaxed),
            misses: self.misses.load(Relaxed),
            truncations: self.truncations.load(Relaxed),
            bit_flips: self.bit_flips.load(Relaxed),
        }
    }

    /// The next number of the sequence that the seed begins (SplitMix64).
    fn draw(&self) -> u64 {
        let n = self.drawn.fetch_add(1, Relaxed).wrapping_add(1);
        let mut x = self
            .faults
            .seed
            .wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn draw_below(&self, bound: u64) -> u64 {
        self.draw() % bound.max(1)
    }

    fn strikes(&self, probability: f64, counter: &AtomicU64) -> bool {
        let strikes = ((self.draw() >> 11) as f64 / (1_u64 << 53) as f64) < probability;
        counter.fetch_add(u64::from(strikes), Relaxed);
        strikes
    }

    fn error(&self) -> Option<Error> {
        let struck = self
            .faults
            .errors
            .iter()
            .find(|(_, chance)| self.strikes(*chance, &self.errors));
        struck.map(|(kind, _)| Error::new(*kind, "a fault on purpose"))
    }

    /// Holds a call up, but not beyond its deadline.
    fn hold_up(&self, deadline: Instant) -> Result<()> {
        if self.strikes(self.faults.delays, &self.delays) {
            let left = deadline.saturating_duration_since(Instant::now());
            std::thread::sleep(self.faults.delay.min(left));
            if left <= self.faults.delay {
                return Err(too_late());
            }
        }
        Ok(())
    }

    fn spoil(&self, outcome: GetOutcome, into: &mut [IoSliceMut<'_>]) -> GetOutcome {
        let GetOutcome::Hit(bytes) = outcome else {
            return outcome;
        };
        if self.strikes(self.faults.misses, &self.misses) {
            return GetOutcome::Miss;
        }
        if bytes == 0 {
            return outcome;
        }
        if self.strikes(self.faults.bit_flips, &self.bit_flips) {
            flip(into, self.draw_below(bytes), self.draw_below(8) as u32);
        }
        if self.strikes(self.faults.truncations, &self.truncations) {
            return GetOutcome::Hit(self.draw_below(bytes));
        }
        outcome
    }

    fn silence<T>(&self, outcome: &mut Option<T>) {
        if self.strikes(self.faults.silences, &self.silences) {
            *outcome = None;
        }
    }

    fn call<T>(&self, deadline: Instant, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        self.hold_up(deadline)?;
        let outcome = operation()?;
        self.error().map_or(Ok(outcome), Err)
    }
}

fn flip(into: &mut [IoSliceMut<'_>], at: u64, bit: u32) {
    let mut bytes = into.iter_mut().flat_map(|slice| slice.iter_mut());
    if let Some(byte) = bytes.nth(at as usize) {
        *byte ^= 1 << bit;
    }
}

impl Store for Faulty {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let mut found = self.call(deadline, || self.inner.contains(keys, deadline))?;
        for hit in found.iter_mut().filter(|hit| **hit) {
            *hit = !self.strikes(self.faults.misses, &self.misses);
        }
        if self.strikes(self.faults.silences, &self.silences) {
            found.pop();
        }
        Ok(found)
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let held_up = self.hold_up(deadline);
        if held_up.is_ok() {
            self.inner.put_many(batch, deadline);
        }
        for request in batch {
            let fault = if held_up.is_ok() {
                self.error()
            } else {
                Some(too_late())
            };
            request.outcome = fault.map(Err).or(request.outcome.take());
            self.silence(&mut request.outcome);
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        let held_up = self.hold_up(deadline);
        if held_up.is_ok() {
            self.inner.get_many(batch, deadline);
        }
        for request in batch {
            let fault = if held_up.is_ok() {
                self.error()
            } else {
                Some(too_late())
            };
            request.outcome = match (fault, request.outcome.take()) {
                (Some(fault), _) => Some(Err(fault)),
                (None, Some(Ok(outcome))) => {
                    request.checksum = None;
                    Some(Ok(self.spoil(outcome, request.into)))
                }
                (None, other) => other,
            };
            self.silence(&mut request.outcome);
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

    /// None: values that are used where they lie would come without faults.
    fn memory(&self) -> Option<&dyn SharedMemory> {
        None
    }
}

fn too_late() -> Error {
    Error::new(ErrorKind::TimedOut, "a delay on purpose")
}
