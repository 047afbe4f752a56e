//! The state of a circuit breaker: who may call, and what calls told about the other side.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use penstock_contract::{ErrorKind, Result};

/// When a [`Breaker`](super::Breaker) opens and for how long.
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

/// What a [`Breaker`](super::Breaker) did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BreakerCounters {
    /// Times that it opened, also after failed probes.
    pub opened: u64,
    /// Calls that failed at once because it was open.
    pub rejected: u64,
    /// Calls let through to see whether the store is back.
    pub probes: u64,
}

/// A circuit: closed while calls are answered, open for a while after several were not.
pub(crate) struct Circuit {
    settings: BreakerSettings,
    inner: Mutex<Inner>,
}

struct Inner {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Answered,
    Absent,
    Nothing,
}

impl Verdict {
    pub(crate) fn of<T>(outcome: &Result<T>) -> Self {
        match outcome {
            Err(error) => Self::of_failure(error.kind()),
            Ok(_) => Self::Answered,
        }
    }

    pub(crate) fn of_failure(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Unreachable | ErrorKind::TimedOut => Self::Absent,
            _ => Self::Answered,
        }
    }

    /// The verdict of a whole batch. One answered request is enough for an answer.
    pub(crate) fn of_batch<'a, T: 'a>(
        outcomes: impl Iterator<Item = Option<&'a Result<T>>>,
    ) -> Self {
        Self::all(outcomes.flatten().map(Self::of))
    }

    pub(crate) fn all(verdicts: impl Iterator<Item = Self>) -> Self {
        verdicts.fold(Self::Nothing, |so_far, verdict| match so_far {
            Self::Answered => so_far,
            Self::Absent | Self::Nothing => verdict,
        })
    }
}

/// A call that was let through. If it is dropped without a verdict (by a panic), it says nothing.
pub(crate) struct Pass<'a> {
    circuit: &'a Circuit,
    is_probe: bool,
    verdict: Verdict,
}

impl Pass<'_> {
    /// Ends the call with what it said about the other side.
    pub(crate) fn conclude(mut self, verdict: Verdict) {
        self.verdict = verdict;
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.circuit.conclude(self.is_probe, self.verdict);
    }
}

impl Circuit {
    pub(crate) fn new(settings: BreakerSettings) -> Self {
        Self {
            settings,
            inner: Mutex::new(Inner {
                state: State::Closed { failures: 0 },
                counters: BreakerCounters::default(),
            }),
        }
    }

    pub(crate) fn counters(&self) -> BreakerCounters {
        self.inner.lock().counters
    }

    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.inner.lock().state, State::Closed { .. })
    }

    /// Lets a call through, or returns `None` if the call is to fail at once.
    pub(crate) fn enter(&self) -> Option<Pass<'_>> {
        let inner = &mut *self.inner.lock();
        let is_probe = match inner.state {
            State::Closed { .. } => false,
            State::Open { until, pause } if until <= Instant::now() => {
                inner.state = State::Probing { pause };
                inner.counters.probes += 1;
                true
            }
            State::Open { .. } | State::Probing { .. } => {
                inner.counters.rejected += 1;
                return None;
            }
        };
        Some(Pass {
            circuit: self,
            is_probe,
            verdict: Verdict::Nothing,
        })
    }

    fn conclude(&self, is_probe: bool, verdict: Verdict) {
        let inner = &mut *self.inner.lock();
        let open_for = |pause| State::Open {
            until: Instant::now() + pause,
            pause,
        };
        inner.state = match (inner.state, verdict) {
            (State::Closed { .. }, Verdict::Answered) => State::Closed { failures: 0 },
            (State::Closed { failures }, Verdict::Absent) => {
                let failures = failures + 1;
                if failures < self.settings.failures {
                    State::Closed { failures }
                } else {
                    inner.counters.opened += 1;
                    open_for(self.settings.first_pause)
                }
            }
            (State::Probing { .. }, Verdict::Answered) if is_probe => State::Closed { failures: 0 },
            (State::Probing { pause }, Verdict::Absent) if is_probe => {
                inner.counters.opened += 1;
                open_for(pause.saturating_mul(2).min(self.settings.longest_pause))
            }
            (State::Probing { pause }, Verdict::Nothing) if is_probe => State::Open {
                until: Instant::now(),
                pause,
            },
            // A call from before the circuit opened: the probe will tell.
            (state, _) => state,
        };
    }
}
