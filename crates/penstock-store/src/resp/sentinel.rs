//! Sentinel: which server is the master now.
//!
//! Asked whenever a connection is opened. A failover breaks the connections to the old master
//! (Sentinel itself closes them when it makes a replica of it), so the next ones go to the new.

use std::time::Instant;

use super::address::{Address, Endpoint};
use super::command::Commands;
use super::connection::Connection;
use super::failure::Failure;
use super::parser::Reply;
use super::socket::Resolver;
use super::tls::Tls;
use crate::ErrorKind;

/// Who to ask, how, and by when.
pub(super) struct Question<'q> {
    pub(super) address: &'q Address,
    pub(super) tls: Option<&'q Tls>,
    pub(super) client_name: &'q str,
    pub(super) resolver: &'q Resolver,
    pub(super) deadline: Instant,
}

impl Question<'_> {
    /// The server that a connection goes to: the address's own, or the master that the first of
    /// its sentinels names that answers.
    pub(super) fn server(&self) -> Result<Address, Failure> {
        let Endpoint::Sentinel { sentinels, master } = &self.address.endpoint else {
            return Ok(self.address.clone());
        };
        let mut failure = Failure::new(ErrorKind::Config, "no sentinel is named");
        for (i, (host, port)) in sentinels.iter().enumerate() {
            // One that swallows packets must leave time for those after it.
            let left = self.deadline.saturating_duration_since(Instant::now());
            let until = Instant::now() + left / (sentinels.len() - i) as u32;
            let sentinel = self.address.sentinel(host.clone(), *port);
            match self.ask(&sentinel, master, until) {
                Ok((host, port)) => return Ok(self.address.server(host, port)),
                Err(refused) => failure = refused,
            }
        }
        Err(failure)
    }

    fn ask(
        &self,
        sentinel: &Address,
        master: &str,
        deadline: Instant,
    ) -> Result<(String, u16), Failure> {
        let mut connection = Connection::open(
            sentinel,
            self.tls,
            self.client_name,
            self.resolver,
            deadline,
        )?;
        let mut commands = Commands::default();
        commands.push(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", master]);
        let mut found = None;
        connection.call(&commands, deadline, |_, reply| {
            found = Some(location(reply, sentinel, master)?);
            Ok(())
        })?;
        found.ok_or_else(|| Failure::protocol("the sentinel did not answer"))
    }
}

fn location(reply: Reply, sentinel: &Address, master: &str) -> Result<(String, u16), Failure> {
    let nonsense = || Failure::protocol("a sentinel answered with nonsense");
    match reply {
        Reply::Error(line) => Err(Failure::refused(&line)),
        Reply::Nil => Err(Failure::new(
            ErrorKind::Config,
            format!("{sentinel} knows no master named {master:?}"),
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

/// Refuses a server that is no master: one that sentinels have just demoted, or not promoted yet.
pub(super) fn check_master(connection: &mut Connection, deadline: Instant) -> Result<(), Failure> {
    let mut commands = Commands::default();
    commands.push(&["ROLE"]);
    connection.call(&commands, deadline, |_, reply| match reply {
        // A user may be forbidden to ask; a replica then refuses every put by itself.
        Reply::Error(line) if line.starts_with(b"NOPERM") => Ok(()),
        Reply::Error(line) => Err(Failure::refused(&line)),
        Reply::Array(parts) if parts.first() == Some(&Reply::String(b"master".to_vec())) => Ok(()),
        _ => Err(Failure::new(
            ErrorKind::Unavailable,
            "the server that Sentinel names is not a master at the moment",
        )),
    })
}
