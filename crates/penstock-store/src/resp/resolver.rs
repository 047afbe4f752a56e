//! Looks up host names without waiting beyond a deadline.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use penstock_contract::ErrorKind;
use penstock_threads::contain;
use penstock_value::interrupt;

use super::failure::Failure;

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
    /// Look-ups under way, and answers that not all who waited have fetched.
    by_name: Mutex<HashMap<Name, Lookup>>,
    arrived: Condvar,
}

type Name = (String, u16);
type Answer = Result<Vec<SocketAddr>, Failure>;

#[derive(Debug, Default)]
struct Lookup {
    waiting: usize,
    answer: Option<Answer>,
}

impl Resolver {
    pub(super) fn resolve(&self, host: &str, port: u16, deadline: Instant) -> Answer {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        self.resolve_by(host, port, deadline, look_up)
    }

    fn resolve_by(
        &self,
        host: &str,
        port: u16,
        deadline: Instant,
        look_up: impl FnOnce(&Name) -> Answer + Send + 'static,
    ) -> Answer {
        let name = (host.to_owned(), port);
        let mut by_name = self.shared.by_name.lock();
        if !by_name.contains_key(&name) {
            let (shared, name) = (Arc::clone(&self.shared), name.clone());
            let started = thread::Builder::new().name("penstock-dns".into()).spawn({
                let name = name.clone();
                move || {
                    let found = contain("penstock-dns", || look_up(&name));
                    let panicked = || {
                        let message = "looking up the host's name panicked: see the log";
                        Err(Failure::new(ErrorKind::Internal, message))
                    };
                    shared.arrive(&name, found.unwrap_or_else(panicked));
                }
            });
            if started.is_err() {
                let message = "no thread to look up the host's name on";
                return Err(Failure::new(ErrorKind::Io, message));
            }
            by_name.insert(name, Lookup::default());
        }
        // Whoever waits keeps it there.
        let found = "a look-up that is waited for";
        by_name.get_mut(&name).expect(found).waiting += 1;
        let answer = loop {
            if let Some(answer) = &by_name[&name].answer {
                break answer.clone();
            }
            if interrupt::wait_until(&self.shared.arrived, &mut by_name, deadline) {
                break Err(Failure::timed_out("looking up the host's name"));
            }
        };
        let lookup = by_name.get_mut(&name).expect(found);
        lookup.waiting -= 1;
        // An answer is for those who waited for it: later it may be wrong.
        if lookup.waiting == 0 && lookup.answer.is_some() {
            by_name.remove(&name);
        }
        answer
    }
}

impl Lookups {
    fn arrive(&self, name: &Name, answer: Answer) {
        let mut by_name = self.by_name.lock();
        match by_name.get_mut(name) {
            Some(lookup) if lookup.waiting > 0 => lookup.answer = Some(answer),
            _ => drop(by_name.remove(name)),
        }
        self.arrived.notify_all();
    }
}

fn look_up(name: &Name) -> Answer {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::mpsc;
    use std::time::Duration;

    use penstock_contract::testing::{soon, within};

    use super::*;

    #[test]
    fn all_who_wait_have_one_answer() {
        let resolver = Resolver::default();
        let asked = Arc::new(AtomicUsize::new(0));
        let (answer, answers) = mpsc::channel();
        let answers = Arc::new(Mutex::new(answers));
        thread::scope(|scope| {
            let resolve = || {
                let (asked, answers) = (Arc::clone(&asked), Arc::clone(&answers));
                resolver.resolve_by("host", 1, soon(), move |_| {
                    asked.fetch_add(1, Relaxed);
                    Ok(answers.lock().recv().unwrap())
                })
            };
            let all: Vec<_> = (0..8).map(|_| scope.spawn(resolve)).collect();
            while waiting(&resolver) < 8 {
                thread::yield_now();
            }
            let address = SocketAddr::from(([127, 0, 0, 1], 1));
            answer.send(vec![address]).unwrap();
            for thread in all {
                assert_eq!(thread.join().unwrap().unwrap(), [address]);
            }
        });
        assert_eq!(asked.load(Relaxed), 1);
        assert!(resolver.shared.by_name.lock().is_empty());
    }

    fn waiting(resolver: &Resolver) -> usize {
        let by_name = resolver.shared.by_name.lock();
        by_name.values().map(|lookup| lookup.waiting).sum()
    }

    #[test]
    fn an_answer_that_nobody_waited_for_is_not_given_later() {
        let resolver = Resolver::default();
        let (answer, answers) = mpsc::channel();
        let late = resolver.resolve_by("host", 1, within(Duration::from_millis(10)), move |_| {
            Ok(answers.recv().unwrap())
        });
        assert_eq!(late.unwrap_err().kind, ErrorKind::TimedOut);
        answer.send(Vec::new()).unwrap();
        while !resolver.shared.by_name.lock().is_empty() {
            thread::yield_now();
        }
        let again = resolver.resolve_by("host", 1, soon(), |_| {
            Ok(vec![SocketAddr::from(([127, 0, 0, 1], 1))])
        });
        assert_eq!(again.unwrap().len(), 1);
    }
}
