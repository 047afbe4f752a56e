//! Steps: which requests begin to be computed, and which fill a block.

use crate::catalogue::{Catalogue, found_mut};
use crate::error::Result;
use crate::request::Lookup;

/// A request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled<'a> {
    /// The request's name.
    pub id: &'a str,
    /// Tokens computed before the step.
    pub computed: u64,
    /// Tokens that the step computes.
    pub tokens: u64,
}

/// What a step changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Positions, in the step, of the requests that were not being computed before.
    pub started: Vec<usize>,
    /// Positions of the requests that fill a block with this step, and their computed tokens after
    /// it.
    pub filled: Vec<(usize, u64)>,
    /// For each request whose prompt is computed: the first token of the step, and the token after
    /// the last.
    pub prompts: Vec<(u64, u64)>,
}

impl Catalogue {
    /// Notes that a step computes these requests; unknown ones are passed over. While a request's
    /// look-up is under way, none of its blocks counts as filled: the pool may have them, so a
    /// later step decides.
    ///
    /// A step leaves a state after its last token. With `are_final`, that is the state of the
    /// request's own tokens. Without, the step may compute tokens that are rejected, so it says
    /// nothing about states.
    pub fn step<'a>(
        &mut self,
        scheduled: impl Iterator<Item = Scheduled<'a>>,
        are_final: bool,
    ) -> Step {
        let mut step = Step::default();
        for (
            place,
            Scheduled {
                id,
                computed,
                tokens,
            },
        ) in scheduled.enumerate()
        {
            let Some(request) = self.requests.get_mut(id) else {
                continue;
            };
            if !request.is_running {
                request.is_running = true;
                let is_own = request.is_own(&self.groups, &self.index, computed);
                request.own_from = is_own.then_some(computed);
                step.started.push(place);
            }
            let after = computed + tokens;
            if are_final && self.groups.keep_states() {
                let groups = 0..self.groups.count();
                let ends = groups.filter(|&group| self.groups.is_end_of_state(group, after));
                request.states.extend(ends.map(|group| (group, after)));
            }
            if computed < request.prompt_tokens {
                step.prompts.push((computed, after));
            }
            let is_asked = matches!(request.lookup, Lookup::Asked { .. });
            if !is_asked && request.is_filled(&self.groups, after) {
                step.filled.push((place, after));
            }
        }
        step
    }

    /// Notes that the request was preempted: it begins anew, with a new look-up.
    ///
    /// Returns the queries that need no answer now.
    ///
    /// # Errors
    /// The request is not known.
    pub fn pause(&mut self, id: &str) -> Result<Vec<u64>> {
        let dropped = self.drop_lookup(id);
        let request = found_mut(&mut self.requests, id)?;
        request.is_running = false;
        request.own_from = None;
        request.considered.fill(0);
        request.states.clear();
        Ok(dropped)
    }
}
