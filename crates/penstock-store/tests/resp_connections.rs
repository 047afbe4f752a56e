//! The RESP store's connections: absent, dead and frozen servers, deadlines, bounds.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, GetOutcome, Store};
use penstock_store::{OpenOptions, open};

use crate::behaviour::batches::{fetch, fill};
use crate::behaviour::{bytes, fresh_namespace, get_one, key, kind_of, past, put, soon, within};
use crate::resp_server::{Server, on_each_server};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &OpenOptions::default()).expect("the URL is right")
}

#[test]
fn a_server_may_be_absent_at_first() {
    on_each_server(|name| {
        let mut server = Server::start(name);
        let namespace = fresh_namespace();
        server.kill();
        let stores = [store(&server.tcp()), store(&server.unix())];
        for store in &stores {
            assert_eq!(
                kind_of(get_one(&**store, namespace)),
                ErrorKind::Unreachable
            );
            assert_eq!(
                kind_of(put(&**store, &key(namespace, 0), b"x")),
                ErrorKind::Unreachable
            );
            let looked_up = store.contains(&[key(namespace, 0)], soon());
            assert_eq!(kind_of(looked_up), ErrorKind::Unreachable);
            assert_eq!((store.stats().errors, store.stats().connects), (3, 0));
        }
        server.restart();
        for store in &stores {
            fill(&**store, namespace, 1, 10);
        }
    });
}

#[test]
fn a_restart_between_operations_goes_unnoticed() {
    on_each_server(|name| {
        let mut server = Server::start(name);
        for url in [server.tcp(), server.unix()] {
            let store = store(&url);
            let namespace = fresh_namespace();
            let one = [key(namespace, 0)];
            type Operation<'o> = Box<dyn Fn() + 'o>;
            let operations: Vec<Operation<'_>> = vec![
                Box::new(|| drop(fill(&*store, namespace, 20, 200_000))),
                Box::new(|| assert_eq!(get_one(&*store, namespace).unwrap(), GetOutcome::Miss)),
                Box::new(|| assert_eq!(store.contains(&one, soon()).unwrap(), [false])),
                Box::new(|| assert_eq!(store.remove(&one, soon()).unwrap(), 0)),
                Box::new(|| store.list(None, &mut |_| {}, soon()).unwrap()),
                Box::new(|| drop(store.describe(soon()).unwrap())),
            ];
            for operation in operations {
                fill(&*store, namespace, 20, 200_000);
                server.kill();
                server.restart();
                operation();
            }
            assert_eq!(store.stats().errors, 0);
        }
    });
}

#[test]
fn a_server_killed_in_the_middle_of_a_get_never_makes_a_hit() {
    const SIZE: usize = 16 << 20;
    on_each_server(|name| {
        for unix in [false, true] {
            let mut server = Server::start(name);
            let store = store(&if unix { server.unix() } else { server.tcp() });
            let namespace = fresh_namespace();
            let keys = fill(&*store, namespace, 4, SIZE);
            let (outcomes, rest) = std::thread::scope(|scope| {
                let getting = scope.spawn(|| {
                    let mut outcomes = Vec::new();
                    while outcomes.iter().all(penstock_contract::Result::is_ok) {
                        outcomes.extend(fetch(&*store, &keys, SIZE, soon()));
                    }
                    outcomes
                });
                // Some values whole, then in the middle of one.
                while store.stats().gets < 4 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(5));
                server.kill();
                (getting.join().unwrap(), fetch(&*store, &keys, SIZE, soon()))
            });
            let failed: Vec<_> = outcomes.iter().filter_map(|o| o.as_ref().err()).collect();
            assert!(!failed.is_empty());
            for error in failed {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            }
            assert!(
                rest.into_iter()
                    .all(|o| kind_of(o) == ErrorKind::Unreachable)
            );

            server.restart();
            let keys = fill(&*store, namespace, 2, SIZE);
            for outcome in fetch(&*store, &keys, SIZE, soon()) {
                assert_eq!(outcome.unwrap(), GetOutcome::Hit(SIZE as u64));
            }
        }
    });
}

#[test]
fn a_frozen_server_costs_no_more_than_the_deadline() {
    on_each_server(|name| {
        let server = Server::start(name);
        for url in [server.tcp(), server.unix()] {
            let store = store(&url);
            let namespace = fresh_namespace();
            let keys = fill(&*store, namespace, 8, 1 << 20);
            let big = bytes(0, 64 << 20);
            server.freeze();
            let started = past();
            let time = Duration::from_millis(60);
            for _ in 0..2 {
                for outcome in fetch(&*store, &keys, 1 << 20, within(time)) {
                    assert_eq!(kind_of(outcome), ErrorKind::TimedOut);
                }
                let outcome = store.put(&keys[0], &[IoSlice::new(&big)], within(time));
                assert_eq!(kind_of(outcome), ErrorKind::TimedOut);
                assert_eq!(
                    kind_of(store.contains(&keys, within(time))),
                    ErrorKind::TimedOut
                );
                assert_eq!(kind_of(store.describe(within(time))), ErrorKind::TimedOut);
            }
            let took = started.elapsed();
            assert!(took >= 8 * time, "gave up early: {took:?}");
            server.thaw();
            for outcome in fetch(&*store, &keys, 1 << 20, soon()) {
                assert_eq!(outcome.unwrap(), GetOutcome::Hit(1 << 20));
            }
        }
    });
}

#[test]
fn a_server_that_never_greets_is_unreachable() {
    on_each_server(|name| {
        let server = Server::start(name);
        server.freeze();
        let options = OpenOptions {
            connect_timeout: Duration::from_millis(50),
            ..OpenOptions::default()
        };
        for url in [server.tcp(), server.unix()] {
            let store = open(&url, &options).unwrap();
            let error = store
                .contains(&[key(fresh_namespace(), 0)], soon())
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        }
        server.thaw();
    });
}

#[test]
fn nothing_is_sent_after_the_deadline() {
    on_each_server(|name| {
        let server = Server::start(name);
        let store = store(&server.unix());
        let keys = fill(&*store, fresh_namespace(), 3, 10);
        assert_eq!(kind_of(store.remove(&keys, past())), ErrorKind::TimedOut);
        assert_eq!(store.contains(&keys, soon()).unwrap(), [true; 3]);
        assert_eq!(store.stats().connects, 1, "nor is the connection lost");
    });
}

#[test]
fn connections_are_bounded_and_shared() {
    on_each_server(|name| {
        let server = Server::start(name);
        let options = OpenOptions {
            pool_connections: 3,
            client_name: "bounded".to_owned(),
            ..OpenOptions::default()
        };
        let store = open(&server.unix(), &options).unwrap();
        let keys = fill(&*store, fresh_namespace(), 8, 300_000);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        for outcome in fetch(&*store, &keys, 300_000, soon()) {
                            assert_eq!(outcome.unwrap(), GetOutcome::Hit(300_000));
                        }
                    }
                });
            }
        });
        let clients = server.text("CLIENT LIST");
        let ours = clients
            .lines()
            .filter(|line| line.contains("name=bounded"))
            .count();
        assert!((1..=3).contains(&ours), "{clients}");
        assert_eq!(store.stats().connects, ours as u64, "none was opened twice");

        // All in use: whoever comes next waits, but not forever.
        server.freeze();
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    let outcome = store.contains(&keys, within(Duration::from_millis(100)));
                    assert_eq!(kind_of(outcome), ErrorKind::TimedOut);
                });
            }
        });
        server.thaw();
        assert!(
            store
                .contains(&keys, soon())
                .unwrap()
                .iter()
                .all(|&found| found)
        );
    });
}
