//! Requests as the simulator replays them: who asks when, and for which chain of blocks.

use std::ops::Range;

use rustc_hash::FxHashMap;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Microseconds from the start of the trace.
    pub at: u64,
    /// The conversation that it belongs to, as far as the trace tells; numbered from 0.
    pub session: u32,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Where the request's runs begin among those of all requests; `count` says how many they are.
    first: usize,
    count: u32,
}

/// Blocks that are always asked for together, one behind the other. A prompt is a list of whole
/// runs. What is in a cache can so be noted by run, with the same results as block by block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The run's number, below [`Trace::run_count`].
    pub(crate) name: u32,
    /// The number of its first block. The others have the next numbers.
    pub(crate) first: u32,
    /// How many blocks it has.
    pub(crate) len: u32,
}

impl Run {
    pub(crate) fn blocks(self) -> Range<u32> {
        self.first..self.first + self.len
    }
}

/// Requests in order of time, and the blocks of their prompts.
///
/// A block's name is a number below [`Trace::unique_blocks`]. It stands for the tokens of the block
/// and all tokens before them, as a chained block hash does.
///
/// A trace has one population of users, or several that ask for the same at other times
/// ([`Trace::scaled`]). Requests of several populations are made while they are replayed.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Tokens of a whole block; the last one of a prompt may have fewer.
    pub block_tokens: u32,
    pub(crate) requests: Vec<Request>,
    /// The runs of all requests, by their places in `spans`.
    pub(crate) runs: Vec<u32>,
    /// The runs of one population, in the order of their blocks. Those that all populations share
    /// come first.
    pub(crate) spans: Vec<Run>,
    /// How many runs and blocks, the first of all, are the same in every population.
    pub(crate) common_runs: u32,
    pub(crate) common_blocks: u32,
    pub(crate) population_blocks: u32,
    pub(crate) population_sessions: u32,
    /// Microseconds by which each population is late.
    pub(crate) delays: Vec<u64>,
}

impl Trace {
    /// The requests of one population, in order of time.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The blocks of a request's prompt, from its start, in the first population.
    pub fn blocks(&self, request: &Request) -> impl DoubleEndedIterator<Item = u32> + '_ {
        let runs = self.runs(request).iter();
        runs.flat_map(|&run| self.spans[run as usize].blocks())
    }

    fn runs(&self, request: &Request) -> &[u32] {
        &self.runs[request.first..request.first + request.count as usize]
    }

    /// The runs of a request's prompt, as the users of one population ask for them.
    pub(crate) fn runs_for(
        &self,
        population: u32,
        request: &Request,
    ) -> impl Iterator<Item = Run> + '_ {
        let runs = population * (self.spans.len() as u32 - self.common_runs);
        let blocks = population * (self.population_blocks - self.common_blocks);
        self.runs(request).iter().map(move |&number| {
            let run = self.spans[number as usize];
            if number < self.common_runs {
                return run;
            }
            Run {
                name: run.name + runs,
                first: run.first + blocks,
                len: run.len,
            }
        })
    }

    /// How many populations of users ask.
    pub fn populations(&self) -> u32 {
        u32::try_from(self.delays.len()).expect("fewer than 2^32 populations")
    }

    /// Requests of all populations.
    pub fn request_count(&self) -> u64 {
        self.requests.len() as u64 * self.delays.len() as u64
    }

    /// Sessions of all populations.
    pub fn session_count(&self) -> u64 {
        u64::from(self.population_sessions) * self.delays.len() as u64
    }

    /// Tokens of all prompts.
    pub fn input_tokens(&self) -> u64 {
        let tokens = self.requests.iter().map(|r| u64::from(r.input_tokens));
        tokens.sum::<u64>() * self.delays.len() as u64
    }

    /// Blocks of all prompts. A block counts as often as it is asked for.
    pub fn block_count(&self) -> u64 {
        let runs = self.runs.iter();
        let blocks = runs.map(|&run| u64::from(self.spans[run as usize].len));
        blocks.sum::<u64>() * self.delays.len() as u64
    }

    /// Different blocks: what a cache that never evicts holds at the end.
    pub fn unique_blocks(&self) -> u32 {
        self.common_blocks + self.populations() * (self.population_blocks - self.common_blocks)
    }

    /// Different blocks that all populations share; none if there is one population.
    pub fn common_blocks(&self) -> u32 {
        self.common_blocks
    }

    /// Different runs.
    pub(crate) fn run_count(&self) -> u32 {
        self.common_runs + self.populations() * (self.spans.len() as u32 - self.common_runs)
    }

    /// Microseconds from the first request to the last.
    pub fn duration(&self) -> u64 {
        let latest = self.delays.iter().max().copied().unwrap_or(0);
        self.requests.last().map_or(0, |last| last.at + latest)
    }
}

/// Collects requests in any order. Their blocks and sessions may have any names.
pub(crate) struct Builder {
    block_tokens: u32,
    requests: Vec<Request>,
    blocks: Vec<u32>,
    names: FxHashMap<u64, u32>,
    sessions: FxHashMap<u64, u32>,
    next_session: u32,
    /// For each block, the session that used it last. Kept while sessions have to be inferred.
    used_by: Vec<u32>,
}

impl Builder {
    /// For a request whose session the trace does not tell. The request then belongs to the session
    /// that last used the deepest known block of its prompt. The first block does not count,
    /// because everybody may use it.
    pub(crate) const INFERRED: Option<u64> = None;

    pub(crate) fn new(block_tokens: u32) -> Self {
        Self {
            block_tokens,
            requests: Vec::new(),
            blocks: Vec::new(),
            names: FxHashMap::default(),
            sessions: FxHashMap::default(),
            next_session: 0,
            used_by: Vec::new(),
        }
    }

    /// Adds a request with its tokens in and out. Its blocks get their numbers in the order in
    /// which they come.
    pub(crate) fn push(
        &mut self,
        at: u64,
        session: Option<u64>,
        names: impl IntoIterator<Item = u64>,
        (input_tokens, output_tokens): (u32, u32),
    ) {
        let first = self.blocks.len();
        for name in names {
            let next = u32::try_from(self.names.len()).expect("fewer than 2^32 blocks");
            self.blocks.push(*self.names.entry(name).or_insert(next));
        }
        let known = match session {
            Some(name) => self.sessions.get(&name).copied(),
            None => self.infer(first),
        };
        let number = known.unwrap_or_else(|| {
            let number = self.next_session;
            self.next_session += 1;
            self.sessions.extend(session.map(|name| (name, number)));
            number
        });
        if session.is_none() {
            self.used_by.resize(self.names.len(), u32::MAX);
            for &block in &self.blocks[first..] {
                self.used_by[block as usize] = number;
            }
        }
        self.requests.push(Request {
            at,
            session: number,
            input_tokens,
            output_tokens,
            first,
            count: u32::try_from(self.blocks.len() - first).expect("fewer than 2^32 blocks"),
        });
    }

    fn infer(&self, first: usize) -> Option<u32> {
        let blocks = self.blocks[first..].iter().skip(1);
        let users = blocks.map_while(|&block| self.used_by.get(block as usize));
        users.last().copied()
    }

    pub(crate) fn set_block_tokens(&mut self, tokens: u32) {
        self.block_tokens = tokens;
    }

    /// Blocks asked for so far.
    pub(crate) fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Sorts requests by time. Time starts at the first request. Requests of the same time stay in
    /// the order in which they were added.
    pub(crate) fn build(mut self) -> Trace {
        self.requests.sort_by_key(|request| request.at);
        let start = self.requests.first().map_or(0, |first| first.at);
        for request in &mut self.requests {
            request.at -= start;
        }
        let unique = u32::try_from(self.names.len()).expect("fewer than 2^32 blocks");
        let spans = self.find_runs(unique);
        let runs = self.by_run(&spans);
        Trace {
            block_tokens: self.block_tokens,
            requests: self.requests,
            runs,
            spans,
            common_runs: 0,
            common_blocks: 0,
            population_blocks: unique,
            population_sessions: self.next_session,
            delays: vec![0],
        }
    }

    /// Joins blocks that are always asked for together. As blocks are numbered in the order in
    /// which they come, such blocks have numbers in a row.
    fn find_runs(&self, unique: u32) -> Vec<Run> {
        // Whether the block before (after) a block is always its neighbour by number.
        const BEFORE: u8 = 0b01;
        const AFTER: u8 = 0b10;
        let mut neighbours = vec![BEFORE | AFTER; unique as usize];
        for request in &self.requests {
            let blocks = &self.blocks[request.first..request.first + request.count as usize];
            for (place, &block) in blocks.iter().enumerate() {
                let before = place.checked_sub(1).map(|place| blocks[place] + 1);
                if before != Some(block) {
                    neighbours[block as usize] &= !BEFORE;
                }
                if blocks.get(place + 1) != Some(&(block + 1)) {
                    neighbours[block as usize] &= !AFTER;
                }
            }
        }
        let mut spans: Vec<Run> = Vec::new();
        for block in 0..unique {
            let is_joined = neighbours[block as usize] & BEFORE != 0
                && neighbours[block as usize - 1] & AFTER != 0;
            match spans.last_mut().filter(|_| is_joined) {
                Some(run) => run.len += 1,
                None => spans.push(Run {
                    name: spans.len() as u32,
                    first: block,
                    len: 1,
                }),
            }
        }
        spans
    }

    /// The runs of all requests, which then count their places among them.
    fn by_run(&mut self, spans: &[Run]) -> Vec<u32> {
        let mut starts = vec![u32::MAX; self.names.len()];
        for run in spans {
            starts[run.first as usize] = run.name;
        }
        let mut runs = Vec::new();
        for request in &mut self.requests {
            let blocks = &self.blocks[request.first..request.first + request.count as usize];
            request.first = runs.len();
            let found = blocks.iter().map(|&block| starts[block as usize]);
            runs.extend(found.filter(|&run| run != u32::MAX));
            request.count = u32::try_from(runs.len() - request.first).expect("no more than blocks");
        }
        runs
    }
}
