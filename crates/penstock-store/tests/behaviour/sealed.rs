//! Values that tell by themselves whether they are whole, and the processes that put them.

use std::ffi::OsStr;
use std::fs;
use std::io::IoSlice;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use penstock_contract::{Key, Listed, Namespace, PutOutcome, Result, Store};
use penstock_value::header::{self, Checksum, HEADER_BYTES, Writer};
use rustix::process::{Pid, Signal, kill_process};

use super::{bytes, eventually, get, key, soon};

/// The namespace of what several processes put.
pub const SHARED: Namespace = Namespace([0x5a; 16]);

/// Puts a value that tells by itself whether it is whole.
pub fn put_sealed(store: &dyn Store, n: u64, len: usize) -> Result<PutOutcome> {
    put_sealed_by(store, n, len, soon())
}

pub fn put_sealed_by(
    store: &dyn Store,
    n: u64,
    len: usize,
    deadline: Instant,
) -> Result<PutOutcome> {
    let (key, payload) = (key(SHARED, n), bytes(n, len));
    let header = header::seal(&key, Writer::UNKNOWN, len as u64, Checksum::of(&payload));
    store.put(
        &key,
        &[IoSlice::new(&header), IoSlice::new(&payload)],
        deadline,
    )
}

/// Whether there is a value; if so it is what [`put_sealed`] put, byte for byte.
pub fn assert_whole(store: &dyn Store, key: &Key) -> bool {
    let Some(value) = get(store, key) else {
        return false;
    };
    let payload = value.len().checked_sub(HEADER_BYTES).expect("a header");
    header::verify_value(&value, key, payload as u64).expect("a whole value");
    let mut n = [0; 8];
    n.copy_from_slice(&key.chunk[8..16]);
    assert!(value[HEADER_BYTES..] == bytes(u64::from_be_bytes(n), payload));
    true
}

pub fn listed(store: &dyn Store) -> Vec<Listed> {
    let mut listed = Vec::new();
    store
        .list(None, &mut |object| listed.push(object), soon())
        .unwrap();
    listed
}

/// How many values there are, each of which is whole; those evicted meanwhile do not count.
pub fn whole_values(store: &dyn Store) -> usize {
    listed(store)
        .iter()
        .filter(|object| assert_whole(store, &object.key))
        .count()
}

/// A process that ends with the test, also if that fails.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Process {
    /// Runs the test binary again, with nothing but one of the tests that are ignored.
    pub fn start(test: &str, environment: &[(&str, &OsStr)]) -> Self {
        Self::start_under(&[], test, environment)
    }

    /// Runs the test binary again under another program, which is given the command behind its own
    /// words.
    pub fn start_under(starter: &[&str], test: &str, environment: &[(&str, &OsStr)]) -> Self {
        let binary = std::env::current_exe().unwrap();
        let mut words = starter.iter().map(OsStr::new).chain([binary.as_os_str()]);
        let process = Command::new(words.next().expect("the binary at least"))
            .args(words)
            .args(["--exact", test, "--ignored"])
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(process)
    }

    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    pub fn succeeds(mut self) -> bool {
        self.0.wait().unwrap().success()
    }

    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    pub fn signal(&mut self, signal: Signal) {
        // The number of a process that was waited for may be another's.
        if self.is_running() {
            let _ = kill_process(Pid::from_child(&self.0), signal);
        }
    }

    /// Stops it and waits until all its threads stand still.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        let stands = |thread: fs::DirEntry| {
            let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            let state = stat
                .rsplit_once(") ")
                .map_or('X', |(_, rest)| rest.as_bytes()[0].into());
            matches!(state, 'T' | 'Z' | 'X')
        };
        eventually("the process stands still", || {
            let threads = fs::read_dir(format!("/proc/{}/task", self.0.id()));
            threads.into_iter().flatten().flatten().all(stands)
        });
    }
}
