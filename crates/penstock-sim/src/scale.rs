//! A trace for many users, made from the trace of a few.
//!
//! The users of a trace are one population. A scaled trace has several such populations. Each asks
//! for the same prompts with texts of its own, at its own times. What many sessions of the trace
//! have in common, as a system prompt, all populations have in common.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::spread::spread;
use crate::trace::{Request, Run, Trace};

/// How a trace is scaled.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// How many populations there are.
    pub populations: u32,
    /// A block is common to all populations if at least this share of the trace's sessions use it,
    /// and at least two of them.
    pub common_share: f64,
    /// Seconds over which the beginnings of the populations are spread.
    pub stagger: f64,
    /// Gives other beginnings if it is another.
    pub seed: u64,
}

impl Default for Scale {
    fn default() -> Self {
        Self {
            populations: 1,
            common_share: 0.05,
            stagger: 60.0,
            seed: 0,
        }
    }
}

impl Trace {
    /// The trace of so many populations. The requests of a population keep their order and the
    /// times between them.
    ///
    /// # Errors
    /// The scale makes no sense, the trace is scaled already, or it would have 2^32 different
    /// blocks or more.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "numbers of sessions, and microseconds of less than a year, are exact"
    )]
    pub fn scaled(&self, scale: &Scale) -> Result<Self> {
        if self.populations() > 1 {
            return Err(Error::Config("the trace is scaled already".into()));
        }
        if scale.populations == 0 {
            return Err(Error::Config("a trace cannot be scaled by 0".into()));
        }
        if !(0.0..=1.0).contains(&scale.common_share) {
            let share = scale.common_share;
            return Err(Error::Config(format!(
                "{share} is no share of the sessions"
            )));
        }
        if !(0.0..=3e7).contains(&scale.stagger) {
            let stagger = scale.stagger;
            return Err(Error::Config(format!(
                "populations cannot start over {stagger} seconds"
            )));
        }
        if scale.populations == 1 {
            return Ok(self.clone());
        }
        let least = (scale.common_share * f64::from(self.population_sessions)).ceil() as u32;
        let mut trace = self.with_common_first(&self.common_runs_of(least.max(2)));
        let own = u64::from(trace.population_blocks - trace.common_blocks);
        let all = u64::from(trace.common_blocks) + u64::from(scale.populations) * own;
        if all > u64::from(u32::MAX) {
            let populations = scale.populations;
            return Err(Error::Config(format!(
                "{populations} populations have {all} different blocks, more than 2^32: scale by \
                 less, or read a shorter trace"
            )));
        }
        let stagger = (scale.stagger * 1e6) as u64 + 1;
        let delay = |population| spread(scale.seed ^ spread(population)) % stagger;
        trace.delays = (0..u64::from(scale.populations)).map(delay).collect();
        let first = trace.delays.iter().min().copied().unwrap_or(0);
        for delay in &mut trace.delays {
            *delay -= first;
        }
        Ok(trace)
    }

    /// For each run, whether at least so many sessions use it.
    fn common_runs_of(&self, least: u32) -> Vec<bool> {
        let mut pairs: Vec<(u32, u32)> = Vec::with_capacity(self.runs.len());
        for request in &self.requests {
            let runs = self.runs_for(0, request);
            pairs.extend(runs.map(|run| (run.name, request.session)));
        }
        pairs.sort_unstable();
        pairs.dedup();
        let mut sessions = vec![0u32; self.spans.len()];
        for (run, _) in pairs {
            sessions[run as usize] += 1;
        }
        sessions.into_iter().map(|count| count >= least).collect()
    }

    /// Gives the trace's runs and blocks other numbers: the common ones first.
    fn with_common_first(&self, is_common: &[bool]) -> Self {
        let mut trace = self.clone();
        let mut numbers = vec![0; self.spans.len()];
        let (mut name, mut first) = (0, 0);
        trace.spans.clear();
        for wanted in [true, false] {
            for run in &self.spans {
                if is_common[run.name as usize] == wanted {
                    numbers[run.name as usize] = name;
                    trace.spans.push(Run {
                        name,
                        first,
                        ..*run
                    });
                    (name, first) = (name + 1, first + run.len);
                }
            }
            if wanted {
                (trace.common_runs, trace.common_blocks) = (name, first);
            }
        }
        for run in &mut trace.runs {
            *run = numbers[*run as usize];
        }
        trace
    }
}

/// A request of one population.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// Microseconds from the start of the trace.
    pub(crate) at: u64,
    /// The session's number among those of all populations.
    pub(crate) session: u64,
    pub(crate) input_tokens: u32,
    /// Where its runs are among those that were given.
    pub(crate) runs: Range<usize>,
}

/// The requests of all populations, in order of time, made one by one. Of requests of the same
/// time, that of the population with the lower number comes first.
pub(crate) struct Arrivals<'a> {
    trace: &'a Trace,
    /// The next request of each population.
    next: Vec<u32>,
    /// The time of each population's next request, with the population's number; the earliest on
    /// top.
    queue: BinaryHeap<Reverse<(u64, u32)>>,
}

impl<'a> Arrivals<'a> {
    pub(crate) fn of(trace: &'a Trace) -> Self {
        let begins = trace.requests.first().map(|request| request.at);
        let queue = begins.into_iter().flat_map(|at| {
            let delays = trace.delays.iter().zip(0u32..);
            delays.map(move |(delay, population)| Reverse((at + delay, population)))
        });
        Self {
            trace,
            next: vec![0; trace.delays.len()],
            queue: queue.collect(),
        }
    }

    /// The next request. Its runs are put behind those of `runs`.
    pub(crate) fn next(&mut self, runs: &mut Vec<Run>) -> Option<Arrival> {
        let mut earliest = self.queue.peek_mut()?;
        let Reverse((at, population)) = *earliest;
        let next = &mut self.next[population as usize];
        let request: &Request = &self.trace.requests[*next as usize];
        *next += 1;
        match self.trace.requests.get(*next as usize) {
            Some(following) => earliest.0.0 += following.at - request.at,
            None => drop(PeekMut::pop(earliest)),
        }
        let start = runs.len();
        runs.extend(self.trace.runs_for(population, request));
        let sessions = u64::from(self.trace.population_sessions);
        Some(Arrival {
            at,
            session: u64::from(population) * sessions + u64::from(request.session),
            input_tokens: request.input_tokens,
            runs: start..runs.len(),
        })
    }
}
