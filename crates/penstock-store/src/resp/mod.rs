//! Valkey and Redis, over the RESP protocol (version 2), by TCP, with or without TLS,
//! or unix socket, standalone or under Sentinel.
//!
//! An object is a string under its key's text form. A put is one SET, so it is atomic and
//! replaces what was there; a get is one GET, whose value goes from the socket straight into the
//! caller's memory. Opening does not connect: a server may be absent, go away and come back.
//!
//! From the address to the bytes: `address` reads the URL, `sentinel` finds the master, `socket`, `tls` and `connection` reach the
//! server, `pool` keeps connections, `command` and `parser` speak the protocol, `lane` moves
//! values over one connection and `transfer` over several.

mod address;
mod command;
mod connection;
mod failure;
mod lane;
mod parser;
mod pool;
mod sentinel;
mod socket;
mod tls;
mod transfer;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use address::{Address, PASSWORD_VARIABLE};
use command::Commands;
use connection::Connection;
use failure::Failure;
use parser::{MAX_STRING, Reply};
use pool::ConnectionPool;
use tls::Tls;
use transfer::{Gets, Puts};

use crate::counters::Counters;
use crate::{
    Capabilities, Error, ErrorKind, GetRequest, KEY_PREFIX, Key, Listed, Namespace, OpenOptions,
    PutRequest, Result, Store, StoreStats, slices,
};

/// Keys in one command.
const KEYS_PER_COMMAND: usize = 1024;
/// Keys that the server looks at in one step of a listing.
const SCAN_COUNT: &str = "1000";
/// The settings that decide how the server serves a pool.
const SETTINGS: [&str; 6] = [
    "maxmemory",
    "maxmemory-policy",
    "save",
    "appendonly",
    "io-threads",
    "proto-max-bulk-len",
];

/// Opens a Valkey or Redis server as a store; does not connect yet.
pub(crate) fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let address = Address::parse(url, std::env::var(PASSWORD_VARIABLE).ok())?;
    let tls = address.tls.as_ref().map(Tls::load).transpose()?;
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
    /// Runs an operation on a connection, once more on a fresh one if the first turned out to
    /// have been closed while it lay idle.
    fn converse<T>(
        &self,
        operation: &'static str,
        deadline: Instant,
        mut talk: impl FnMut(&mut Connection) -> std::result::Result<T, Failure>,
    ) -> Result<T> {
        let mut attempt = || {
            let mut connection = self.pool.lend(deadline)?;
            match talk(&mut connection) {
                Err(failure) if connection.was_stale(&failure) => {}
                outcome => return outcome.inspect_err(|failure| self.pool.broke(failure)),
            }
            drop(connection);
            let mut connection = self.pool.lend_fresh(deadline)?;
            talk(&mut connection).inspect_err(|failure| self.pool.broke(failure))
        };
        attempt().map_err(|failure: Failure| failure.error(&self.url, operation))
    }

    fn failed(&self, operation: &'static str) -> impl Fn(&Failure, &Key) -> Error {
        move |failure, key| failure.error(&self.url, operation).with("key", key)
    }
}

impl Store for RespStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: true,
            persistent: true,
            bounded: true,
            max_value_bytes: MAX_STRING,
        }
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.converse("contains", deadline, |connection| {
            look_up(connection, keys, deadline)
        });
        self.counters.looked_up(&found);
        found
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let describe = self.failed("put");
        transfer::run(
            &self.pool,
            &mut Puts {
                requests: &mut *batch,
                describe: &describe,
            },
            deadline,
        );
        for request in batch {
            if let Some(outcome) = &request.outcome {
                self.counters.put(outcome, slices::len_of(request.value));
            }
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        let describe = self.failed("get");
        transfer::run(
            &self.pool,
            &mut Gets {
                requests: &mut *batch,
                describe: &describe,
            },
            deadline,
        );
        for request in batch {
            if let Some(outcome) = &request.outcome {
                self.counters.got(outcome);
            }
        }
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
        let pattern = match namespace {
            Some(namespace) => format!("{KEY_PREFIX}{namespace}:*"),
            None => format!("{KEY_PREFIX}*"),
        };
        // Each step is a conversation of its own, so that a connection found stale at the start
        // does not make anything be visited twice.
        let mut cursor = "0".to_owned();
        loop {
            let step = self.converse("list", deadline, |connection| {
                scan(connection, &cursor, &pattern, deadline)
            });
            let (next, listed) = step.inspect_err(|_| self.counters.failed())?;
            listed.into_iter().for_each(&mut *visit);
            if next == "0" {
                return Ok(());
            }
            cursor = next;
        }
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.converse("describe", deadline, |connection| {
            facts(connection, deadline)
        })
        .inspect_err(|_| self.counters.failed())
    }

    fn stats(&self) -> StoreStats {
        StoreStats {
            connects: self.pool.opened(),
            ..self.counters.snapshot()
        }
    }
}

fn look_up(
    connection: &mut Connection,
    keys: &[Key],
    deadline: Instant,
) -> std::result::Result<Vec<bool>, Failure> {
    // One EXISTS of many keys only counts, but does so in a fraction of the time; in a look-up
    // either all keys or none are there as a rule.
    let chunks: Vec<Range<usize>> = (0..keys.len())
        .step_by(KEYS_PER_COMMAND)
        .map(|start| start..keys.len().min(start + KEYS_PER_COMMAND))
        .collect();
    let mut commands = Commands::default();
    chunks
        .iter()
        .for_each(|chunk| commands.push_keys("EXISTS", &keys[chunk.clone()]));
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
    ask_each(connection, "EXISTS", &asked, deadline, |_, reply| {
        if let Some(i) = unclear.next() {
            found[i] = count(reply)? > 0;
        }
        Ok(())
    })?;
    Ok(found)
}

/// One step of a listing: the next cursor and the objects seen.
fn scan(
    connection: &mut Connection,
    cursor: &str,
    pattern: &str,
    deadline: Instant,
) -> std::result::Result<(String, Vec<Listed>), Failure> {
    let mut commands = Commands::default();
    commands.push(&["SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT]);
    let mut page = None;
    connection.call(&commands, deadline, |_, reply| {
        page = Some(scan_page(reply)?);
        Ok(())
    })?;
    let Some((next, keys)) = page else {
        return Err(unexpected());
    };

    let mut listed = Vec::with_capacity(keys.len());
    let mut empty = Vec::new();
    ask_each(
        connection,
        "STRLEN",
        &keys,
        deadline,
        |key, reply| match reply {
            // It is not a string, so no store put it there.
            Reply::Error(line) if line.starts_with(b"WRONGTYPE") => Ok(()),
            // An empty value, or none: the key may have been removed meanwhile.
            Reply::Integer(0) => {
                empty.push(key);
                Ok(())
            }
            reply => {
                listed.push(Listed {
                    key,
                    bytes: count(reply)?,
                });
                Ok(())
            }
        },
    )?;
    ask_each(connection, "EXISTS", &empty, deadline, |key, reply| {
        if count(reply)? > 0 {
            listed.push(Listed { key, bytes: 0 });
        }
        Ok(())
    })?;
    Ok((next, listed))
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

fn scan_page(reply: Reply) -> std::result::Result<(String, Vec<Key>), Failure> {
    let Reply::Array(parts) = refuse(reply)? else {
        return Err(unexpected());
    };
    let Ok([Reply::String(cursor), Reply::Array(names)]) = <[Reply; 2]>::try_from(parts) else {
        return Err(unexpected());
    };
    let cursor = String::from_utf8(cursor).map_err(|_| unexpected())?;
    if !cursor.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(unexpected());
    }
    let keys = names.into_iter().filter_map(|name| match name {
        // A key that only begins like ours belongs to somebody else.
        Reply::String(name) => std::str::from_utf8(&name)
            .ok()
            .and_then(|n| Key::parse(n).ok()),
        _ => None,
    });
    Ok((cursor, keys.collect()))
}

/// What INFO says, by its names, and the settings, as `config:NAME`.
fn facts(
    connection: &mut Connection,
    deadline: Instant,
) -> std::result::Result<Vec<(String, String)>, Failure> {
    let mut commands = Commands::default();
    commands.push(&["INFO"]);
    SETTINGS
        .iter()
        .for_each(|setting| commands.push(&["CONFIG", "GET", setting]));
    let mut facts = BTreeMap::new();
    connection.call(&commands, deadline, |i, reply| {
        match (i, reply) {
            (0, reply) => {
                let Reply::String(text) = refuse(reply)? else {
                    return Err(unexpected());
                };
                for line in String::from_utf8_lossy(&text).lines() {
                    if let Some((name, value)) = line.split_once(':') {
                        facts.insert(name.to_owned(), value.to_owned());
                    }
                }
            }
            (_, Reply::Array(pairs)) => {
                for pair in pairs.chunks_exact(2) {
                    if let [Reply::String(name), Reply::String(value)] = pair {
                        let name = format!("config:{}", String::from_utf8_lossy(name));
                        facts.insert(name, String::from_utf8_lossy(value).into_owned());
                    }
                }
            }
            // CONFIG is often forbidden, or renamed away.
            (_, _) => {}
        }
        Ok(())
    })?;
    Ok(facts.into_iter().collect())
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
