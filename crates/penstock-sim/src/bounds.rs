//! What no policy can beat: a cache without a bound, and one that knows the future.

use std::collections::BinaryHeap;

use crate::trace::Trace;

/// Blocks found by requests in a row from their first, in a cache that never evicts.
pub fn infinite(trace: &Trace) -> u64 {
    let mut seen = vec![false; trace.unique_blocks() as usize];
    let mut hits = 0;
    for request in trace.requests() {
        let blocks = trace.blocks(request);
        hits += blocks.iter().take_while(|&&b| seen[b as usize]).count() as u64;
        for &block in blocks {
            seen[block as usize] = true;
        }
    }
    hits
}

/// Blocks found by requests in a row from their first, in a cache of `capacity` blocks that gives
/// up the block whose next use is farthest away (Belady, "A study of replacement algorithms",
/// 1966), and takes in none that is not used again.
///
/// Of blocks that the same request uses next the last goes first, so a block is never given up before
/// the ones that follow it.
pub fn belady(trace: &Trace, capacity: u64) -> u64 {
    const NEVER: u32 = u32::MAX;
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
    let count = trace.requests().len();
    // For every place in the trace, the request that next uses the block that stands there, and as
    // which of its blocks.
    let mut next_uses = vec![(NEVER, 0); trace.block_count()];
    let mut last_seen = vec![(NEVER, 0); trace.unique_blocks() as usize];
    let mut place = trace.block_count();
    let sequence: Vec<&[u32]> = trace.requests().iter().map(|r| trace.blocks(r)).collect();
    for number in (0..count).rev() {
        let request = u32::try_from(number).expect("fewer than 2^32 requests");
        for (depth, &block) in sequence[number].iter().enumerate().rev() {
            place -= 1;
            next_uses[place] = last_seen[block as usize];
            last_seen[block as usize] = (request, depth as u32);
        }
    }
    // Held blocks by the request that uses them next; a request's own list is never looked at
    // again once it is over, so no heap is needed: the farthest list that is not empty is.
    let mut by_use: Vec<BinaryHeap<(u32, u32)>> = vec![BinaryHeap::new(); count];
    let mut held_until = vec![NEVER; trace.unique_blocks() as usize];
    let (mut farthest, mut held, mut hits) = (0usize, 0usize, 0u64);
    let mut place = 0;
    for blocks in sequence {
        let found = blocks
            .iter()
            .take_while(|&&b| held_until[b as usize] != NEVER);
        hits += found.count() as u64;
        for &block in blocks {
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
    hits
}
