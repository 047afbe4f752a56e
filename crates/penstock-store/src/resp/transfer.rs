//! Transfers: a batch of puts or gets, moved over one or more pipelines by the calling thread.

use std::io::{IoSlice, IoSliceMut};
use std::time::Instant;

use penstock_contract::{GetOutcome, GetRequest, Key, PutOutcome, PutRequest, slices};
use penstock_value::header::payload_checksum;
use rustix::event::PollFlags;

use super::command;
use super::failure::Failure;
use super::pipeline::{Answer, Batch, Pipeline, Queue, Window};
use super::pool::ConnectionPool;
use super::readiness::wait;

/// Most pipelines to one server. While the server's thread waits for room in one connection, it can
/// serve another.
const MOST_LANES: usize = 2;
/// Bytes of a share for which one more pipeline is worth while.
const LANE_WORTH: u64 = 512 << 10;
/// Bytes of values in flight over all pipelines to one server. Much more halves the throughput:
/// what the server sends then leaves its caches before it is received.
const BYTES_IN_FLIGHT: u64 = 1 << 20;
/// Requests in flight over all pipelines to one server, whatever their size. When the server
/// finishes one, it must have the next at hand.
const LEAST_IN_FLIGHT: usize = 2;
/// Most requests of one pipeline in flight.
const MOST_IN_FLIGHT: usize = 64;

/// Makes the caller's error of a failure and the key that it happened to.
pub(super) type Describe<'d> = &'d dyn Fn(&Failure, &Key) -> penstock_contract::Error;

/// Values to put.
pub(super) struct Puts<'t, 'v> {
    pub(super) requests: &'t mut [PutRequest<'v>],
    pub(super) describe: Describe<'t>,
}

impl Batch for Puts<'_, '_> {
    fn encode(&self, index: usize, text: &mut Vec<u8>) {
        command::set(text, &self.requests[index].key, self.weight(index));
    }

    fn carries(&self, index: usize) -> Option<&[IoSlice<'_>]> {
        Some(self.requests[index].value)
    }

    fn capacity(&self, _: usize) -> Option<u64> {
        None
    }

    fn destination(&mut self, _: usize, _: u64, _: u64) -> Vec<IoSliceMut<'_>> {
        Vec::new()
    }

    fn weight(&self, index: usize) -> u64 {
        slices::len_of(self.requests[index].value)
    }

    fn finish(&mut self, index: usize, outcome: Result<Answer, Failure>) {
        let request = &mut self.requests[index];
        request.outcome = Some(match outcome {
            Ok(Answer::Taken) => Ok(PutOutcome::Stored),
            Ok(_) => Err((self.describe)(&unfit(), &request.key)),
            Err(failure) => Err((self.describe)(&failure, &request.key)),
        });
    }
}

/// Values to get.
pub(super) struct Gets<'t, 'v, 'b> {
    pub(super) requests: &'t mut [GetRequest<'v, 'b>],
    pub(super) describe: Describe<'t>,
}

impl Batch for Gets<'_, '_, '_> {
    fn encode(&self, index: usize, text: &mut Vec<u8>) {
        command::get(text, &self.requests[index].key);
    }

    fn carries(&self, _: usize) -> Option<&[IoSlice<'_>]> {
        None
    }

    fn capacity(&self, index: usize) -> Option<u64> {
        Some(self.weight(index))
    }

    fn destination(&mut self, index: usize, mut from: u64, mut most: u64) -> Vec<IoSliceMut<'_>> {
        let mut slices = Vec::new();
        for slice in self.requests[index].into.iter_mut() {
            let skip = from.min(slice.len() as u64);
            from -= skip;
            let rest = &mut slice[skip as usize..];
            let take = most.min(rest.len() as u64);
            most -= take;
            if take > 0 {
                slices.push(IoSliceMut::new(&mut rest[..take as usize]));
            }
            if most == 0 {
                break;
            }
        }
        slices
    }

    fn weight(&self, index: usize) -> u64 {
        slices::room_of(self.requests[index].into)
    }

    fn finish(&mut self, index: usize, outcome: Result<Answer, Failure>) {
        let request = &mut self.requests[index];
        if let (true, Ok(Answer::Value(bytes))) = (request.wants_checksum, &outcome) {
            request.checksum = Some(payload_checksum(request.into, *bytes));
        }
        request.outcome = Some(match outcome {
            Ok(Answer::Value(bytes)) => Ok(GetOutcome::Hit(bytes)),
            Ok(Answer::TooLarge(bytes)) => Ok(GetOutcome::TooLarge(bytes)),
            Ok(Answer::Nothing) => Ok(GetOutcome::Miss),
            Ok(Answer::Taken) => Err((self.describe)(&unfit(), &request.key)),
            Err(failure) => Err((self.describe)(&failure, &request.key)),
        });
    }
}

fn unfit() -> Failure {
    Failure::protocol("the server sent a reply of another kind")
}

/// The part of a batch that one server gets: the requests' indices, in order.
pub(super) struct Share<'p> {
    pub(super) pool: &'p ConnectionPool,
    pub(super) requests: Queue,
}

/// Moves a batch, all shares at once. When this returns, every request has its outcome. What goes
/// wrong with one server does not affect the other servers' shares.
pub(super) fn run<B: Batch>(shares: Vec<Share<'_>>, batch: &mut B, deadline: Instant) {
    let mut flows: Vec<Flow<'_>> = shares
        .into_iter()
        .filter(|share| !share.requests.is_empty())
        .filter_map(|share| Flow::open(share, batch, deadline))
        .collect();
    while !flows.is_empty() {
        let mut moved = false;
        flows.retain_mut(|flow| {
            moved |= flow.step(batch, deadline);
            !flow.pipelines.is_empty()
        });
        let waited = if !moved {
            wait_for_any(&mut flows, deadline)
        } else if Instant::now() >= deadline {
            Err(Failure::timed_out("moving values"))
        } else {
            Ok(())
        };
        if let Err(failure) = waited {
            flows
                .drain(..)
                .for_each(|flow| flow.give_up(&failure, batch));
        }
    }
}

/// A share on the move over one or more pipelines.
struct Flow<'p> {
    pool: &'p ConnectionPool,
    queue: Queue,
    pipelines: Vec<Pipeline<'p>>,
    window: Window,
    /// How many more pipelines may be replaced. Each pipeline may turn out stale once; its
    /// replacement is new as a rule.
    replacements: usize,
}

impl<'p> Flow<'p> {
    /// Begins. `None` if that failed; then all its requests have failed too.
    fn open<B: Batch>(share: Share<'p>, batch: &mut B, deadline: Instant) -> Option<Self> {
        let Share {
            pool,
            requests: queue,
        } = share;
        let total: u64 = queue.iter().map(|&index| batch.weight(index)).sum();
        let wanted = (total.div_ceil(LANE_WORTH) as usize)
            .clamp(1, MOST_LANES)
            .min(queue.len());
        let mut flow = Self {
            pool,
            pipelines: Vec::new(),
            window: Window {
                least: LEAST_IN_FLIGHT.div_ceil(wanted),
                bytes: BYTES_IN_FLIGHT / wanted as u64,
                // An even share, so that the first pipeline does not take all of a small batch.
                most: queue.len().div_ceil(wanted).min(MOST_IN_FLIGHT),
            },
            queue,
            replacements: 0,
        };
        match pool.lend(deadline) {
            Ok(connection) => flow.pipelines.push(Pipeline::new(connection, flow.window)),
            Err(failure) => {
                flow.fail_queued(&failure, batch);
                return None;
            }
        }
        while flow.pipelines.len() < wanted {
            match pool.lend_another(deadline) {
                Some(connection) => flow.pipelines.push(Pipeline::new(connection, flow.window)),
                None => break,
            }
        }
        flow.replacements = flow.pipelines.len();
        Some(flow)
    }

    /// Steps every pipeline, and ends those that are done or broke; returns whether anything moved.
    fn step<B: Batch>(&mut self, batch: &mut B, deadline: Instant) -> bool {
        let mut moved = false;
        let mut at = 0;
        while at < self.pipelines.len() {
            match self.pipelines[at].step(batch, &mut self.queue) {
                Ok(stepped) => {
                    moved |= stepped;
                    at += 1;
                }
                Err(failure) => {
                    let pipeline = self.pipelines.swap_remove(at);
                    self.replace(pipeline, &failure, batch, deadline);
                    moved = true;
                }
            }
        }
        if self.queue.is_empty() {
            let (done, busy): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pipelines)
                .into_iter()
                .partition(Pipeline::is_idle);
            done.into_iter().for_each(Pipeline::finish);
            self.pipelines = busy;
        }
        moved
    }

    /// Ends a pipeline that broke. If it was stale, another takes its place. If no pipeline is
    /// left, the requests in the queue fail.
    fn replace<B: Batch>(
        &mut self,
        pipeline: Pipeline<'p>,
        failure: &Failure,
        batch: &mut B,
        deadline: Instant,
    ) {
        let stale = pipeline.fail(failure, batch, &mut self.queue, self.replacements > 0);
        let mut failure = failure.clone();
        if stale {
            self.replacements -= 1;
            match self.pool.lend_fresh(deadline) {
                Ok(connection) => self.pipelines.push(Pipeline::new(connection, self.window)),
                Err(refused) => failure = refused,
            }
        } else {
            self.pool.broke(&failure);
        }
        if self.pipelines.is_empty() {
            self.fail_queued(&failure, batch);
        }
    }

    fn give_up<B: Batch>(mut self, failure: &Failure, batch: &mut B) {
        for pipeline in std::mem::take(&mut self.pipelines) {
            pipeline.fail(failure, batch, &mut self.queue, false);
        }
        self.pool.broke(failure);
        self.fail_queued(failure, batch);
    }

    fn fail_queued<B: Batch>(&mut self, failure: &Failure, batch: &mut B) {
        self.queue
            .drain(..)
            .for_each(|index| batch.finish(index, Err(failure.clone())));
    }
}

fn wait_for_any(flows: &mut [Flow<'_>], deadline: Instant) -> Result<(), Failure> {
    let pipelines = || flows.iter().flat_map(|flow| &flow.pipelines);
    let mut polled: Vec<_> = pipelines().map(Pipeline::polled).collect();
    wait(&mut polled, deadline, "waiting for the server")?;
    let events: Vec<PollFlags> = polled.iter().map(|socket| socket.revents()).collect();
    flows
        .iter_mut()
        .flat_map(|flow| &mut flow.pipelines)
        .zip(events)
        .for_each(|(pipeline, events)| pipeline.woken(events));
    Ok(())
}
