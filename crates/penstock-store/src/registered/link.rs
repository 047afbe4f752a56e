//! One socket to a store's program: a request, then its reply.
//!
//! What the program sends is received by the thread whose request it answers, while that thread
//! waits. So nothing is ever written to memory that its owner has taken back. A reply that came too
//! late is received by whoever needs the link next, or by the program's keeper, and thrown away.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use penstock_contract::{Error, ErrorKind, slices};
use penstock_value::interrupt;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::protocol::{REPLY_BYTES, Reply};
use crate::readiness;

/// Most slices in one system call.
const SLICES_AT_ONCE: usize = 64;
/// How long a program may owe a reply, and send nothing of it, before it counts as hanging.
pub(super) const GRACE: Duration = Duration::from_secs(2);
/// Most pieces of a late reply that are received in one look: whoever looks has other things to do.
const PIECES_AT_ONCE: usize = 16;

/// Why a request came to nothing.
#[derive(Debug)]
pub(super) enum Failure {
    /// The deadline passed. The link is good once the late reply has been thrown away.
    Late,
    /// The deadline passed before the whole request was sent. The program can make nothing of it.
    Stuck,
    /// The program has owed a reply for longer than [`GRACE`].
    Hung,
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
        matches!(self, Self::Stuck | Self::Hung | Self::Gone | Self::Strange)
    }

    pub(super) fn into_error(self) -> Error {
        let (kind, what) = match self {
            Self::Late => (ErrorKind::TimedOut, "the store's program does not answer"),
            Self::Stuck => (ErrorKind::TimedOut, "the store's program does not listen"),
            Self::Hung => (
                ErrorKind::Unreachable,
                "the store's program did not answer, and is started again",
            ),
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
    /// When the reply should have come, or when the last of it came, if that is later.
    since: Instant,
    left: Left,
}

/// What is still to come of a reply.
#[derive(Clone, Copy)]
enum Left {
    /// The whole reply; of its head, so many bytes have come, which are in the array.
    Head(usize, [u8; REPLY_BYTES]),
    /// The rest of the reply, so many bytes after the head.
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

    /// When the program will count as hanging, if it owes a reply and sends nothing of it.
    pub(super) fn hangs_at(&self) -> Option<Instant> {
        self.owes_since().map(|since| since + GRACE)
    }

    /// Throws away what is still owed. What has come already is received first, however old the debt
    /// is: nobody may have looked for long.
    pub(super) fn settle(&mut self, deadline: Instant) -> Result<(), Failure> {
        while let Some(hangs_at) = self.hangs_at() {
            let looked = Instant::now();
            match self.throw_away(deadline.min(hangs_at)) {
                Err(Failure::Late) => self.may_go_on(deadline, looked)?,
                other => other?,
            }
        }
        Ok(())
    }

    /// Throws away what has come of what is owed, without waiting.
    pub(super) fn look(&mut self) -> Result<(), Failure> {
        for _ in 0..PIECES_AT_ONCE {
            if self.owed.is_none() {
                break;
            }
            let now = Instant::now();
            match self.throw_away(now) {
                Err(Failure::Late) => match self.may_go_on(now, now) {
                    Err(Failure::Late) => break,
                    other => other?,
                },
                other => other?,
            }
        }
        Ok(())
    }

    /// Whether there is a point in waiting for more, if nothing had come by the moment `looked`. What
    /// comes after that moment is not seen yet, so no later one decides: this thread may have stood
    /// still meanwhile.
    fn may_go_on(&self, deadline: Instant, looked: Instant) -> Result<(), Failure> {
        match self.hangs_at() {
            Some(hangs_at) if hangs_at <= looked => Err(Failure::Hung),
            _ if deadline <= looked || interrupt::is_interrupted() => Err(Failure::Late),
            _ => Ok(()),
        }
    }

    /// Throws away one piece of what is owed.
    fn throw_away(&mut self, deadline: Instant) -> Result<(), Failure> {
        let mut waste = [0; 65_536];
        match self.owed.map(|owed| owed.left) {
            None | Some(Left::Body(0)) => self.owed = None,
            Some(Left::Body(left)) => {
                let most = waste.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                self.receive(&mut waste[..most], deadline)?;
            }
            Some(Left::Head(..)) => {
                self.head(deadline)?;
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
            self.owed = Some(Owed {
                since: since.max(Instant::now()),
                left: Left::Head(have + some, head),
            });
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
                since,
            }) = &mut self.owed
            else {
                return Err(Failure::Strange);
            };
            *since = (*since).max(Instant::now());
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

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    /// A link that has owed a reply for so long, and the program's end of it.
    fn owing(since: Duration) -> (Link, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let mut link = Link::new(ours);
        link.send(&[], Instant::now() - since).unwrap();
        (link, theirs)
    }

    /// The head of a reply with so many bytes after it.
    fn head(bytes: u64) -> [u8; REPLY_BYTES] {
        let mut head = [0; REPLY_BYTES];
        head[8..].copy_from_slice(&bytes.to_le_bytes());
        head
    }

    #[test]
    fn a_reply_that_has_come_is_no_sign_of_a_hanging_program_however_old_it_is() {
        let long = GRACE * 100;
        for settle in [|link: &mut Link| link.settle(Instant::now()), Link::look] {
            let (mut link, program) = owing(long);
            rustix::io::write(&program, &head(3)).unwrap();
            rustix::io::write(&program, b"yes").unwrap();
            settle(&mut link).unwrap();
            assert!(link.owes_since().is_none());
        }
    }

    #[test]
    fn a_program_that_sends_something_gets_time_for_the_rest() {
        let (mut link, program) = owing(GRACE * 100);
        rustix::io::write(&program, &head(3)).unwrap();
        let before = Instant::now();
        link.look().unwrap();
        let hangs_at = link.hangs_at().unwrap();
        assert!(hangs_at >= before + GRACE);
        rustix::io::write(&program, b"y").unwrap();
        link.look().unwrap();
        assert!(link.hangs_at().unwrap() > hangs_at);
        rustix::io::write(&program, b"es").unwrap();
        link.look().unwrap();
        assert!(link.owes_since().is_none());
    }

    #[test]
    fn a_program_is_judged_by_what_was_seen_however_long_its_caller_stood_still() {
        // By now its time has been over for long.
        let (link, _program) = owing(GRACE * 100);
        let hangs_at = link.hangs_at().unwrap();
        let before = hangs_at - Duration::from_nanos(1);
        assert!(link.may_go_on(hangs_at, before).is_ok());
        assert!(matches!(link.may_go_on(before, before), Err(Failure::Late)));
        assert!(matches!(
            link.may_go_on(hangs_at, hangs_at),
            Err(Failure::Hung)
        ));
    }

    #[test]
    fn a_program_that_sends_nothing_hangs_once_its_time_is_over() {
        let (mut link, _program) = owing(GRACE);
        assert!(matches!(link.look(), Err(Failure::Hung)));
        // Nobody waits for longer than that, however much time the next request has.
        let (mut link, _program) = owing(GRACE - Duration::from_millis(100));
        let settled = link.settle(Instant::now() + GRACE * 1000);
        assert!(matches!(settled, Err(Failure::Hung)));
        // Nor does it hang before.
        let (mut link, _program) = owing(Duration::ZERO);
        link.send(&[], Instant::now() + GRACE * 1000).unwrap();
        link.look().unwrap();
        assert!(matches!(link.settle(Instant::now()), Err(Failure::Late)));
    }
}
