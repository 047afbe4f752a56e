//! One socket to a store's program: a request, then its reply.
//!
//! What the program sends is received by the thread whose request it answers, while that thread
//! waits. So nothing is ever written to memory that its owner has taken back. A reply that came too
//! late is received by whoever needs the link next, and thrown away.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::protocol::{REPLY_BYTES, Reply};
use crate::{Error, ErrorKind, readiness, slices};

/// Most slices in one system call.
const SLICES_AT_ONCE: usize = 64;

/// Why a request came to nothing.
#[derive(Debug)]
pub(super) enum Failure {
    /// The deadline passed. The link is good once the late reply has been thrown away.
    Late,
    /// The deadline passed before the whole request was sent. The program can make nothing of it.
    Stuck,
    /// The program went away.
    Gone,
    /// The program says something that the protocol does not allow.
    Strange,
    /// The store has failed, in due form.
    Refused(Error),
}

impl Failure {
    /// Whether the program is to be ended.
    pub(super) fn is_fatal(&self) -> bool {
        matches!(self, Self::Stuck | Self::Gone | Self::Strange)
    }

    pub(super) fn into_error(self) -> Error {
        let (kind, what) = match self {
            Self::Late => (ErrorKind::TimedOut, "the store's program does not answer"),
            Self::Stuck => (ErrorKind::TimedOut, "the store's program does not listen"),
            Self::Gone => (ErrorKind::Unreachable, "the store's program has gone"),
            Self::Strange => (ErrorKind::Protocol, "the store's program talks nonsense"),
            Self::Refused(error) => return error,
        };
        Error::new(kind, what)
    }
}

/// A socket to the program.
pub(super) struct Link {
    socket: OwnedFd,
    /// What is still to come of a reply that nobody waits for.
    owed: Option<Owed>,
}

#[derive(Clone, Copy)]
struct Owed {
    /// When it should have come.
    since: Instant,
    left: Left,
}

/// What is still to come of a reply.
#[derive(Clone, Copy)]
enum Left {
    /// All of it; of its head, so many bytes have come, which are in the array.
    Head(usize, [u8; REPLY_BYTES]),
    /// So many bytes after the head.
    Body(u64),
}

impl Link {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, owed: None }
    }

    /// Since when the program owes a reply, if it does.
    pub(super) fn owes_since(&self) -> Option<Instant> {
        self.owed.as_ref().map(|owed| owed.since)
    }

    /// Throws away what is still owed.
    pub(super) fn settle(&mut self, deadline: Instant) -> Result<(), Failure> {
        while let Some(owed) = self.owed {
            let mut waste = [0; 65_536];
            match owed.left {
                Left::Body(0) => self.owed = None,
                Left::Body(left) => {
                    let most = waste.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    self.receive(&mut waste[..most], deadline)?;
                }
                Left::Head(..) => {
                    self.head(deadline)?;
                }
            }
        }
        Ok(())
    }

    /// Sends a request: from now on, a reply is owed.
    pub(super) fn send(
        &mut self,
        request: &[IoSlice<'_>],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (mut sent, total) = (0, slices::len_of(request));
        while sent < total {
            let mut rest = slices::remaining(request, sent as usize);
            rest.truncate(SLICES_AT_ONCE);
            let mut no_control = SendAncillaryBuffer::default();
            let flags = SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(&self.socket, &rest, &mut no_control, flags) {
                Ok(some) => sent += some as u64,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match self.wait(PollFlags::OUT, deadline) {
                    Ok(()) => {}
                    // Nothing was sent: it is as if nobody had asked.
                    Err(Failure::Late) if sent == 0 => return Err(Failure::Late),
                    Err(Failure::Late) => return Err(Failure::Stuck),
                    Err(other) => return Err(other),
                },
                Err(_) => return Err(Failure::Gone),
            }
        }
        self.owed = Some(Owed {
            since: deadline,
            left: Left::Head(0, [0; REPLY_BYTES]),
        });
        Ok(())
    }

    /// Receives a reply's head.
    pub(super) fn head(&mut self, deadline: Instant) -> Result<Reply, Failure> {
        loop {
            let Some(Owed {
                left: Left::Head(have, mut head),
                since,
            }) = self.owed
            else {
                return Err(Failure::Strange);
            };
            if have == REPLY_BYTES {
                let reply = Reply::parse(&head).ok_or(Failure::Strange)?;
                let left = Left::Body(reply.bytes);
                self.owed = Some(Owed { since, left });
                return Ok(reply);
            }
            let some = self.some(&mut [IoSliceMut::new(&mut head[have..])], deadline)?;
            let left = Left::Head(have + some, head);
            self.owed = Some(Owed { since, left });
        }
    }

    /// Receives so much of a reply's body.
    pub(super) fn receive(&mut self, into: &mut [u8], deadline: Instant) -> Result<(), Failure> {
        let bytes = into.len() as u64;
        self.receive_into(&mut [IoSliceMut::new(into)], bytes, deadline)
    }

    /// Receives so much of a reply's body into slices, from their start.
    pub(super) fn receive_into(
        &mut self,
        into: &mut [IoSliceMut<'_>],
        bytes: u64,
        deadline: Instant,
    ) -> Result<(), Failure> {
        if bytes > slices::room_of(into) {
            return Err(Failure::Strange);
        }
        let mut have = 0;
        while have < bytes {
            let some = self.some(&mut window(into, have, bytes - have), deadline)? as u64;
            have += some;
            let Some(Owed {
                left: Left::Body(left),
                ..
            }) = &mut self.owed
            else {
                return Err(Failure::Strange);
            };
            *left = left.checked_sub(some).ok_or(Failure::Strange)?;
        }
        Ok(())
    }

    /// The whole reply was received. If there is more of it, the program is not to be trusted.
    pub(super) fn done(&mut self) -> Result<(), Failure> {
        match self.owed.take() {
            Some(Owed {
                left: Left::Body(0),
                ..
            }) => Ok(()),
            _ => Err(Failure::Strange),
        }
    }

    fn some(&self, into: &mut [IoSliceMut<'_>], deadline: Instant) -> Result<usize, Failure> {
        loop {
            match rustix::io::readv(&self.socket, into) {
                Ok(0) => return Err(Failure::Gone),
                Ok(some) => return Ok(some),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(_) => return Err(Failure::Gone),
            }
        }
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> Result<(), Failure> {
        match readiness::wait(&mut [PollFd::new(&self.socket, flags)], deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::Late),
            Err(_) => Err(Failure::Gone),
        }
    }
}

/// Slices without their first `done` bytes, and no more than `most` bytes of them.
fn window<'a>(
    slices: &'a mut [IoSliceMut<'_>],
    mut done: u64,
    mut most: u64,
) -> Vec<IoSliceMut<'a>> {
    let mut window = Vec::with_capacity(slices.len().min(SLICES_AT_ONCE));
    for slice in slices {
        if most == 0 || window.len() == SLICES_AT_ONCE {
            break;
        }
        let skip = done.min(slice.len() as u64);
        done -= skip;
        let some = most.min(slice.len() as u64 - skip);
        most -= some;
        if some > 0 {
            window.push(IoSliceMut::new(
                &mut slice[skip as usize..(skip + some) as usize],
            ));
        }
    }
    window
}
