//! Which node a request goes to.

use std::str::FromStr;

use crate::error::Error;
use crate::scale::Arrival;
use crate::spread::spread;
use crate::trace::Run;

/// The ways to route, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// A request goes to any node, whatever the node was asked before.
    Random,
    /// All requests of a session go to one node.
    Sticky,
    /// A request goes to the node that used the longest part of the prompt last, unless that node
    /// has too much to do.
    PrefixAware,
}

impl Routing {
    /// All ways to route requests.
    pub const ALL: [Self; 3] = [Self::Random, Self::Sticky, Self::PrefixAware];

    /// The name of this way to route.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Sticky => "sticky",
            Self::PrefixAware => "prefix-aware",
        }
    }
}

impl FromStr for Routing {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("the routing {text:?} is none of {known}"))
        })
    }
}

const NOWHERE: u32 = u32::MAX;
/// Prefix-aware routing passes over a node with more than this many times the mean load.
const OVERLOAD: f64 = 2.0;
/// The time, in microseconds, after which a part 1/e of a node's load is left.
const FORGET_AFTER: f64 = 60e6;

pub(crate) struct Router {
    routing: Routing,
    nodes: u32,
    /// For each run of blocks, the node that used it last.
    last: Vec<u32>,
    /// Tokens sent to each node lately, as of `at`.
    loads: Vec<f64>,
    total: f64,
    at: u64,
    scale: f64,
}

impl Router {
    pub(crate) fn new(routing: Routing, nodes: u32, runs: u32) -> Self {
        let is_aware = routing == Routing::PrefixAware;
        Self {
            routing,
            nodes,
            last: vec![NOWHERE; if is_aware { runs as usize } else { 0 }],
            loads: vec![0.0; if is_aware { nodes as usize } else { 0 }],
            total: 0.0,
            at: 0,
            scale: 1.0,
        }
    }

    /// The node for a request, the `number`th of its trace.
    pub(crate) fn route(&mut self, number: u64, request: &Arrival, prompt: &[Run]) -> u32 {
        if self.nodes == 1 {
            return 0;
        }
        match self.routing {
            Routing::Random => self.any(number),
            Routing::Sticky => self.any(request.session),
            Routing::PrefixAware => self.aware(number, request, prompt),
        }
    }

    /// A node, the same for the same number.
    fn any(&self, number: u64) -> u32 {
        (spread(number) % u64::from(self.nodes)) as u32
    }

    fn aware(&mut self, number: u64, request: &Arrival, prompt: &[Run]) -> u32 {
        // Loads are kept relative to a growing scale, so that no load has to be aged by itself.
        #[expect(clippy::cast_precision_loss, reason = "a few digits will do")]
        let passed = (request.at - self.at) as f64;
        self.at = request.at;
        self.scale *= (passed / FORGET_AFTER).exp().min(1e6);
        if self.scale > 1e100 {
            for load in &mut self.loads {
                *load /= self.scale;
            }
            self.total /= self.scale;
            self.scale = 1.0;
        }
        let last = prompt.iter().map(|run| self.last[run.name as usize]);
        let holder = last.take_while(|&node| node != NOWHERE).last();
        let limit = OVERLOAD * self.total / f64::from(self.nodes);
        let node = match holder.filter(|&node| self.loads[node as usize] <= limit) {
            Some(node) => node,
            None => self.less_loaded(number),
        };
        let load = f64::from(request.input_tokens.max(1)) * self.scale;
        self.loads[node as usize] += load;
        self.total += load;
        for run in prompt {
            self.last[run.name as usize] = node;
        }
        node
    }

    /// The better of two nodes chosen at random (Mitzenmacher, 2001).
    fn less_loaded(&self, number: u64) -> u32 {
        let (a, b) = (self.any(number), self.any(!number));
        if self.loads[a as usize] <= self.loads[b as usize] {
            a
        } else {
            b
        }
    }
}
