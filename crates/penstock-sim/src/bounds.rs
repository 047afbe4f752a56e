//! Bounds that no policy can beat: a cache without a bound, and one that knows the future.

use std::collections::BinaryHeap;

use crate::trace::Trace;

/// Hits of a cache that never evicts: blocks that requests find in a row from their first.
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

/// Hits of a cache of `capacity` blocks that evicts the block whose next use is farthest away
/// (Belady, "A study of replacement algorithms", 1966). It takes in no block that is not used
/// again. A hit is a block that a request finds in a row from its first.
///
/// If several blocks have their next use in the same request, the last of them goes first. So a
/// block is never evicted before the blocks that follow it.
pub fn belady(trace: &Trace, capacity: u64) -> u64 {
    const NEVER: u32 = u32::MAX;
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
    let count = trace.requests().len();
    // For every place in the trace: the request that next uses the block at this place, and which
    // of that request's blocks it is.
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
    // Held blocks, by the request that uses them next. Once a request is over, its list is never
    // looked at again. So the requests need no heap: the farthest list that is not empty is the one
    // to evict from.
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
