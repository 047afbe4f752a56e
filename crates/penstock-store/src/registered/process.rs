//! A store's program while it lives, from its start to its end, and the start of the next one.
//!
//! Each program has a thread here, its keeper, which starts it, waits for its end and buries it. The
//! kernel ends a program when the thread that started it ends, so the keeper lives as long as the
//! program does. The program is gone when this process is, however that ended.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use penstock_contract::{Capabilities, Error, ErrorKind, Result};
use penstock_threads::contain;
use penstock_value::interrupt;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType,
};
use rustix::process::{self, Pid, Signal, WaitId, WaitIdOptions};

use super::Secrets;
use super::link::{Failure, GRACE, Link};
use super::protocol::{Greeting, LONGEST_TEXT};
use crate::readiness;

/// How long a program may take from its start to its greeting.
const START: Duration = Duration::from_secs(30);
/// How often a program is started before its store counts as one that does not open.
const FIRST_TRIES: u32 = 3;
/// How long a program may take to end by itself when it is not needed any more.
const FAREWELL: Duration = Duration::from_secs(2);
/// The first pause between the end of a program and the start of the next, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));
/// A program that lived for so long has shown that it works: pauses begin anew.
const HEALTHY: Duration = Duration::from_secs(20);

/// A program that has greeted.
pub(super) struct Running {
    /// The process that started it: another one, a fork of it, leaves the program alone.
    owner: u32,
    control: OwnedFd,
    /// Counts links that came back with a reply owed: the keeper is to look after them.
    owing: OwnedFd,
    is_condemned: AtomicBool,
    pub(super) capabilities: Capabilities,
    pub(super) url: String,
    concurrency: usize,
    links: Mutex<Links>,
    returned: Condvar,
}

#[derive(Default)]
struct Links {
    idle: Vec<Link>,
    lent: usize,
    /// The program is not needed any more, or has gone: links are closed when nobody uses them.
    are_over: bool,
}

impl Links {
    /// Throws away what has come of late replies. Fails if the program is to be ended.
    fn look(&mut self) -> std::result::Result<(), Failure> {
        self.idle.iter_mut().try_for_each(Link::look)
    }
}

impl Running {
    fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Ends the program, without a farewell if it is there and of no use.
    fn end_for(&self, failure: &Failure) {
        // How one that has gone came to its end is told by its status: it is not ours to kill.
        if !matches!(failure, Failure::Gone) {
            self.is_condemned.store(true, Ordering::Release);
        }
        self.dismiss();
    }

    /// Tells the program that it is not needed any more. Its keeper sees to it that it ends.
    fn dismiss(&self) {
        if self.is_ours() {
            let mut links = self.links.lock();
            links.are_over = true;
            let closed = std::mem::take(&mut links.idle);
            drop(links);
            drop(closed);
            self.returned.notify_all();
            // If the program has gone already, there is nobody to tell.
            let _ = rustix::net::shutdown(&self.control, Shutdown::Both);
        }
    }

    /// Does something on a link that owes nothing.
    pub(super) fn on_link<T>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&mut Link) -> std::result::Result<T, Failure>,
    ) -> std::result::Result<T, Failure> {
        let mut link = self.lend(deadline)?;
        let done = link.settle(deadline).and_then(|()| work(&mut link));
        let is_good = match &done {
            Err(failure) if failure.is_fatal() => {
                self.end_for(failure);
                false
            }
            _ => true,
        };
        let owes = link.owes_since().is_some();
        let mut links = self.links.lock();
        links.lent -= 1;
        if is_good && !links.are_over {
            links.idle.push(link);
        }
        drop(links);
        self.returned.notify_one();
        if owes {
            // It can only be full, and then the keeper looks anyway.
            let _ = rustix::io::write(&self.owing, &1_u64.to_ne_bytes());
        }
        done
    }

    /// For the keeper: throws away replies that came too late, and ends the program if it hangs.
    /// Returns when to look again, if nothing happens before.
    fn look(&self) -> Option<Instant> {
        // What is counted is looked at below.
        let _ = rustix::io::read(&self.owing, &mut [0; 8]);
        let mut links = self.links.lock();
        if let Err(failure) = links.look() {
            drop(links);
            self.end_for(&failure);
            return None;
        }
        links.idle.iter().filter_map(Link::hangs_at).min()
    }

    fn lend(&self, deadline: Instant) -> std::result::Result<Link, Failure> {
        let mut links = self.links.lock();
        loop {
            if links.are_over {
                return Err(Failure::Gone);
            }
            if let Err(failure) = links.look() {
                drop(links);
                self.end_for(&failure);
                return Err(failure);
            }
            // The link that owes nothing, if there is one; else the one that has owed the least.
            links
                .idle
                .sort_by_key(|link| std::cmp::Reverse(link.owes_since()));
            if links
                .idle
                .last()
                .is_some_and(|link| link.owes_since().is_none())
                || links.idle.len() + links.lent == self.concurrency
            {
                if let Some(link) = links.idle.pop() {
                    links.lent += 1;
                    return Ok(link);
                }
            } else {
                let link = self.connect()?;
                links.lent += 1;
                return Ok(link);
            }
            if interrupt::wait_until(&self.returned, &mut links, deadline) {
                return Err(Failure::Late);
            }
        }
    }

    /// Hands the program a socket of its own for one more request at a time.
    fn connect(&self) -> std::result::Result<Link, Failure> {
        let (ours, theirs) = pair(SocketFlags::NONBLOCK).map_err(|_| Failure::Gone)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let theirs = [theirs.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&theirs));
        let message = [IoSlice::new(b"+")];
        rustix::net::sendmsg(&self.control, &message, &mut control, SendFlags::NOSIGNAL)
            .map_err(|_| Failure::Gone)?;
        Ok(Link::new(ours))
    }
}

/// Two ends of a socket; flags are for ours. The program's end waits when it receives.
fn pair(flags: SocketFlags) -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    if flags.contains(SocketFlags::NONBLOCK) {
        rustix::io::ioctl_fionbio(&ours, true)?;
    }
    Ok((ours, theirs))
}

/// A program that is started when it is needed.
pub(super) struct Program {
    shared: Arc<Shared>,
}

struct Shared {
    command: Vec<OsString>,
    url: String,
    secrets: Secrets,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    phase: Phase,
    /// Programs in a row that did not live for long.
    failures: u32,
    starts: u64,
    is_closed: bool,
}

/// Why no program runs, in a form that can be said more than once.
type Why = (ErrorKind, String);

enum Phase {
    /// Not before then, because of this.
    Down(Instant, Option<Why>),
    /// This process starts one. A fork of it has no keeper.
    Starting(u32),
    Up(Arc<Running>),
}

impl State {
    /// How long to wait with the next program after one that lived for so long.
    fn pause_after(&mut self, lived: Duration) -> Duration {
        if lived > HEALTHY {
            self.failures = 0;
        }
        let pause = PAUSES.0 * 2_u32.pow(self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        pause.min(PAUSES.1)
    }
}

impl Program {
    pub(super) fn new(command: &[OsString], url: &str, secrets: Secrets) -> Self {
        let state = State {
            phase: Phase::Down(Instant::now(), None),
            failures: 0,
            starts: 0,
            is_closed: false,
        };
        Self {
            shared: Arc::new(Shared {
                command: command.to_vec(),
                url: url.to_owned(),
                secrets,
                state: Mutex::new(state),
                changed: Condvar::new(),
            }),
        }
    }

    /// What the program must not repeat in a message.
    pub(super) fn secrets(&self) -> &Secrets {
        &self.shared.secrets
    }

    /// How often the program was started.
    pub(super) fn starts(&self) -> u64 {
        self.shared.state.lock().starts
    }

    /// The program, which is started if it does not run.
    pub(super) fn running(&self, deadline: Instant) -> Result<Arc<Running>> {
        let mut state = self.shared.state.lock();
        loop {
            match &state.phase {
                Phase::Up(running) if running.is_ours() => return Ok(Arc::clone(running)),
                Phase::Starting(owner) if *owner == std::process::id() => {}
                Phase::Up(_) | Phase::Starting(_) => {
                    // This process is a fork, and what runs or starts is its parent's.
                    state.phase = Phase::Down(Instant::now(), None);
                    continue;
                }
                Phase::Down(until, why) if Instant::now() < *until => {
                    let (kind, why) = why
                        .clone()
                        .unwrap_or((ErrorKind::Unreachable, String::new()));
                    return Err(Error::new(kind, why));
                }
                Phase::Down(..) => {
                    state.phase = Phase::Starting(std::process::id());
                    state.starts += 1;
                    let shared = Arc::clone(&self.shared);
                    thread::Builder::new()
                        .name("penstock-keeper".to_owned())
                        .spawn(move || shared.keep())
                        .map_err(|cause| {
                            state.phase = Phase::Down(Instant::now(), None);
                            Error::new(ErrorKind::Io, "a thread does not start").caused_by(cause)
                        })?;
                }
            }
            if interrupt::wait_until(&self.shared.changed, &mut state, deadline) {
                return Err(Error::new(
                    ErrorKind::TimedOut,
                    "the store's program is not up yet",
                ));
            }
        }
    }

    /// Starts the program for the first time, and waits until it has greeted. A bad moment does not
    /// decide whether a pool opens, so it is started again if it fails, but not forever, nor if the
    /// store says that it cannot be opened as it is asked.
    pub(super) fn first(&self) -> Result<Arc<Running>> {
        let mut tries = FIRST_TRIES;
        loop {
            tries -= 1;
            match self.running(Instant::now() + START + GRACE) {
                Err(error) if error.kind() != ErrorKind::Config && tries > 0 => {
                    if !self.wait_for_next() {
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
    }

    /// Waits until the next program may be started. False if the caller is interrupted.
    fn wait_for_next(&self) -> bool {
        let mut state = self.shared.state.lock();
        while let Phase::Down(until, _) = state.phase
            && Instant::now() < until
        {
            interrupt::wait_until(&self.shared.changed, &mut state, until);
            if MutexGuard::unlocked(&mut state, interrupt::is_interrupted) {
                return false;
            }
        }
        drop(state);
        !interrupt::is_interrupted()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        if let Phase::Up(running) = &state.phase {
            running.dismiss();
        }
    }
}

impl Shared {
    /// The keeper's work: one program, from its start to its end.
    fn keep(&self) {
        let attended = contain("penstock-keeper", || match self.start() {
            Ok((child, running)) => {
                let greeted = Instant::now();
                (self.attend(child, running), greeted.elapsed())
            }
            // However long that took: one that never greets has not lived.
            Err(error) => {
                let why = (error.kind(), format!("the store does not open: {error}"));
                (Some(why), Duration::ZERO)
            }
        });
        let (why, lived) = attended.unwrap_or_else(|| {
            let why = "attending the store's program panicked: see the log".to_owned();
            (Some((ErrorKind::Internal, why)), Duration::ZERO)
        });
        let mut state = self.state.lock();
        let pause = state.pause_after(lived);
        state.phase = Phase::Down(Instant::now() + pause, why);
        drop(state);
        self.changed.notify_all();
    }

    fn start(&self) -> Result<(Child, Arc<Running>)> {
        let failed = |what: &'static str| {
            move |cause: io::Error| Error::new(ErrorKind::Io, what).caused_by(cause)
        };
        let (control, theirs) =
            pair(SocketFlags::empty()).map_err(failed("a socket cannot be made"))?;
        let owing = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|cause| failed("a file descriptor cannot be made")(cause.into()))?;
        let (program, arguments) = self
            .command
            .split_first()
            .ok_or_else(|| Error::new(ErrorKind::Config, "no program is named"))?;
        let mut child = Command::new(program)
            .args(arguments)
            .env("_PENSTOCK_OWNER", std::process::id().to_string())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(io::stderr()))
            // Ctrl-C is for us. We tell the program when it is over.
            .process_group(0)
            .spawn()
            .map_err(failed("the store's program does not start"))?;
        let greeted = self.greet(&control);
        match greeted {
            Ok(running) => Ok((child, running(control, owing))),
            Err(error) => {
                end(&mut child, Duration::ZERO);
                Err(error)
            }
        }
    }

    /// Sends the URL, and reads the greeting.
    fn greet(
        &self,
        control: &OwnedFd,
    ) -> Result<impl FnOnce(OwnedFd, OwnedFd) -> Arc<Running> + use<>> {
        let until = Instant::now() + START;
        let refused = |kind, what: String| Error::new(kind, what);
        let gone = |_| refused(ErrorKind::Unavailable, "it ended before it greeted".into());
        let length = (self.url.len() as u32).to_le_bytes();
        for piece in [&length[..], self.url.as_bytes()] {
            let mut rest = piece;
            while !rest.is_empty() {
                let sent = rustix::net::send(control, rest, SendFlags::NOSIGNAL).map_err(gone)?;
                rest = &rest[sent..];
            }
        }
        let mut length = [0; 4];
        read_exact(control, &mut length, until)?;
        let length = u32::from_le_bytes(length);
        if u64::from(length) > LONGEST_TEXT {
            return Err(refused(ErrorKind::Protocol, "it does not greet".into()));
        }
        let mut greeting = vec![0; length as usize];
        read_exact(control, &mut greeting, until)?;
        match Greeting::parse(&greeting) {
            Err(why) => Err(refused(ErrorKind::Protocol, why)),
            Ok(Greeting::Refused(kind, message)) => Err(self.secrets.error(&kind, &message)),
            Ok(Greeting::Ready {
                capabilities,
                concurrency,
                url,
            }) => {
                let url = self.secrets.hide(&url);
                Ok(move |control, owing| {
                    Arc::new(Running {
                        owner: std::process::id(),
                        control,
                        owing,
                        is_condemned: AtomicBool::new(false),
                        capabilities,
                        url,
                        concurrency,
                        links: Mutex::default(),
                        returned: Condvar::new(),
                    })
                })
            }
        }
    }

    /// Lets others use a program until it ends, and buries it. Returns why it ended.
    fn attend(&self, mut child: Child, running: Arc<Running>) -> Option<Why> {
        let is_closed = {
            let mut state = self.state.lock();
            state.phase = Phase::Up(Arc::clone(&running));
            state.is_closed
        };
        self.changed.notify_all();
        if is_closed {
            running.dismiss();
        }
        // Nothing is ever received of the control socket but the end: the program's, or our own
        // dismissal. Whatever else it sends makes it as useless.
        let forever = || Instant::now() + Duration::from_secs(86_400);
        let mut polled =
            [&running.control, &running.owing].map(|fd| PollFd::new(fd, PollFlags::IN));
        loop {
            let until = running.look().unwrap_or_else(forever);
            let is_ready = readiness::wait(&mut polled, until);
            if is_ready.is_err() || (is_ready == Ok(true) && !polled[0].revents().is_empty()) {
                break;
            }
        }
        let is_condemned = running.is_condemned.swap(true, Ordering::AcqRel);
        running.dismiss();
        let patience = if is_condemned {
            Duration::ZERO
        } else {
            FAREWELL
        };
        let how = end(&mut child, patience);
        let why = if is_condemned {
            "the store's program did not answer, and was ended".to_owned()
        } else {
            format!("the store's program has ended ({how})")
        };
        Some((ErrorKind::Unreachable, why))
    }
}

/// Waits for a program's end, and brings it about when patience is over. Says how it ended.
fn end(child: &mut Child, patience: Duration) -> String {
    let until = Instant::now() + patience;
    let process = Pid::from_child(child);
    // It stays to be waited for, so that no other process can have its number, nor its group's.
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let has_ended = || matches!(process::waitid(WaitId::Pid(process), look), Ok(Some(_)));
    while Instant::now() < until && !has_ended() {
        thread::sleep(Duration::from_millis(5));
    }
    // Its children are of its group, and stay when it ends by itself. Whoever left the group is not
    // ours.
    let _ = process::kill_process_group(process, Signal::KILL);
    let _ = child.kill();
    child
        .wait()
        .map_or_else(|error| error.to_string(), |status| status.to_string())
}

fn read_exact(socket: &OwnedFd, mut into: &mut [u8], deadline: Instant) -> Result<()> {
    let ended = || Error::new(ErrorKind::Unavailable, "it ended before it greeted");
    while !into.is_empty() {
        let mut polled = [PollFd::new(socket, PollFlags::IN)];
        if !readiness::wait(&mut polled, deadline).map_err(|_| ended())? {
            return Err(Error::new(ErrorKind::TimedOut, "it did not greet in time"));
        }
        match rustix::io::read(socket, &mut *into) {
            Ok(0) | Err(_) => return Err(ended()),
            Ok(some) => into = &mut into[some..],
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_a_program_has_shown_that_it_works() {
        let mut state = State {
            phase: Phase::Down(Instant::now(), None),
            failures: 0,
            starts: 0,
            is_closed: false,
        };
        let mut after = |lived: Duration| state.pause_after(lived);
        assert_eq!(after(Duration::ZERO), PAUSES.0);
        assert_eq!(after(HEALTHY), PAUSES.0 * 2);
        for _ in 0..100 {
            after(Duration::ZERO);
        }
        assert_eq!(after(Duration::ZERO), PAUSES.1);
        assert_eq!(after(HEALTHY + PAUSES.0), PAUSES.0);
        assert_eq!(after(Duration::ZERO), PAUSES.0 * 2);
    }
}
