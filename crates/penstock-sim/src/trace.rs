//! Requests as the simulator replays them: who asks when, and for which chain of blocks.

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
    first: usize,
    count: u32,
}

/// Requests in order of time, and the blocks of their prompts.
///
/// A block's name is a number below [`Trace::unique_blocks`]. It stands for the tokens of the block
/// and all tokens before them, as a chained block hash does.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Tokens of a whole block; the last one of a prompt may have fewer.
    pub block_tokens: u32,
    requests: Vec<Request>,
    blocks: Vec<u32>,
    unique: u32,
}

impl Trace {
    /// The requests, in order of time.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The blocks of a request's prompt, from its start.
    pub fn blocks(&self, request: &Request) -> &[u32] {
        &self.blocks[request.first..request.first + request.count as usize]
    }

    /// Blocks of all prompts. A block counts as often as it is asked for.
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Different blocks: what a cache that never evicts holds at the end.
    pub fn unique_blocks(&self) -> u32 {
        self.unique
    }

    /// Microseconds from the first request to the last.
    pub fn duration(&self) -> u64 {
        self.requests.last().map_or(0, |last| last.at)
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
        Trace {
            block_tokens: self.block_tokens,
            requests: self.requests,
            blocks: self.blocks,
            unique: u32::try_from(self.names.len()).expect("fewer than 2^32 blocks"),
        }
    }
}
