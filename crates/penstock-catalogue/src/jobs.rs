//! Loads, prefetches and stores under way.

use crate::CatalogueError;
use crate::catalogue::{Catalogue, found_mut};
use crate::error::Result;
use crate::index::Number;
use crate::job::{Job, Kind};

impl Catalogue {
    /// Has the request name blocks, given by group and index, as jobs name them. Whoever begins a
    /// job does this before it asks whether another moves them.
    ///
    /// # Errors
    /// The request is not known.
    pub(crate) fn join(&mut self, id: &str, blocks: &mut [(usize, usize, Number)]) -> Result<()> {
        let request = found_mut(&mut self.requests, id)?;
        for (group, index, number) in blocks {
            *number = self.index.join(*number);
            request.blocks[*group][*index] = *number;
        }
        Ok(())
    }

    /// Takes in a job that moves blocks of one request, all of which it has
    /// [joined](Self::join).
    pub(crate) fn begin(
        &mut self,
        job: u64,
        kind: Kind,
        numbers: Vec<Number>,
        reads: Vec<u64>,
        witnesses: usize,
    ) -> Result<()> {
        if self.jobs.contains_key(&job) {
            return Err(CatalogueError::DuplicateJob(job));
        }
        for &number in &numbers {
            self.index.refer_again(number);
            match kind {
                Kind::Load => {
                    self.index.set_loaded(number);
                    self.index.state_mut(number).loading += 1;
                }
                Kind::Store => self.index.state_mut(number).storing += 1,
                Kind::Prefetch => self.index.set_prefetched(number, true),
            }
        }
        match kind {
            Kind::Load => self.loads += 1,
            Kind::Prefetch => self.prefetched += numbers.len(),
            Kind::Store => self.reading.extend(reads.iter().map(|&block| (block, job))),
        }
        let job_of = Job {
            kind,
            numbers,
            reads,
            witnesses,
            is_released: false,
        };
        self.jobs.insert(job, job_of);
        Ok(())
    }

    /// Ends a load or a prefetch.
    ///
    /// # Errors
    /// No such job is under way.
    pub fn end(&mut self, job: u64) -> Result<()> {
        self.release(job)?;
        let ended = self.take(job)?;
        if ended.kind == Kind::Load {
            self.loads -= 1;
        }
        for &number in &ended.numbers {
            match ended.kind {
                Kind::Load => self.index.state_mut(number).loading -= 1,
                Kind::Store => self.index.state_mut(number).storing -= 1,
                Kind::Prefetch => {}
            }
            self.index.release(number);
        }
        Ok(())
    }

    /// Notes that nobody waits for a prefetch any more, whether it is over or not: others may fetch
    /// its blocks. This changes nothing for any other kind of job.
    ///
    /// # Errors
    /// No such job is under way.
    pub fn release(&mut self, job: u64) -> Result<()> {
        let of = self
            .jobs
            .get_mut(&job)
            .ok_or(CatalogueError::UnknownJob(job))?;
        if of.kind == Kind::Prefetch && !of.is_released {
            of.is_released = true;
            self.prefetched -= of.numbers.len();
            for &number in &of.numbers {
                self.index.set_prefetched(number, false);
            }
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, job: u64) -> Result<Job> {
        self.jobs
            .remove(&job)
            .ok_or(CatalogueError::UnknownJob(job))
    }

    /// Notes blocks that a job did not find in the pool, or not whole, by their positions in the
    /// job. Reports of a job that is over are ignored.
    ///
    /// # Errors
    /// The job has no block at such a position.
    pub fn lose(&mut self, job: u64, positions: &[usize]) -> Result<()> {
        for number in self.numbers_at(job, positions)? {
            self.index.set_lost(number);
        }
        Ok(())
    }

    /// Notes blocks that are in the pool but cannot be decrypted here, by their positions in a job.
    /// As with [`lose`](Self::lose), reports of a job that is over are ignored.
    ///
    /// # Errors
    /// The job has no block at such a position.
    pub fn set_foreign(&mut self, job: u64, positions: &[usize]) -> Result<()> {
        for number in self.numbers_at(job, positions)? {
            self.index.set_foreign(number);
        }
        Ok(())
    }

    fn numbers_at(&self, job: u64, positions: &[usize]) -> Result<Vec<Number>> {
        let Some(Job { numbers, .. }) = self.jobs.get(&job) else {
            return Ok(Vec::new());
        };
        positions
            .iter()
            .map(|&position| {
                let number = numbers.get(position).copied();
                number.ok_or(CatalogueError::NoPosition { job, position })
            })
            .collect()
    }
}
