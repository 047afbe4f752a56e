//! Tiers: several stores as one, the nearest first.

use std::collections::{BTreeMap, HashMap};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use penstock_contract::{
    BatchBytes, Capabilities, Counters, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed,
    Namespace, PutOutcome, PutRequest, Result, Store, StoreStats,
};

use super::promoter::Promoter;

/// Several stores, in the order in which they are asked. A put goes to all of them. A get returns
/// the value of the first store that has it; a thread then puts this value into the stores before
/// that one.
///
/// The reader finds out which copy of a value is damaged, and removes it, tier by tier
/// ([`penstock_value::SealedStore::mend`]).
///
/// A tier that fails is passed over: an operation fails only if it fails in every tier. Each tier
/// should be behind a [`super::Breaker`] of its own, so that a tier that is gone costs nothing.
pub struct Tiered {
    tiers: Vec<Arc<dyn Store>>,
    promoter: Promoter,
    counters: Counters,
}

impl Tiered {
    /// Makes one store of several, the nearest first.
    ///
    /// # Panics
    ///
    /// Without any store.
    pub fn new(tiers: Vec<Arc<dyn Store>>) -> Self {
        assert!(!tiers.is_empty(), "tiers of no store");
        Self {
            promoter: Promoter::start(tiers.clone()),
            tiers,
            counters: Counters::default(),
        }
    }

    /// Gets from one tier the values that have not been found yet. Returns the indices of those
    /// that it has.
    fn get_from(
        &self,
        tier: usize,
        batch: &mut [GetRequest<'_, '_>],
        deadline: Instant,
    ) -> Vec<usize> {
        let is_found =
            |request: &GetRequest<'_, '_>| matches!(request.outcome, Some(Ok(GetOutcome::Hit(_))));
        let (indices, mut missing): (Vec<usize>, Vec<GetRequest<'_, '_>>) = batch
            .iter_mut()
            .enumerate()
            .filter(|(_, request)| !is_found(request))
            .map(|(index, request)| {
                let again = GetRequest {
                    position: request.position,
                    wants_checksum: request.wants_checksum,
                    is_in_place: request.is_in_place,
                    ..GetRequest::new(request.key, &mut *request.into)
                };
                (index, again)
            })
            .unzip();
        if missing.is_empty() {
            return Vec::new();
        }
        self.tiers[tier].get_many(&mut missing, deadline);
        let answers: Vec<_> = missing
            .into_iter()
            .map(|request| (request.outcome, request.checksum))
            .collect();
        let mut found = Vec::new();
        for (index, (outcome, checksum)) in indices.into_iter().zip(answers) {
            batch[index].checksum = checksum;
            if matches!(outcome, Some(Ok(GetOutcome::Hit(_)))) {
                found.push(index);
            }
            let before = &mut batch[index].outcome;
            *before = Some(worst_of(before.take(), outcome));
        }
        found
    }

    /// Has the values that a tier had put into the tiers before it. They are not verified: the
    /// reader does that when it gets them there, as it does here.
    fn promote(&self, tier: usize, found: &[usize], batch: &[GetRequest<'_, '_>]) {
        if tier == 0 {
            return;
        }
        for request in found.iter().map(|&index| &batch[index]) {
            if let Some(Ok(GetOutcome::Hit(bytes))) = request.outcome {
                self.promoter
                    .offer(request.key, &first_bytes(request.into, bytes), tier);
            }
        }
    }

    /// Whether some tier knows what time of day values were used at. Then listings count nanoseconds
    /// since 1970; 0 is for what no tier knows the time of. Else they count as the tiers do.
    fn tells_time(&self) -> bool {
        self.tiers.iter().any(|tier| tier.used_at(LATE).is_some())
    }

    /// Runs an operation on every tier; fails if all do.
    fn on_each<T>(&self, operation: impl FnMut(&Arc<dyn Store>) -> Result<T>) -> Result<Vec<T>> {
        let (mut done, mut failure) = (Vec::new(), None);
        for outcome in self.tiers.iter().map(operation) {
            match outcome {
                Ok(value) => done.push(value),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if done.is_empty() => Err(error),
            _ => Ok(done),
        }
    }
}

/// A last use, by any store's own unit, that is none of a retired value.
const LATE: u64 = u64::MAX / 2;

/// Nanoseconds since 1970.
fn nanos(used_at: SystemTime) -> u64 {
    let since_1970 = used_at.duration_since(SystemTime::UNIX_EPOCH);
    since_1970.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

/// What two tiers together say about a get. The first of these that is true: a tier has a value; a
/// tier has one that does not fit; a tier failed, which might have had one; there is none.
fn worst_of(
    before: Option<Result<GetOutcome>>,
    now: Option<Result<GetOutcome>>,
) -> Result<GetOutcome> {
    let rank = |outcome: &Result<GetOutcome>| match outcome {
        Ok(GetOutcome::Hit(_)) => 3,
        Ok(GetOutcome::TooLarge(_)) => 2,
        Err(_) => 1,
        Ok(GetOutcome::Miss) => 0,
    };
    let now = now.unwrap_or_else(|| {
        Err(Error::new(
            ErrorKind::Protocol,
            "a tier left a request without an outcome",
        ))
    });
    match before {
        Some(before) if rank(&before) >= rank(&now) => before,
        _ => now,
    }
}

/// The first bytes of a destination.
fn first_bytes<'s>(into: &'s [IoSliceMut<'_>], mut bytes: u64) -> Vec<IoSlice<'s>> {
    let cut = into.iter().map(|slice| {
        let take = bytes.min(slice.len() as u64);
        bytes -= take;
        IoSlice::new(&slice[..take as usize])
    });
    cut.filter(|slice| !slice.is_empty()).collect()
}

impl Store for Tiered {
    fn capabilities(&self) -> Capabilities {
        let all = |can: fn(&Capabilities) -> bool| {
            self.tiers.iter().all(|tier| can(&tier.capabilities()))
        };
        let any = |can: fn(&Capabilities) -> bool| {
            self.tiers.iter().any(|tier| can(&tier.capabilities()))
        };
        let largest = self
            .tiers
            .iter()
            .map(|tier| tier.capabilities().max_value_bytes);
        Capabilities {
            // A value that another process removes would stay in a tier that is ours alone.
            shared: all(|can| can.shared),
            persistent: any(|can| can.persistent),
            bounded: all(|can| can.bounded),
            pipelined: any(|can| can.pipelined),
            max_value_bytes: largest.max().unwrap_or(0),
        }
    }

    fn url(&self) -> String {
        let urls: Vec<String> = self.tiers.iter().map(|tier| tier.url()).collect();
        urls.join(" ")
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let mut found = vec![false; keys.len()];
        let mut failure = None;
        let mut answered = false;
        for tier in &self.tiers {
            let missing: Vec<usize> = (0..keys.len()).filter(|&i| !found[i]).collect();
            if missing.is_empty() && answered {
                break;
            }
            let asked: Vec<Key> = missing.iter().map(|&i| keys[i]).collect();
            match tier.contains(&asked, deadline) {
                Ok(has) => {
                    answered = true;
                    for (i, has) in missing.into_iter().zip(has) {
                        found[i] = has;
                    }
                }
                Err(error) => failure = Some(error),
            }
        }
        let found = match failure {
            Some(error) if !answered => Err(error),
            _ => Ok(found),
        };
        self.counters.looked_up(&found);
        found
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        for tier in &self.tiers {
            let mut puts: Vec<PutRequest<'_>> = batch
                .iter()
                .map(|request| PutRequest {
                    position: request.position,
                    ..PutRequest::new(request.key, request.value)
                })
                .collect();
            tier.put_many(&mut puts, deadline);
            let outcomes: Vec<_> = puts.into_iter().map(|request| request.outcome).collect();
            for (request, outcome) in batch.iter_mut().zip(outcomes) {
                request.outcome = match (request.outcome.take(), outcome) {
                    (Some(Ok(PutOutcome::Stored)), _) | (_, Some(Ok(PutOutcome::Stored))) => {
                        Some(Ok(PutOutcome::Stored))
                    }
                    (Some(Ok(kept)), _) => Some(Ok(kept)),
                    (before, now) => now.or(before),
                };
            }
        }
        self.counters.put_batch(batch);
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        for tier in 0..self.tiers.len() {
            let found = self.get_from(tier, batch, deadline);
            self.promote(tier, &found, batch);
        }
        self.counters.got_batch(batch);
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        let touched = self.on_each(|tier| tier.touch(values, deadline));
        touched
            .map(|tiers| {
                let any = |index| tiers.iter().any(|there: &Vec<bool>| there[index]);
                (0..values.len()).map(any).collect()
            })
            .inspect_err(|_| self.counters.failed())
    }

    fn retire(&self, namespace: Namespace, deadline: Instant) -> Result<()> {
        self.on_each(|tier| tier.retire(namespace, deadline))
            .map(|_| ())
            .inspect_err(|_| self.counters.failed())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        // As a rule, all tiers have the same values.
        let removed = self.on_each(|tier| tier.remove(keys, deadline));
        removed
            .map(|counts| counts.into_iter().max().unwrap_or(0))
            .inspect_err(|_| self.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        // What one tier has may have been used in another one.
        let mut seen = HashMap::<Key, Listed>::new();
        let tells_time = self.tells_time();
        let listed = self.on_each(|tier| {
            let mut note = |mut listed: Listed| {
                if tells_time {
                    listed.last_use = tier.used_at(listed.last_use).map_or(0, nanos);
                }
                let known = seen.entry(listed.key).or_insert(listed);
                known.last_use = known.last_use.max(listed.last_use);
            };
            tier.list(namespace, &mut note, deadline)
        });
        seen.into_values().for_each(visit);
        listed.map(|_| ()).inspect_err(|_| self.counters.failed())
    }

    fn used_at(&self, last_use: u64) -> Option<SystemTime> {
        (self.tells_time() && last_use > 0)
            .then(|| SystemTime::UNIX_EPOCH + Duration::from_nanos(last_use))
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let mut number = 0;
        let described = self.on_each(|tier| {
            number += 1;
            let facts = tier.describe(deadline)?;
            let mut named: BTreeMap<String, String> = facts
                .into_iter()
                .map(|(name, value)| (format!("tier{number}:{name}"), value))
                .collect();
            named.insert(format!("tier{number}:url"), tier.url());
            Ok(named)
        });
        described
            .map(|facts| facts.into_iter().flatten().collect())
            .inspect_err(|_| self.counters.failed())
    }

    /// Puts go to all tiers, so the one that wants the largest batches gets them. Gets do too if the
    /// nearest tier is this machine's memory: its values are read in place, one by one, and a batch
    /// is what it lacks. Else most gets are answered by the nearest, which may be slower for more.
    fn batch_bytes(&self) -> BatchBytes {
        let best = |of: fn(BatchBytes) -> u64| {
            let all = self.tiers.iter().map(|tier| of(tier.batch_bytes()));
            all.max().unwrap_or(0)
        };
        BatchBytes {
            put: best(|batch| batch.put),
            get: if self.tiers[0].memory().is_some() {
                best(|batch| batch.get)
            } else {
                self.tiers[0].batch_bytes().get
            },
        }
    }

    fn tiers(&self) -> &[Arc<dyn Store>] {
        &self.tiers
    }

    fn stats(&self) -> StoreStats {
        let of_tiers = self.tiers.iter().map(|tier| tier.stats());
        let (connects, evictions) = of_tiers.fold((0, 0), |(connects, evictions), stats| {
            (connects + stats.connects, evictions + stats.evictions)
        });
        StoreStats {
            connects,
            evictions,
            ..self.counters.snapshot()
        }
    }
}
