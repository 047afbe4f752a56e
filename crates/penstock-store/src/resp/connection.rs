//! Connections: a socket, the bytes that were received on it and not used yet, and commands whose
//! replies are small.

use std::io::{IoSlice, IoSliceMut};
use std::ops::ControlFlow;
use std::time::Instant;

use penstock_contract::ErrorKind;
use rustix::event::{PollFd, PollFlags};

use super::address::{Address, PASSWORD_VARIABLE};
use super::command::Commands;
use super::failure::Failure;
use super::parser::{MAX_LINE, Reply, ReplyReader};
use super::readiness::wait;
use super::resolver::Resolver;
use super::socket::Socket;
use super::tls::Tls;

/// Bytes of a connection's receive buffer. Replies' heads and small replies go through it.
const BUFFER_BYTES: usize = 16 << 10;
// Otherwise a line could fill the buffer while it is neither complete nor too long.
const _: () = assert!(BUFFER_BYTES > MAX_LINE);

/// An authenticated connection to the pool's database.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) received: Received,
    /// Every request on it was answered, and nothing else was received. While this is false, the
    /// connection must only be used for the work under way.
    pub(super) settled: bool,
    /// Some bytes have come since [`Self::begin`].
    pub(super) heard: bool,
    /// The server has turned out to be a replica: another server may be the master now.
    pub(super) demoted: bool,
    /// The connection has lain idle since its last use, so the server may have closed it meanwhile.
    reused: bool,
}

impl Connection {
    /// Connects, authenticates and selects the database.
    pub(super) fn open(
        address: &Address,
        tls: Option<&Tls>,
        name: &str,
        resolver: &Resolver,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let socket = Socket::connect(&address.endpoint, tls, resolver, deadline)?;
        let mut connection = Self {
            socket,
            received: Received::default(),
            settled: true,
            heard: false,
            demoted: false,
            reused: false,
        };
        connection.shake_hands(address, name, deadline)?;
        Ok(connection)
    }

    /// Prepares for an operation after the connection lay idle; false if it is unfit.
    pub(super) fn reuse(&mut self) -> bool {
        self.reused = true;
        self.heard = false;
        self.settled && self.received.bytes().is_empty() && self.socket.is_quiet()
    }

    /// Whether this failure may only mean that the server closed the connection while it lay idle.
    /// Then nothing has been answered on it, and everything may be sent again on another
    /// connection.
    pub(super) fn was_stale(&self, failure: &Failure) -> bool {
        self.reused && !self.heard && failure.kind == ErrorKind::Unreachable
    }

    /// Sends commands and calls `visit` with each reply, in order. If `visit` makes a refusal of a
    /// reply, this is the call's outcome. The other replies are read all the same, and the
    /// connection stays settled.
    pub(super) fn call(
        &mut self,
        commands: &Commands,
        deadline: Instant,
        mut visit: impl FnMut(usize, Reply) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut refused: Option<Failure> = None;
        let outcome = self.exchange(commands, deadline, |i, reply| match visit(i, reply) {
            Err(failure) if failure.is_refusal => {
                refused.get_or_insert(failure);
                Ok(())
            }
            outcome => outcome,
        });
        match refused {
            // A server that refuses may close the connection after it: the refusal says why.
            Some(refused) => {
                self.demoted |= refused.is_demoted;
                Err(refused)
            }
            None => outcome,
        }
    }

    fn exchange(
        &mut self,
        commands: &Commands,
        deadline: Instant,
        mut visit: impl FnMut(usize, Reply) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut exchange = Exchange::new(commands);
        loop {
            match exchange.step(self, &mut visit)? {
                Progress::Done => return Ok(()),
                Progress::Moved if Instant::now() >= deadline => {
                    return Err(Failure::timed_out("reading the server's reply"));
                }
                Progress::Moved => {}
                Progress::Waiting => {
                    let mut polled = [exchange.polled(self)];
                    wait(&mut polled, deadline, "waiting for the server's reply")?;
                }
            }
        }
    }

    /// Handles the replies that have been received. Returns whether anything was received.
    fn hear(
        &mut self,
        reader: &mut ReplyReader,
        mut visit: impl FnMut(Reply) -> Result<ControlFlow<()>, Failure>,
    ) -> Result<bool, Failure> {
        let mut heard = false;
        loop {
            while !self.received.bytes().is_empty() {
                let (taken, reply) = reader
                    .feed(self.received.bytes())
                    .map_err(|violation| Failure::protocol(violation.to_string()))?;
                self.received.consume(taken);
                match reply.map(&mut visit).transpose()? {
                    Some(ControlFlow::Break(())) => return Ok(true),
                    Some(ControlFlow::Continue(())) => {}
                    // What is left is the beginning of a line.
                    None => break,
                }
            }
            // Receive only once: a peer that never stops talking must not keep us from the
            // deadline.
            if heard || self.fill()? == Came::Nothing {
                return Ok(heard);
            }
            heard = true;
        }
    }

    /// Receives into the buffer what is there now.
    pub(super) fn fill(&mut self) -> Result<Came, Failure> {
        let (came, bytes) = receive(
            &mut self.socket,
            &mut [IoSliceMut::new(self.received.space())],
        )?;
        self.heard |= bytes > 0;
        self.received.extend(bytes);
        Ok(came)
    }

    /// Called after sending failed: the server may have said why before it closed the connection.
    pub(super) fn last_words(&mut self, failure: Failure) -> Failure {
        match self.fill() {
            // Over TLS, this is how a server says why.
            Err(reason) if reason.kind != ErrorKind::Unreachable => return reason,
            // If nothing has come, the bytes below are none or too few for a reply.
            Ok(_) | Err(_) => {}
        }
        match ReplyReader::default().feed(self.received.bytes()) {
            Ok((_, Some(Reply::Error(line)))) => Failure::refused(&line),
            _ => failure,
        }
    }

    fn shake_hands(
        &mut self,
        address: &Address,
        name: &str,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (steps, commands) = greeting(address, name);
        self.call(&commands, deadline, |i, reply| {
            steps[i].heed(reply, address)
        })
    }
}

/// What a greeting consists of.
#[derive(Clone, Copy)]
enum Step {
    Authenticate,
    Select,
    ReadOnly,
    Name,
}

/// All that is said to a server before it is asked for anything, sent together.
fn greeting(address: &Address, name: &str) -> (Vec<Step>, Commands) {
    let mut steps = Vec::new();
    let mut commands = Commands::default();
    if authenticate(address, &mut commands) {
        steps.push(Step::Authenticate);
    }
    if address.database != 0 {
        steps.push(Step::Select);
        commands.push(&["SELECT", &address.database.to_string()]);
    }
    if address.is_replica {
        steps.push(Step::ReadOnly);
        commands.push(&["READONLY"]);
    }
    steps.push(Step::Name);
    commands.push(&["CLIENT", "SETNAME", name]);
    (steps, commands)
}

/// Says who we are, and which protocol we speak; returns whether there is anything to say.
fn authenticate(address: &Address, commands: &mut Commands) -> bool {
    let password = address.password.as_ref().map(|secret| secret.reveal());
    match (&address.user, password) {
        (None, None) if address.is_resp3 => commands.push(&["HELLO", "3"]),
        (user, password) if address.is_resp3 => {
            let user = user.as_deref().unwrap_or("default");
            commands.push(&["HELLO", "3", "AUTH", user, password.unwrap_or_default()]);
        }
        (None, None) => return false,
        (None, Some(password)) => commands.push(&["AUTH", password]),
        // The user may be one that needs no password.
        (Some(user), password) => commands.push(&["AUTH", user, password.unwrap_or_default()]),
    }
    true
}

impl Step {
    /// Acts on the server's reply to this step.
    fn heed(self, reply: Reply, address: &Address) -> Result<(), Failure> {
        match (self, reply) {
            (_, Reply::Status(_)) => Ok(()),
            (Self::Authenticate, Reply::Array(_)) if address.is_resp3 => Ok(()),
            (Self::Authenticate, Reply::Error(line))
                if line.starts_with(b"NOPROTO") || line.starts_with(b"ERR unknown command") =>
            {
                let message = "the server does not speak RESP3: leave protocol=3 out of the URL";
                Err(Failure::new(ErrorKind::Config, message))
            }
            (Self::Authenticate, Reply::Error(line)) => {
                let refused = Failure::refused(&line);
                match refused.kind {
                    ErrorKind::Unavailable => Err(refused),
                    // Use our own words: the server's could repeat what it was sent.
                    _ => {
                        let has_password = address.password.is_some();
                        Err(refused.reworded(ErrorKind::Denied, denial(has_password)))
                    }
                }
            }
            (Self::Select, Reply::Error(line)) => {
                let refused = Failure::refused(&line);
                match refused.kind {
                    ErrorKind::Protocol => {
                        let message = format!("the server has no database {}", address.database);
                        Err(refused.reworded(ErrorKind::Config, message))
                    }
                    _ => Err(refused),
                }
            }
            (Self::ReadOnly, Reply::Error(line)) => Err(Failure::refused(&line)),
            // The name only helps whoever looks at the server. But the reply to it also tells
            // whether we may be here at all.
            (Self::Name, Reply::Error(line)) => match (&line, Failure::refused(&line)) {
                (line, _) if line.starts_with(b"NOPERM") || line.starts_with(b"LOADING") => Ok(()),
                (_, refused) if refused.kind == ErrorKind::Protocol => Ok(()),
                (_, refused) => Err(refused),
            },
            _ => Err(Failure::protocol(
                "the server answered the greeting with nonsense",
            )),
        }
    }
}

/// Commands on their way over a connection, and their replies. Never waits.
#[derive(Debug)]
pub(super) struct Exchange<'c> {
    unsent: &'c [u8],
    asked: usize,
    answered: usize,
    reader: ReplyReader,
}

/// How far a step of an [`Exchange`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Every reply has come; the connection is settled.
    Done,
    Moved,
    Waiting,
}

impl<'c> Exchange<'c> {
    pub(super) fn new(commands: &'c Commands) -> Self {
        Self {
            unsent: commands.bytes(),
            asked: commands.count(),
            answered: 0,
            reader: ReplyReader::default(),
        }
    }

    /// Sends and receives what can be now, and calls `visit` with each reply, in order.
    pub(super) fn step(
        &mut self,
        connection: &mut Connection,
        visit: &mut impl FnMut(usize, Reply) -> Result<(), Failure>,
    ) -> Result<Progress, Failure> {
        connection.settled = false;
        let mut heard = false;
        // Take replies before sending more: so the server never has to hold back.
        if self.answered < self.asked {
            heard = connection.hear(&mut self.reader, |reply| {
                visit(self.answered, reply)?;
                self.answered += 1;
                Ok(if self.answered == self.asked {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                })
            })?;
        }
        if self.answered == self.asked {
            if !self.unsent.is_empty() || !connection.received.bytes().is_empty() {
                return Err(Failure::protocol(
                    "the server sent a reply that nobody asked for",
                ));
            }
            connection.settled = true;
            return Ok(Progress::Done);
        }
        let sent = if self.unsent.is_empty() {
            connection.socket.flush()
        } else {
            connection
                .socket
                .send(&[IoSlice::new(self.unsent)])
                .map(|sent| {
                    let sent = sent.unwrap_or(0);
                    self.unsent = &self.unsent[sent..];
                    sent > 0
                })
        };
        match sent {
            Ok(sent) if heard || sent => Ok(Progress::Moved),
            Ok(_) => Ok(Progress::Waiting),
            Err(failure) => Err(connection.last_words(failure)),
        }
    }

    /// What the exchange waits for.
    pub(super) fn polled<'s>(&self, connection: &'s Connection) -> PollFd<'s> {
        let sending = if self.unsent.is_empty() {
            PollFlags::empty()
        } else {
            PollFlags::OUT
        };
        connection.socket.polled(PollFlags::IN | sending, 1)
    }
}

/// How much of the given room a receive has filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    Nothing,
    /// All there was.
    Some,
    /// There may be more.
    Full,
}

/// Receives what is there now, and says how many bytes; the end of the stream is a failure.
pub(super) fn receive(
    socket: &mut Socket,
    slices: &mut [IoSliceMut<'_>],
) -> Result<(Came, usize), Failure> {
    let room: usize = slices.iter().map(|slice| slice.len()).sum();
    match socket.receive(slices)? {
        None => Ok((Came::Nothing, 0)),
        Some(0) => Err(Failure::closed()),
        Some(bytes) => Ok((if bytes < room { Came::Some } else { Came::Full }, bytes)),
    }
}

fn denial(with_password: bool) -> String {
    if with_password {
        "the server refused the user or the password".to_owned()
    } else {
        format!("the server refused the user without a password (is {PASSWORD_VARIABLE} set?)")
    }
}

/// Bytes received and not used yet.
#[derive(Debug)]
pub(super) struct Received {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Received {
    fn default() -> Self {
        Self {
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
        }
    }
}

impl Received {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        assert!(
            bytes <= self.end - self.start,
            "consumes what was not received"
        );
        self.start += bytes;
    }

    /// Where further bytes may be received. It is never empty while less than a line is held.
    pub(super) fn space(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.buffer[self.end..]
    }

    /// Counts bytes that were received into [`Self::space`].
    pub(super) fn extend(&mut self, bytes: usize) {
        assert!(
            bytes <= self.buffer.len() - self.end,
            "received more than there was space for"
        );
        self.end += bytes;
    }
}
