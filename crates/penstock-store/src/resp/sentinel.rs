//! Sentinel: which server is the master now.
//!
//! Sentinels are asked whenever a connection is opened. A failover ends the connections to the old
//! master in one of three ways. The old master dies; or Sentinel closes the connections when it
//! makes the old master a replica; or the old master itself says that it is a replica (READONLY),
//! after which they are not used again. The next connections go to the new master.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use penstock_contract::ErrorKind;

use super::address::{Address, Endpoint};
use super::command::Commands;
use super::connection::Connection;
use super::failure::Failure;
use super::parser::Reply;
use super::resolver::Resolver;
use super::tls::Tls;

/// Where connections go, how, and by when.
pub(super) struct Way<'w> {
    pub(super) address: &'w Address,
    pub(super) tls: Option<&'w Tls>,
    pub(super) client_name: &'w str,
    pub(super) resolver: &'w Resolver,
    pub(super) deadline: Instant,
}

impl Way<'_> {
    /// Connects to the address's own server or, if there are sentinels, to the master that one of
    /// them names. Asks the sentinels in turn until one names a master that can be reached and is
    /// one. `first` is the sentinel that helped last.
    pub(super) fn connect(&self, first: &AtomicUsize) -> Result<Connection, Failure> {
        let Endpoint::Sentinel { sentinels, master } = &self.address.endpoint else {
            return self.open(self.address, self.deadline);
        };
        let start = first.load(Ordering::Relaxed);
        let mut failure = Failure::new(ErrorKind::Config, "no sentinel is named");
        for tried in 0..sentinels.len() {
            let number = (start + tried) % sentinels.len();
            let (host, port) = &sentinels[number];
            // A sentinel that swallows packets must leave time for those after it.
            let left = self.deadline.saturating_duration_since(Instant::now());
            let until = Instant::now() + left / (sentinels.len() - tried) as u32;
            match self.by_sentinel(host, *port, master, until) {
                Ok(connection) => {
                    first.store(number, Ordering::Relaxed);
                    return Ok(connection);
                }
                Err(refused) => failure = refused,
            }
        }
        Err(failure)
    }

    fn by_sentinel(
        &self,
        host: &str,
        port: u16,
        master: &str,
        deadline: Instant,
    ) -> Result<Connection, Failure> {
        let sentinel = self.address.sentinel(host.to_owned(), port);
        let (host, port) = self.ask(&sentinel, master, deadline).map_err(|failure| {
            let failure = match failure.kind {
                ErrorKind::Denied => failure.reworded(
                    ErrorKind::Denied,
                    "refused sentinel_user or sentinel_password, or wants them",
                ),
                _ => failure,
            };
            failure.of(&format!("sentinel {sentinel}"))
        })?;
        let server = self.address.server(host, port);
        let reached = self.open(&server, deadline).and_then(|mut connection| {
            check_master(&mut connection, deadline)?;
            Ok(connection)
        });
        reached.map_err(|failure| failure.of(&format!("{server}, master by {sentinel}")))
    }

    fn open(&self, server: &Address, deadline: Instant) -> Result<Connection, Failure> {
        Connection::open(server, self.tls, self.client_name, self.resolver, deadline)
    }

    fn ask(
        &self,
        sentinel: &Address,
        master: &str,
        deadline: Instant,
    ) -> Result<(String, u16), Failure> {
        let mut connection = self.open(sentinel, deadline)?;
        let mut commands = Commands::default();
        commands.push(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", master]);
        let mut found = None;
        connection.call(&commands, deadline, |_, reply| {
            found = Some(location(reply, master)?);
            Ok(())
        })?;
        found.ok_or_else(|| Failure::protocol("the sentinel did not answer"))
    }
}

fn location(reply: Reply, master: &str) -> Result<(String, u16), Failure> {
    let nonsense = || Failure::protocol("a sentinel answered with nonsense");
    match reply {
        Reply::Error(line) => Err(Failure::refused(&line)),
        Reply::Nil => Err(Failure::new(
            ErrorKind::Config,
            format!("knows no master named {master:?}"),
        )),
        Reply::Array(parts) => {
            let Ok([Reply::String(host), Reply::String(port)]) = <[Reply; 2]>::try_from(parts)
            else {
                return Err(nonsense());
            };
            let text = |bytes| String::from_utf8(bytes).map_err(|_| nonsense());
            let port = text(port)?.parse().map_err(|_| nonsense())?;
            Ok((text(host)?, port))
        }
        _ => Err(nonsense()),
    }
}

/// Refuses a server that is not a master: sentinels have just demoted it, or not promoted it yet.
fn check_master(connection: &mut Connection, deadline: Instant) -> Result<(), Failure> {
    let mut commands = Commands::default();
    commands.push(&["ROLE"]);
    connection.call(&commands, deadline, |_, reply| match reply {
        // The user may not be allowed to ask. A replica then refuses every put by itself.
        Reply::Error(line) if line.starts_with(b"NOPERM") => Ok(()),
        Reply::Error(line) => Err(Failure::refused(&line)),
        Reply::Array(parts) if parts.first() == Some(&Reply::String(b"master".to_vec())) => Ok(()),
        _ => Err(Failure::new(
            ErrorKind::Unavailable,
            "is not a master at the moment",
        )),
    })
}
