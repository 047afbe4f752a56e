//! The counters behind [`StoreStats`], which stores keep.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{GetOutcome, GetRequest, PutOutcome, PutRequest, Result, StoreStats, slices};

/// One store handle's counters. Each is exact, but a snapshot does not show all of them at one
/// instant.
#[derive(Default)]
pub struct Counters {
    lookups: AtomicU64,
    lookup_hits: AtomicU64,
    gets: AtomicU64,
    misses: AtomicU64,
    puts: AtomicU64,
    puts_present: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    evictions: AtomicU64,
    errors: AtomicU64,
    connects: AtomicU64,
}

impl Counters {
    /// Notes the answer to a look-up of several keys.
    pub fn looked_up(&self, answer: &Result<Vec<bool>>) {
        match answer {
            Ok(found) => {
                self.lookups.fetch_add(found.len() as u64, Relaxed);
                let hits = found.iter().filter(|&&hit| hit).count();
                self.lookup_hits.fetch_add(hits as u64, Relaxed);
            }
            Err(_) => self.failed(),
        }
    }

    /// Puts a batch one by one, and notes the outcomes.
    pub fn put_each(
        &self,
        batch: &mut [PutRequest<'_>],
        mut put: impl FnMut(&PutRequest<'_>) -> Result<PutOutcome>,
    ) {
        for request in &mut *batch {
            request.outcome = Some(put(request));
        }
        self.put_batch(batch);
    }

    /// Gets a batch one by one, and notes the outcomes.
    pub fn get_each(
        &self,
        batch: &mut [GetRequest<'_, '_>],
        mut get: impl FnMut(&mut GetRequest<'_, '_>) -> Result<GetOutcome>,
    ) {
        for request in &mut *batch {
            let outcome = get(request);
            request.outcome = Some(outcome);
        }
        self.got_batch(batch);
    }

    /// Notes the outcomes of a batch of puts.
    pub fn put_batch(&self, batch: &[PutRequest<'_>]) {
        for request in batch {
            if let Some(outcome) = &request.outcome {
                self.put(outcome, slices::len_of(request.value));
            }
        }
    }

    /// Notes the outcomes of a batch of gets.
    pub fn got_batch(&self, batch: &[GetRequest<'_, '_>]) {
        for request in batch {
            if let Some(outcome) = &request.outcome {
                self.got(outcome);
            }
        }
    }

    /// Notes the outcome of a get.
    pub fn got(&self, outcome: &Result<GetOutcome>) {
        match outcome {
            Ok(GetOutcome::Hit(bytes)) => {
                self.gets.fetch_add(1, Relaxed);
                self.bytes_read.fetch_add(*bytes, Relaxed);
            }
            Ok(GetOutcome::Miss) => {
                self.misses.fetch_add(1, Relaxed);
            }
            Ok(GetOutcome::TooLarge(_)) => {}
            Err(_) => self.failed(),
        }
    }

    /// Notes the outcome of a put of a value of so many bytes.
    pub fn put(&self, outcome: &Result<PutOutcome>, bytes: u64) {
        match outcome {
            Ok(PutOutcome::Stored) => {
                self.puts.fetch_add(1, Relaxed);
                self.bytes_written.fetch_add(bytes, Relaxed);
            }
            Ok(PutOutcome::AlreadyPresent) => {
                self.puts_present.fetch_add(1, Relaxed);
            }
            Err(_) => self.failed(),
        }
    }

    /// Notes objects evicted to keep within the bound.
    pub fn evicted(&self, objects: u64) {
        self.evictions.fetch_add(objects, Relaxed);
    }

    /// Notes an operation that failed.
    pub fn failed(&self) {
        self.errors.fetch_add(1, Relaxed);
    }

    /// The counters as they stand.
    pub fn snapshot(&self) -> StoreStats {
        StoreStats {
            lookups: self.lookups.load(Relaxed),
            lookup_hits: self.lookup_hits.load(Relaxed),
            gets: self.gets.load(Relaxed),
            misses: self.misses.load(Relaxed),
            puts: self.puts.load(Relaxed),
            puts_present: self.puts_present.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
            evictions: self.evictions.load(Relaxed),
            errors: self.errors.load(Relaxed),
            connects: self.connects.load(Relaxed),
        }
    }
}
