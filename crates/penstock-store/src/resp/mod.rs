//! Valkey and Redis, over the RESP protocol: version 2, or version 3 if the URL says `protocol=3`.
//! A server is reached by TCP, with or without TLS, or by unix socket. It may be standalone, under
//! Sentinel, or part of a cluster.
//!
//! An object is a string under its key's text form. A put is one SET, so it is atomic and replaces
//! what was there. A get is one GET; its value goes from the socket straight into the caller's
//! memory. Opening does not connect: a server may be absent, go away and come back.
//!
//! The modules, from the address to the bytes:
//!
//! - `address` reads the URL.
//! - `sentinel` finds the master, and `cluster` the node that serves a key.
//! - `socket`, `tls` and `connection` reach the server, and `pool` keeps connections.
//! - `command` and `parser` speak the protocol.
//! - `pipeline` moves values over one connection, and `transfer` over several.

mod address;
mod cluster;
mod command;
mod connection;
mod facts;
mod failure;
#[cfg(test)]
pub(crate) mod fuzz;
mod listing;
mod parser;
mod pipeline;
mod pool;
mod readiness;
mod resolver;
mod schemes;
mod sentinel;
mod socket;
mod tls;
mod transfer;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use address::{Address, Endpoint, PASSWORD_VARIABLE};
use cluster::ClusterStore;
use command::Commands;
use connection::Connection;
use failure::Failure;
use parser::{MAX_STRING, Reply};
use penstock_contract::{
    Capabilities, Counters, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest,
    Result, Store, StoreStats,
};
use pool::ConnectionPool;
pub(crate) use schemes::{SCHEMES, USAGE};
use tls::Tls;
use transfer::{Gets, Puts, Share};

use crate::OpenOptions;

/// Keys in one command.
const KEYS_PER_COMMAND: usize = 1024;
/// What one server and a cluster of them can do.
const CAPABILITIES: Capabilities = Capabilities {
    shared: true,
    persistent: true,
    bounded: true,
    pipelined: true,
    max_value_bytes: MAX_STRING,
};

/// Opens a Valkey or Redis server as a store; does not connect yet.
pub(crate) fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let address = Address::parse(url, std::env::var(PASSWORD_VARIABLE).ok())?;
    let tls = address.tls.as_ref().map(Tls::load).transpose()?;
    if let Endpoint::Cluster(_) = address.endpoint {
        return Ok(Arc::new(ClusterStore::new(address, tls, options.clone())));
    }
    Ok(Arc::new(RespStore {
        url: address.to_string(),
        pool: ConnectionPool::new(address, tls, options.clone()),
        counters: Counters::default(),
    }))
}

struct RespStore {
    url: String,
    pool: ConnectionPool,
    counters: Counters,
}

impl RespStore {
    fn converse<T>(
        &self,
        operation: &'static str,
        deadline: Instant,
        talk: impl FnMut(&mut Connection) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        self.pool
            .converse(deadline, talk)
            .map_err(|failure| failure.error(&self.url, operation))
    }

    /// One share with all requests of a batch.
    fn share(&self, requests: usize) -> Vec<Share<'_>> {
        vec![Share {
            pool: &self.pool,
            requests: (0..requests).collect(),
        }]
    }

    fn failed(&self, operation: &'static str) -> impl Fn(&Failure, &Key) -> Error {
        move |failure, key| failure.error(&self.url, operation).with("key", key)
    }
}

impl Store for RespStore {
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
        let found = self.converse("contains", deadline, |connection| {
            which(connection, "EXISTS", keys, deadline)
        });
        self.counters.looked_up(&found);
        found
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let describe = self.failed("put");
        let all = self.share(batch.len());
        transfer::run(
            all,
            &mut Puts {
                requests: &mut *batch,
                describe: &describe,
            },
            deadline,
        );
        self.counters.put_batch(batch);
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        let describe = self.failed("get");
        let all = self.share(batch.len());
        transfer::run(
            all,
            &mut Gets {
                requests: &mut *batch,
                describe: &describe,
            },
            deadline,
        );
        self.counters.got_batch(batch);
    }

    /// The server's clock counts seconds, so a prompt's places make no difference.
    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        if values.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<Key> = values.iter().map(|&(key, _)| key).collect();
        self.converse("touch", deadline, |connection| {
            which(connection, "TOUCH", &keys, deadline)
        })
        .inspect_err(|_| self.counters.failed())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        if keys.is_empty() {
            return Ok(0);
        }
        let mut commands = Commands::default();
        keys.chunks(KEYS_PER_COMMAND)
            .for_each(|keys| commands.push_keys("UNLINK", keys));
        let removed = self.converse("remove", deadline, |connection| {
            let mut removed = 0;
            connection.call(&commands, deadline, |_, reply| {
                removed += count(reply)?;
                Ok(())
            })?;
            Ok(removed)
        });
        removed.inspect_err(|_| self.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        listing::list(&self.pool, namespace, visit, deadline)
            .map_err(|failure| failure.error(&self.url, "list"))
            .inspect_err(|_| self.counters.failed())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.converse("describe", deadline, |connection| {
            facts::of(connection, deadline)
        })
        .map(|facts| facts.into_iter().collect())
        .inspect_err(|_| self.counters.failed())
    }

    fn stats(&self) -> StoreStats {
        StoreStats {
            connects: self.pool.opened(),
            ..self.counters.snapshot()
        }
    }
}

/// For which keys a command that counts those that exist, EXISTS or TOUCH, counts one.
fn which(
    connection: &mut Connection,
    command: &str,
    keys: &[Key],
    deadline: Instant,
) -> std::result::Result<Vec<bool>, Failure> {
    // One command for many keys only returns a count, but takes a fraction of the time. As a rule,
    // either all keys are there or none.
    let chunks: Vec<Range<usize>> = (0..keys.len())
        .step_by(KEYS_PER_COMMAND)
        .map(|start| start..keys.len().min(start + KEYS_PER_COMMAND))
        .collect();
    let mut commands = Commands::default();
    chunks
        .iter()
        .for_each(|chunk| commands.push_keys(command, &keys[chunk.clone()]));
    let mut found = vec![false; keys.len()];
    let mut unclear = Vec::new();
    connection.call(&commands, deadline, |i, reply| {
        let chunk = chunks[i].clone();
        match count(reply)? {
            0 => {}
            n if n == chunk.len() as u64 => found[chunk].fill(true),
            _ => unclear.extend(chunk),
        }
        Ok(())
    })?;
    let asked: Vec<Key> = unclear.iter().map(|&i| keys[i]).collect();
    let mut unclear = unclear.into_iter();
    ask_each(connection, command, &asked, deadline, |_, reply| {
        if let Some(i) = unclear.next() {
            found[i] = count(reply)? > 0;
        }
        Ok(())
    })?;
    Ok(found)
}

/// Sends the same command for each key in one pipeline.
fn ask_each(
    connection: &mut Connection,
    command: &str,
    keys: &[Key],
    deadline: Instant,
    mut visit: impl FnMut(Key, Reply) -> std::result::Result<(), Failure>,
) -> std::result::Result<(), Failure> {
    let mut commands = Commands::default();
    keys.iter()
        .for_each(|key| commands.push_keys(command, std::slice::from_ref(key)));
    connection.call(&commands, deadline, |i, reply| visit(keys[i], reply))
}

fn refuse(reply: Reply) -> std::result::Result<Reply, Failure> {
    match reply {
        Reply::Error(line) => Err(Failure::refused(&line)),
        reply => Ok(reply),
    }
}

fn count(reply: Reply) -> std::result::Result<u64, Failure> {
    match refuse(reply)? {
        Reply::Integer(number) => u64::try_from(number).map_err(|_| unexpected()),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> Failure {
    Failure::new(
        ErrorKind::Protocol,
        "the server sent a reply of another kind",
    )
}
