//! Bounds that no policy can beat: a cache without a bound, and one that knows the future.

use std::collections::BinaryHeap;

use crate::error::{Error, Result};
use crate::scale::Arrivals;
use crate::trace::Trace;

/// Hits of a cache that never evicts: blocks that requests find in a row from their first.
pub fn infinite(trace: &Trace) -> u64 {
    let mut seen = vec![false; trace.run_count() as usize];
    let mut hits = 0;
    let mut arrivals = Arrivals::of(trace);
    let mut runs = Vec::new();
    while let Some(arrival) = arrivals.next(&mut runs) {
        let known = runs[arrival.runs].iter();
        let found = known.take_while(|run| seen[run.name as usize]);
        hits += found.map(|run| u64::from(run.len)).sum::<u64>();
        for run in runs.drain(..) {
            seen[run.name as usize] = true;
        }
    }
    hits
}

/// Hits of a cache of `capacity` blocks that evicts the block whose next use is farthest away
/// (Belady, "A study of replacement algorithms", 1966). It takes in no block that is not used
/// again. A hit is a block that a request finds in a row from its first.
///
/// If several blocks have their next use in the same request, the last of them goes first. So a
/// block is never evicted before the blocks that follow it.
///
/// # Errors
/// The trace has several populations: their future does not fit into memory.
pub fn belady(trace: &Trace, capacity: u64) -> Result<u64> {
    if trace.populations() > 1 {
        let what = "the bound that knows the future (Belady) is for traces that are not scaled";
        return Err(Error::Config(what.into()));
    }
    const NEVER: u32 = u32::MAX;
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
    let count = trace.requests().len();
    // For every place in the trace: the request that next uses the block at this place, and which
    // of that request's blocks it is.
    let mut next_uses = vec![(NEVER, 0); trace.block_count() as usize];
    let mut last_seen = vec![(NEVER, 0); trace.unique_blocks() as usize];
    let mut place = next_uses.len();
    for (number, request) in trace.requests().iter().enumerate().rev() {
        let number = u32::try_from(number).expect("fewer than 2^32 requests");
        let mut depth = trace.blocks(request).count() as u32;
        for block in trace.blocks(request).rev() {
            (place, depth) = (place - 1, depth - 1);
            next_uses[place] = last_seen[block as usize];
            last_seen[block as usize] = (number, depth);
        }
    }
    // Held blocks, by the request that uses them next. Once a request is over, its list is never
    // looked at again. So the requests need no heap: the farthest list that is not empty is the one
    // to evict from.
    let mut by_use: Vec<BinaryHeap<(u32, u32)>> = vec![BinaryHeap::new(); count];
    let mut held_until = vec![NEVER; trace.unique_blocks() as usize];
    let (mut farthest, mut held, mut hits) = (0usize, 0usize, 0u64);
    let mut place = 0;
    for request in trace.requests() {
        let found = trace
            .blocks(request)
            .take_while(|&block| held_until[block as usize] != NEVER);
        hits += found.count() as u64;
        for block in trace.blocks(request) {
            let (next, depth) = next_uses[place];
            place += 1;
            let until = std::mem::replace(&mut held_until[block as usize], next);
            held -= usize::from(until != NEVER);
            if next == NEVER {
                continue;
            }
            held += 1;
            by_use[next as usize].push((depth, block));
            farthest = farthest.max(next as usize);
            while held > capacity {
                match by_use[farthest].pop() {
                    Some((_, victim)) if held_until[victim as usize] as usize == farthest => {
                        held_until[victim as usize] = NEVER;
                        held -= 1;
                    }
                    Some(_) => {}
                    None => farthest -= 1,
                }
            }
        }
    }
    Ok(hits)
}
