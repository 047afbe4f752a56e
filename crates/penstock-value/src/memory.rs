//! A store in this process's memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use penstock_contract::{
    Capabilities, Counters, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed, Namespace,
    PutOutcome, PutRequest, Result, Store, StoreStats, deadline, slices,
};
use penstock_evict::{Lru, Policy};

/// What an object costs besides its value's bytes: its entries in the map and in the policy.
const ENTRY_BYTES: u64 = 256;

/// Objects in this process's memory, bounded in bytes; the least recently used go first.
///
/// Nothing outlives the handle, and nobody else sees it.
pub struct MemoryStore {
    capacity: u64,
    held: Mutex<Held>,
    counters: Counters,
}

struct Held {
    values: HashMap<Key, Arc<Vec<u8>>>,
    recency: Lru<Key>,
}

impl MemoryStore {
    /// An empty store that holds at most `capacity` bytes. Each object counts 256 bytes besides its
    /// value.
    pub fn new(capacity: u64) -> Self {
        let held = Held {
            values: HashMap::new(),
            recency: Lru::new(),
        };
        Self {
            capacity,
            held: Mutex::new(held),
            counters: Counters::default(),
        }
    }

    fn put_one(&self, key: &Key, value: &[std::io::IoSlice<'_>]) -> Result<PutOutcome> {
        let bytes = slices::len_of(value);
        let limit = self.capabilities().max_value_bytes;
        if bytes > limit {
            return Err(Error::new(
                ErrorKind::Config,
                format!("a value of {bytes} bytes is larger than the store takes ({limit})"),
            )
            .with("store", self.url())
            .with("key", key));
        }
        let present = |held: &Held| {
            held.values
                .get(key)
                .is_some_and(|v| v.len() as u64 == bytes)
        };
        {
            let mut held = self.held.lock();
            if present(&held) {
                held.recency.touch(key);
                return Ok(PutOutcome::AlreadyPresent);
            }
        }
        let value = Arc::new(slices::gather(value));
        // Declared here so that evicted values are freed after the lock is released.
        let mut evicted = Vec::new();
        let mut held = self.held.lock();
        if present(&held) {
            return Ok(PutOutcome::AlreadyPresent);
        }
        evicted.extend(held.values.insert(*key, value));
        held.recency.insert(*key, self.charge(bytes));
        let replaced = evicted.len();
        while held.recency.weight() > self.capacity {
            let Some((victim, _)) = held.recency.evict() else {
                break;
            };
            evicted.extend(held.values.remove(&victim));
        }
        drop(held);
        self.counters.evicted((evicted.len() - replaced) as u64);
        Ok(PutOutcome::Stored)
    }

    fn get_one(&self, key: &Key, into: &mut [std::io::IoSliceMut<'_>]) -> GetOutcome {
        let mut held = self.held.lock();
        let Some(value) = held.values.get(key).cloned() else {
            return GetOutcome::Miss;
        };
        held.recency.touch(key);
        drop(held);
        let bytes = value.len() as u64;
        if bytes > slices::room_of(into) {
            return GetOutcome::TooLarge(bytes);
        }
        slices::scatter(&value, into);
        GetOutcome::Hit(bytes)
    }
}

impl Store for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: false,
            persistent: false,
            bounded: true,
            pipelined: false,
            max_value_bytes: self.capacity.saturating_sub(ENTRY_BYTES),
        }
    }

    fn url(&self) -> String {
        format!("memory://?size={}", self.capacity)
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let answer = deadline::check(deadline).map(|()| {
            let held = self.held.lock();
            keys.iter()
                .map(|key| held.values.contains_key(key))
                .collect()
        });
        self.counters.looked_up(&answer);
        answer
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        self.counters.put_each(batch, |request| {
            deadline::check(deadline).and_then(|()| self.put_one(&request.key, request.value))
        });
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.counters.get_each(batch, |request| {
            deadline::check(deadline).map(|()| self.get_one(&request.key, request.into))
        });
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        deadline::check(deadline).inspect_err(|_| self.counters.failed())?;
        // Only the order counts here: what is further on in a prompt is used first.
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by_key(|&index| std::cmp::Reverse(values[index].1));
        let mut there = vec![false; values.len()];
        let mut held = self.held.lock();
        for index in order {
            let key = &values[index].0;
            there[index] = held.values.contains_key(key);
            held.recency.touch(key);
        }
        Ok(there)
    }

    fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        deadline::check(deadline).inspect_err(|_| self.counters.failed())?;
        let mut held = self.held.lock();
        let retired = held.recency.oldest_first().map(|(key, _)| *key);
        let mut retired: Vec<Key> = retired.filter(|key| key.namespace == namespace).collect();
        // Each becomes the first to go, so the oldest comes last.
        while let Some(key) = retired.pop() {
            held.recency.demote(&key);
        }
        Ok(())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        deadline::check(deadline).inspect_err(|_| self.counters.failed())?;
        let mut removed = Vec::new();
        let mut held = self.held.lock();
        for key in keys {
            held.recency.remove(key);
            removed.extend(held.values.remove(key));
        }
        drop(held);
        Ok(removed.len() as u64)
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        deadline::check(deadline).inspect_err(|_| self.counters.failed())?;
        // A copy, so that the visitor may use the store.
        let held = self.held.lock();
        let listed: Vec<Listed> = (0..)
            .zip(held.recency.oldest_first())
            .filter(|(_, (key, _))| namespace.is_none_or(|namespace| key.namespace == namespace))
            .map(|(last_use, (key, charge))| Listed {
                key: *key,
                bytes: charge - ENTRY_BYTES,
                last_use,
            })
            .collect();
        drop(held);
        listed.into_iter().for_each(visit);
        Ok(())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        deadline::check(deadline).inspect_err(|_| self.counters.failed())?;
        let held = self.held.lock();
        Ok(vec![
            ("capacity_bytes".into(), self.capacity.to_string()),
            ("used_bytes".into(), held.recency.weight().to_string()),
            ("objects".into(), held.recency.len().to_string()),
        ])
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }

    fn charge(&self, value_bytes: u64) -> u64 {
        value_bytes.saturating_add(ENTRY_BYTES)
    }
}
