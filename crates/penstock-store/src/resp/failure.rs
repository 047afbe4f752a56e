//! Failures of connections and the server's refusals, before they become [`Error`]s.

use std::io;

use penstock_contract::{Error, ErrorKind};
use rustix::io::Errno;

/// Longest part of a server's message that is passed on, in bytes.
const MESSAGE_LIMIT: usize = 200;

/// What went wrong with a connection or a request.
///
/// Unlike [`Error`] it can be copied: one broken connection fails every request that was waiting
/// for an answer on it.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    message: String,
    cause: Option<Errno>,
    /// The server refused in due form: the connection is as good as before.
    pub(super) is_refusal: bool,
    /// The server is a replica now, and asking it again is in vain.
    pub(super) is_demoted: bool,
    /// The place in its cluster to which the server sends us.
    pub(super) redirect: Option<Box<Redirect>>,
}

/// A node of a cluster says that another one serves a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Redirect {
    /// Host of the other node, or `None` if it is that of the node that was asked.
    pub(super) host: Option<String>,
    pub(super) port: u16,
    /// The redirect is for this request only, and ASKING has to precede the request: the key's slot
    /// is on its way to the other node.
    pub(super) is_ask: bool,
}

impl Redirect {
    /// Reads `MOVED 3999 host:port` or `ASK 3999 host:port`.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(line).ok()?.split(' ');
        let is_ask = words.next()? == "ASK";
        let (_slot, place) = (words.next()?, words.next()?);
        // Split at the last colon: an IPv6 address has more of them.
        let (host, port) = place.rsplit_once(':')?;
        Some(Self {
            host: (!host.is_empty()).then(|| host.to_owned()),
            port: port.parse().ok()?,
            is_ask,
        })
    }
}

impl Failure {
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            cause: None,
            is_refusal: false,
            is_demoted: false,
            redirect: None,
        }
    }

    pub(super) fn timed_out(doing: &str) -> Self {
        Self::new(
            ErrorKind::TimedOut,
            format!("the deadline passed while {doing}"),
        )
    }

    pub(super) fn closed() -> Self {
        Self::new(ErrorKind::Unreachable, "the server closed the connection")
    }

    pub(super) fn protocol(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Protocol, message)
    }

    /// A system call on a socket failed.
    pub(super) fn system(doing: &str, cause: Errno) -> Self {
        let message = format!("{doing} failed");
        Self {
            kind: ErrorKind::Unreachable,
            message,
            cause: Some(cause),
            is_refusal: false,
            is_demoted: false,
            redirect: None,
        }
    }

    /// The server answered with an error line (without its leading `-`).
    pub(super) fn refused(line: &[u8]) -> Self {
        let code = line.split(|&byte| byte == b' ').next().unwrap_or_default();
        let kind = match code {
            b"NOAUTH" | b"WRONGPASS" | b"NOPERM" | b"DENIED" => ErrorKind::Denied,
            b"OOM" => ErrorKind::Full,
            b"LOADING" | b"BUSY" | b"CLUSTERDOWN" | b"TRYAGAIN" | b"MASTERDOWN" | b"READONLY"
            | b"NOREPLICAS" | b"MISCONF" => ErrorKind::Unavailable,
            // This text is for an operator who did not know that there is a cluster.
            b"MOVED" | b"ASK" => {
                return Self {
                    is_refusal: true,
                    redirect: Redirect::parse(line).map(Box::new),
                    ..Self::new(
                        ErrorKind::Unavailable,
                        "the server is part of a cluster: use a URL with +cluster, as in \
                         valkey+cluster://host",
                    )
                };
            }
            _ if line.starts_with(b"ERR max number of clients") => ErrorKind::Unavailable,
            _ => ErrorKind::Protocol,
        };
        Self {
            is_refusal: true,
            is_demoted: matches!(code, b"READONLY" | b"MASTERDOWN"),
            ..Self::new(kind, format!("the server refused: {}", printable(line)))
        }
    }

    /// Says which of several peers failed.
    pub(super) fn of(mut self, peer: &str) -> Self {
        self.message = format!("{peer}: {}", self.message);
        self
    }

    /// Replaces the message, so that nothing of what the server said remains.
    pub(super) fn reworded(self, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            ..self
        }
    }

    /// The error to hand to the caller.
    pub(super) fn error(&self, store: &str, operation: &'static str) -> Error {
        let error = Error::new(self.kind, self.message.clone())
            .with("store", store)
            .with("operation", operation);
        match self.cause {
            Some(cause) => error.caused_by(io::Error::from(cause)),
            None => error,
        }
    }
}

/// A server's words, fit for a log line: bounded, one line, no control characters.
fn printable(line: &[u8]) -> String {
    let cut = &line[..line.len().min(MESSAGE_LIMIT)];
    String::from_utf8_lossy(cut)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_kinds() {
        for (line, kind) in [
            ("NOAUTH Authentication required.", ErrorKind::Denied),
            (
                "WRONGPASS invalid username-password pair or user is disabled.",
                ErrorKind::Denied,
            ),
            (
                "NOPERM User x has no permissions to run the 'set' command",
                ErrorKind::Denied,
            ),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                ErrorKind::Full,
            ),
            (
                "LOADING Redis is loading the dataset in memory",
                ErrorKind::Unavailable,
            ),
            (
                "READONLY You can't write against a read only replica.",
                ErrorKind::Unavailable,
            ),
            ("MOVED 3999 127.0.0.1:6381", ErrorKind::Unavailable),
            ("ERR max number of clients reached", ErrorKind::Unavailable),
            ("WRONGTYPE Operation against a key", ErrorKind::Protocol),
            ("ERR syntax error", ErrorKind::Protocol),
            ("", ErrorKind::Protocol),
        ] {
            assert_eq!(Failure::refused(line.as_bytes()).kind, kind, "{line}");
        }
    }

    #[test]
    fn redirects_say_where_to() {
        let redirect = |line: &str| {
            let redirect = Failure::refused(line.as_bytes()).redirect?;
            Some((redirect.host, redirect.port, redirect.is_ask))
        };
        assert_eq!(
            redirect("MOVED 3999 127.0.0.1:6381"),
            Some((Some("127.0.0.1".into()), 6381, false))
        );
        assert_eq!(redirect("ASK 1 ::1:7"), Some((Some("::1".into()), 7, true)));
        assert_eq!(redirect("MOVED 16383 :6381"), Some((None, 6381, false)));
        for line in [
            "MOVED",
            "ASK 1",
            "MOVED 1 nowhere",
            "ASK 1 h:70000",
            "ERR x y:1",
        ] {
            assert_eq!(redirect(line), None, "{line}");
        }
    }

    #[test]
    fn refusals_are_bounded_and_on_one_line() {
        let line = [b"ERR a\x1b[2Jb\n".as_slice(), &[b'x'; 5000]].concat();
        let text = Failure::refused(&line)
            .error("redis://h:1", "get")
            .to_string();
        assert!(text.len() < 400, "{text}");
        assert!(!text.contains(['\n', '\x1b']), "{text}");
    }
}
