//! A cluster of servers as one store: every key goes to the node that serves its slot.
//!
//! The calling thread moves a batch over all its nodes at once. A look-up asks all nodes at once.
//! If a node says that another node serves a slot now (MOVED) or soon (ASK), that is followed. A
//! node that is gone costs only what lies there: its keys are not found, and its puts fail. It is
//! left alone until another has taken its place or it is back.

mod ask;
mod routed;
mod slots;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use ask::Part;
use penstock_contract::{
    Capabilities, Counters, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest,
    Result, Store, StoreStats,
};
use routed::Routed;
use slots::slot_of;
use topology::{Map, Node, Topology};

use super::address::{Address, Endpoint, Place};
use super::failure::{Failure, Redirect};
use super::pipeline::Batch;
use super::tls::Tls;
use super::transfer::{self, Gets, Puts, Share};
use super::{CAPABILITIES, facts, listing};
use crate::OpenOptions;

/// How often a request is sent on to another node.
const MOST_REDIRECTS: usize = 4;

pub(super) struct ClusterStore {
    url: String,
    topology: Topology,
    counters: Counters,
}

/// Which requests of a batch go to which node.
type Routes = BTreeMap<Place, (Arc<Node>, Vec<usize>)>;

impl ClusterStore {
    /// The cluster of an address with seeds; does not connect yet.
    pub(super) fn new(address: Address, tls: Option<Tls>, options: OpenOptions) -> Self {
        let seeds = match &address.endpoint {
            Endpoint::Cluster(seeds) => seeds.clone(),
            _ => Vec::new(),
        };
        Self {
            url: address.to_string(),
            topology: Topology::new(address, &seeds, tls, options),
            counters: Counters::default(),
        }
    }

    /// Moves a batch. `keys[i]` is the key of request i. When this returns, every request has its
    /// outcome.
    fn transfer<B: Batch>(&self, batch: &mut B, keys: &[Key], is_put: bool, deadline: Instant) {
        let mut routed = Routed::new(batch, keys.len());
        let map = match self.topology.map(deadline) {
            Ok(map) => map,
            Err(failure) => return routed.refuse(0..keys.len(), &failure),
        };
        let (mut routes, homeless) = route(&map, keys, 0..keys.len(), is_put);
        routed.refuse(homeless, &unserved());
        for _ in 0..=MOST_REDIRECTS {
            let mut passes = Vec::new();
            let mut shares = Vec::new();
            for (node, requests) in routes.values() {
                match node.circuit.enter() {
                    Some(pass) => {
                        passes.push((pass, requests));
                        shares.push(Share {
                            pool: &node.pool,
                            requests: requests.iter().copied().collect(),
                        });
                    }
                    None => routed.refuse(requests.iter().copied(), &left_alone(node)),
                }
            }
            let had_time = Instant::now() < deadline;
            transfer::run(shares, &mut routed, deadline);
            for (pass, requests) in passes {
                if had_time {
                    pass.conclude(routed.verdict(requests));
                }
            }
            let redirected = routed.take_redirected();
            if redirected.is_empty() {
                return;
            }
            routes = self.send_on(&map, &routes, redirected);
        }
        let left: Vec<_> = routes
            .into_values()
            .flat_map(|(_, requests)| requests)
            .collect();
        routed.refuse(left, &sent_around());
    }

    /// Where redirected requests go next.
    fn send_on(&self, map: &Map, from: &Routes, redirected: Vec<(usize, Redirect)>) -> Routes {
        let mut hosts = BTreeMap::new();
        for (place, (_, requests)) in from {
            requests.iter().for_each(|&index| {
                hosts.insert(index, place.0.clone());
            });
        }
        let mut routes = Routes::new();
        for (index, redirect) in redirected {
            if !redirect.is_ask {
                self.topology.mark_stale();
            }
            let host = redirect
                .host
                .unwrap_or_else(|| hosts.remove(&index).unwrap_or_default());
            let place = (host, redirect.port);
            routes
                .entry(place)
                .or_insert_with_key(|place| (self.topology.at(map, place), Vec::new()))
                .1
                .push(index);
        }
        routes
    }

    /// Sends a command for each key, and calls `visit` with each integer that is answered and its
    /// key's index. Leaves out keys that no node answers for. Fails if no node answers for any key.
    fn ask_each(
        &self,
        command: &'static str,
        keys: &[Key],
        is_put: bool,
        deadline: Instant,
        mut visit: impl FnMut(usize, u64),
    ) -> std::result::Result<(), Failure> {
        let map = self.topology.map(deadline)?;
        let (mut routes, homeless) = route(&map, keys, 0..keys.len(), is_put);
        let mut failure = (homeless.len() == keys.len()).then(unserved);
        let mut answered = false;
        let mut asking: BTreeSet<usize> = BTreeSet::new();
        for _ in 0..=MOST_REDIRECTS {
            let mut parts = Vec::new();
            for (node, requests) in routes.values() {
                match node.circuit.enter() {
                    Some(pass) => {
                        parts.push(Part::new(node, pass, command, requests, keys, &asking))
                    }
                    None => failure = Some(left_alone(node)),
                }
            }
            let had_time = Instant::now() < deadline;
            let mut redirected = Vec::new();
            let (answers, verdicts) = ask::ask_all(&parts, deadline);
            for (index, outcome) in answers {
                match outcome {
                    Ok(number) => {
                        answered = true;
                        visit(index, number);
                    }
                    Err(Failure {
                        redirect: Some(redirect),
                        ..
                    }) => redirected.push((index, *redirect)),
                    Err(refused) => failure = Some(refused),
                }
            }
            for (part, verdict) in parts.into_iter().zip(verdicts) {
                if had_time {
                    part.conclude(verdict);
                }
            }
            if redirected.is_empty() {
                break;
            }
            asking = redirected
                .iter()
                .filter(|(_, redirect)| redirect.is_ask)
                .map(|&(index, _)| index)
                .collect();
            routes = self.send_on(&map, &routes, redirected);
        }
        match failure {
            Some(failure) if !answered => Err(failure),
            _ => Ok(()),
        }
    }

    /// Runs an operation on every primary, one after the other, until one fails.
    fn on_each_primary(
        &self,
        deadline: Instant,
        mut operation: impl FnMut(&Node) -> std::result::Result<(), Failure>,
    ) -> std::result::Result<(), Failure> {
        let map = self.topology.map(deadline)?;
        map.nodes[..map.primaries].iter().try_for_each(|node| {
            operation(node)
                .map_err(|failure| failure.of(&format!("{}:{}", node.place.0, node.place.1)))
        })
    }

    fn failed(&self, operation: &'static str) -> impl Fn(&Failure, &Key) -> Error {
        move |failure, key| failure.error(&self.url, operation).with("key", key)
    }
}

/// Groups requests by the node that serves their keys. Requests whose slot no node serves are
/// returned separately.
fn route(
    map: &Map,
    keys: &[Key],
    requests: impl Iterator<Item = usize>,
    is_put: bool,
) -> (Routes, Vec<usize>) {
    let (mut routes, mut homeless) = (Routes::new(), Vec::new());
    for index in requests {
        let slot = slot_of(&keys[index]);
        let node = if is_put {
            map.primary(slot)
        } else {
            map.reader(slot)
        };
        match node {
            Some(node) => routes
                .entry(node.place.clone())
                .or_insert_with(|| (Arc::clone(node), Vec::new()))
                .1
                .push(index),
            None => homeless.push(index),
        }
    }
    (routes, homeless)
}

impl Store for ClusterStore {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut found = vec![false; keys.len()];
        let found = self
            .ask_each("EXISTS", keys, false, deadline, |index, number| {
                found[index] = number > 0;
            })
            .map(|()| found)
            .map_err(|failure| failure.error(&self.url, "contains"));
        self.counters.looked_up(&found);
        found
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let keys: Vec<Key> = batch.iter().map(|request| request.key).collect();
        let describe = self.failed("put");
        let mut puts = Puts {
            requests: &mut *batch,
            describe: &describe,
        };
        self.transfer(&mut puts, &keys, true, deadline);
        self.counters.put_batch(batch);
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        let keys: Vec<Key> = batch.iter().map(|request| request.key).collect();
        let describe = self.failed("get");
        let mut gets = Gets {
            requests: &mut *batch,
            describe: &describe,
        };
        self.transfer(&mut gets, &keys, false, deadline);
        self.counters.got_batch(batch);
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        if values.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<Key> = values.iter().map(|&(key, _)| key).collect();
        let mut there = vec![false; keys.len()];
        // Primaries evict, so they are to know.
        self.ask_each("TOUCH", &keys, true, deadline, |index, number| {
            there[index] = number > 0;
        })
        .map(|()| there)
        .map_err(|failure| failure.error(&self.url, "touch"))
        .inspect_err(|_| self.counters.failed())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        if keys.is_empty() {
            return Ok(0);
        }
        let mut removed = 0;
        self.ask_each("UNLINK", keys, true, deadline, |_, number| {
            removed += number;
        })
        .map(|()| removed)
        .map_err(|failure| failure.error(&self.url, "remove"))
        .inspect_err(|_| self.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.on_each_primary(deadline, |node| {
            listing::list(&node.pool, namespace, visit, deadline)
        })
        .map_err(|failure| failure.error(&self.url, "list"))
        .inspect_err(|_| self.counters.failed())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let mut nodes = Vec::new();
        self.on_each_primary(deadline, |node| {
            let facts = node
                .pool
                .converse(deadline, |connection| facts::of(connection, deadline))?;
            nodes.push(facts);
            Ok(())
        })
        .map_err(|failure| failure.error(&self.url, "describe"))
        .inspect_err(|_| self.counters.failed())?;
        Ok(facts::together(&nodes).into_iter().collect())
    }

    fn stats(&self) -> StoreStats {
        StoreStats {
            connects: self.topology.opened(),
            ..self.counters.snapshot()
        }
    }
}

fn unserved() -> Failure {
    Failure::new(
        ErrorKind::Unavailable,
        "no node of the cluster serves the key's slot",
    )
}

fn left_alone(node: &Node) -> Failure {
    let (host, port) = &node.place;
    Failure::new(
        ErrorKind::Unavailable,
        format!("node {host}:{port} did not answer lately and is left alone for a while"),
    )
}

fn sent_around() -> Failure {
    Failure::new(
        ErrorKind::Unavailable,
        "the cluster's nodes sent the request from one to the other",
    )
}

/// For fuzzing: the slots of a map that was read exist and are in order.
#[cfg(test)]
pub(super) fn check_map(reply: super::parser::Reply) {
    for shard in slots::parse(reply, "asked").into_iter().flatten() {
        assert!(shard.first <= shard.last && shard.last < slots::SLOTS);
    }
}
