//! The topology of a cluster as far as it is known: which node serves which slot.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use penstock_contract::ErrorKind;

use super::super::address::{Address, Place};
use super::super::command::Commands;
use super::super::failure::Failure;
use super::super::pool::ConnectionPool;
use super::super::tls::Tls;
use super::slots::{SLOTS, Shard, parse};
use crate::OpenOptions;
use crate::layers::BreakerSettings;
use crate::layers::circuit::Circuit;

/// Shortest time between two questions for the map.
const REFRESH_PAUSE: Duration = Duration::from_millis(200);
/// Age at which a map is asked for anew although nothing speaks against it: a replica may have
/// joined.
const REFRESH_PERIOD: Duration = Duration::from_secs(30);
/// Longest that one node may take to tell the map, so that the next can be asked.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(500);
/// A node that is gone costs the rest of an operation's time. After two such failures it is left
/// alone.
const NODE_BREAKER: BreakerSettings = BreakerSettings {
    failures: 2,
    first_pause: Duration::from_millis(250),
    longest_pause: Duration::from_secs(5),
};

/// A server of the cluster.
pub(super) struct Node {
    pub(super) place: Place,
    pub(super) pool: ConnectionPool,
    pub(super) circuit: Circuit,
}

/// Which node serves which slot, at one time.
#[derive(Default)]
pub(super) struct Map {
    /// Primaries, then replicas if they are read from.
    pub(super) nodes: Vec<Arc<Node>>,
    /// How many of them are primaries.
    pub(super) primaries: usize,
    /// By slot: the index of the node that takes puts, and of the node that answers gets.
    slots: Vec<Option<(usize, usize)>>,
    drawn: Option<Instant>,
}

impl Map {
    /// The primary of a slot.
    pub(super) fn primary(&self, slot: usize) -> Option<&Arc<Node>> {
        let (primary, _) = (*self.slots.get(slot)?)?;
        Some(&self.nodes[primary])
    }

    /// The node to ask for what lies in a slot. It is a replica if replicas are read from and this
    /// one answers, else the primary. Look-ups and gets ask the same node, so that a get finds what
    /// a look-up saw.
    pub(super) fn reader(&self, slot: usize) -> Option<&Arc<Node>> {
        let (primary, reader) = (*self.slots.get(slot)?)?;
        let node = &self.nodes[reader];
        Some(if node.circuit.is_open() {
            &self.nodes[primary]
        } else {
            node
        })
    }

    fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}

/// What is known of the cluster, and how to learn more.
pub(super) struct Topology {
    address: Address,
    tls: Option<Tls>,
    options: OpenOptions,
    seeds: Vec<Arc<Node>>,
    map: RwLock<Arc<Map>>,
    /// When the map was asked for last.
    asked: Mutex<Option<Instant>>,
    is_stale: AtomicBool,
    /// Nodes that redirects named and that the map does not have.
    strangers: Mutex<HashMap<Place, Arc<Node>>>,
    /// Connections opened to nodes that are not known any more.
    opened: AtomicU64,
}

impl Topology {
    pub(super) fn new(
        address: Address,
        seeds: &[Place],
        tls: Option<Tls>,
        options: OpenOptions,
    ) -> Self {
        let mut topology = Self {
            address,
            tls,
            options,
            seeds: Vec::new(),
            map: RwLock::default(),
            asked: Mutex::default(),
            is_stale: AtomicBool::new(false),
            strangers: Mutex::default(),
            opened: AtomicU64::new(0),
        };
        topology.seeds = seeds
            .iter()
            .map(|place| topology.node(place, false))
            .collect();
        topology
    }

    /// Connections opened so far.
    pub(super) fn opened(&self) -> u64 {
        let of = |nodes: &[Arc<Node>]| nodes.iter().map(|node| node.pool.opened()).sum::<u64>();
        let strangers: Vec<_> = self.strangers.lock().values().cloned().collect();
        self.opened.load(Ordering::Relaxed)
            + of(&self.seeds)
            + of(&self.map.read().nodes)
            + of(&strangers)
    }

    /// Notes that something showed that the map is not right any more.
    pub(super) fn mark_stale(&self) {
        self.is_stale.store(true, Ordering::Relaxed);
    }

    /// The map. It is asked for anew if it is doubtful. Only the first thread to see that asks; the
    /// others go on with the map that is known, if there is one.
    pub(super) fn map(&self, deadline: Instant) -> Result<Arc<Map>, Failure> {
        let known = Arc::clone(&self.map.read());
        if !known.is_empty() && !self.is_doubtful(&known) {
            return Ok(known);
        }
        let guard = if known.is_empty() {
            self.asked.try_lock_until(deadline)
        } else {
            self.asked.try_lock()
        };
        let Some(mut asked) = guard else {
            return if known.is_empty() {
                Err(Failure::timed_out("another asked for the cluster's map"))
            } else {
                Ok(known)
            };
        };
        let known = Arc::clone(&self.map.read());
        if !known.is_empty() && asked.is_some_and(|at| at.elapsed() < REFRESH_PAUSE) {
            return Ok(known);
        }
        *asked = Some(Instant::now());
        self.is_stale.store(false, Ordering::Relaxed);
        match self.ask(&known, deadline) {
            Ok(shards) => {
                let map = Arc::new(self.draw(&shards, &known));
                *self.map.write() = Arc::clone(&map);
                Ok(map)
            }
            Err(failure) if known.is_empty() => Err(failure),
            Err(_) => {
                self.mark_stale();
                Ok(known)
            }
        }
    }

    /// Whether the map may be wrong. While a node does not answer, another may be taking its place.
    fn is_doubtful(&self, map: &Map) -> bool {
        self.is_stale.load(Ordering::Relaxed)
            || map.drawn.is_none_or(|at| at.elapsed() > REFRESH_PERIOD)
            || map.nodes.iter().any(|node| node.circuit.is_open())
    }

    /// Asks for the map, one node after the other: nodes that answer, then the seeds, then nodes
    /// that did not answer lately.
    fn ask(&self, known: &Map, deadline: Instant) -> Result<Vec<Shard>, Failure> {
        let (silent, answering): (Vec<_>, Vec<_>) =
            known.nodes.iter().partition(|node| node.circuit.is_open());
        let mut failure = Failure::new(ErrorKind::Config, "no node is named");
        let candidates: Vec<_> = answering
            .into_iter()
            .chain(&self.seeds)
            .chain(silent)
            .collect();
        for (i, node) in candidates.iter().enumerate() {
            let left = deadline.saturating_duration_since(Instant::now());
            let share = if i + 1 < candidates.len() {
                left / 2
            } else {
                left
            };
            match told_by(node, Instant::now() + share.min(REFRESH_TIMEOUT)) {
                Ok(shards) if !shards.is_empty() => return Ok(shards),
                Ok(_) => {
                    failure = Failure::new(
                        ErrorKind::Unavailable,
                        "no node of the cluster serves any slot",
                    );
                }
                Err(refused) => {
                    failure = refused.of(&format!("{}:{}", node.place.0, node.place.1));
                }
            }
        }
        Err(failure)
    }

    fn draw(&self, shards: &[Shard], known: &Map) -> Map {
        let mut before: HashMap<(Place, bool), Arc<Node>> = HashMap::new();
        for (place, node) in self.strangers.lock().drain() {
            before.insert((place, false), node);
        }
        for (i, node) in known.nodes.iter().enumerate() {
            before.insert((node.place.clone(), i >= known.primaries), Arc::clone(node));
        }
        let mut nodes = Vec::new();
        let mut numbers: HashMap<(Place, bool), usize> = HashMap::new();
        let mut number = |place: &Place, is_replica: bool| {
            let name = (place.clone(), is_replica);
            *numbers.entry(name).or_insert_with_key(|name| {
                nodes.push(
                    before
                        .remove(name)
                        .unwrap_or_else(|| self.node(place, is_replica)),
                );
                nodes.len() - 1
            })
        };
        let primaries: Vec<_> = shards
            .iter()
            .map(|shard| number(&shard.primary, false))
            .collect();
        let count = primaries.iter().max().map_or(0, |last| last + 1);
        let mut slots = vec![None; SLOTS];
        for (shard, &primary) in shards.iter().zip(&primaries) {
            let replicas: Vec<_> = if self.address.reads_replicas {
                shard
                    .replicas
                    .iter()
                    .map(|place| number(place, true))
                    .collect()
            } else {
                Vec::new()
            };
            for slot in shard.first..=shard.last {
                let reader = match replicas.len() {
                    0 => primary,
                    some => replicas[slot % some],
                };
                slots[slot] = Some((primary, reader));
            }
        }
        let gone: u64 = before.values().map(|node| node.pool.opened()).sum();
        self.opened.fetch_add(gone, Ordering::Relaxed);
        Map {
            nodes,
            primaries: count,
            slots,
            drawn: Some(Instant::now()),
        }
    }

    /// The node that a redirect names.
    pub(super) fn at(&self, map: &Map, place: &Place) -> Arc<Node> {
        let known = map.nodes[..map.primaries]
            .iter()
            .find(|node| node.place == *place);
        match known {
            Some(node) => Arc::clone(node),
            None => Arc::clone(
                self.strangers
                    .lock()
                    .entry(place.clone())
                    .or_insert_with(|| self.node(place, false)),
            ),
        }
    }

    fn node(&self, place: &Place, is_replica: bool) -> Arc<Node> {
        let (host, port) = place.clone();
        let address = if is_replica {
            self.address.replica(host, port)
        } else {
            self.address.server(host, port)
        };
        Arc::new(Node {
            place: place.clone(),
            pool: ConnectionPool::new(address, self.tls.clone(), self.options.clone()),
            circuit: Circuit::new(NODE_BREAKER),
        })
    }
}

/// What a node says about the cluster.
fn told_by(node: &Node, deadline: Instant) -> Result<Vec<Shard>, Failure> {
    let mut commands = Commands::default();
    commands.push(&["CLUSTER", "SLOTS"]);
    node.pool.converse(deadline, |connection| {
        let mut shards = Vec::new();
        connection.call(&commands, deadline, |_, reply| {
            shards = parse(reply, &node.place.0)?;
            Ok(())
        })?;
        Ok(shards)
    })
}
