//! Pipelines: each moves one connection's share of a batch of values.
//!
//! Values go straight between the caller's slices and the socket. A pipeline sends requests ahead
//! of the replies, within a window. It never waits: [`Pipeline::step`] does what can be done now.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use penstock_contract::{ErrorKind, slices};
use rustix::event::{PollFd, PollFlags};

use super::connection::{Came, Connection, Received, receive};
use super::failure::Failure;
use super::parser::{Head, MAX_STRING, Violation, head};
use super::pool::Lent;

/// Most slices in one system call.
const MOST_SLICES: usize = 64;
/// Most bytes received in one system call. More at once is slower, because the server then waits
/// for the space that we empty.
const RECEIVE_BYTES: u64 = 128 << 10;
/// If this many bytes of a value are missing, it is worth waking up only when they have come.
const WORTH_WAKING: u64 = RECEIVE_BYTES;
/// Text of requests gathered for one system call, in bytes.
const GATHERED_TEXT: usize = 8 << 10;

/// A request's reply, as far as the pipeline understands it.
#[derive(Debug)]
pub(super) enum Answer {
    /// The server has taken the value.
    Taken,
    /// The value, of this many bytes, is in the destination.
    Value(u64),
    /// The value, of this many bytes, is larger than the destination.
    TooLarge(u64),
    /// The server has no value.
    Nothing,
}

/// Requests of one kind, by index.
pub(super) trait Batch {
    /// Appends a request's text: all of it, or if it carries a value, all up to the value.
    fn encode(&self, index: usize, text: &mut Vec<u8>);
    /// Whether the text begins with a command of its own that is answered by OK.
    fn has_prelude(&self, _index: usize) -> bool {
        false
    }
    /// The value that a request carries.
    fn carries(&self, index: usize) -> Option<&[IoSlice<'_>]>;
    /// The bytes that the destination holds, if the reply may be a value.
    fn capacity(&self, index: usize) -> Option<u64>;
    /// The destination from byte `from` on, at most `most` bytes of it, in few slices.
    fn destination(&mut self, index: usize, from: u64, most: u64) -> Vec<IoSliceMut<'_>>;
    /// Bytes of value that a request puts in flight, either way.
    fn weight(&self, index: usize) -> u64;
    /// Takes a request's outcome.
    fn finish(&mut self, index: usize, outcome: Result<Answer, Failure>);
}

/// Requests that no pipeline has begun, the next one first.
pub(super) type Queue = VecDeque<usize>;

/// How much a pipeline may have in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Requests that are allowed whatever their size.
    pub(super) least: usize,
    /// Bytes of values up to which more requests than `least` are allowed.
    pub(super) bytes: u64,
    /// Most requests, however small.
    pub(super) most: usize,
}

/// What is being sent: text, then a value and CR LF if there is one.
#[derive(Debug, Default)]
struct Outgoing {
    text: Vec<u8>,
    value_of: Option<usize>,
    bytes: u64,
    sent: u64,
}

/// Where the pipeline is in the reply to the oldest request in flight.
#[derive(Clone, Copy, Debug)]
enum Incoming {
    /// In the reply to the prelude, if the request has one.
    Prelude,
    Head,
    /// `at` of `bytes` have gone to the destination.
    Value {
        at: u64,
        bytes: u64,
    },
    /// A value that is too large: `left` of its `bytes` are still to be thrown away.
    Discard {
        left: u64,
        bytes: u64,
    },
    /// The CR LF after a value.
    End(u64, Fit),
}

#[derive(Clone, Copy, Debug)]
enum Fit {
    Fits,
    TooLarge,
}

/// One connection and what is in flight on it.
#[derive(Debug)]
pub(super) struct Pipeline<'p> {
    connection: Lent<'p>,
    window: Window,
    outgoing: Outgoing,
    incoming: Incoming,
    /// Requests whose sending has begun and whose reply has not been read whole, oldest first.
    in_flight: VecDeque<usize>,
    weight: u64,
    /// What the last attempt or the last poll said about sending and receiving.
    may_send: bool,
    may_receive: bool,
}

impl<'p> Pipeline<'p> {
    pub(super) fn new(mut connection: Lent<'p>, window: Window) -> Self {
        connection.settled = false;
        Self {
            connection,
            window,
            outgoing: Outgoing::default(),
            incoming: Incoming::Prelude,
            in_flight: VecDeque::new(),
            weight: 0,
            may_send: true,
            may_receive: false,
        }
    }

    /// Sends and receives once each, if that is possible now; returns whether anything moved.
    pub(super) fn step<B: Batch>(
        &mut self,
        batch: &mut B,
        queue: &mut Queue,
    ) -> Result<bool, Failure> {
        let sent = self.send(batch, queue)?;
        let received = self.receive(batch)?;
        Ok(sent || received)
    }

    /// Whether nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// What the pipeline waits for.
    pub(super) fn polled(&self) -> PollFd<'_> {
        let sending = if self.outgoing.bytes > 0 || self.connection.socket.is_flushing() {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        let least = match self.incoming {
            Incoming::Value { at, bytes } => (bytes - at).clamp(1, WORTH_WAKING) as u32,
            _ => 1,
        };
        self.connection
            .socket
            .polled(PollFlags::IN | sending, least)
    }

    /// Tells the pipeline what a poll of [`Self::polled`] returned.
    pub(super) fn woken(&mut self, events: PollFlags) {
        self.may_send |= events.intersects(PollFlags::OUT | PollFlags::ERR | PollFlags::HUP);
        self.may_receive |= events.intersects(PollFlags::IN | PollFlags::ERR | PollFlags::HUP);
    }

    /// Ends the pipeline; its connection is kept if nothing is in flight.
    pub(super) fn finish(mut self) {
        self.connection.settled = self.in_flight.is_empty();
    }

    /// Ends the pipeline after a failure. Either all requests in flight go back into the queue, and
    /// this returns true; or they all fail.
    pub(super) fn fail<B: Batch>(
        self,
        failure: &Failure,
        batch: &mut B,
        queue: &mut Queue,
        may_requeue: bool,
    ) -> bool {
        let requeue = may_requeue && self.connection.was_stale(failure);
        if requeue {
            self.in_flight
                .iter()
                .rev()
                .for_each(|&index| queue.push_front(index));
        } else {
            self.in_flight
                .iter()
                .for_each(|&index| batch.finish(index, Err(failure.clone())));
        }
        requeue
    }

    fn send<B: Batch>(&mut self, batch: &mut B, queue: &mut Queue) -> Result<bool, Failure> {
        if self.outgoing.bytes == 0 {
            self.gather(batch, queue);
        }
        if !self.may_send {
            return Ok(false);
        }
        if self.outgoing.bytes == 0 {
            let flushed = self.connection.socket.flush();
            self.may_send = !self.connection.socket.is_flushing();
            return flushed.map_err(|failure| self.connection.last_words(failure));
        }
        let outgoing = &mut self.outgoing;
        let value = outgoing
            .value_of
            .and_then(|index| batch.carries(index))
            .unwrap_or_default();
        let end: &[u8] = if outgoing.value_of.is_some() {
            b"\r\n"
        } else {
            b""
        };
        let parts = [outgoing.text.as_slice()]
            .into_iter()
            .chain(value.iter().map(|slice| &**slice))
            .chain([end]);
        let slices: Vec<_> = from_byte(parts, outgoing.sent).take(MOST_SLICES).collect();
        match self.connection.socket.send(&slices) {
            Ok(Some(bytes)) => {
                outgoing.sent += bytes as u64;
                // A full socket buffer takes only a part: sending again at once would be in vain.
                let asked: usize = slices.iter().map(|slice| slice.len()).sum();
                self.may_send = bytes == asked;
                if outgoing.sent == outgoing.bytes {
                    outgoing.text.clear();
                    *outgoing = Outgoing {
                        text: std::mem::take(&mut outgoing.text),
                        ..Default::default()
                    };
                }
                Ok(true)
            }
            Ok(None) => {
                self.may_send = false;
                Ok(false)
            }
            Err(failure) => Err(self.connection.last_words(failure)),
        }
    }

    /// Begins as many requests as the window allows and as one system call can send.
    fn gather<B: Batch>(&mut self, batch: &mut B, queue: &mut Queue) {
        let outgoing = &mut self.outgoing;
        while self.in_flight.len() < self.window.most
            && (self.weight < self.window.bytes || self.in_flight.len() < self.window.least)
            && outgoing.text.len() < GATHERED_TEXT
            && outgoing.value_of.is_none()
        {
            let Some(index) = queue.pop_front() else {
                break;
            };
            if batch.carries(index).is_some() && batch.weight(index) > MAX_STRING {
                // The server would refuse it only by closing the connection, which all other
                // requests use.
                let message = format!("a value has {MAX_STRING} bytes at most");
                batch.finish(index, Err(Failure::new(ErrorKind::Config, message)));
                continue;
            }
            batch.encode(index, &mut outgoing.text);
            self.in_flight.push_back(index);
            self.weight += batch.weight(index);
            if let Some(value) = batch.carries(index) {
                outgoing.value_of = Some(index);
                outgoing.bytes += 2 + slices::len_of(value);
            }
        }
        outgoing.bytes += outgoing.text.len() as u64;
    }

    fn receive<B: Batch>(&mut self, batch: &mut B) -> Result<bool, Failure> {
        if !self.may_receive {
            return Ok(false);
        }
        let came = match (self.incoming, self.in_flight.front()) {
            (Incoming::Value { at, bytes }, Some(&index)) => {
                let (came, of_value) =
                    receive_value(&mut self.connection, batch, index, at, bytes)?;
                self.incoming = Incoming::Value {
                    at: at + of_value,
                    bytes,
                };
                came
            }
            _ => self.connection.fill()?,
        };
        // If less came than there was room for, nothing is left: receiving again at once would be
        // in vain.
        self.may_receive = came == Came::Full;
        while self.understand(batch)? {}
        Ok(came != Came::Nothing)
    }

    /// Makes something of the received bytes. False if there are too few of them.
    fn understand<B: Batch>(&mut self, batch: &mut B) -> Result<bool, Failure> {
        let received = &mut self.connection.received;
        let Some(&index) = self.in_flight.front() else {
            return if received.bytes().is_empty() {
                Ok(false)
            } else {
                Err(Failure::protocol(
                    "the server sent a reply that nobody asked for",
                ))
            };
        };
        let next = match self.incoming {
            Incoming::Prelude if !batch.has_prelude(index) => Next::Goes(Incoming::Head),
            Incoming::Prelude => prelude(received)?,
            Incoming::Head => answer_head(received, batch.capacity(index))?,
            Incoming::Value { at, bytes } if at < bytes => {
                take_value(received, batch, index, at, bytes)
            }
            Incoming::Value { bytes, .. } => Next::Goes(Incoming::End(bytes, Fit::Fits)),
            Incoming::Discard { left: 0, bytes } => Next::Goes(Incoming::End(bytes, Fit::TooLarge)),
            Incoming::Discard { left, bytes } => discard(received, left, bytes),
            Incoming::End(bytes, fit) => end(received, bytes, fit)?,
        };
        match next {
            Next::TooFew => return Ok(false),
            Next::Goes(incoming) => self.incoming = incoming,
            Next::Answered(answer) => self.answered(batch, index, answer)?,
        }
        Ok(true)
    }

    /// The reply to the oldest request in flight has been read whole.
    fn answered<B: Batch>(
        &mut self,
        batch: &mut B,
        index: usize,
        answer: Result<Answer, Failure>,
    ) -> Result<(), Failure> {
        self.incoming = Incoming::Prelude;
        if let Err(refused) = &answer {
            self.connection.demoted |= refused.is_demoted;
        }
        // The last request that was begun may not be sent whole yet.
        let early = self.in_flight.len() == 1 && self.outgoing.bytes > 0;
        if early {
            return Err(match answer {
                Err(refused) => refused,
                Ok(_) => Failure::protocol("the server answered before it was asked"),
            });
        }
        self.in_flight.pop_front();
        self.weight -= batch.weight(index);
        batch.finish(index, answer);
        Ok(())
    }
}

/// What becomes of the oldest request in flight.
enum Next {
    /// More bytes must come first.
    TooFew,
    /// The request's reply goes on.
    Goes(Incoming),
    /// The request's reply has been read whole.
    Answered(Result<Answer, Failure>),
}

/// Reads the beginning of a reply. `None` if not all of the beginning has come.
fn read_head(received: &Received) -> Result<Option<(Head<'_>, usize)>, Failure> {
    head(received.bytes()).map_err(|violation: Violation| Failure::protocol(violation.to_string()))
}

fn of_another_kind() -> Failure {
    Failure::protocol("the server sent a reply of another kind")
}

fn prelude(received: &mut Received) -> Result<Next, Failure> {
    let Some((head, length)) = read_head(received)? else {
        return Ok(Next::TooFew);
    };
    // If the prelude is refused, the request's own reply says what that led to.
    if !matches!(head, Head::Status(_) | Head::Error(_)) {
        return Err(of_another_kind());
    }
    received.consume(length);
    Ok(Next::Goes(Incoming::Head))
}

/// `capacity` is that of the destination, if the reply may be a value.
fn answer_head(received: &mut Received, capacity: Option<u64>) -> Result<Next, Failure> {
    let Some((head, length)) = read_head(received)? else {
        return Ok(Next::TooFew);
    };
    let next = match (head, capacity) {
        (Head::Status(b"OK"), None) => Next::Answered(Ok(Answer::Taken)),
        (Head::Nil, Some(_)) => Next::Answered(Ok(Answer::Nothing)),
        (Head::Error(line), _) => Next::Answered(Err(Failure::refused(line))),
        (Head::String(bytes), Some(capacity)) if bytes <= capacity => {
            Next::Goes(Incoming::Value { at: 0, bytes })
        }
        (Head::String(bytes), Some(_)) => Next::Goes(Incoming::Discard { left: bytes, bytes }),
        _ => return Err(of_another_kind()),
    };
    received.consume(length);
    Ok(next)
}

/// Copies what has come of a value to its destination.
fn take_value<B: Batch>(
    received: &mut Received,
    batch: &mut B,
    index: usize,
    at: u64,
    bytes: u64,
) -> Next {
    let here = received.bytes();
    if here.is_empty() {
        return Next::TooFew;
    }
    let take = (bytes - at).min(here.len() as u64);
    let mut taken = 0;
    for slice in &mut batch.destination(index, at, take) {
        let len = slice.len();
        slice.copy_from_slice(&here[taken..taken + len]);
        taken += len;
    }
    received.consume(taken);
    let at = at + taken as u64;
    Next::Goes(Incoming::Value { at, bytes })
}

fn discard(received: &mut Received, left: u64, bytes: u64) -> Next {
    let take = left.min(received.bytes().len() as u64);
    if take == 0 {
        return Next::TooFew;
    }
    received.consume(take as usize);
    let left = left - take;
    Next::Goes(Incoming::Discard { left, bytes })
}

fn end(received: &mut Received, bytes: u64, fit: Fit) -> Result<Next, Failure> {
    match received.bytes() {
        [b'\r', b'\n', ..] => received.consume(2),
        [] | [b'\r'] => return Ok(Next::TooFew),
        _ => return Err(Failure::protocol("a value does not end in CR LF")),
    }
    Ok(Next::Answered(Ok(match fit {
        Fit::Fits => Answer::Value(bytes),
        Fit::TooLarge => Answer::TooLarge(bytes),
    })))
}

/// Receives into the missing part of a value. Receives into the connection's buffer too, if the
/// rest of the value leaves room. Also returns how many bytes the value got.
fn receive_value<B: Batch>(
    connection: &mut Connection,
    batch: &mut B,
    index: usize,
    at: u64,
    bytes: u64,
) -> Result<(Came, u64), Failure> {
    let missing = bytes - at;
    let mut slices = batch.destination(index, at, missing.min(RECEIVE_BYTES));
    slices.truncate(MOST_SLICES);
    let asked: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
    if asked == missing {
        // The head of the next reply comes with the end of this value.
        slices.push(IoSliceMut::new(connection.received.space()));
    }
    let (came, bytes) = receive(&mut connection.socket, &mut slices)?;
    connection.heard |= bytes > 0;
    let of_value = asked.min(bytes as u64);
    connection.received.extend(bytes - of_value as usize);
    Ok((came, of_value))
}

/// The parts' concatenation from one of its bytes on, without empty slices.
fn from_byte<'s>(
    parts: impl Iterator<Item = &'s [u8]>,
    mut from: u64,
) -> impl Iterator<Item = IoSlice<'s>> {
    parts.filter_map(move |part| {
        let skip = from.min(part.len() as u64);
        from -= skip;
        let rest = &part[skip as usize..];
        (!rest.is_empty()).then(|| IoSlice::new(rest))
    })
}
