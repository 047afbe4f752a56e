//! Submitting jobs: from blocks to objects, and to whoever works on them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_contract::Block;

use super::Engine;
use crate::group::Work;
use crate::host_tier::Value;
use crate::job::Plan;
use crate::load_job::{Aim, LoadJob, LoadSpec};
use crate::store_job::{StoreAim, StoreJob};
use crate::table::Job;
use crate::{Deadline, EngineError, Fence, Outcome, Owner};

impl Engine {
    /// Stores blocks. Before `after` is passed, they may change. Once it is passed, they are read,
    /// and must not change until [`Event::Released`](crate::Event). The time that they may wait for
    /// a slot also counts only from then on. Only jobs of the same owner find them again.
    ///
    /// If more objects than the setting `max_outstanding_objects` are outstanding, the job is
    /// dropped: its outcomes say so.
    pub fn submit_store(
        &self,
        job: u64,
        blocks: &[Block],
        owner: &Owner,
        after: Fence,
    ) -> Result<(), EngineError> {
        self.begin_store(
            job,
            self.store_job(job, blocks, owner, StoreAim::Usual, after)?,
        )
    }

    /// Stores blocks, and compares the last `witnesses` of them with what the store has, if it has
    /// them: see [`Outcome::Disagreed`]. This engine must have computed these itself, and so must it
    /// have whatever they were computed from. See [`submit_store`](Self::submit_store) for the rest.
    pub fn submit_witness(
        &self,
        job: u64,
        blocks: &[Block],
        witnesses: usize,
        owner: &Owner,
        after: Fence,
    ) -> Result<(), EngineError> {
        let aim = StoreAim::Witness(witnesses);
        self.begin_store(job, self.store_job(job, blocks, owner, aim, after)?)
    }

    /// Stores blocks that another engine waits for. They are put before all others that wait. See
    /// [`submit_store`](Self::submit_store) for the rest.
    pub fn submit_awaited_store(
        &self,
        job: u64,
        blocks: &[Block],
        owner: &Owner,
        after: Fence,
    ) -> Result<(), EngineError> {
        self.begin_store(
            job,
            self.store_job(job, blocks, owner, StoreAim::Awaited, after)?,
        )
    }

    fn begin_store(&self, job: u64, store: Arc<StoreJob>) -> Result<(), EngineError> {
        if self.table.insert(job, Job::Store(Arc::clone(&store)))? {
            self.inner.queues.host_tier().want(store.objects());
            self.inner.queues.push_gathers(store.tickets());
        } else {
            store.drop_all();
        }
        let counters = &self.inner.counters;
        counters.store_jobs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Completes a store at once as dropped: for one that must not be done.
    pub fn decline_store(&self, job: u64, blocks: &[Block]) -> Result<(), EngineError> {
        let store = self.store_job(job, blocks, &Owner::default(), StoreAim::Usual, Fence::NONE)?;
        self.table.insert(job, Job::Over)?;
        store.drop_all();
        Ok(())
    }

    /// Loads blocks by `deadline`, an instant or a [`Deadline`]. The blocks must be left alone
    /// until [`Event::Loaded`](crate::Event).
    ///
    /// Nothing is fetched or written before `after` is passed, and the deadline moves by the time
    /// that this takes. If it takes longer than the setting `fence_wait`, the job is given up. With
    /// `prefix`, an object is wanted only if all objects before it are loaded: after the first that
    /// is not, the rest is skipped. `owner`, and too many outstanding objects, are as for a store.
    pub fn submit_load(
        &self,
        job: u64,
        blocks: &[Block],
        owner: &Owner,
        deadline: impl Into<Deadline>,
        prefix: bool,
        after: Fence,
    ) -> Result<(), EngineError> {
        let plan = self.plan(blocks, Work::Load, owner)?;
        let held = self.inner.queues.host_tier().find(&plan.objects);
        let spec = LoadSpec {
            aim: Aim::Blocks,
            plan,
            deadline: deadline.into(),
            prefix,
            fence: after,
            fence_wait: self.inner.config.fence_wait,
        };
        self.start_load(job, spec, held)?;
        let counters = &self.inner.counters;
        counters.load_jobs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Completes a load at once as dropped: for one that must not be done.
    pub fn decline_load(&self, job: u64, blocks: &[Block]) -> Result<(), EngineError> {
        let plan = self.plan(blocks, Work::Load, &Owner::default())?;
        let held = plan.objects.iter().map(|_| None).collect();
        let spec = LoadSpec {
            aim: Aim::Blocks,
            plan,
            deadline: Instant::now().into(),
            prefix: false,
            fence: Fence::NONE,
            fence_wait: Duration::ZERO,
        };
        let load = self.load_job(job, spec, held);
        self.table.insert(job, Job::Over)?;
        load.abandon(Outcome::Dropped);
        Ok(())
    }

    /// Gets the objects of blocks into the host tier by `deadline`. They stay there until
    /// [`release`](Self::release), and a load finds them there. A prefetch goes behind all loads.
    /// It has no claim to room: objects that find none are dropped. It ends with
    /// [`Event::Prefetched`](crate::Event). The blocks' ids mean nothing.
    pub fn submit_prefetch(
        &self,
        job: u64,
        blocks: &[Block],
        owner: &Owner,
        deadline: Instant,
    ) -> Result<(), EngineError> {
        let plan = self.plan(blocks, Work::Prefetch, owner)?;
        if self.table.get(job).is_some() {
            return Err(EngineError::outstanding(job));
        }
        let host_tier = self.inner.queues.host_tier();
        let held = host_tier.open(job, &plan.objects);
        let spec = LoadSpec {
            aim: Aim::HostTier,
            plan,
            deadline: deadline.into(),
            prefix: true,
            fence: Fence::NONE,
            fence_wait: self.inner.config.fence_wait,
        };
        self.start_load(job, spec, held)
            .inspect_err(|_| host_tier.release(job))
    }

    fn store_job(
        &self,
        job: u64,
        blocks: &[Block],
        owner: &Owner,
        aim: StoreAim,
        after: Fence,
    ) -> Result<Arc<StoreJob>, EngineError> {
        let plan = self.plan(blocks, Work::Store, owner)?;
        Ok(StoreJob::new(
            job,
            plan,
            aim,
            after,
            Arc::clone(&self.completions),
            Arc::clone(&self.inner.counters),
            Arc::clone(&self.stores_in_flight),
        ))
    }

    fn load_job(&self, job: u64, spec: LoadSpec, held: Vec<Option<Value>>) -> Arc<LoadJob> {
        LoadJob::new(
            job,
            spec,
            held,
            Arc::clone(&self.completions),
            Arc::clone(&self.inner.counters),
        )
    }

    fn start_load(
        &self,
        job: u64,
        spec: LoadSpec,
        held: Vec<Option<Value>>,
    ) -> Result<(), EngineError> {
        let aim = spec.aim;
        let load = self.load_job(job, spec, held);
        if !self.table.insert(job, Job::Load(Arc::clone(&load)))? {
            load.abandon(Outcome::Dropped);
            return Ok(());
        }
        if aim == Aim::Blocks {
            self.inner.queues.host_tier().want(load.objects());
        }
        load.report_if_done();
        self.inner.queues.push_load(load, aim);
        Ok(())
    }

    /// The objects of a job's blocks.
    fn plan(&self, blocks: &[Block], work: Work, owner: &Owner) -> Result<Plan, EngineError> {
        if self.inner.queues.is_closed() {
            return Err(EngineError::Closed);
        }
        let groups = self.groups.read();
        let writer = self.writer();
        let mut plan = Plan::default();
        plan.parts.reserve(blocks.len());
        for block in blocks {
            let group = block.group;
            let known = groups.get(&group);
            let known = known.ok_or_else(|| EngineError::not_registered(group))?;
            known.plan(block, work, owner, writer, &mut plan)?;
        }
        Ok(plan)
    }
}
