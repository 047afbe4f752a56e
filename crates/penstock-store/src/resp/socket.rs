//! Sockets: connecting, sending and receiving. None of these ever waits beyond a deadline.

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use penstock_contract::ErrorKind;
use penstock_value::interrupt;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, sockopt,
};

use super::address::Endpoint;
use super::failure::Failure;
use super::readiness::wait;
use super::resolver::Resolver;
use super::tls::{Tls, TlsStream};

/// How long to wait before trying again to enter a unix socket's full backlog.
const BACKLOG_PAUSE: Duration = Duration::from_millis(2);

/// A connected stream in non-blocking mode.
#[derive(Debug)]
pub(super) enum Socket {
    Plain(PlainSocket),
    Tls(TlsStream),
}

#[derive(Debug)]
pub(super) struct PlainSocket {
    fd: OwnedFd,
    /// How many bytes make it readable. `None` if that cannot be changed.
    low_water: Option<Cell<u32>>,
}

impl PlainSocket {
    /// From now on, the socket is ready for reading when `bytes` bytes have come, or when no more
    /// will.
    #[allow(unsafe_code, reason = "no safe wrapper knows this option")]
    fn set_low_water(&self, bytes: u32) {
        let Some(current) = &self.low_water else {
            return;
        };
        if current.get() == bytes {
            return;
        }
        let value = bytes as libc::c_int;
        // SAFETY: the descriptor is open, and the kernel reads an int where it is told that there
        // is one.
        let refused = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const value).cast(),
                size_of_val(&value) as libc::socklen_t,
            )
        };
        // If this is refused, the socket is just ready more often.
        if refused == 0 {
            current.set(bytes);
        }
    }
}

impl Socket {
    /// Connects, and agrees on TLS if it is used.
    pub(super) fn connect(
        endpoint: &Endpoint,
        tls: Option<&Tls>,
        resolver: &Resolver,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let fd = Self::connect_plain(endpoint, resolver, deadline)?;
        match (tls, endpoint) {
            (Some(tls), Endpoint::Tcp { host, .. }) => {
                TlsStream::connect(fd, tls, host, deadline).map(Self::Tls)
            }
            (_, Endpoint::Tcp { .. }) => Ok(Self::Plain(PlainSocket {
                fd,
                low_water: Some(Cell::new(1)),
            })),
            _ => Ok(Self::Plain(PlainSocket {
                fd,
                low_water: None,
            })),
        }
    }

    /// Connects, trying a host's addresses in the resolver's order.
    fn connect_plain(
        endpoint: &Endpoint,
        resolver: &Resolver,
        deadline: Instant,
    ) -> Result<OwnedFd, Failure> {
        match endpoint {
            Endpoint::Unix(path) => Self::connect_unix(path, deadline),
            Endpoint::Sentinel { .. } | Endpoint::Cluster(_) => {
                unreachable!("the server's own address was found out before")
            }
            Endpoint::Tcp { host, port } => {
                let addresses = resolver.resolve(host, *port, deadline)?;
                let mut failure = Failure::new(ErrorKind::Unreachable, "the host has no address");
                for (i, address) in addresses.iter().enumerate() {
                    // An address that swallows packets must leave time for those after it.
                    let left = deadline.saturating_duration_since(Instant::now());
                    let share = left / (addresses.len() - i) as u32;
                    match Self::connect_tcp(*address, Instant::now() + share) {
                        Ok(socket) => return Ok(socket),
                        Err(f) => failure = f,
                    }
                }
                Err(failure)
            }
        }
    }

    fn connect_tcp(address: SocketAddr, deadline: Instant) -> Result<OwnedFd, Failure> {
        let family = if address.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let fd = Self::create(family)?;
        let failed = |cause| Failure::system("connecting", cause);
        match rustix::net::connect(&fd, &address) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::INTR) => {
                let mut polled = [PollFd::new(&fd, PollFlags::OUT)];
                wait(&mut polled, deadline, "connecting")?;
                sockopt::socket_error(&fd)
                    .and_then(|outcome| outcome)
                    .map_err(failed)?;
            }
            Err(cause) => return Err(failed(cause)),
        }
        sockopt::set_tcp_nodelay(&fd, true).map_err(failed)?;
        // The other side may vanish without a word while the connection lies idle.
        sockopt::set_socket_keepalive(&fd, true).map_err(failed)?;
        #[cfg(target_os = "linux")]
        if address.ip().to_canonical().is_loopback() {
            // Nothing is congested on the way to this very machine, and a host's default that
            // paces what it sends (bbr) costs up to a third of the throughput there. Any other
            // algorithm works as well, so a refusal is no reason to fail.
            let _ = sockopt::set_tcp_congestion(&fd, "reno");
        }
        Ok(fd)
    }

    fn connect_unix(path: &Path, deadline: Instant) -> Result<OwnedFd, Failure> {
        let address = SocketAddrUnix::new(path).map_err(|cause| {
            Failure::system("using the socket's path", cause)
                .reworded(ErrorKind::Config, "the unix socket's path is too long")
        })?;
        loop {
            let fd = Self::create(AddressFamily::UNIX)?;
            match rustix::net::connect(&fd, &address) {
                Ok(()) => return Ok(fd),
                // The backlog is full, and there is no way to poll for that.
                Err(Errno::AGAIN | Errno::INTR)
                    if Instant::now() + BACKLOG_PAUSE < deadline
                        && !interrupt::is_interrupted() =>
                {
                    thread::sleep(BACKLOG_PAUSE);
                }
                Err(Errno::AGAIN | Errno::INTR) => return Err(Failure::timed_out("connecting")),
                Err(cause) => return Err(Failure::system("connecting", cause)),
            }
        }
    }

    fn create(family: AddressFamily) -> Result<OwnedFd, Failure> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(|cause| Failure::system("making a socket", cause))
    }

    /// Sends what the socket takes now; `None` if nothing.
    pub(super) fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<Option<usize>, Failure> {
        match self {
            // Not `writev`, which would raise SIGPIPE in a host program that does not ignore it.
            Self::Plain(PlainSocket { fd, .. }) => {
                let mut no_control = SendAncillaryBuffer::default();
                now_or_later(|| {
                    rustix::net::sendmsg(&*fd, slices, &mut no_control, SendFlags::NOSIGNAL)
                })
                .map_err(|cause| Failure::system("sending", cause))
            }
            Self::Tls(stream) => stream.send(slices),
        }
    }

    /// Whether some bytes that [`Self::send`] took still wait for the socket.
    pub(super) fn is_flushing(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.is_flushing(),
        }
    }

    /// Sends bytes that wait for the socket. Returns whether any moved.
    pub(super) fn flush(&mut self) -> Result<bool, Failure> {
        match self {
            Self::Plain(_) => Ok(false),
            Self::Tls(stream) => stream.flush(),
        }
    }

    /// Receives what is there now. `None` if nothing is there, 0 at the end of the stream. If less
    /// comes than there was room for, that is all there is.
    pub(super) fn receive(
        &mut self,
        slices: &mut [IoSliceMut<'_>],
    ) -> Result<Option<usize>, Failure> {
        match self {
            Self::Plain(PlainSocket { fd, .. }) => now_or_later(|| rustix::io::readv(&*fd, slices))
                .map_err(|cause| Failure::system("receiving", cause)),
            Self::Tls(stream) => stream.receive(slices),
        }
    }

    /// Whether the connection is open and the server has sent nothing that was not received.
    pub(super) fn is_quiet(&mut self) -> bool {
        match self {
            Self::Plain(PlainSocket { fd, .. }) => {
                let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
                let mut byte = [0];
                matches!(
                    now_or_later(|| rustix::net::recv(&*fd, &mut byte, flags)),
                    Ok(None)
                )
            }
            Self::Tls(stream) => stream.is_quiet(),
        }
    }

    /// For [`wait`]. The socket is ready for reading when at least `least` bytes have come or no
    /// more will come, or earlier. Every wake-up for a few bytes of a large value takes time from
    /// the others.
    pub(super) fn polled(&self, events: PollFlags, least: u32) -> PollFd<'_> {
        match self {
            Self::Plain(plain) => {
                plain.set_low_water(least);
                PollFd::from_borrowed_fd(plain.fd.as_fd(), events)
            }
            Self::Tls(stream) => stream.polled(events),
        }
    }
}

fn now_or_later<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<Option<T>, Errno> {
    loop {
        match call() {
            Ok(value) => return Ok(Some(value)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(cause) => return Err(cause),
        }
    }
}
