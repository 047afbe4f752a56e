//! The table of jobs whose last completion has not been polled yet.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use crate::load_job::LoadJob;
use crate::store_job::StoreJob;
use crate::sync::Mutex;
use crate::{EngineError, Outcome};

#[derive(Clone)]
pub(crate) enum Job {
    Load(Arc<LoadJob>),
    Store(Arc<StoreJob>),
    /// The job was given up at once, and only its completions are left.
    Over,
}

impl Job {
    fn objects(&self) -> usize {
        match self {
            // An empty job takes a place too.
            Self::Load(job) => job.len().max(1),
            Self::Store(job) => job.len().max(1),
            Self::Over => 0,
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
    /// The job's place in `Jobs::deadlines`, if it has one.
    deadline: Option<Instant>,
}

#[derive(Default)]
struct Jobs {
    by_id: HashMap<u64, Listed>,
    /// Load jobs by the deadline that they had when it was last read. It may be later by now.
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

    /// Lists a job. Returns false if there is no room for it: then it is listed as a job that is
    /// over.
    pub(crate) fn insert(&self, id: u64, job: Job) -> Result<bool, EngineError> {
        let mut jobs = self.jobs.lock();
        if jobs.by_id.contains_key(&id) {
            return Err(EngineError::outstanding(id));
        }
        let outstanding = jobs.objects + job.objects();
        let has_room = outstanding <= self.max_objects;
        let job = if has_room {
            jobs.objects = outstanding;
            job
        } else {
            Job::Over
        };
        let deadline = match &job {
            Job::Load(load) => Some(load.deadline()),
            Job::Store(_) | Job::Over => None,
        };
        jobs.deadlines
            .extend(deadline.map(|deadline| (deadline, id)));
        jobs.by_id.insert(id, Listed { job, deadline });
        Ok(has_room)
    }

    pub(crate) fn get(&self, id: u64) -> Option<Job> {
        let jobs = self.jobs.lock();
        jobs.by_id.get(&id).map(|listed| listed.job.clone())
    }

    pub(crate) fn remove(&self, id: u64) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        let Listed { job, deadline } = jobs.by_id.remove(&id)?;
        jobs.objects -= job.objects();
        if let Some(deadline) = deadline {
            jobs.deadlines.remove(&(deadline, id));
        }
        Some(job)
    }

    /// Gives up every load job whose deadline is past. Returns whether there was one, and the next
    /// deadline.
    ///
    /// A job's state is seen only by polling. So it is enough to do this when polling, and no timer
    /// is needed.
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

    /// All load jobs.
    pub(crate) fn loads(&self) -> Vec<Arc<LoadJob>> {
        let jobs = self.jobs.lock();
        let load = |job: &Job| match job {
            Job::Load(job) => Some(Arc::clone(job)),
            Job::Store(_) | Job::Over => None,
        };
        jobs.by_id
            .values()
            .map(|listed| &listed.job)
            .filter_map(load)
            .collect()
    }
}
