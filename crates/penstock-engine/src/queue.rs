//! The work that waits for lanes, and the order in which lanes take it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use penstock_contract::ErrorKind;

use crate::Outcome;
use crate::arena::{Arena, Empty, Gathered, Lent, Purpose, Slot};
use crate::config::{Batches, EngineConfig};
use crate::fence::Passage;
use crate::host_tier::HostTier;
use crate::load_job::{Aim, HeldTicket, LoadJob, LoadTicket};
use crate::registration::Registration;
use crate::signal::Signals;
use crate::store_job::{GivenUp, StoreJob, StoreTicket};
use crate::sync::Mutex;

/// The queues of one engine. Their lock is taken before the lock of a job, never after it.
pub(crate) struct Queues {
    state: Mutex<State>,
    config: EngineConfig,
    batches: Batches,
    arena: Arc<Arena>,
    host_tier: HostTier,
    /// Whether stored values have another place to go while the store fails: the host tier or node
    /// memory.
    stores_anyway: bool,
    /// Whether that place is node memory.
    has_node: bool,
    /// Whether blocks are copied straight into node memory, without a slot: those in host memory,
    /// and those of a device once it reaches node memory.
    places: bool,
    is_node_pinned: AtomicBool,
    signals: Arc<Signals>,
}

#[derive(Default)]
struct State {
    gathers: VecDeque<Gather>,
    /// Payload bytes of `gathers`.
    gather_bytes: usize,
    /// Objects that another engine waits for. They come before all of `puts`.
    awaited: VecDeque<Put>,
    puts: VecDeque<Put>,
    /// Payload bytes of `awaited` and `puts` that are in node memory. Slots bound the others.
    placed_bytes: usize,
    /// Jobs with queued objects, oldest first.
    loads: VecDeque<Arc<LoadJob>>,
    /// Prefetch jobs with queued objects, oldest first. They are taken only while `loads` has no
    /// work for a lane.
    prefetches: VecDeque<Arc<LoadJob>>,
    /// Calls to drain under way.
    draining: usize,
    /// The time until which stores are dropped, because the last puts all failed.
    failing_until: Option<Instant>,
    closed: bool,
}

/// An object that waits for its fence, and then for a slot unless it is placed.
struct Gather {
    ticket: StoreTicket,
    since: Instant,
    is_placed: bool,
}

impl Gather {
    /// Whether it goes along in a copy that `first` is the first object of, and that has `bytes` with
    /// it. The first object always goes.
    fn goes_along(&self, first: Option<&StoreTicket>, is_placed: bool, bytes: usize) -> bool {
        let ticket = &self.ticket;
        first.is_none_or(|first| {
            self.is_placed == is_placed
                && Arc::ptr_eq(first.registration(), ticket.registration())
                && bytes <= ticket.registration().copy_bytes()
                && matches!(ticket.passage(), Passage::Passed(_))
        })
    }
}

/// An object that waits to be put.
pub(crate) struct Put {
    pub(crate) ticket: StoreTicket,
    pub(crate) payload: Payload,
}

/// Where the payload of an object that waits to be put is.
pub(crate) enum Payload {
    InSlot(Slot<Gathered>),
    /// In node memory, as a whole value.
    InNode,
}

impl Put {
    /// Payload bytes, if they are in node memory.
    fn placed_bytes(&self) -> usize {
        match self.payload {
            Payload::InSlot(_) => 0,
            Payload::InNode => self.ticket.transfer().bytes,
        }
    }
}

/// What a copy lane does next.
pub(crate) enum CopyWork {
    /// Objects of one registration, in one copy.
    Gather(Vec<(StoreTicket, Slot<Empty>)>),
    /// Objects of one registration, in one copy, that go straight into node memory.
    Place(Vec<StoreTicket>),
    /// Wait for a signal, or until this time.
    Wait(Option<Instant>),
    Close,
}

/// What a get lane does next.
pub(crate) enum LoadWork {
    /// Objects of one job.
    Load(Vec<(LoadTicket, Slot<Empty>)>),
    /// Objects of one job that the host tier has.
    Scatter(Vec<HeldTicket>),
    Wait,
    Close,
}

/// What a put lane does next.
pub(crate) enum PutWork {
    Put(Vec<Put>),
    Wait,
    Close,
}

impl Queues {
    /// With node memory, no values stay in the arena.
    pub(crate) fn new(
        config: EngineConfig,
        batches: Batches,
        has_node: bool,
        arena: Arc<Arena>,
        signals: Arc<Signals>,
    ) -> Self {
        let host_tier = HostTier::new(config.slots, config.slot_bytes, config.prefetch_slots);
        if !config.keep || has_node {
            host_tier.close();
        }
        Self {
            state: Mutex::default(),
            stores_anyway: config.keep || has_node,
            has_node,
            places: has_node && config.in_place && config.keys.is_none(),
            is_node_pinned: AtomicBool::new(false),
            config,
            batches,
            arena,
            host_tier,
            signals,
        }
    }

    /// Notes that devices reach node memory.
    pub(crate) fn node_is_pinned(&self) {
        self.is_node_pinned.store(true, Ordering::Release);
    }

    /// Whether copies go straight between node memory and the blocks of a registration.
    pub(crate) fn reaches_node(&self, registration: &Registration) -> bool {
        self.places && (registration.is_host() || self.is_node_pinned.load(Ordering::Relaxed))
    }

    /// Queues the objects for which there is room, and drops the rest.
    pub(crate) fn push_gathers(&self, tickets: Vec<StoreTicket>) {
        let since = Instant::now();
        let mut refused = Vec::new();
        {
            let mut state = self.state.lock();
            let accepting =
                !state.closed && state.draining == 0 && (self.stores_anyway || !state.is_failing());
            for ticket in tickets {
                let bytes = state.gather_bytes + ticket.transfer().bytes;
                if accepting
                    && state.gathers.len() < self.config.max_pending_objects
                    && bytes <= self.config.max_pending_bytes
                {
                    state.gather_bytes = bytes;
                    // What is compared must stay as it was computed.
                    let is_placed =
                        !ticket.is_witness() && self.reaches_node(ticket.registration());
                    state.gathers.push_back(Gather {
                        ticket,
                        since,
                        is_placed,
                    });
                } else {
                    refused.push(ticket);
                }
            }
        }
        self.signals.copy.notify_all();
        end(refused, Outcome::Dropped);
    }

    /// Queues an object anew that could not be placed: it is gathered as any other.
    pub(crate) fn gather_instead(&self, ticket: StoreTicket) {
        let mut state = self.state.lock();
        // Asked under the lock: whoever gives the job up marks it first, and then looks here.
        let given_up = ticket.given_up().map(GivenUp::outcome);
        if let Some(outcome) = given_up.or(state.closed.then_some(Outcome::Dropped)) {
            drop(state);
            return ticket.resolve(outcome);
        }
        state.gather_bytes += ticket.transfer().bytes;
        state.gathers.push_front(Gather {
            ticket,
            since: Instant::now(),
            is_placed: false,
        });
        drop(state);
        self.signals.copy.notify_one();
    }

    /// Queues a gathered object, unless its job was cancelled.
    pub(crate) fn push_put(&self, mut put: Put) {
        let refused = {
            let mut state = self.state.lock();
            put.ticket.gathered();
            let bytes = state.placed_bytes + put.placed_bytes();
            let objects = state.awaited.len() + state.puts.len();
            // Slots bound the others.
            let is_full = matches!(put.payload, Payload::InNode)
                && (bytes > self.config.max_pending_bytes
                    || objects >= self.config.max_pending_objects);
            // Asked under the lock, as for gathers.
            if put.ticket.given_up() == Some(GivenUp::All) {
                Some((put, Outcome::Cancelled))
            } else if state.closed || is_full || (state.is_failing() && !self.has_node) {
                Some((put, Outcome::Dropped))
            } else {
                state.placed_bytes = bytes;
                state.puts_like(&put).push_back(put);
                None
            }
        };
        match refused {
            Some((Put { ticket, payload }, outcome)) => {
                if let Payload::InSlot(slot) = payload {
                    let slot = slot.into_verified(ticket.transfer());
                    self.host_tier.keep(ticket.transfer(), slot, None);
                }
                ticket.resolve(outcome);
            }
            None => self.signals.put.notify_one(),
        }
    }

    pub(crate) fn push_load(&self, job: Arc<LoadJob>, aim: Aim) {
        {
            let mut state = self.state.lock();
            if state.closed {
                drop(state);
                job.abandon(Outcome::Cancelled);
                return;
            }
            match aim {
                Aim::Blocks => state.loads.push_back(job),
                Aim::HostTier => state.prefetches.push_back(job),
            }
        }
        self.signals.get.notify_all();
    }

    /// A free slot. If there is none, a kept value is given up for it.
    pub(crate) fn lease(&self, purpose: Purpose) -> Option<Slot<Empty>> {
        loop {
            match self.arena.lease(purpose) {
                Lent::Slot(slot) => return Some(slot),
                Lent::NoShare => return None,
                Lent::NoneFree if self.host_tier.evict() => {}
                Lent::NoneFree => return None,
            }
        }
    }

    pub(crate) fn next_copy(&self) -> CopyWork {
        let mut over = Vec::new();
        let work = self.next_gather(&mut self.state.lock(), &mut over);
        for (ticket, outcome) in over {
            ticket.resolve(outcome);
        }
        work
    }

    /// What a copy lane does next. Objects that have waited too long, or whose fence was lost, go
    /// into `over`.
    fn next_gather(&self, state: &mut State, over: &mut Vec<(StoreTicket, Outcome)>) -> CopyWork {
        if state.closed {
            return CopyWork::Close;
        }
        while let Some(oldest) = state.gathers.front() {
            let (until, outcome) = match oldest.ticket.passage() {
                // The objects behind it have later fences.
                Passage::Ahead => (oldest.since + self.config.fence_wait, Outcome::Dropped),
                Passage::Passed(_) if oldest.is_placed => {
                    return CopyWork::Place(state.take_placed());
                }
                Passage::Passed(at) => {
                    let batch = self.pop_gathers(state);
                    if !batch.is_empty() {
                        return CopyWork::Gather(batch);
                    }
                    // It waits for a slot. Those behind it that need none do not.
                    let placed = state.take_placed();
                    if !placed.is_empty() {
                        return CopyWork::Place(placed);
                    }
                    (at + self.config.store_wait, Outcome::Dropped)
                }
                Passage::Lost => (oldest.since, Outcome::Failed(ErrorKind::Io)),
            };
            if Instant::now() < until {
                return CopyWork::Wait(Some(until));
            }
            over.extend(state.pop_gather().map(|gather| (gather.ticket, outcome)));
        }
        CopyWork::Wait(None)
    }

    /// The oldest objects that one copy takes, with a slot for each. None if there is no slot.
    fn pop_gathers(&self, state: &mut State) -> Vec<(StoreTicket, Slot<Empty>)> {
        let mut batch: Vec<(StoreTicket, Slot<Empty>)> = Vec::new();
        let mut bytes = 0;
        while let Some(next) = state.gathers.front() {
            bytes += next.ticket.transfer().bytes;
            if !next.goes_along(batch.first().map(|(first, _)| first), false, bytes) {
                break;
            }
            let Some(slot) = self.lease(Purpose::Store) else {
                break;
            };
            batch.extend(state.pop_gather().map(|gather| (gather.ticket, slot)));
        }
        batch
    }

    /// Older jobs come before younger ones, except those whose fence is ahead.
    pub(crate) fn next_load(&self) -> LoadWork {
        let mut state = self.state.lock();
        if state.closed {
            return LoadWork::Close;
        }
        let mut index = 0;
        while let Some(job) = state.loads.get(index) {
            match job.passage() {
                Passage::Passed(_) => {}
                // Polling gives the job up if this takes too long.
                Passage::Ahead => {
                    index += 1;
                    continue;
                }
                Passage::Lost => job.abandon(Outcome::Failed(ErrorKind::Io)),
            }
            let held = job.take_held(self.config.batch, self.config.batch_bytes);
            if !held.is_empty() {
                return LoadWork::Scatter(held);
            }
            let queued = job.queued();
            if queued == 0 {
                state.loads.remove(index);
                continue;
            }
            // An even share for every lane, so that all lanes begin with the front of the job.
            let share = queued
                .div_ceil(self.config.get_lanes)
                .min(self.batches.get.objects);
            let slots: Vec<_> = (0..share)
                .map_while(|_| self.lease(Purpose::Load))
                .collect();
            if slots.is_empty() {
                return LoadWork::Wait;
            }
            let tickets = job.take(slots.len(), self.batches.get.bytes);
            if !tickets.is_empty() {
                return LoadWork::Load(tickets.into_iter().zip(slots).collect());
            }
        }
        self.next_prefetch(&mut state)
    }

    /// What a get lane does for prefetches. A prefetch that finds no room to stay in is over: its
    /// request will load what it needs.
    fn next_prefetch(&self, state: &mut State) -> LoadWork {
        while let Some(job) = state.prefetches.front() {
            let queued = job.queued();
            if queued == 0 {
                state.prefetches.pop_front();
                continue;
            }
            // The slots that other lanes are filling will be pinned too. Their count is read before
            // the count of what is pinned already: a value that passes from one to the other
            // meanwhile counts twice, rather than not at all.
            let filling = self.arena.prefetching();
            let room = self.host_tier.room().saturating_sub(filling);
            let share = queued.min(self.batches.get.objects).min(room);
            let slots: Vec<_> = (0..share)
                .map_while(|_| self.lease(Purpose::Prefetch))
                .collect();
            if slots.is_empty() && self.has_node {
                // Slots are only on the way there: one is free soon.
                return LoadWork::Wait;
            }
            if slots.is_empty() {
                job.drop_queued();
                state.prefetches.pop_front();
                continue;
            }
            let tickets = job.take(slots.len(), self.batches.get.bytes);
            if !tickets.is_empty() {
                return LoadWork::Load(tickets.into_iter().zip(slots).collect());
            }
        }
        LoadWork::Wait
    }

    pub(crate) fn next_put(&self) -> PutWork {
        let mut state = self.state.lock();
        if state.closed {
            return PutWork::Close;
        }
        let batch = state.pop_puts(self.batches.put.objects, self.batches.put.bytes);
        if batch.is_empty() {
            PutWork::Wait
        } else {
            PutWork::Put(batch)
        }
    }

    /// Notes whether the store takes puts. While it does not, store jobs' objects are dropped at
    /// once, so that they do not hold blocks and slots for nothing; with node memory, they go there
    /// alone. After a while, puts are tried again.
    pub(crate) fn store_takes_puts(&self, yes: bool) {
        if yes {
            self.state.lock().failing_until = None;
        } else {
            self.state.lock().failing_until = Some(Instant::now() + self.config.store_backoff);
            if !self.has_node {
                self.drop_stores();
            }
        }
    }

    /// Whether the last puts all failed, so recently that the store is left alone.
    pub(crate) fn is_store_failing(&self) -> bool {
        self.state.lock().is_failing()
    }

    /// Ends what these jobs have not gathered. An object that a lane takes to a place and that finds
    /// no room there is not gathered later either.
    pub(crate) fn give_up_gathers(&self, jobs: &[Arc<StoreJob>]) {
        jobs.iter().for_each(|job| job.give_up(GivenUp::Gathers));
        let is_one = |id| jobs.iter().any(|job| job.id() == id);
        let dropped = self.state.lock().take_gathers(is_one);
        end(dropped, GivenUp::Gathers.outcome());
    }

    /// Ends what no lane is putting, or copying, of a job. What is being copied is not put.
    pub(crate) fn cancel_store(&self, job: &StoreJob) {
        job.give_up(GivenUp::All);
        self.end_stores(GivenUp::All.outcome(), |id| id == job.id());
    }

    /// Ends every object that waits to be gathered.
    pub(crate) fn drop_gathers(&self) {
        let dropped = self.state.lock().take_gathers(|_| true);
        end(dropped, Outcome::Dropped);
    }

    /// Ends every object that waits to be gathered or put.
    pub(crate) fn drop_stores(&self) {
        self.end_stores(Outcome::Dropped, |_| true);
    }

    fn end_stores(&self, outcome: Outcome, of: impl Fn(u64) -> bool) {
        let (gathers, puts) = {
            let mut state = self.state.lock();
            (state.take_gathers(&of), state.take_puts(&of))
        };
        end(gathers, outcome);
        end(puts.into_iter().map(|put| put.ticket), outcome);
    }

    /// Forgets load jobs that have nothing left to fetch.
    pub(crate) fn prune_loads(&self) {
        let mut state = self.state.lock();
        state.loads.retain(|job| job.queued() > 0);
        state.prefetches.retain(|job| job.queued() > 0);
    }

    /// While the guard lives, new stores are dropped.
    pub(crate) fn refuse_stores(&self) -> Refusing<'_> {
        self.state.lock().draining += 1;
        Refusing { queues: self }
    }

    /// Ends everything that waits, and tells the lanes to end. Idempotent.
    pub(crate) fn close(&self) {
        let loads = {
            let mut state = self.state.lock();
            state.closed = true;
            let prefetches = std::mem::take(&mut state.prefetches);
            let loads = std::mem::take(&mut state.loads);
            loads.into_iter().chain(prefetches)
        };
        for job in loads {
            job.abandon(Outcome::Cancelled);
        }
        self.host_tier.close();
        self.drop_stores();
        self.signals.notify_all();
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn host_tier(&self) -> &HostTier {
        &self.host_tier
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }
}

impl State {
    fn is_failing(&self) -> bool {
        self.failing_until
            .is_some_and(|until| until > Instant::now())
    }

    fn pop_gather(&mut self) -> Option<Gather> {
        let gather = self.gathers.pop_front()?;
        self.gather_bytes -= gather.ticket.transfer().bytes;
        Some(gather)
    }

    /// The oldest objects that one copy takes to node memory. None if their fence is ahead.
    fn take_placed(&mut self) -> Vec<StoreTicket> {
        let Some(start) = self.gathers.iter().position(|gather| gather.is_placed) else {
            return Vec::new();
        };
        let first = &self.gathers[start].ticket;
        if !matches!(first.passage(), Passage::Passed(_)) {
            return Vec::new();
        }
        let (mut end, mut bytes) = (start, 0);
        for next in self.gathers.range(start..) {
            let with_it = bytes + next.ticket.transfer().bytes;
            if !next.goes_along((end > start).then_some(first), true, with_it) {
                break;
            }
            (end, bytes) = (end + 1, with_it);
        }
        self.gather_bytes -= bytes;
        let taken = self.gathers.drain(start..end);
        taken.map(|gather| gather.ticket).collect()
    }

    fn take_gathers(&mut self, of: impl Fn(u64) -> bool) -> Vec<StoreTicket> {
        let (taken, left): (VecDeque<_>, _) = std::mem::take(&mut self.gathers)
            .into_iter()
            .partition(|gather: &Gather| of(gather.ticket.job_id()));
        self.gathers = left;
        let tickets = taken.into_iter().map(|gather| gather.ticket);
        tickets
            .inspect(|ticket| self.gather_bytes -= ticket.transfer().bytes)
            .collect()
    }

    /// The queue in which an object waits to be put.
    fn puts_like(&mut self, put: &Put) -> &mut VecDeque<Put> {
        if put.ticket.is_awaited() {
            &mut self.awaited
        } else {
            &mut self.puts
        }
    }

    fn take_puts(&mut self, of: impl Fn(u64) -> bool) -> VecDeque<Put> {
        let mut all = VecDeque::new();
        for queue in [&mut self.awaited, &mut self.puts] {
            let (taken, left): (VecDeque<_>, _) = std::mem::take(queue)
                .into_iter()
                .partition(|put: &Put| of(put.ticket.job_id()));
            *queue = left;
            all.extend(taken);
        }
        let placed = all.iter().map(Put::placed_bytes).sum::<usize>();
        self.placed_bytes -= placed;
        all
    }

    fn pop_puts(&mut self, objects: usize, bytes: usize) -> Vec<Put> {
        let mut batch: Vec<Put> = Vec::new();
        let mut batch_bytes = 0;
        while batch.len() < objects {
            let queue = if self.awaited.is_empty() {
                &mut self.puts
            } else {
                &mut self.awaited
            };
            let Some(next) = queue.front() else { break };
            batch_bytes += next.ticket.transfer().bytes;
            if !batch.is_empty() && batch_bytes > bytes {
                break;
            }
            batch.extend(queue.pop_front());
        }
        let placed = batch.iter().map(Put::placed_bytes).sum::<usize>();
        self.placed_bytes -= placed;
        batch
    }
}

/// Ends objects of stores. Not to be called under the queues' lock, since there may be many.
fn end(tickets: impl IntoIterator<Item = StoreTicket>, outcome: Outcome) {
    tickets
        .into_iter()
        .for_each(|ticket| ticket.resolve(outcome));
}

/// See [`Queues::refuse_stores`].
pub(crate) struct Refusing<'a> {
    queues: &'a Queues,
}

impl Drop for Refusing<'_> {
    fn drop(&mut self) {
        self.queues.state.lock().draining -= 1;
    }
}
