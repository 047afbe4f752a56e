//! TLS under RESP: who is trusted, who we are, and a stream that never waits.
//!
//! rustls implements the protocol. Values are copied through its buffers. Without TLS, they go
//! straight between the socket and the caller's memory.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use penstock_contract::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::address::TlsFiles;
use super::failure::Failure;
use super::readiness::wait;

/// Bytes taken from the caller before they are on the wire: a few records.
const UNSENT_BYTES: usize = 128 << 10;
/// Most reads of the socket in one call. A peer may send records without content for ever, and must
/// not keep us from the deadline.
const MOST_READS: usize = 1024;

/// Whom to trust, who we are, and whom we expect. This is read once, when the store is opened.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    /// In place of the host's name.
    name: Option<ServerName<'static>>,
}

impl Tls {
    /// Reads the files that the address names. Without a file of authorities, the system's are
    /// trusted.
    pub(super) fn load(files: &TlsFiles) -> Result<Self> {
        let named = |name: &String| {
            ServerName::try_from(name.clone())
                .map_err(|_| config(format!("not a name that a certificate can hold: {name:?}")))
        };
        let name = files.name.as_ref().map(named).transpose()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| config(format!("TLS cannot be set up: {error}")))?
            .with_root_certificates(roots(files)?);
        let config = match (&files.certificate, &files.key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key)) => {
                let chain = certificates(certificate)?;
                let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                    config(format!(
                        "{}: no private key in PEM form: {error}",
                        key.display()
                    ))
                })?;
                builder
                    .with_client_auth_cert(chain, secret)
                    .map_err(|error| {
                        config(format!(
                            "{} and {} do not belong together: {error}",
                            certificate.display(),
                            key.display()
                        ))
                    })?
            }
            _ => return Err(config("a client certificate needs both cert and key")),
        };
        Ok(Self {
            config: Arc::new(config),
            name,
        })
    }
}

fn roots(files: &TlsFiles) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = &files.authorities {
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|error| {
                config(format!("{}: not an authority: {error}", file.display()))
            })?;
        }
        return Ok(roots);
    }
    let found = rustls_native_certs::load_native_certs();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        return Err(config(
            "this system has no list of certificate authorities: name a file with ?ca=/path.pem",
        ));
    }
    Ok(roots)
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |why: &str| config(format!("{}: {why}", file.display()));
    let found = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>)
        .map_err(|error| wrong(&format!("not certificates in PEM form: {error}")))?;
    if found.is_empty() {
        return Err(wrong("holds no certificate"));
    }
    Ok(found)
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}

/// An encrypted stream over a connected socket in non-blocking mode.
#[derive(Debug)]
pub(super) struct TlsStream {
    wire: Wire,
    session: Box<ClientConnection>,
}

impl TlsStream {
    /// Shakes hands: when this returns, the server has proved who it is.
    pub(super) fn connect(
        fd: OwnedFd,
        tls: &Tls,
        host: &str,
        deadline: Instant,
    ) -> std::result::Result<Self, Failure> {
        let name = match &tls.name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(|_| {
                Failure::new(
                    ErrorKind::Config,
                    "the host's name is none that a certificate can hold: give one with ?name=",
                )
            })?,
        };
        let mut session =
            ClientConnection::new(Arc::clone(&tls.config), name).map_err(|error| failed(&error))?;
        session.set_buffer_limit(Some(UNSENT_BYTES));
        let mut stream = Self {
            wire: Wire(fd),
            session: Box::new(session),
        };
        while stream.session.is_handshaking() {
            let sent = stream.flush()?;
            let came = stream.session.is_handshaking() && stream.read_records()?;
            if !sent && !came && stream.session.is_handshaking() {
                let mut polled = [stream.polled(PollFlags::IN)];
                wait(&mut polled, deadline, "agreeing on TLS")?;
            }
        }
        stream.flush()?;
        Ok(stream)
    }

    /// Takes the bytes that fit. `None` if no bytes fit until the socket takes those from before.
    pub(super) fn send(
        &mut self,
        slices: &[IoSlice<'_>],
    ) -> std::result::Result<Option<usize>, Failure> {
        self.flush()?;
        if self.session.wants_write() {
            return Ok(None);
        }
        let taken = self
            .session
            .writer()
            .write_vectored(slices)
            .map_err(|error| failed_io("sending", &error))?;
        self.flush()?;
        Ok((taken > 0).then_some(taken))
    }

    /// Whether something taken by [`Self::send`] is not on the wire yet.
    pub(super) fn is_flushing(&self) -> bool {
        self.session.wants_write()
    }

    /// Puts on the wire what the socket takes now. Returns whether that was anything.
    pub(super) fn flush(&mut self) -> std::result::Result<bool, Failure> {
        let mut moved = false;
        while self.session.wants_write() {
            match self.session.write_tls(&mut self.wire) {
                Ok(bytes) => moved |= bytes > 0,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(failed_io("sending", &error)),
            }
        }
        Ok(moved)
    }

    /// Receives what is there now, until `slices` are full; `None` if nothing, 0 at the end.
    pub(super) fn receive(
        &mut self,
        slices: &mut [IoSliceMut<'_>],
    ) -> std::result::Result<Option<usize>, Failure> {
        let room: usize = slices.iter().map(|slice| slice.len()).sum();
        let (mut got, mut reads) = (0, 0);
        loop {
            match self.session.reader().read(rest(slices, got)) {
                Ok(0) => return Ok(Some(got)),
                Ok(bytes) => got += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let more = match self.read_records() {
                        // What came before the connection broke is delivered first, and the failure
                        // after that.
                        Err(broken) if got > 0 && broken.kind == ErrorKind::Unreachable => false,
                        outcome => outcome?,
                    };
                    reads += 1;
                    if !more || reads == MOST_READS {
                        return Ok((got > 0).then_some(got));
                    }
                }
                // The socket ended without TLS's own end. Somebody may have cut the connection.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return if got > 0 { Ok(Some(got)) } else { Ok(Some(0)) };
                }
                Err(error) => return Err(failed_io("receiving", &error)),
            }
            if got == room {
                return Ok(Some(got));
            }
        }
    }

    /// Whether the connection is open and nothing has been received that was not asked for.
    pub(super) fn is_quiet(&mut self) -> bool {
        // A server sends tickets for later sessions whenever it likes. They are not replies.
        matches!(self.receive(&mut [IoSliceMut::new(&mut [0])]), Ok(None))
    }

    /// For [`wait`]: ready when records can be received, or sent if some wait to be.
    pub(super) fn polled(&self, events: PollFlags) -> PollFd<'_> {
        let sending = if self.session.wants_write() {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        PollFd::from_borrowed_fd(self.wire.0.as_fd(), events | sending)
    }

    /// Receives and decrypts once; false if nothing is there now.
    fn read_records(&mut self) -> std::result::Result<bool, Failure> {
        match self.session.read_tls(&mut self.wire) {
            Ok(0) if self.session.is_handshaking() => Err(Failure::closed()),
            Ok(_) => {
                let outcome = self.session.process_new_packets();
                if let Err(error) = outcome {
                    // Tell the server why, as far as the socket takes it.
                    let _ = self.flush();
                    return Err(match error {
                        rustls::Error::InvalidMessage(_) if self.session.is_handshaking() => {
                            Failure::protocol("the server does not speak TLS on this port")
                        }
                        error => failed(&error),
                    });
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(failed_io("receiving", &error)),
        }
    }
}

/// The part that is still empty of the first slice that is not full.
fn rest<'s>(slices: &'s mut [IoSliceMut<'_>], mut filled: usize) -> &'s mut [u8] {
    for slice in slices {
        if filled < slice.len() {
            return &mut slice[filled..];
        }
        filled -= slice.len();
    }
    &mut []
}

/// The socket as rustls wants it.
#[derive(Debug)]
struct Wire(OwnedFd);

impl Wire {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Read for Wire {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(self.fd(), &mut *into) {
                Err(Errno::INTR) => {}
                outcome => return outcome.map_err(io::Error::from),
            }
        }
    }
}

impl Write for Wire {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            let mut control = SendAncillaryBuffer::default();
            match rustix::net::sendmsg(self.fd(), slices, &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                outcome => return outcome.map_err(io::Error::from),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed_io(doing: &str, error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(code) => Failure::system(doing, Errno::from_raw_os_error(code)),
        None => Failure::protocol(format!("{doing} over TLS failed: {error}")),
    }
}

fn failed(error: &rustls::Error) -> Failure {
    use rustls::AlertDescription as Alert;
    let (kind, message) = match error {
        rustls::Error::InvalidCertificate(why) => (
            ErrorKind::Denied,
            format!("the server's certificate is not accepted: {why}"),
        ),
        rustls::Error::AlertReceived(
            alert @ (Alert::CertificateRequired
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::HandshakeFailure),
        ) => (
            ErrorKind::Denied,
            format!("the server ended TLS ({alert:?}); does it ask for a client certificate?"),
        ),
        other => (ErrorKind::Protocol, format!("TLS failed: {other}")),
    };
    Failure::new(kind, message)
}
