//! The completion queue, and the table of jobs that have not been completed to their owner yet.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use crate::load::LoadJob;
use crate::store::StoreJob;
use crate::sync::{Condvar, Mutex};
use crate::{Completion, EngineError, Event, Outcome};

/// Completions that nobody has polled yet, in the order in which things happened.
///
/// It holds at most two entries for each job of the table. Its lock is a leaf.
#[derive(Default)]
pub(crate) struct Completions {
    queue: Mutex<Vec<Completion>>,
    pushed: Condvar,
}

impl Completions {
    /// Something happened to a job that was submitted at `since`.
    pub(crate) fn push(&self, job: u64, event: Event, since: Instant) {
        let took = since.elapsed();
        self.queue.lock().push(Completion { job, event, took });
        self.pushed.notify_all();
    }

    /// Moves everything to the end of `out`.
    pub(crate) fn drain(&self, out: &mut Vec<Completion>) {
        out.append(&mut self.queue.lock());
    }

    /// Sleeps until there is something to drain (true) or `until` has come.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut queue = self.queue.lock();
        while queue.is_empty() {
            if self.pushed.wait_until(&mut queue, until).timed_out() {
                return !queue.is_empty();
            }
        }
        true
    }
}

#[derive(Clone)]
pub(crate) enum Job {
    Load(Arc<LoadJob>),
    Store(Arc<StoreJob>),
}

impl Job {
    fn objects(&self) -> usize {
        match self {
            Self::Load(job) => job.len(),
            Self::Store(job) => job.len(),
        }
    }
}

/// Jobs from their submission until their last completion is polled. Its lock is a leaf.
pub(crate) struct Table {
    jobs: Mutex<Jobs>,
    max_objects: usize,
}

struct Listed {
    job: Job,
    /// Its place in `Jobs::deadlines`, if it has one.
    deadline: Option<Instant>,
}

#[derive(Default)]
struct Jobs {
    by_id: HashMap<u64, Listed>,
    /// Load jobs by the deadline that they had when it was last looked at; it may be later by now.
    deadlines: BTreeSet<(Instant, u64)>,
    objects: usize,
}

impl Table {
    pub(crate) fn new(max_objects: usize) -> Self {
        Self {
            jobs: Mutex::default(),
            max_objects,
        }
    }

    pub(crate) fn insert(&self, id: u64, job: Job) -> Result<(), EngineError> {
        let mut jobs = self.jobs.lock();
        if jobs.by_id.contains_key(&id) {
            return Err(EngineError::DuplicateJob(id));
        }
        // An empty job takes a place too.
        let outstanding = jobs.objects + job.objects().max(1);
        if outstanding > self.max_objects {
            return Err(EngineError::Busy {
                outstanding,
                bound: self.max_objects,
            });
        }
        jobs.objects = outstanding;
        let deadline = match &job {
            Job::Load(load) => Some(load.deadline()),
            Job::Store(_) => None,
        };
        jobs.deadlines
            .extend(deadline.map(|deadline| (deadline, id)));
        jobs.by_id.insert(id, Listed { job, deadline });
        Ok(())
    }

    pub(crate) fn get(&self, id: u64) -> Option<Job> {
        let jobs = self.jobs.lock();
        jobs.by_id.get(&id).map(|listed| listed.job.clone())
    }

    pub(crate) fn remove(&self, id: u64) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        let Listed { job, deadline } = jobs.by_id.remove(&id)?;
        jobs.objects -= job.objects().max(1);
        if let Some(deadline) = deadline {
            jobs.deadlines.remove(&(deadline, id));
        }
        Some(job)
    }

    /// Gives up every load job whose deadline is past; returns whether there was one, and the
    /// next deadline.
    ///
    /// Nobody can see a job's state but by polling, so it is enough to do this then, and no
    /// timer is needed.
    pub(crate) fn expire(&self, now: Instant) -> (bool, Option<Instant>) {
        let mut is_over = false;
        loop {
            let (load, id) = {
                let mut jobs = self.jobs.lock();
                let (deadline, id) = match jobs.deadlines.first() {
                    Some(&first) if first.0 <= now => first,
                    later => return (is_over, later.map(|&(deadline, _)| deadline)),
                };
                jobs.deadlines.remove(&(deadline, id));
                match jobs.by_id.get_mut(&id) {
                    Some(Listed {
                        job: Job::Load(load),
                        deadline,
                    }) => {
                        *deadline = None;
                        (Arc::clone(load), id)
                    }
                    _ => continue,
                }
            };
            let deadline = load.deadline();
            if deadline <= now {
                load.abandon(Outcome::TimedOut);
                is_over = true;
                continue;
            }
            let mut jobs = self.jobs.lock();
            if let Some(listed) = jobs.by_id.get_mut(&id) {
                listed.deadline = Some(deadline);
                jobs.deadlines.insert((deadline, id));
            }
        }
    }

    /// Every load job there is.
    pub(crate) fn loads(&self) -> Vec<Arc<LoadJob>> {
        let jobs = self.jobs.lock();
        let load = |job: &Job| match job {
            Job::Load(job) => Some(Arc::clone(job)),
            Job::Store(_) => None,
        };
        jobs.by_id
            .values()
            .map(|listed| &listed.job)
            .filter_map(load)
            .collect()
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use std::time::Duration;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn an_owner_that_waits_hears_of_every_job() {
        loom::model(|| {
            let completions = Arc::new(Completions::default());
            let lanes: Vec<_> = (0..2)
                .map(|job| {
                    let completions = Arc::clone(&completions);
                    thread::spawn(move || completions.push(job, Event::Released, Instant::now()))
                })
                .collect();
            let far = Instant::now() + Duration::from_secs(60);
            let mut heard = Vec::new();
            while heard.len() < 2 {
                assert!(completions.wait(far));
                completions.drain(&mut heard);
            }
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            let mut jobs: Vec<_> = heard.iter().map(|completion| completion.job).collect();
            jobs.sort_unstable();
            assert_eq!(jobs, [0, 1]);
        });
    }
}
