//! Transfers: a batch of puts or gets, moved over one or more lanes by the calling thread.

use std::io::{IoSlice, IoSliceMut};
use std::time::Instant;

use rustix::event::PollFlags;

use super::command;
use super::failure::Failure;
use super::lane::{Answer, Batch, Lane, Queue, Window};
use super::pool::ConnectionPool;
use super::socket::wait;
use crate::{GetOutcome, GetRequest, Key, PutOutcome, PutRequest, slices};

/// Most lanes of one transfer: while the server's thread waits for the room in one connection, it
/// can serve another.
const MOST_LANES: usize = 2;
/// Bytes of a batch that are worth one more lane.
const LANE_WORTH: u64 = 512 << 10;
/// Bytes of values in flight over all lanes of a transfer. Much more halves the throughput, since
/// what the server sends then leaves its caches before it is received.
const BYTES_IN_FLIGHT: u64 = 1 << 20;
/// Requests in flight over all lanes, whatever their size: when the server finishes one, it must
/// have the next at hand.
const LEAST_IN_FLIGHT: usize = 2;
/// Most requests of one lane in flight.
const MOST_IN_FLIGHT: usize = 64;

/// Makes the caller's error of a failure, with the key it happened to.
pub(super) type Describe<'d> = &'d dyn Fn(&Failure, &Key) -> crate::Error;

/// Values to put.
pub(super) struct Puts<'t, 'v> {
    pub(super) requests: &'t mut [PutRequest<'v>],
    pub(super) describe: Describe<'t>,
}

impl Batch for Puts<'_, '_> {
    fn count(&self) -> usize {
        self.requests.len()
    }

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
    fn count(&self) -> usize {
        self.requests.len()
    }

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

/// Moves a batch; every request has its outcome when this returns.
pub(super) fn run<B: Batch>(pool: &ConnectionPool, batch: &mut B, deadline: Instant) {
    let count = batch.count();
    let mut queue = Queue::new(count);
    if let Err(failure) = move_all(pool, batch, &mut queue, deadline) {
        while let Some(index) = queue.take() {
            batch.finish(index, Err(failure.clone()));
        }
    }
}

/// On failure, requests that were not begun remain in the queue; all others have outcomes.
fn move_all<B: Batch>(
    pool: &ConnectionPool,
    batch: &mut B,
    queue: &mut Queue,
    deadline: Instant,
) -> Result<(), Failure> {
    let count = batch.count();
    let total: u64 = (0..count).map(|index| batch.weight(index)).sum();
    let wanted = (total.div_ceil(LANE_WORTH) as usize)
        .clamp(1, MOST_LANES)
        .min(count);
    if count == 0 {
        return Ok(());
    }
    let window = Window {
        least: LEAST_IN_FLIGHT.div_ceil(wanted),
        bytes: BYTES_IN_FLIGHT / wanted as u64,
        // An even share, so that the first lane does not take all of a small batch.
        most: count.div_ceil(wanted).min(MOST_IN_FLIGHT),
    };
    let mut lanes = vec![Lane::new(pool.lend(deadline)?, window)];
    while lanes.len() < wanted {
        match pool.lend_another(deadline) {
            Some(connection) => lanes.push(Lane::new(connection, window)),
            None => break,
        }
    }
    // Each lane may turn out stale once; its replacement is new as a rule.
    let mut replacements = lanes.len();

    loop {
        let mut moved = false;
        let mut at = 0;
        while at < lanes.len() {
            match lanes[at].step(batch, queue) {
                Ok(stepped) => {
                    moved |= stepped;
                    at += 1;
                }
                Err(failure) => {
                    let stale =
                        lanes
                            .swap_remove(at)
                            .fail(&failure, batch, queue, replacements > 0);
                    if stale {
                        replacements -= 1;
                        match pool.lend_fresh(deadline) {
                            Ok(connection) => lanes.push(Lane::new(connection, window)),
                            Err(failure) if lanes.is_empty() => return Err(failure),
                            Err(_) => {}
                        }
                    } else {
                        pool.broke(&failure);
                    }
                    if lanes.is_empty() && !queue.is_empty() {
                        return Err(failure);
                    }
                    moved = true;
                }
            }
        }
        if queue.is_empty() {
            let (done, busy): (Vec<_>, Vec<_>) = lanes.into_iter().partition(Lane::is_idle);
            done.into_iter().for_each(Lane::finish);
            lanes = busy;
            if lanes.is_empty() {
                return Ok(());
            }
        }
        let waited = if !moved {
            wait_for_any(&mut lanes, deadline)
        } else if Instant::now() >= deadline {
            Err(Failure::timed_out("moving values"))
        } else {
            Ok(())
        };
        if let Err(failure) = waited {
            lanes.into_iter().for_each(|lane| {
                lane.fail(&failure, batch, queue, false);
            });
            pool.broke(&failure);
            return Err(failure);
        }
    }
}

fn wait_for_any(lanes: &mut [Lane<'_>], deadline: Instant) -> Result<(), Failure> {
    let mut polled: Vec<_> = lanes.iter().map(Lane::polled).collect();
    wait(&mut polled, deadline, "waiting for the server")?;
    let events: Vec<PollFlags> = polled.iter().map(|socket| socket.revents()).collect();
    lanes
        .iter_mut()
        .zip(events)
        .for_each(|(lane, events)| lane.woken(events));
    Ok(())
}
