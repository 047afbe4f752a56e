//! Real servers for tests: started on loopback and a unix socket in a temporary directory, and
//! stopped, by their process id, when dropped.

#![allow(dead_code, reason = "not every test binary uses all of it")]

pub(crate) mod cluster;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use penstock_contract::testing::{LONG, eventually, soon};
use penstock_store::OpenOptions;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const NAMES: [&str; 2] = ["redis-server", "valkey-server"];

/// Stands for a free port among a server's options, another one at each attempt to start.
pub(crate) const FREE_PORT: &str = "a free port";

/// Below those that Linux gives to connections (`ip_local_port_range`, from 32768 on): nobody
/// takes one of these in passing.
const PORTS: std::ops::Range<u64> = 12_000..30_000;

/// For a server that is there: a connection is made, however long it takes.
pub(crate) fn patient() -> OpenOptions {
    OpenOptions {
        connect_timeout: LONG,
        ..OpenOptions::default()
    }
}

/// Runs a check on each of the servers that are installed, which one has to be; says so of the
/// other.
pub(crate) fn on_each_server(check: impl Fn(&'static str)) {
    let (installed, missing): (Vec<_>, Vec<_>) =
        NAMES.into_iter().partition(|name| is_installed(name));
    assert!(
        !installed.is_empty(),
        "neither of {missing:?} is installed: run scripts/install-servers.sh"
    );
    for name in missing {
        eprintln!("skipped: tests on {name}, which is not installed");
    }
    for name in installed {
        eprintln!("on {name}");
        check(name);
    }
}

fn is_installed(name: &str) -> bool {
    Command::new(name)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

/// A server without persistence.
pub(crate) struct Server {
    name: &'static str,
    arguments: Vec<String>,
    port: u16,
    directory: TempDir,
    process: Option<Child>,
}

impl Server {
    pub(crate) fn start(name: &'static str) -> Self {
        Self::start_with(name, &[])
    }

    /// Starts with more options, as on the server's command line; [`FREE_PORT`] is replaced.
    pub(crate) fn start_with(name: &'static str, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut server = Self {
            name,
            arguments: Vec::new(),
            port: 0,
            directory,
            process: None,
        };
        // Another process may take a port between our finding it and the server's binding it.
        for _ in 0..5 {
            server.port = free_port();
            let chosen = |argument: &&str| match *argument {
                FREE_PORT => free_port().to_string(),
                other => other.to_owned(),
            };
            server.arguments = arguments.iter().map(chosen).collect();
            server.spawn();
            if server.comes_up() {
                return server;
            }
            server.kill();
        }
        panic!("{name} does not start: {}", server.log());
    }

    /// Starts again on the same port and socket, after [`Self::kill`].
    pub(crate) fn restart(&mut self) {
        self.spawn();
        assert!(
            self.comes_up(),
            "{} does not start again: {}",
            self.name,
            self.log()
        );
    }

    /// Starts again with further arguments, and returns when the server answers at all.
    pub(crate) fn restart_with(&mut self, arguments: &[&str]) {
        self.arguments
            .extend(arguments.iter().map(ToString::to_string));
        self.spawn();
        eventually("it listens", || UnixStream::connect(self.socket()).is_ok());
    }

    fn spawn(&mut self) {
        let log = std::fs::File::create(self.directory.path().join("log")).expect("a log file");
        let mut command = Command::new(self.name);
        command
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .arg("--unixsocket")
            .arg(self.socket())
            .arg("--dir")
            .arg(self.directory.path())
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(Stdio::null());
        self.process = Some(command.spawn().expect("the server's program runs"));
    }

    fn comes_up(&mut self) -> bool {
        let until = soon();
        while Instant::now() < until {
            if let Ok(Some(_)) = self.process.as_mut().expect("spawned").try_wait() {
                return false;
            }
            // It may end between listening here and failing to listen elsewhere.
            if self
                .try_commands(&["PING"])
                .is_ok_and(|replies| !replies[0].is_empty() && !replies[0].starts_with("-LOADING"))
            {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The value of an option that it was started with.
    pub(crate) fn option(&self, name: &str) -> &str {
        let at = self.arguments.iter().position(|argument| argument == name);
        &self.arguments[at.expect("such an option") + 1]
    }

    pub(crate) fn tcp(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn unix(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Sends one line over a connection of its own; returns the first line of the reply.
    pub(crate) fn command(&self, line: &str) -> String {
        self.commands(&[line]).pop().expect("one reply")
    }

    /// Sends lines over one connection; returns the first line of each reply, which must be the
    /// only one but for the last.
    pub(crate) fn commands(&self, lines: &[&str]) -> Vec<String> {
        self.try_commands(lines).expect("the server answers")
    }

    fn try_commands(&self, lines: &[&str]) -> std::io::Result<Vec<String>> {
        let mut stream = UnixStream::connect(self.socket())?;
        let mut replies = BufReader::new(stream.try_clone()?);
        let reply = |line: &&str| {
            stream.write_all(format!("{line}\r\n").as_bytes())?;
            let mut reply = String::new();
            replies.read_line(&mut reply)?;
            Ok(reply.trim_end().to_owned())
        };
        lines.iter().map(reply).collect()
    }

    /// Sends one line; returns the string that the server replies.
    pub(crate) fn text(&self, line: &str) -> String {
        self.try_text(line).expect("the server answers")
    }

    /// Sends one line; returns the string that the server replies. Fails if the server closes the
    /// connection meanwhile, as it does with all when a sentinel gives it another role.
    pub(crate) fn try_text(&self, line: &str) -> std::io::Result<String> {
        let mut stream = UnixStream::connect(self.socket())?;
        stream.write_all(format!("{line}\r\n").as_bytes())?;
        let mut replies = BufReader::new(stream);
        let mut head = String::new();
        if replies.read_line(&mut head)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let length = head
            .trim_end()
            .strip_prefix('$')
            .and_then(|n| n.parse().ok());
        let mut text = vec![0; length.unwrap_or_else(|| panic!("not a string: {head}"))];
        replies.read_exact(&mut text)?;
        Ok(String::from_utf8(text).expect("UTF-8"))
    }

    /// Returns when its replicas, of which it has at least one, have all that it has.
    pub(crate) fn wait_replicated(&self) {
        eventually("its replicas are in step", || self.is_replicated());
    }

    fn is_replicated(&self) -> bool {
        let said = self.text("INFO replication");
        let number = |text: &str| text.parse::<u64>().expect("an offset");
        let own = said
            .lines()
            .find_map(|line| line.strip_prefix("master_repl_offset:"));
        let own = number(own.expect("its own offset"));
        let mut theirs = said
            .lines()
            .filter(|line| line.starts_with("slave") && line.contains("state=online"))
            .filter_map(|line| {
                line.split(',')
                    .find_map(|part| part.strip_prefix("offset="))
            })
            .map(number)
            .peekable();
        theirs.peek().is_some() && theirs.all(|offset| offset >= own)
    }

    /// Sends one line; returns the strings that the server replies.
    pub(crate) fn texts(&self, line: &str) -> Vec<String> {
        let mut stream = UnixStream::connect(self.socket()).expect("the server listens");
        stream
            .write_all(format!("{line}\r\n").as_bytes())
            .expect("the server reads");
        let mut replies = BufReader::new(stream).lines().map(|l| l.expect("a line"));
        let head = replies.next().expect("a reply");
        let count = head.strip_prefix('*').and_then(|n| n.parse().ok());
        let count: usize = count.unwrap_or_else(|| panic!("not an array: {head}"));
        replies.skip(1).step_by(2).take(count).collect()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Whether it was not killed.
    pub(crate) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// SIGSTOP: connections stay open, and nothing answers.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("running");
        let pid = Pid::from_child(process);
        kill_process(pid, signal).expect("our own child takes signals");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A loopback port that nothing listens on, and that is unlikely to be anybody else's choice.
pub(crate) fn free_port() -> u16 {
    loop {
        let random = RandomState::new().hash_one(());
        let port = PORTS.start + random % (PORTS.end - PORTS.start);
        let port = u16::try_from(port).expect("below 2^16");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// What an impostor does with a connection once it has answered the greeting.
pub(crate) type Script = Box<dyn FnOnce(&mut TcpStream) + Send>;

/// A peer that does what no real server does.
pub(crate) struct Impostor {
    port: u16,
}

impl Impostor {
    /// `scripts[n]` drives the n-th connection, one after the other; further ones are refused.
    pub(crate) fn start(scripts: Vec<Script>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        std::thread::spawn(move || {
            for script in scripts {
                let Ok((mut stream, _)) = listener.accept() else {
                    return;
                };
                stream.set_nodelay(true).expect("a TCP socket");
                let mut greeting = [0; 4096];
                if stream.read(&mut greeting).is_err() || stream.write_all(b"+OK\r\n").is_err() {
                    continue;
                }
                script(&mut stream);
            }
        });
        Self { port }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// A sentinel that alone decides over one master.
pub(crate) struct Sentinel {
    port: u16,
    process: Child,
    directory: TempDir,
}

impl Sentinel {
    /// Watches the master of this name on this port.
    pub(crate) fn start(server: &'static str, master: &str, master_port: u16) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let config = directory.path().join("sentinel.conf");
        for _ in 0..5 {
            let port = free_port();
            std::fs::write(
                &config,
                format!(
                    "bind 127.0.0.1\nport {port}\ndir {}\n\
                     sentinel monitor {master} 127.0.0.1 {master_port} 1\n\
                     sentinel down-after-milliseconds {master} 300\n\
                     sentinel failover-timeout {master} 3000\n",
                    directory.path().display()
                ),
            )
            .expect("a file");
            let mut process = Command::new(server)
                .arg(&config)
                .arg("--sentinel")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("the server's program runs");
            let until = soon();
            while Instant::now() < until && matches!(process.try_wait(), Ok(None)) {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Self {
                        port,
                        process,
                        directory,
                    };
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        panic!("{server} does not start as a sentinel");
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self, master: &str) -> String {
        format!("redis+sentinel://127.0.0.1:{}/{master}", self.port)
    }

    /// Sends one line; returns the first line of the reply.
    pub(crate) fn command(&self, line: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream
            .write_all(format!("{line}\r\n").as_bytes())
            .expect("the sentinel reads");
        let mut reply = String::new();
        BufReader::new(stream)
            .read_line(&mut reply)
            .expect("the sentinel answers");
        reply.trim_end().to_owned()
    }

    /// Returns when it has found a replica, without which it could replace nothing.
    pub(crate) fn knows_replicas(&self, master: &str) {
        eventually("the sentinel finds a replica", || {
            self.command(&format!("SENTINEL REPLICAS {master}")) == "*1"
        });
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
