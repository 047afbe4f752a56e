//! The life of a store job.
//!
//! An object waits for a slot, is gathered into it, waits to be put, and is put. The queue or lane
//! that holds its ticket shows where it is. The job itself only counts what is still to be read,
//! and what still has no outcome.

use std::sync::Arc;
use std::time::Instant;

use penstock_contract::{ErrorKind, Key};

use crate::Counters;
use crate::completion::{Completions, Event};
use crate::fence::{Fence, Passage};
use crate::gauge::Gauge;
use crate::job::{Plan, Transfer};
use crate::outcome::{Outcome, Outcomes, Part};
use crate::registration::Registration;
use crate::sync::{Condvar, Mutex, wait_until};

pub(crate) struct StoreJob {
    id: u64,
    objects: Vec<Transfer>,
    /// The blocks that the objects make up.
    parts: Vec<Part>,
    aim: StoreAim,
    /// The first of the objects that are compared.
    first_witness: usize,
    since: Instant,
    /// No block is read before the fence is passed.
    fence: Fence,
    state: Mutex<State>,
    released: Condvar,
    completions: Arc<Completions>,
    counters: Arc<Counters>,
    in_flight: Arc<Gauge>,
}

struct State {
    outcomes: Vec<Option<Outcome>>,
    /// Objects whose blocks may still be read.
    unread: usize,
    unfinished: usize,
    given_up: Option<GivenUp>,
}

/// What of a job is not done any more. Nobody has to find the objects for that: a lane that holds one
/// asks before it goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GivenUp {
    /// No blocks are read for it. What has been gathered is stored.
    Gathers,
    /// Everything, since it was cancelled.
    All,
}

impl GivenUp {
    pub(crate) fn outcome(self) -> Outcome {
        match self {
            Self::Gathers => Outcome::Dropped,
            Self::All => Outcome::Cancelled,
        }
    }
}

/// What a store is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreAim {
    /// What the store does not have goes there.
    Usual,
    /// What the store does not have goes there, and another engine waits for it.
    Awaited,
    /// What the store does not have goes there, and what it has of so many blocks, the last ones, is
    /// compared.
    Witness(usize),
}

impl StoreJob {
    pub(crate) fn new(
        id: u64,
        plan: Plan,
        aim: StoreAim,
        fence: Fence,
        completions: Arc<Completions>,
        counters: Arc<Counters>,
        in_flight: Arc<Gauge>,
    ) -> Arc<Self> {
        let Plan { objects, parts } = plan;
        let count = objects.len();
        let others = match aim {
            StoreAim::Witness(witnesses) => parts.len().saturating_sub(witnesses),
            StoreAim::Usual | StoreAim::Awaited => parts.len(),
        };
        let before = others.checked_sub(1).and_then(|last| parts.get(last));
        let first_witness = before.map_or(0, |part| part.end);
        let state = State {
            outcomes: vec![None; count],
            unread: count,
            unfinished: count,
            given_up: None,
        };
        Arc::new(Self {
            id,
            objects,
            parts,
            aim,
            first_witness,
            since: Instant::now(),
            fence,
            state: Mutex::new(state),
            released: Condvar::new(),
            completions,
            counters,
            in_flight,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    pub(crate) fn objects(&self) -> &[Transfer] {
        &self.objects
    }

    /// A ticket for each object. To be called once. Reports the job if it has no objects.
    pub(crate) fn tickets(self: &Arc<Self>) -> Vec<StoreTicket> {
        if self.objects.is_empty() {
            let stored = Event::Stored(Outcomes::of_store(&self.parts, &[]));
            self.completions
                .push(self.id, Event::Released, self.began());
            self.completions.push(self.id, stored, self.began());
        }
        self.in_flight.add(self.objects.len());
        (0..self.objects.len())
            .map(|index| StoreTicket {
                job: Arc::clone(self),
                index,
                read: false,
                finished: false,
            })
            .collect()
    }

    /// Ends a job that was not begun, with nothing stored.
    pub(crate) fn drop_all(self: &Arc<Self>) {
        for ticket in self.tickets() {
            ticket.resolve(Outcome::Dropped);
        }
    }

    /// Notes that objects are not gathered any more, or not put either. What is given up stays so.
    pub(crate) fn give_up(&self, what: GivenUp) {
        let mut state = self.state.lock();
        if state.given_up != Some(GivenUp::All) {
            state.given_up = Some(what);
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The objects that a job that is over did not store.
    pub(crate) fn failed(&self) -> Vec<Key> {
        let state = self.state.lock();
        let failed = self.objects.iter().zip(&state.outcomes);
        failed
            .filter(|(_, outcome)| !outcome.is_some_and(|outcome| outcome.is_success()))
            .map(|(object, _)| object.key)
            .collect()
    }

    /// Whether its blocks can be read, and since when.
    pub(crate) fn passage(&self) -> Passage {
        self.fence.passage(self.since)
    }

    /// When its clock began; now if it has not begun.
    fn began(&self) -> Instant {
        match self.passage() {
            Passage::Passed(at) => at,
            Passage::Ahead | Passage::Lost => Instant::now(),
        }
    }

    /// Waits until no block of the job will be read any more (true), or until the time `until`.
    pub(crate) fn wait_released(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        while state.unread > 0 {
            if wait_until(&self.released, &mut state, until) {
                return state.unread == 0;
            }
        }
        true
    }
}

/// One object of a store job. It gets an outcome whatever becomes of its holder: dropped without an
/// outcome, it has failed.
pub(crate) struct StoreTicket {
    job: Arc<StoreJob>,
    index: usize,
    read: bool,
    finished: bool,
}

impl StoreTicket {
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.job.objects[self.index]
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.transfer().registration
    }

    pub(crate) fn job_id(&self) -> u64 {
        self.job.id
    }

    /// See [`StoreJob::passage`].
    pub(crate) fn passage(&self) -> Passage {
        self.job.passage()
    }

    /// Whether another engine waits for the object.
    pub(crate) fn is_awaited(&self) -> bool {
        self.job.aim == StoreAim::Awaited
    }

    /// Whether it is compared with what the store has.
    pub(crate) fn is_witness(&self) -> bool {
        self.index >= self.job.first_witness
    }

    /// What of the job was given up.
    pub(crate) fn given_up(&self) -> Option<GivenUp> {
        self.job.state.lock().given_up
    }

    /// Notes that the blocks have been read and are not needed any more.
    pub(crate) fn gathered(&mut self) {
        if !self.read {
            self.read = true;
            let mut state = self.job.state.lock();
            state.unread -= 1;
            if state.unread == 0 {
                let job = &self.job;
                job.completions.push(job.id, Event::Released, job.began());
                self.job.released.notify_all();
            }
        }
    }

    /// Sets the outcome.
    pub(crate) fn resolve(mut self, outcome: Outcome) {
        self.settle(outcome);
    }

    fn settle(&mut self, outcome: Outcome) {
        if self.finished {
            return;
        }
        self.finished = true;
        self.gathered();
        let job = &self.job;
        job.counters.count(&outcome);
        {
            let mut state = job.state.lock();
            state.outcomes[self.index] = Some(outcome);
            state.unfinished -= 1;
            if state.unfinished == 0 {
                let objects: Vec<Outcome> = state.outcomes.iter().copied().flatten().collect();
                let stored = Event::Stored(Outcomes::of_store(&job.parts, &objects));
                job.completions.push(job.id, stored, job.began());
            }
        }
        job.in_flight.sub(1);
    }
}

impl Drop for StoreTicket {
    fn drop(&mut self) {
        self.settle(Outcome::Failed(ErrorKind::Internal));
    }
}
