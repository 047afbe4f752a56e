//! Looks up host names without waiting beyond a deadline.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::failure::Failure;
use crate::{ErrorKind, interrupt};

/// Looks up host names without making the caller wait beyond its deadline.
///
/// The system's look-up knows no deadline, so it runs on a thread of its own. For one host and
/// port, at most one look-up runs at a time. Callers that give up leave it running; later callers
/// wait for the look-up that is running.
#[derive(Debug, Default)]
pub(super) struct Resolver {
    shared: Arc<Lookups>,
}

#[derive(Debug, Default)]
struct Lookups {
    /// Look-ups under way (`None`), and answers that nobody has fetched yet.
    answers: Mutex<HashMap<(String, u16), Option<Answer>>>,
    arrived: Condvar,
}

type Answer = Result<Vec<SocketAddr>, Failure>;

impl Resolver {
    pub(super) fn resolve(&self, host: &str, port: u16, deadline: Instant) -> Answer {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let name = (host.to_owned(), port);
        let mut answers = self.shared.answers.lock();
        if !answers.contains_key(&name) {
            let (shared, name) = (Arc::clone(&self.shared), name.clone());
            let started = thread::Builder::new().name("penstock-dns".into()).spawn({
                let name = name.clone();
                move || {
                    let answer = look_up(&name);
                    shared.answers.lock().insert(name, Some(answer));
                    shared.arrived.notify_all();
                }
            });
            if started.is_err() {
                let message = "no thread to look up the host's name on";
                return Err(Failure::new(ErrorKind::Io, message));
            }
            answers.insert(name, None);
        }
        loop {
            match answers.get(&name) {
                Some(Some(_)) => return answers.remove(&name).flatten().expect("just seen"),
                Some(None) => {
                    if interrupt::wait_until(&self.shared.arrived, &mut answers, deadline) {
                        return Err(Failure::timed_out("looking up the host's name"));
                    }
                }
                // Another caller fetched the answer that both were waiting for.
                None => {
                    drop(answers);
                    return self.resolve(host, port, deadline);
                }
            }
        }
    }
}

fn look_up(name: &(String, u16)) -> Answer {
    let (host, port) = name;
    match (host.as_str(), *port).to_socket_addrs() {
        Ok(addresses) => Ok(addresses.collect()),
        // The system's text says no more than this.
        Err(_) => Err(Failure::new(
            ErrorKind::Unreachable,
            format!("the host's name {host:?} could not be looked up"),
        )),
    }
}
