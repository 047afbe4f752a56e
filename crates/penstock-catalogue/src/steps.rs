//! Steps: which requests begin to be computed, and which fill a block.

use crate::catalogue::{Catalogue, found_mut};
use crate::error::Result;
use crate::request::Lookup;

/// A request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled<'a> {
    /// Its name.
    pub id: &'a str,
    /// Tokens computed before the step.
    pub computed: u64,
    /// Tokens that the step computes.
    pub tokens: u64,
}

/// What follows from a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Places of the requests that were not being computed before.
    pub started: Vec<usize>,
    /// Places of the requests that fill a block with it, and the tokens computed then.
    pub filled: Vec<(usize, u64)>,
    /// Of the requests whose prompt is computed: the tokens from, and to.
    pub prompts: Vec<(u64, u64)>,
}

impl Catalogue {
    /// A step computes these requests; those that are not known are passed over. Of a request whose
    /// look-up is under way no block counts as filled yet: the pool may have it, so a later step decides.
    pub fn step<'a>(&mut self, scheduled: impl Iterator<Item = Scheduled<'a>>) -> Step {
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
                step.started.push(place);
            }
            let after = computed + tokens;
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

    /// The request was preempted: it begins anew, with a look-up of its own.
    ///
    /// Returns the queries that need no answer now.
    ///
    /// # Errors
    /// The request is not known.
    pub fn pause(&mut self, id: &str) -> Result<Vec<u64>> {
        let dropped = self.drop_lookup(id);
        let request = found_mut(&mut self.requests, id)?;
        request.is_running = false;
        request.considered.fill(0);
        Ok(dropped)
    }
}
