//! The connections of one store. They are opened on demand, kept while idle, and bounded in number.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use penstock_contract::ErrorKind;
use penstock_value::interrupt;

use super::address::Address;
use super::connection::Connection;
use super::failure::Failure;
use super::resolver::Resolver;
use super::sentinel::Way;
use super::tls::Tls;
use crate::OpenOptions;

#[derive(Debug)]
pub(super) struct ConnectionPool {
    address: Address,
    tls: Option<Tls>,
    options: OpenOptions,
    resolver: Resolver,
    /// The sentinel to ask first: the one that helped last.
    sentinel: AtomicUsize,
    state: Mutex<State>,
    returned: Condvar,
    opened: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Settled connections, the one used last at the end.
    idle: Vec<Connection>,
    /// All connections: idle ones, lent ones, and those being opened.
    count: usize,
}

impl ConnectionPool {
    pub(super) fn new(address: Address, tls: Option<Tls>, options: OpenOptions) -> Self {
        Self {
            address,
            tls,
            options,
            resolver: Resolver::default(),
            sentinel: AtomicUsize::new(0),
            state: Mutex::default(),
            returned: Condvar::new(),
            opened: AtomicU64::new(0),
        }
    }

    /// Connections opened since the pool was made.
    pub(super) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Lends a connection: an idle one, else a new one, else the first that comes back.
    ///
    /// Fails at once if the deadline has passed, before anything is sent.
    pub(super) fn lend(&self, deadline: Instant) -> Result<Lent<'_>, Failure> {
        if Instant::now() >= deadline {
            return Err(Failure::new(
                ErrorKind::TimedOut,
                "the deadline had passed already",
            ));
        }
        loop {
            if let Some(lent) = self.take_idle() {
                return Ok(lent);
            }
            let mut state = self.state.lock();
            if !state.idle.is_empty() {
                continue;
            }
            if state.count < self.most() {
                state.count += 1;
                drop(state);
                return self.open(deadline);
            }
            if interrupt::wait_until(&self.returned, &mut state, deadline) {
                return Err(Failure::timed_out("others used all connections"));
            }
        }
    }

    /// Lends one more connection to someone who has one already. Never waits for someone else's.
    pub(super) fn lend_another(&self, deadline: Instant) -> Option<Lent<'_>> {
        if let Some(lent) = self.take_idle() {
            return Some(lent);
        }
        let mut state = self.state.lock();
        if state.count >= self.most() {
            return None;
        }
        state.count += 1;
        drop(state);
        self.open(deadline).ok()
    }

    /// Lends a connection opened just now.
    pub(super) fn lend_fresh(&self, deadline: Instant) -> Result<Lent<'_>, Failure> {
        self.discard_idle();
        self.lend(deadline)
    }

    /// Runs an operation on a connection. If the connection turns out to have been closed while it
    /// lay idle, runs the operation once more on a fresh one.
    pub(super) fn converse<T>(
        &self,
        deadline: Instant,
        mut talk: impl FnMut(&mut Connection) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut connection = self.lend(deadline)?;
        match talk(&mut connection) {
            Err(failure) if connection.was_stale(&failure) => {}
            outcome => return outcome.inspect_err(|failure| self.broke(failure)),
        }
        drop(connection);
        let mut connection = self.lend_fresh(deadline)?;
        talk(&mut connection).inspect_err(|failure| self.broke(failure))
    }

    /// Notes a lent connection's failure. If the connection broke, those that lie idle are likely
    /// dead too. They are closed, so that they do not fail one operation each. A deadline that
    /// passed says nothing about them: our own thread may have been late.
    pub(super) fn broke(&self, failure: &Failure) {
        if failure.kind == ErrorKind::Unreachable {
            self.discard_idle();
        }
    }

    fn discard_idle(&self) {
        let mut state = self.state.lock();
        let dead = std::mem::take(&mut state.idle);
        state.count -= dead.len();
        drop(state);
        self.returned.notify_all();
    }

    fn most(&self) -> usize {
        self.options.pool_connections.max(1)
    }

    fn take_idle(&self) -> Option<Lent<'_>> {
        loop {
            // Check it without the lock: this thread may have a low priority.
            let mut connection = self.state.lock().idle.pop()?;
            if connection.reuse() {
                return Some(Lent {
                    pool: self,
                    connection: Some(connection),
                });
            }
            self.state.lock().count -= 1;
            self.returned.notify_one();
        }
    }

    /// Opens a connection that has been counted already.
    fn open(&self, deadline: Instant) -> Result<Lent<'_>, Failure> {
        // If opening fails, dropping this takes the connection out of the count.
        let mut lent = Lent {
            pool: self,
            connection: None,
        };
        let limit = Instant::now() + self.options.connect_timeout;
        let name = &self.options.client_name;
        let opened = Way {
            address: &self.address,
            tls: self.tls.as_ref(),
            client_name: name,
            resolver: &self.resolver,
            deadline: deadline.min(limit),
        }
        .connect(&self.sentinel);
        lent.connection = Some(opened.map_err(|failure| match failure.kind {
            ErrorKind::TimedOut if limit < deadline => failure.reworded(
                ErrorKind::Unreachable,
                format!(
                    "no connection was made within {:?}{}",
                    self.options.connect_timeout,
                    // A server without TLS takes our greeting for the beginning of a command.
                    match self.tls {
                        Some(_) => "; does the server speak TLS on this port?",
                        None => "",
                    }
                ),
            ),
            _ => failure,
        })?);
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(lent)
    }
}

/// A lent connection. Dropping it gives it back if it is settled, and closes it otherwise.
#[derive(Debug)]
pub(super) struct Lent<'p> {
    pool: &'p ConnectionPool,
    /// The connection; `None` only while it is being opened.
    connection: Option<Connection>,
}

impl std::ops::Deref for Lent<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection.as_ref().expect("opened before it is lent")
    }
}

impl std::ops::DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("opened before it is lent")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let connection = self
            .connection
            .take()
            .filter(|connection| connection.settled && !connection.demoted);
        let mut state = self.pool.state.lock();
        match connection {
            Some(connection) => state.idle.push(connection),
            None => state.count -= 1,
        }
        drop(state);
        self.pool.returned.notify_one();
    }
}
