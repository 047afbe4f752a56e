//! The life of a load job. A prefetch is a load job without blocks.
//!
//! Each object goes through these states:
//! - queued;
//! - fetching: a lane has a slot and asks the store, or has the value from the host tier;
//! - scattering: the value is verified and is being written into the blocks, or kept;
//! - done.
//!
//! The step to scattering is taken under the job's lock, and only before the deadline. Giving up a
//! job moves everything that is not scattering to done. The job is reported only once every object
//! is done. So from then on, no byte of it is written any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::{ErrorKind, Key};

use crate::completion::{Completions, Event};
use crate::fence::{Fence, Passage};
use crate::host_tier::Value;
use crate::job::{Plan, Transfer};
use crate::outcome::{Outcome, Outcomes, Part};
use crate::registration::Registration;
use crate::sync::Mutex;
use crate::{Counters, Deadline};

/// Where the objects of a job go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    Blocks,
    /// The host tier, where they stay until they are released.
    HostTier,
}

pub(crate) struct LoadJob {
    id: u64,
    aim: Aim,
    objects: Vec<Transfer>,
    /// The blocks that the objects make up.
    parts: Vec<Part>,
    since: Instant,
    /// Nothing is fetched before the fence is passed. So the time that a load takes is due to the
    /// pool alone.
    fence: Fence,
    /// How long the fence may be ahead.
    fence_wait: Duration,
    /// The deadline if the fence is passed at once.
    deadline: Deadline,
    total_bytes: u64,
    /// Whether an object is useless without the objects before it.
    prefix: bool,
    state: Mutex<State>,
    completions: Arc<Completions>,
    counters: Arc<Counters>,
}

struct State {
    progress: Vec<Progress>,
    /// For each object: its value, if the host tier had it and nobody has taken it yet.
    held: Vec<Option<Value>>,
    /// No object before this one is queued.
    next: usize,
    unfinished: usize,
    /// Payload bytes of the objects that are where they were wanted.
    there_bytes: u64,
    /// The objects from this one on are given up, with this outcome.
    given_up: Option<(usize, Outcome)>,
    reported: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Queued,
    Fetching,
    Scattering,
    Done(Outcome),
}

impl LoadJob {
    /// A load job. `held` are the values of objects that the host tier has.
    pub(crate) fn new(
        id: u64,
        spec: LoadSpec,
        held: Vec<Option<Value>>,
        completions: Arc<Completions>,
        counters: Arc<Counters>,
    ) -> Arc<Self> {
        let LoadSpec {
            aim,
            plan: Plan { objects, parts },
            deadline,
            prefix,
            fence,
            fence_wait,
        } = spec;
        let state = State {
            progress: vec![Progress::Queued; objects.len()],
            held,
            next: 0,
            unfinished: objects.len(),
            there_bytes: 0,
            given_up: None,
            reported: false,
        };
        let total_bytes = objects.iter().map(|object| object.bytes as u64).sum();
        let state = Mutex::new(state);
        let job = Arc::new(Self {
            id,
            aim,
            objects,
            parts,
            since: Instant::now(),
            fence,
            fence_wait,
            deadline,
            total_bytes,
            prefix,
            state,
            completions,
            counters,
        });
        if aim == Aim::HostTier {
            job.finish_held();
        }
        job
    }

    /// Finishes the objects of a prefetch that the host tier has: they are there already.
    fn finish_held(&self) {
        let mut state = self.state.lock();
        for (index, transfer) in self.objects.iter().enumerate() {
            if state.held[index].is_some() {
                self.finish(&mut state, index, Outcome::Kept(transfer.bytes as u64));
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    pub(crate) fn objects(&self) -> &[Transfer] {
        &self.objects
    }

    /// The objects that a job that is over did not bring.
    pub(crate) fn failed(&self) -> Vec<Key> {
        let state = self.state.lock();
        let failed = self.objects.iter().zip(&state.progress);
        failed
            .filter(|(_, progress)| !matches!(progress, Progress::Done(o) if o.is_there()))
            .map(|(object, _)| object.key)
            .collect()
    }

    /// Whether objects can be fetched, and since when.
    pub(crate) fn passage(&self) -> Passage {
        self.fence.passage(self.since)
    }

    /// The earliest time at which the job is given up, as far as is known now. In the past if the
    /// job is to be given up.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline_in(&self.state.lock())
    }

    fn deadline_in(&self, state: &State) -> Instant {
        match self.passage() {
            Passage::Passed(at) => {
                let waited = at.saturating_duration_since(self.since);
                self.deadline.now(state.there_bytes, self.total_bytes) + waited
            }
            // As if the fence were passed now.
            Passage::Ahead | Passage::Lost => {
                let allowed = self.deadline.at.saturating_duration_since(self.since);
                (Instant::now() + allowed).min(self.since + self.fence_wait)
            }
        }
    }

    pub(crate) fn aim(&self) -> Aim {
        self.aim
    }

    /// The number of objects that nobody fetches yet.
    pub(crate) fn queued(&self) -> usize {
        let mut state = self.state.lock();
        self.skip_finished(&mut state);
        state.progress[state.next..]
            .iter()
            .filter(|p| **p == Progress::Queued)
            .count()
    }

    /// Takes up to `objects` objects to be fetched now, and up to `bytes` of payload. The first
    /// object is taken even if it alone has more.
    pub(crate) fn take(self: &Arc<Self>, objects: usize, bytes: usize) -> Vec<LoadTicket> {
        let mut tickets: Vec<LoadTicket> = Vec::new();
        let mut taken_bytes = 0;
        let mut state = self.state.lock();
        while tickets.len() < objects {
            self.skip_finished(&mut state);
            let index = state.next;
            let Some(transfer) = self.objects.get(index) else {
                break;
            };
            if !tickets.is_empty() && taken_bytes + transfer.bytes > bytes {
                break;
            }
            taken_bytes += transfer.bytes;
            state.progress[index] = Progress::Fetching;
            state.next += 1;
            tickets.push(LoadTicket {
                job: Arc::clone(self),
                index,
            });
        }
        tickets
    }

    /// Takes up to `objects` objects that need no fetching, and up to `bytes` of payload. The first
    /// object is taken even if it alone has more.
    pub(crate) fn take_held(self: &Arc<Self>, objects: usize, bytes: usize) -> Vec<HeldTicket> {
        let mut taken: Vec<HeldTicket> = Vec::new();
        let mut taken_bytes = 0;
        let mut state = self.state.lock();
        self.skip_finished(&mut state);
        for index in state.next..self.objects.len() {
            if state.progress[index] != Progress::Queued || state.held[index].is_none() {
                continue;
            }
            taken_bytes += self.objects[index].bytes;
            if taken.len() == objects || (!taken.is_empty() && taken_bytes > bytes) {
                break;
            }
            if let Some(value) = state.held[index].take() {
                state.progress[index] = Progress::Fetching;
                let job = Arc::clone(self);
                taken.push((LoadTicket { job, index }, value));
            }
        }
        taken
    }

    fn skip_finished(&self, state: &mut State) {
        while state
            .progress
            .get(state.next)
            .is_some_and(|p| *p != Progress::Queued)
        {
            state.next += 1;
        }
    }

    /// Gives up every object that is not being scattered already.
    pub(crate) fn abandon(&self, outcome: Outcome) {
        let mut state = self.state.lock();
        self.finish_from(&mut state, 0, outcome);
        self.report(&mut state);
    }

    /// Gives up the objects that nobody fetches yet.
    pub(crate) fn drop_queued(&self) {
        let mut state = self.state.lock();
        for index in 0..self.objects.len() {
            if state.progress[index] == Progress::Queued {
                self.finish(&mut state, index, Outcome::Dropped);
            }
        }
        self.report(&mut state);
    }

    /// Reports the job if nothing is left to do.
    pub(crate) fn report_if_done(&self) {
        self.report(&mut self.state.lock());
    }

    fn finish(&self, state: &mut State, index: usize, outcome: Outcome) {
        state.progress[index] = Progress::Done(outcome);
        state.held[index] = None;
        state.unfinished -= 1;
        if outcome.is_there() {
            state.there_bytes += outcome.bytes();
        }
        self.counters.count(&outcome);
    }

    fn finish_from(&self, state: &mut State, first: usize, outcome: Outcome) {
        if state.given_up.is_none_or(|(from, _)| first < from) {
            state.given_up = Some((first, outcome));
        }
        for index in first..self.objects.len() {
            if matches!(state.progress[index], Progress::Queued | Progress::Fetching) {
                self.finish(state, index, outcome);
            }
        }
    }

    /// Reports the job, once, if it is over.
    fn report(&self, state: &mut State) {
        if state.unfinished == 0 && !state.reported {
            state.reported = true;
            let objects: Vec<Outcome> = state
                .progress
                .iter()
                .map(|progress| match progress {
                    Progress::Done(outcome) => *outcome,
                    _ => unreachable!("no object is unfinished"),
                })
                .collect();
            let outcomes = Outcomes::of_load(&self.parts, &objects);
            let event = match self.aim {
                Aim::Blocks => Event::Loaded(outcomes),
                Aim::HostTier => Event::Prefetched(outcomes),
            };
            let began = match self.passage() {
                Passage::Passed(at) => at,
                Passage::Ahead | Passage::Lost => Instant::now(),
            };
            self.completions.push(self.id, event, began);
        }
    }
}

/// What a load job is to do.
pub(crate) struct LoadSpec {
    pub(crate) aim: Aim,
    pub(crate) plan: Plan,
    pub(crate) deadline: Deadline,
    /// Whether an object is useless without the objects before it.
    pub(crate) prefix: bool,
    /// The fence that it waits for, and how long it may wait.
    pub(crate) fence: Fence,
    pub(crate) fence_wait: Duration,
}

/// An object of a load job, and its value.
pub(crate) type HeldTicket = (LoadTicket, Value);

/// One object of a load job in the hands of a lane. It gets an outcome whatever becomes of the
/// lane: dropped without an outcome, it has failed.
pub(crate) struct LoadTicket {
    job: Arc<LoadJob>,
    index: usize,
}

impl LoadTicket {
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.job.objects[self.index]
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.transfer().registration
    }

    /// The latest time at which the job is given up.
    pub(crate) fn limit(&self) -> Instant {
        let waited = match self.job.passage() {
            Passage::Passed(at) => at.saturating_duration_since(self.job.since),
            Passage::Ahead | Passage::Lost => Duration::ZERO,
        };
        self.job.deadline.limit() + waited
    }

    /// The prefetch that the object is for; none if the object is for its blocks.
    pub(crate) fn prefetch(&self) -> Option<u64> {
        (self.job.aim == Aim::HostTier).then_some(self.job.id)
    }

    /// Whether anybody still wants the object.
    pub(crate) fn is_wanted(&self) -> bool {
        self.job.state.lock().progress[self.index] == Progress::Fetching
    }

    /// Asks to write into the blocks, or to keep the value. If this returns true, the job is not
    /// reported before `resolve`.
    pub(crate) fn begin_scatter(&self) -> bool {
        let mut state = self.job.state.lock();
        let wanted = state.progress[self.index] == Progress::Fetching;
        if wanted && Instant::now() >= self.job.deadline_in(&state) {
            self.job.finish_from(&mut state, 0, Outcome::TimedOut);
            self.job.report(&mut state);
            return false;
        }
        if wanted {
            state.progress[self.index] = Progress::Scattering;
        }
        wanted
    }

    /// Takes [`begin_scatter`](Self::begin_scatter) back: what has been written into the blocks is
    /// not what they should hold, and the object is still to be fetched, unless it was given up
    /// meanwhile.
    pub(crate) fn scatter_later(&self) {
        let mut state = self.job.state.lock();
        match state.given_up {
            Some((first, outcome)) if first <= self.index => {
                self.job.finish(&mut state, self.index, outcome);
                self.job.report(&mut state);
            }
            _ => state.progress[self.index] = Progress::Fetching,
        }
    }

    /// Sets the outcome, unless the object was given up meanwhile.
    pub(crate) fn resolve(self, outcome: Outcome) {
        self.settle(outcome);
    }

    /// Sets the outcome as [`resolve`](Self::resolve) does, while the object's description is still
    /// needed.
    pub(crate) fn settle(&self, outcome: Outcome) {
        let job = &self.job;
        let mut state = job.state.lock();
        if matches!(state.progress[self.index], Progress::Done(_)) {
            return;
        }
        job.finish(&mut state, self.index, outcome);
        if job.prefix && !outcome.is_there() {
            job.finish_from(&mut state, self.index + 1, Outcome::Skipped);
        }
        job.report(&mut state);
    }
}

impl Drop for LoadTicket {
    fn drop(&mut self) {
        self.settle(Outcome::Failed(ErrorKind::Internal));
    }
}
