//! Replays of a trace over a fleet, and over one cache.

use crate::cache::{Cache, PolicyKind, Scratch};
use crate::error::Result;
use crate::fleet::{Fleet, Outcome, Tiers};
use crate::flow;
use crate::scale::Arrivals;
use crate::trace::Trace;

impl Fleet {
    /// Replays a trace. Tells `progress` how many requests are done. If `progress` returns false,
    /// the replay stops, and there is no outcome.
    ///
    /// # Errors
    /// The fleet makes no sense.
    pub fn replay(
        &self,
        trace: &Trace,
        progress: impl FnMut(u64) -> bool,
    ) -> Result<Option<Outcome>> {
        let tiers = Tiers {
            host: self.host_bytes > 0,
            pool_bytes: self.pool_bytes,
        };
        let outcomes = self.compare(trace, &[tiers], progress)?;
        Ok(outcomes.and_then(|mut outcomes| outcomes.pop()))
    }

    /// Replays a trace once, over fleets that differ from this one in their tiers only. Gives an
    /// outcome for each of `tiers`, the same as replays one by one would.
    ///
    /// # Errors
    /// The fleet makes no sense.
    pub fn compare(
        &self,
        trace: &Trace,
        tiers: &[Tiers],
        progress: impl FnMut(u64) -> bool,
    ) -> Result<Option<Vec<Outcome>>> {
        self.check(trace, tiers)?;
        Ok(flow::run(self, trace, tiers, progress))
    }
}

/// Hits of one cache of `capacity` blocks under a whole trace: blocks found in a row from the
/// first.
///
/// ```
/// use std::path::Path;
///
/// use penstock_sim::{PolicyKind, ReadOptions, hits, parse};
///
/// let lines = r#"{"timestamp": 0, "hash_ids": [1, 2], "input_length": 1024, "output_length": 9}
/// {"timestamp": 5, "hash_ids": [1, 2, 3], "input_length": 1536, "output_length": 9}"#;
/// let read = parse(lines.as_bytes(), Path::new("two turns"), &ReadOptions::default())?;
/// assert_eq!(hits(&read.trace, PolicyKind::Lru, 10), 2);
/// assert_eq!(hits(&read.trace, PolicyKind::Lru, 1), 1);
/// # Ok::<(), penstock_sim::Error>(())
/// ```
pub fn hits(trace: &Trace, policy: PolicyKind, capacity: u64) -> u64 {
    let mut cache = Cache::new(policy, capacity);
    let mut arrivals = Arrivals::of(trace);
    let (mut runs, mut scratch, mut hits) = (Vec::new(), Scratch::default(), 0);
    while arrivals.next(&mut runs).is_some() {
        hits += u64::from(cache.use_prompt(&runs, &mut scratch).blocks);
        runs.clear();
    }
    hits
}
