//! A store in a program beside this process. It may be slow, fail, hang, leak or die: here, that is
//! a failed operation. It is not told of namespaces that are retired, as it evicts by rules of its own.

use std::ffi::OsString;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use penstock_contract::{
    Capabilities, Counters, Error, ErrorKind, GetRequest, KEY_BYTES, Key, Listed, Namespace,
    PutRequest, Result, Store, StoreStats, deadline, slices,
};

use super::link::{Failure, Link};
use super::process::{Program, Running};
use super::protocol::{self, Operation, Reply};
use super::{Secrets, replies};

/// A store in a program.
pub(super) struct ProgramStore {
    program: Program,
    capabilities: Capabilities,
    url: String,
    counters: Counters,
}

/// What an operation on a link comes to.
type Done<T> = std::result::Result<T, Failure>;

impl ProgramStore {
    /// Starts the program, which says what its store can do, or why it does not open.
    pub(super) fn open(command: &[OsString], url: &str, secrets: Secrets) -> Result<Self> {
        let program = Program::new(command, url, secrets);
        let running = program.first()?;
        let url = match running.url.as_str() {
            "" => program.secrets().hide(&shown(url)),
            said => said.to_owned(),
        };
        Ok(Self {
            capabilities: running.capabilities,
            program,
            url,
            counters: Counters::default(),
        })
    }

    /// Sends a request and hands its reply to `receive`.
    fn ask<T>(
        &self,
        operation: Operation,
        items: &Items,
        values: &[IoSlice<'_>],
        deadline: Instant,
        receive: impl FnOnce(&mut Link, Reply) -> Done<T>,
    ) -> Result<T> {
        deadline::check(deadline)?;
        let running: Arc<Running> = self.program.running(deadline)?;
        let bytes = items.bytes.len() as u64 + slices::len_of(values);
        let done = running.on_link(deadline, |link| {
            let left = deadline.saturating_duration_since(Instant::now());
            let head = protocol::request(operation, items.count, left, bytes);
            let mut request = vec![IoSlice::new(&head), IoSlice::new(&items.bytes)];
            request.extend(values.iter().map(|value| IoSlice::new(value)));
            link.send(&request, deadline)?;
            let reply = link.head(deadline)?;
            let done = if reply.has_failed {
                let text = replies::text(link, reply.bytes, deadline)?;
                let (kind, message) = protocol::error(&text);
                Err(Failure::Refused(
                    self.program.secrets().error(&kind, &message),
                ))
            } else {
                Ok(receive(link, reply)?)
            };
            link.done()?;
            done
        });
        done.map_err(Failure::into_error)
    }

    /// A yes or no for each of so many items.
    fn answers(&self, operation: Operation, items: &Items, deadline: Instant) -> Result<Vec<bool>> {
        if items.count == 0 {
            return deadline::check(deadline).map(|()| Vec::new());
        }
        self.ask(operation, items, &[], deadline, |link, reply| {
            replies::answers(link, reply, items.count, deadline)
        })
    }

    fn put_all(&self, batch: &mut [PutRequest<'_>], deadline: Instant) -> Result<()> {
        let mut items = Items::with_room(batch.len(), KEY_BYTES + 16);
        let limit = self.capabilities.max_value_bytes;
        let fits = |request: &PutRequest<'_>| slices::len_of(request.value) <= limit;
        for request in batch.iter_mut().filter(|request| !fits(request)) {
            request.outcome = Some(Err(self.too_long(request)));
        }
        let mut sent: Vec<&mut PutRequest<'_>> =
            batch.iter_mut().filter(|request| fits(request)).collect();
        if sent.is_empty() {
            return Ok(());
        }
        for request in &sent {
            items.begin(&request.key);
            items.number(request.position);
            items.number(slices::len_of(request.value));
        }
        let pieces = sent.iter().flat_map(|request| request.value);
        let values: Vec<IoSlice<'_>> = pieces.map(|piece| IoSlice::new(piece)).collect();
        let outcomes = self.ask(Operation::Put, &items, &values, deadline, |link, reply| {
            replies::puts(link, reply, items.count, self.program.secrets(), deadline)
        })?;
        drop(values);
        for (request, outcome) in sent.iter_mut().zip(outcomes) {
            request.outcome = Some(outcome);
        }
        Ok(())
    }

    fn too_long(&self, request: &PutRequest<'_>) -> Error {
        let (bytes, most) = (
            slices::len_of(request.value),
            self.capabilities.max_value_bytes,
        );
        Error::new(
            ErrorKind::Config,
            format!("a value of {bytes} bytes is larger than the store takes ({most})"),
        )
        .with("store", &self.url)
        .with("key", request.key)
    }

    fn get_all(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut items = Items::with_room(batch.len(), KEY_BYTES + 16);
        for request in &*batch {
            items.begin(&request.key);
            items.number(request.position);
            items.number(slices::room_of(request.into));
        }
        self.ask(Operation::Get, &items, &[], deadline, |link, reply| {
            replies::gets(link, reply, batch, self.program.secrets(), deadline)
        })
    }
}

/// A URL for people: without user, password and parameters.
fn shown(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

/// The items of a request, as they are sent.
struct Items {
    bytes: Vec<u8>,
    count: usize,
}

impl Items {
    fn with_room(count: usize, bytes_each: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(count * bytes_each),
            count: 0,
        }
    }

    fn of_keys(keys: &[Key]) -> Self {
        let mut items = Self::with_room(keys.len(), KEY_BYTES);
        keys.iter().for_each(|key| items.begin(key));
        items
    }

    fn begin(&mut self, key: &Key) {
        self.bytes.extend(key.to_bytes());
        self.count += 1;
    }

    fn number(&mut self, number: u64) {
        self.bytes.extend(number.to_le_bytes());
    }
}

impl Store for ProgramStore {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let answer = self.answers(Operation::Contains, &Items::of_keys(keys), deadline);
        self.counters.looked_up(&answer);
        answer
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        if let Err(error) = self.put_all(batch, deadline) {
            for request in batch.iter_mut().filter(|each| each.outcome.is_none()) {
                request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
            }
        }
        self.counters.put_batch(batch);
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        if let Err(error) = self.get_all(batch, deadline) {
            for request in batch.iter_mut().filter(|each| each.outcome.is_none()) {
                request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
            }
        }
        self.counters.got_batch(batch);
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        let mut items = Items::with_room(values.len(), KEY_BYTES + 8);
        for (key, position) in values {
            items.begin(key);
            items.number(*position);
        }
        self.answers(Operation::Touch, &items, deadline)
            .inspect_err(|_| self.counters.failed())
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        if keys.is_empty() {
            return deadline::check(deadline).map(|()| 0);
        }
        let items = Items::of_keys(keys);
        self.ask(Operation::Remove, &items, &[], deadline, |_, reply| {
            Ok(u64::from(reply.items))
        })
        .inspect_err(|_| self.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        let mut items = Items::with_room(1, 16);
        if let Some(namespace) = namespace {
            items.bytes.extend(namespace.0);
            items.count = 1;
        }
        // Visited only when all of it has come: a visitor may use this store, and a request of its
        // own would wait for this one.
        let mut objects = Vec::new();
        self.ask(Operation::List, &items, &[], deadline, |link, reply| {
            replies::objects(link, reply, deadline, |object| {
                if namespace.is_none_or(|namespace| object.key.namespace == namespace) {
                    objects.push(object);
                }
            })
        })
        .inspect_err(|_| self.counters.failed())?;
        objects.into_iter().for_each(visit);
        Ok(())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let nothing = Items::with_room(0, 0);
        self.ask(
            Operation::Describe,
            &nothing,
            &[],
            deadline,
            |link, reply| {
                let facts = protocol::facts(&replies::text(link, reply.bytes, deadline)?);
                let hide = |text: String| self.program.secrets().hide(&text);
                Ok(facts
                    .into_iter()
                    .map(|(name, fact)| (hide(name), hide(fact)))
                    .collect())
            },
        )
        .inspect_err(|_| self.counters.failed())
    }

    fn stats(&self) -> StoreStats {
        StoreStats {
            connects: self.program.starts(),
            ..self.counters.snapshot()
        }
    }
}
