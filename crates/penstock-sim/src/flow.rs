//! How a replay runs: requests go in batches through three stages, all at work at the same time.
//!
//! What caches hold depends only on who asks for what and when, not on what engines decide to load.
//! So requests are made and routed first. Then every pool is asked, each by itself. Then every node
//! serves its own requests, in order, once for each of the arrangements that are compared. Nothing
//! that runs beside something else shares anything with it, so the number of threads changes no
//! figure.

use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::cache::{Cache, Found, Scratch};
use crate::fleet::{Fleet, Outcome, Sums, Tiers};
use crate::node::{Machine, Node, Prompt};
use crate::route::Router;
use crate::scale::{Arrival, Arrivals};
use crate::trace::{Run, Trace};

/// Requests of a batch, and so between two calls of a replay's `progress`.
const BATCH: usize = 1 << 13;
/// The nodes are served in so many groups for each thread, so that no thread waits long for others.
const GROUPS_PER_THREAD: usize = 2;

/// Replays a trace over a fleet with each of `tiers`. None if `progress` said to stop.
pub(crate) fn run(
    fleet: &Fleet,
    trace: &Trace,
    tiers: &[Tiers],
    mut progress: impl FnMut(u64) -> bool,
) -> Option<Vec<Outcome>> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut source = Source {
        arrivals: Arrivals::of(trace),
        router: Router::new(fleet.routing, fleet.nodes, trace.run_count()),
        number: 0,
    };
    let mut pools = Pool::all(fleet, trace, tiers);
    let count = (threads * GROUPS_PER_THREAD).min(fleet.nodes as usize);
    let group = |number| Group::new(fleet, trace, tiers, &pools, number, count);
    let mut groups: Vec<Group> = (0..count).map(group).collect();

    let batch = || Batch::new(pools.len());
    let (mut made, mut asked, mut served) = (batch(), batch(), batch());
    let mut done = 0;
    loop {
        if !progress(done) {
            return None;
        }
        if done == trace.request_count() {
            break;
        }
        let mut tasks: Vec<Task> = Vec::new();
        tasks.push(Box::new(|| source.fill(&mut made)));
        let Batch {
            requests,
            runs,
            found,
        } = &mut asked;
        for (pool, found) in pools.iter_mut().zip(found) {
            tasks.push(Box::new(|| pool.ask(requests, runs, found)));
        }
        for group in &mut groups {
            tasks.push(Box::new(|| group.serve(&served)));
        }
        in_parallel(tasks, threads);
        done += served.requests.len() as u64;
        served.clear();
        (made, asked, served) = (served, made, asked);
    }
    let outcome = |number| outcome(&mut groups, &pools, number);
    Some((0..tiers.len()).map(outcome).collect())
}

type Task<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Runs all tasks, the first first.
fn in_parallel(mut tasks: Vec<Task>, threads: usize) {
    tasks.reverse();
    let threads = threads.min(tasks.len());
    let tasks = Mutex::new(tasks);
    let work = || {
        let next = || tasks.lock().unwrap_or_else(PoisonError::into_inner).pop();
        while let Some(task) = next() {
            task();
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
}

/// A request at its node.
struct Asked {
    request: Arrival,
    node: u32,
    blocks: u32,
}

/// Requests in order of time.
struct Batch {
    requests: Vec<Asked>,
    /// The runs of all requests.
    runs: Vec<Run>,
    /// For each pool, what it had of each request.
    found: Vec<Vec<Found>>,
}

impl Batch {
    fn new(pools: usize) -> Self {
        Self {
            requests: Vec::with_capacity(BATCH),
            runs: Vec::new(),
            found: (0..pools).map(|_| Vec::with_capacity(BATCH)).collect(),
        }
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.runs.clear();
        self.found.iter_mut().for_each(Vec::clear);
    }
}

/// The first stage: requests, each sent to its node.
struct Source<'a> {
    arrivals: Arrivals<'a>,
    router: Router,
    number: u64,
}

impl Source<'_> {
    fn fill(&mut self, batch: &mut Batch) {
        while batch.requests.len() < BATCH {
            let Some(request) = self.arrivals.next(&mut batch.runs) else {
                return;
            };
            let prompt = &batch.runs[request.runs.clone()];
            let node = self.router.route(self.number, &request, prompt);
            self.number += 1;
            batch.requests.push(Asked {
                blocks: prompt.iter().map(|run| run.len).sum(),
                request,
                node,
            });
        }
    }
}

/// The second stage: a pool, and what it has of each request.
struct Pool {
    nbytes: u64,
    cache: Cache,
    scratch: Scratch,
}

impl Pool {
    /// A pool for each size that is asked for.
    fn all(fleet: &Fleet, trace: &Trace, tiers: &[Tiers]) -> Vec<Self> {
        let mut sizes: Vec<u64> = tiers.iter().map(|tiers| tiers.pool_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let pool = |nbytes| Self {
            nbytes,
            cache: Cache::new(fleet.pool_policy, nbytes / fleet.block_bytes(trace)),
            scratch: Scratch::default(),
        };
        sizes
            .into_iter()
            .filter(|&size| size > 0)
            .map(pool)
            .collect()
    }

    fn ask(&mut self, requests: &[Asked], runs: &[Run], found: &mut Vec<Found>) {
        let prompts = requests
            .iter()
            .map(|asked| &runs[asked.request.runs.clone()]);
        found.extend(prompts.map(|prompt| self.cache.use_prompt(prompt, &mut self.scratch)));
    }
}

/// The third stage: some of the nodes, with their own caches, in each arrangement.
struct Group {
    number: usize,
    groups: usize,
    hosts: Vec<Cache>,
    scratch: Scratch,
    /// What the own caches had of the requests of a batch that come to this group.
    in_host: Vec<u32>,
    by_node: Vec<u64>,
    arrangements: Vec<Arrangement>,
    windows: u32,
    /// Microseconds that the windows cover.
    duration: u128,
    block_bytes: u64,
}

/// Nodes with one of the tiers that are compared, and what came of it.
struct Arrangement {
    has_host: bool,
    /// The pool's place among all pools.
    pool: Option<usize>,
    nodes: Vec<Node>,
    windows: Vec<Sums>,
    ttft: Vec<f32>,
}

impl Group {
    fn new(
        fleet: &Fleet,
        trace: &Trace,
        tiers: &[Tiers],
        pools: &[Pool],
        number: usize,
        groups: usize,
    ) -> Self {
        let block_bytes = fleet.block_bytes(trace);
        let count = (number..fleet.nodes as usize).step_by(groups).count();
        let has_hosts = fleet.host_bytes > 0 && tiers.iter().any(|tiers| tiers.host);
        let host = |_| Cache::new(fleet.policy, fleet.host_bytes / block_bytes);
        let arrangement = |tiers: &Tiers| {
            let pool = pools
                .iter()
                .position(|pool| pool.nbytes == tiers.pool_bytes);
            let machine = Machine {
                block_bytes,
                block_tokens: u64::from(trace.block_tokens),
                prefill_speed: fleet.prefill_speed,
                host: fleet.host,
                pool: pool.map(|_| fleet.pool),
            };
            Arrangement {
                has_host: tiers.host && fleet.host_bytes > 0,
                pool,
                nodes: (0..count)
                    .map(|_| Node::new(machine, fleet.engine))
                    .collect(),
                windows: vec![Sums::default(); fleet.windows as usize],
                ttft: Vec::new(),
            }
        };
        Self {
            number,
            groups,
            hosts: (0..if has_hosts { count } else { 0 }).map(host).collect(),
            scratch: Scratch::default(),
            in_host: Vec::new(),
            by_node: vec![0; count],
            arrangements: tiers.iter().map(arrangement).collect(),
            windows: fleet.windows,
            duration: u128::from(trace.duration()) + 1,
            block_bytes,
        }
    }

    fn serve(&mut self, batch: &Batch) {
        let own = |&(_, asked): &(usize, &Asked)| asked.node as usize % self.groups == self.number;
        let own = || batch.requests.iter().enumerate().filter(own);
        self.in_host.clear();
        for (_, asked) in own() {
            let node = asked.node as usize / self.groups;
            self.by_node[node] += 1;
            let prompt = &batch.runs[asked.request.runs.clone()];
            let host = self.hosts.get_mut(node);
            let found = host.map(|host| host.use_prompt(prompt, &mut self.scratch));
            self.in_host.push(found.unwrap_or_default().blocks);
        }
        for arrangement in &mut self.arrangements {
            let found = arrangement.pool.map(|pool| &batch.found[pool]);
            for ((place, asked), &in_host) in own().zip(&self.in_host) {
                let in_pool = found.map(|found| found[place]).unwrap_or_default();
                let in_host = if arrangement.has_host { in_host } else { 0 };
                let node = asked.node as usize / self.groups;
                let sums = arrangement.serve(node, asked, in_host, in_pool, self.block_bytes);
                let window =
                    u128::from(asked.request.at) * u128::from(self.windows) / self.duration;
                arrangement.windows[window as usize].add(&sums);
            }
        }
    }
}

impl Arrangement {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "estimates of time"
    )]
    fn serve(
        &mut self,
        node: usize,
        asked: &Asked,
        in_host: u32,
        in_pool: Found,
        block_bytes: u64,
    ) -> Sums {
        let prompt = Prompt {
            tokens: u64::from(asked.request.input_tokens),
            blocks: u64::from(asked.blocks),
            in_host: u64::from(in_host),
            in_pool: u64::from(in_pool.blocks),
        };
        let served = self.nodes[node].serve(asked.request.at as f64 / 1e6, &prompt);
        self.ttft.push(served.seconds as f32);
        Sums {
            requests: 1,
            input_tokens: prompt.tokens,
            blocks: prompt.blocks,
            host_blocks: served.host_blocks,
            pool_blocks: served.pool_blocks,
            computed_tokens: served.computed_tokens,
            read_bytes: served.read_blocks * block_bytes,
            written_bytes: u64::from(in_pool.written) * block_bytes,
            pool_readers: u64::from(served.read_blocks > 0),
            pool_writers: u64::from(in_pool.written > 0),
        }
    }
}

/// What all nodes together found, in the arrangement of this number.
fn outcome(groups: &mut [Group], pools: &[Pool], number: usize) -> Outcome {
    let busiest = groups.iter().flat_map(|group| &group.by_node).max();
    let busiest_node = busiest.copied().unwrap_or(0);
    let mut ttft = Vec::new();
    let mut windows: Vec<Sums> = Vec::new();
    let (mut host_blocks_held, mut pool) = (0, None);
    for group in groups {
        let arrangement = &mut group.arrangements[number];
        ttft.append(&mut arrangement.ttft);
        windows.resize(arrangement.windows.len(), Sums::default());
        for (window, sums) in windows.iter_mut().zip(&arrangement.windows) {
            window.add(sums);
        }
        if arrangement.has_host {
            host_blocks_held += group.hosts.iter().map(Cache::len).sum::<u64>();
        }
        pool = arrangement.pool;
    }
    ttft.sort_unstable_by(f32::total_cmp);
    let mut total = Sums::default();
    for window in &windows {
        total.add(window);
    }
    Outcome {
        total,
        windows,
        ttft,
        busiest_node,
        pool_blocks_held: pool.map_or(0, |pool| pools[pool].cache.len()),
        host_blocks_held,
    }
}
