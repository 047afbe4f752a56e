//! A circuit breaker: a store that does not answer is left alone for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{
    Capabilities, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest, Result, Store,
    StoreStats,
};

/// When a [`Breaker`] opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// Calls in a row that must fail to open it; at least one.
    pub failures: u32,
    /// Pause before the first probe.
    pub first_pause: Duration,
    /// The pause doubles with each probe that fails, up to this.
    pub longest_pause: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            failures: 3,
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(5),
        }
    }
}

/// What a [`Breaker`] did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BreakerCounters {
    /// Times that it opened, after probes too.
    pub opened: u64,
    /// Calls that failed at once because it was open.
    pub rejected: u64,
    /// Calls let through to see whether the store is back.
    pub probes: u64,
}

/// A store behind a circuit breaker.
///
/// After so many calls in a row that failed with [`ErrorKind::Unreachable`] or
/// [`ErrorKind::TimedOut`], calls fail at once with [`ErrorKind::Unavailable`]. After a pause one
/// call is let through: if it succeeds everything is as before, if not the pause doubles. A call
/// whose deadline had passed when it was made says nothing about the store.
pub struct Breaker {
    inner: Arc<dyn Store>,
    settings: BreakerSettings,
    circuit: Mutex<Circuit>,
}

struct Circuit {
    state: State,
    counters: BreakerCounters,
}

#[derive(Clone, Copy)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant, pause: Duration },
    Probing { pause: Duration },
}

/// What a call says about the store.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Answered,
    Absent,
    Nothing,
}

impl Verdict {
    fn of<T>(outcome: &Result<T>) -> Self {
        match outcome {
            Err(error) if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::TimedOut) => {
                Self::Absent
            }
            _ => Self::Answered,
        }
    }

    /// An answer to one request of a batch is an answer.
    fn of_batch<'a, T: 'a>(outcomes: impl Iterator<Item = Option<&'a Result<T>>>) -> Self {
        let verdicts = outcomes.flatten().map(Self::of);
        verdicts.fold(Self::Nothing, |so_far, verdict| match so_far {
            Self::Answered => so_far,
            Self::Absent | Self::Nothing => verdict,
        })
    }
}

/// A call that was let through. Dropped without a verdict (by a panic), it says nothing.
struct Pass<'a> {
    breaker: &'a Breaker,
    is_probe: bool,
    verdict: Verdict,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.breaker.conclude(self.is_probe, self.verdict);
    }
}

impl Breaker {
    /// Puts a breaker in front of a store.
    pub fn new(inner: Arc<dyn Store>, settings: BreakerSettings) -> Self {
        let circuit = Circuit {
            state: State::Closed { failures: 0 },
            counters: BreakerCounters::default(),
        };
        Self {
            inner,
            settings,
            circuit: Mutex::new(circuit),
        }
    }

    /// What it did since it was made.
    pub fn counters(&self) -> BreakerCounters {
        self.circuit.lock().counters
    }

    /// Whether calls fail at once now, or all but a probe.
    pub fn is_open(&self) -> bool {
        !matches!(self.circuit.lock().state, State::Closed { .. })
    }

    fn enter(&self) -> Result<Pass<'_>> {
        let circuit = &mut *self.circuit.lock();
        let is_probe = match circuit.state {
            State::Closed { .. } => false,
            State::Open { until, pause } if until <= Instant::now() => {
                circuit.state = State::Probing { pause };
                circuit.counters.probes += 1;
                true
            }
            State::Open { .. } | State::Probing { .. } => {
                circuit.counters.rejected += 1;
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "the store did not answer lately and is left alone for a while",
                )
                .with("store", self.inner.url()));
            }
        };
        Ok(Pass {
            breaker: self,
            is_probe,
            verdict: Verdict::Nothing,
        })
    }

    fn conclude(&self, is_probe: bool, verdict: Verdict) {
        let circuit = &mut *self.circuit.lock();
        let open_for = |pause| State::Open {
            until: Instant::now() + pause,
            pause,
        };
        circuit.state = match (circuit.state, verdict) {
            (State::Closed { .. }, Verdict::Answered) => State::Closed { failures: 0 },
            (State::Closed { failures }, Verdict::Absent) => {
                let failures = failures + 1;
                if failures < self.settings.failures {
                    State::Closed { failures }
                } else {
                    circuit.counters.opened += 1;
                    open_for(self.settings.first_pause)
                }
            }
            (State::Probing { .. }, Verdict::Answered) if is_probe => State::Closed { failures: 0 },
            (State::Probing { pause }, Verdict::Absent) if is_probe => {
                circuit.counters.opened += 1;
                open_for(pause.saturating_mul(2).min(self.settings.longest_pause))
            }
            (State::Probing { pause }, Verdict::Nothing) if is_probe => State::Open {
                until: Instant::now(),
                pause,
            },
            // From before it opened: the probe will tell.
            (state, _) => state,
        };
    }

    fn call<T>(&self, deadline: Instant, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut pass = self.enter()?;
        let had_time = Instant::now() < deadline;
        let outcome = operation();
        if had_time {
            pass.verdict = Verdict::of(&outcome);
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
            Ok(mut pass) => {
                let had_time = Instant::now() < deadline;
                self.inner.put_many(batch, deadline);
                if had_time {
                    pass.verdict = Verdict::of_batch(batch.iter().map(|r| r.outcome.as_ref()));
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
            Ok(mut pass) => {
                let had_time = Instant::now() < deadline;
                self.inner.get_many(batch, deadline);
                if had_time {
                    pass.verdict = Verdict::of_batch(batch.iter().map(|r| r.outcome.as_ref()));
                }
            }
            Err(error) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
                }
            }
        }
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.call(deadline, || self.inner.remove(keys, deadline))
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
}
