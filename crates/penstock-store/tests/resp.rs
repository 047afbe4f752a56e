//! The RESP store against real servers.

mod behaviour;
mod resp_server;

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use behaviour::batches::{fetch, fill};
use behaviour::{bytes, fresh_namespace, get, key, put, soon};
use penstock_store::{ErrorKind, GetOutcome, Namespace, OpenOptions, PutOutcome, Store, open};
use resp_server::{Server, free_port, on_each_server};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &OpenOptions::default()).expect("the URL is right")
}

fn within(time: Duration) -> Instant {
    Instant::now() + time
}

fn kind_of<T: std::fmt::Debug>(result: penstock_store::Result<T>) -> ErrorKind {
    result.expect_err("must fail").kind()
}

#[test]
fn behaves_as_a_store_over_tcp() {
    on_each_server(|name| {
        let server = Server::start(name);
        behaviour::run_all(|| store(&server.tcp()));
    });
}

#[test]
fn behaves_as_a_store_over_a_unix_socket() {
    on_each_server(|name| {
        let server = Server::start(name);
        behaviour::run_all(|| store(&server.unix()));
    });
}

#[test]
fn behaves_as_a_store_in_version_3_of_the_protocol() {
    on_each_server(|name| {
        let server = Server::start_with(name, &["--requirepass", "secret"]);
        let url = |user: &str| format!("{}?protocol=3", server.tcp().replace("//", user));
        behaviour::run_all(|| store(&url("//:secret@")));
        let key = key(fresh_namespace(), 0);
        assert!(put(&*store(&url("//default:secret@")), &key, b"value").is_ok());
        for wrong in ["//", "//:wrong@", "//nobody:secret@"] {
            let error = put(&*store(&url(wrong)), &key, b"value").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(!error.to_string().contains("wrong"), "{error}");
        }
        let open = store(&format!("{}?protocol=3&password=secret", server.unix()));
        let facts = open.describe(soon()).unwrap();
        let fact = |name: &str| facts.iter().any(|(n, _)| n == name);
        assert!(fact("used_memory") && fact("config:maxmemory"));
    });
}

#[test]
fn names_of_hosts_are_looked_up() {
    on_each_server(|name| {
        let server = Server::start(name);
        let store = store(&format!("redis://localhost:{}", server.port()));
        fill(&*store, fresh_namespace(), 1, 10);
        let nowhere = self::store("redis://no-such-host.invalid:1");
        let error = nowhere
            .contains(&[key(fresh_namespace(), 0)], soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(
            error.to_string().contains("no-such-host.invalid"),
            "{error}"
        );
    });
}

#[test]
fn big_batches_move_over_several_connections() {
    on_each_server(|name| {
        let server = Server::start(name);
        for url in [server.tcp(), server.unix()] {
            let store = store(&url);
            let namespace = fresh_namespace();
            for (count, size) in [(300, 1000), (100, 70_000), (20, 1 << 20), (3, 20 << 20)] {
                let keys = fill(&*store, namespace, count, size);
                for outcome in fetch(&*store, &keys, size, soon()) {
                    assert_eq!(outcome.unwrap(), GetOutcome::Hit(size as u64));
                }
            }
            assert!(
                (2..=4).contains(&store.stats().connects),
                "{:?}",
                store.stats()
            );
        }
    });
}

#[test]
fn one_bad_key_does_not_spoil_a_batch() {
    on_each_server(|name| {
        let server = Server::start(name);
        let store = store(&server.tcp());
        let keys = fill(&*store, fresh_namespace(), 9, 30_000);
        store.remove(&keys[1..2], soon()).unwrap();
        store.remove(&keys[3..4], soon()).unwrap();
        assert_eq!(server.command(&format!("LPUSH {} x", keys[3])), ":1");
        put(&*store, &keys[5], &vec![0; 200_000]).unwrap();
        let outcomes = fetch(&*store, &keys, 30_000, soon());
        for (n, outcome) in outcomes.into_iter().enumerate() {
            match n {
                1 => assert_eq!(outcome.unwrap(), GetOutcome::Miss),
                3 => {
                    let error = outcome.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
                    assert!(error.to_string().contains(&keys[3].to_string()), "{error}");
                }
                5 => assert_eq!(outcome.unwrap(), GetOutcome::TooLarge(200_000)),
                _ => assert_eq!(outcome.unwrap(), GetOutcome::Hit(30_000)),
            }
        }
        assert_eq!(store.contains(&keys[3..4], soon()).unwrap(), [true]);
        assert_eq!(
            store.stats().connects,
            1,
            "all of it in step on one connection"
        );
    });
}

#[test]
fn look_ups_listings_and_removals_of_many_keys() {
    on_each_server(|name| {
        let server = Server::start(name);
        let store = store(&server.unix());
        let (one, other) = (fresh_namespace(), fresh_namespace());
        let keys = fill(&*store, one, 3000, 10);
        fill(&*store, other, 50, 20);
        assert!(
            store
                .contains(&keys, soon())
                .unwrap()
                .iter()
                .all(|&found| found)
        );
        assert_eq!(store.remove(&keys[1500..1501], soon()).unwrap(), 1);
        let found = store.contains(&keys, soon()).unwrap();
        assert!(
            found
                .iter()
                .enumerate()
                .all(|(n, &found)| found == (n != 1500))
        );

        // What is not ours is neither listed nor in the way.
        server.command(&format!("SET penstock:{one}:strange x"));
        server.command("SET somebody:else x");
        server.command(&format!("LPUSH {} x", keys[1500]));
        let mut listed = Vec::new();
        store
            .list(Some(one), &mut |object| listed.push(object), soon())
            .unwrap();
        listed.sort_by_key(|object| object.key);
        listed.dedup_by_key(|object| object.key);
        assert_eq!(listed.len(), 2999);
        assert!(
            listed
                .iter()
                .all(|object| object.bytes == 10 && object.key.namespace == one)
        );
        let mut all = 0;
        store.list(None, &mut |_| all += 1, soon()).unwrap();
        assert!(all >= 3049, "{all}");

        assert_eq!(store.remove(&keys, soon()).unwrap(), 3000);
        assert!(
            store
                .contains(&keys, soon())
                .unwrap()
                .iter()
                .all(|&found| !found)
        );
    });
}

#[test]
fn describes_the_server() {
    on_each_server(|name| {
        let server = Server::start_with(name, &["--maxmemory-policy", "allkeys-lru"]);
        server.command("CONFIG SET maxmemory 100mb");
        let facts = store(&server.tcp()).describe(soon()).unwrap();
        let fact = |name: &str| {
            let found = facts.iter().find(|(n, _)| n == name);
            found
                .unwrap_or_else(|| panic!("no {name} in {facts:?}"))
                .1
                .as_str()
        };
        assert_eq!(fact("tcp_port"), server.port().to_string());
        assert_eq!(fact("config:maxmemory"), (100 << 20).to_string());
        assert_eq!(fact("config:maxmemory-policy"), "allkeys-lru");
        assert_eq!(fact("config:appendonly"), "no");
        assert_eq!((fact("config:save"), fact("config:io-threads")), ("", "1"));
        assert!(fact("used_memory").parse::<u64>().is_ok());
        assert!(!fact("redis_version").is_empty());
    });
}

#[test]
fn passwords_and_users() {
    on_each_server(|name| {
        let server = Server::start_with(name, &["--requirepass", "hunter2 %&:@"]);
        let admin = |line: &str| server.commands(&["AUTH \"hunter2 %&:@\"", line]);
        let user = "ACL SETUSER reader on >s3cret ~penstock:* +get +exists +info";
        assert_eq!(admin(user), ["+OK", "+OK"]);
        assert_eq!(admin("ACL SETUSER open on nopass ~* +@all"), ["+OK", "+OK"]);

        let host = format!("127.0.0.1:{}", server.port());
        let encoded = "hunter2%20%25%26%3A%40";
        let unix = server.unix();
        let namespace = fresh_namespace();
        for url in [
            format!("redis://:{encoded}@{host}"),
            format!("valkey://default:{encoded}@{host}"),
            format!("{unix}?password={encoded}"),
            format!("redis+{unix}?user=default&password={encoded}"),
            format!("redis://open@{host}"),
        ] {
            let store = store(&url);
            fill(&*store, namespace, 2, 100);
            assert!(!store.url().contains("hunter2"), "{}", store.url());
        }

        let reader = store(&format!("redis://reader:s3cret@{host}"));
        assert!(get(&*reader, &key(namespace, 0)).is_some());
        assert!(reader.contains(&[key(namespace, 0)], soon()).unwrap()[0]);
        let facts = reader.describe(soon()).unwrap();
        assert!(
            facts.iter().any(|(name, _)| name == "used_memory"),
            "without CONFIG"
        );
        let error = put(&*reader, &key(namespace, 9), b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert_eq!(
            kind_of(reader.remove(&[key(namespace, 0)], soon())),
            ErrorKind::Denied
        );
        assert!(
            get(&*reader, &key(namespace, 0)).is_some(),
            "a refusal breaks nothing"
        );

        for url in [
            format!("redis://{host}"),
            format!("redis://:wrong-hunter3@{host}"),
            format!("redis://reader:wrong-hunter3@{host}"),
            format!("redis://nobody@{host}"),
            format!("{unix}?user=reader&password=wrong-hunter3"),
        ] {
            let store = store(&url);
            let errors = [
                store.contains(&[key(namespace, 0)], soon()).unwrap_err(),
                put(&*store, &key(namespace, 0), b"x").unwrap_err(),
                store.list(None, &mut |_| {}, soon()).unwrap_err(),
            ];
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Denied, "{url}: {error}");
                assert!(!format!("{error} {error:?}").contains("hunter"), "{error}");
            }
        }
    });
}

#[test]
fn a_password_for_a_server_that_has_none_is_denied() {
    on_each_server(|name| {
        let server = Server::start(name);
        let url = server.tcp().replace("//", "//:hunter2@");
        let error = store(&url)
            .contains(&[key(fresh_namespace(), 0)], soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    });
}

/// Runs itself again, since a process's own environment cannot be changed safely.
#[test]
fn the_password_may_come_from_the_environment() {
    const INSIDE: &str = "PENSTOCK_TEST_INSIDE_WITH_URL";
    if let Ok(url) = std::env::var(INSIDE) {
        fill(&*store(&url), fresh_namespace(), 1, 10);
        return;
    }
    on_each_server(|name| {
        let server = Server::start_with(name, &["--requirepass", "from outside"]);
        let again = |url: String, password: Option<&str>| {
            let mut run = std::process::Command::new(std::env::current_exe().unwrap());
            run.args(["--exact", "the_password_may_come_from_the_environment"]);
            run.env(INSIDE, url).env_remove("PENSTOCK_POOL_PASSWORD");
            run.envs(password.map(|password| ("PENSTOCK_POOL_PASSWORD", password)));
            run.output().unwrap().status.success()
        };
        assert!(again(server.tcp(), Some("from outside")));
        assert!(again(
            format!("{}?user=default", server.unix()),
            Some("from outside")
        ));
        assert!(!again(server.tcp(), Some("wrong")));
        assert!(!again(server.tcp(), None));
    });
}

#[test]
fn databases_are_apart() {
    on_each_server(|name| {
        let server = Server::start(name);
        let namespace = fresh_namespace();
        let two = store(&format!("{}/2", server.tcp()));
        fill(&*two, namespace, 1, 10);
        assert!(
            get(
                &*store(&format!("{}?db=2", server.unix())),
                &key(namespace, 0)
            )
            .is_some()
        );
        for url in [
            server.tcp(),
            format!("{}/0", server.tcp()),
            format!("{}/3", server.tcp()),
        ] {
            assert!(get(&*store(&url), &key(namespace, 0)).is_none(), "{url}");
        }
        let none = store(&format!("{}/99", server.tcp()));
        let error = none.contains(&[key(namespace, 0)], soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("99"), "{error}");
    });
}

#[test]
fn full_is_an_outcome_for_puts_only() {
    on_each_server(|name| {
        let server = Server::start_with(name, &["--maxmemory-policy", "noeviction"]);
        let store = store(&server.unix());
        let namespace = fresh_namespace();
        let keys = fill(&*store, namespace, 4, 100_000);
        server.command("CONFIG SET maxmemory 1");
        let error = put(&*store, &key(namespace, 9), &bytes(9, 100_000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(error.kind().is_retryable());
        for outcome in fetch(&*store, &keys, 100_000, soon()) {
            assert_eq!(outcome.unwrap(), GetOutcome::Hit(100_000));
        }
        server.command("CONFIG SET maxmemory 0");
        assert!(put(&*store, &key(namespace, 9), b"x").is_ok());
        assert_eq!(store.stats().connects, 1, "a refusal costs no connection");
    });
}

#[test]
fn servers_that_cannot_serve_are_unavailable() {
    on_each_server(|name| {
        let namespace = fresh_namespace();
        let replica = Server::start(name);
        let store = store(&replica.tcp());
        fill(&*store, namespace, 1, 10);
        let nobody = free_port();
        assert_eq!(
            replica.command(&format!("REPLICAOF 127.0.0.1 {nobody}")),
            "+OK"
        );
        assert_eq!(
            kind_of(put(&*store, &key(namespace, 1), b"x")),
            ErrorKind::Unavailable
        );
        replica.command("CONFIG SET replica-serve-stale-data no");
        assert_eq!(
            kind_of(store.contains(&[key(namespace, 0)], soon())),
            ErrorKind::Unavailable
        );
        replica.command("REPLICAOF NO ONE");
        assert!(get(&*store, &key(namespace, 0)).is_some());

        let cluster = Server::start_with(name, &["--cluster-enabled", "yes"]);
        let store = self::store(&cluster.tcp());
        let put_one = || put(&*store, &key(namespace, 0), b"x");
        assert_eq!(kind_of(put_one()), ErrorKind::Unavailable, "CLUSTERDOWN");
        cluster.command("CLUSTER ADDSLOTSRANGE 0 16383");
        let until = soon();
        while !cluster.text("CLUSTER INFO").contains("cluster_state:ok") {
            assert!(Instant::now() < until, "the cluster does not form");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(
            put_one().unwrap(),
            PutOutcome::Stored,
            "a cluster of one serves"
        );
        let database = self::store(&format!("{}/1", cluster.tcp()));
        assert_eq!(
            kind_of(put(&*database, &key(namespace, 0), b"x")),
            ErrorKind::Config
        );
    });
}

#[test]
fn a_server_that_is_busy_or_may_not_write_is_unavailable() {
    on_each_server(|name| {
        let server = Server::start_with(name, &["--lua-time-limit", "50"]);
        let store = store(&server.tcp());
        let namespace = fresh_namespace();
        fill(&*store, namespace, 1, 10);
        assert_eq!(server.command("CONFIG SET min-replicas-to-write 1"), "+OK");
        let error = put(&*store, &key(namespace, 1), b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("NOREPLICAS"), "{error}");
        assert!(get(&*store, &key(namespace, 0)).is_some());
        server.command("CONFIG SET min-replicas-to-write 0");

        std::thread::scope(|scope| {
            let script = scope.spawn(|| server.command("EVAL \"while true do end\" 0"));
            let until = soon();
            // Until the script has run for its time nobody is answered at all.
            let error = loop {
                match store.contains(&[key(namespace, 0)], within(Duration::from_millis(500))) {
                    Err(error) if error.kind() == ErrorKind::Unavailable => break error,
                    _ => assert!(Instant::now() < until, "never busy"),
                }
            };
            assert!(error.to_string().contains("BUSY"), "{error}");
            assert_eq!(
                kind_of(put(&*store, &key(namespace, 1), b"x")),
                ErrorKind::Unavailable
            );
            assert_eq!(kind_of(get_one(&*store, namespace)), ErrorKind::Unavailable);
            assert_eq!(server.command("SCRIPT KILL"), "+OK");
            assert!(script.join().unwrap().starts_with("-ERR"));
        });
        assert!(get(&*store, &key(namespace, 0)).is_some());
    });
}

#[test]
fn a_loading_server_is_unavailable_and_then_serves() {
    on_each_server(|name| {
        let mut server = Server::start(name);
        let store = store(&server.unix());
        let namespace = fresh_namespace();
        let keys = fill(&*store, namespace, 2000, 100);
        assert_eq!(server.command("SAVE"), "+OK");
        server.kill();
        // A millisecond a key.
        let slowly = [
            "--key-load-delay",
            "1000",
            "--loading-process-events-interval-bytes",
            "1024",
        ];
        server.restart_with(&slowly);
        let mut loading = 0;
        let until = soon();
        while let Err(error) = store.contains(&keys, soon()) {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains("LOADING"), "{error}");
            assert!(Instant::now() < until);
            loading += 1;
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(loading > 0, "never seen loading");
        assert!(
            store
                .contains(&keys, soon())
                .unwrap()
                .iter()
                .all(|&found| found)
        );
    });
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

fn get_one(store: &dyn Store, namespace: Namespace) -> penstock_store::Result<GetOutcome> {
    let mut into = [0; 100];
    store.get(
        &key(namespace, 0),
        &mut [IoSliceMut::new(&mut into)],
        soon(),
    )
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
                    while outcomes.iter().all(penstock_store::Result::is_ok) {
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
            let started = Instant::now();
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
            assert!(
                took < 8 * time + Duration::from_secs(10),
                "late by more than noise: {took:?}"
            );
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
        assert_eq!(
            kind_of(store.remove(&keys, Instant::now())),
            ErrorKind::TimedOut
        );
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

#[test]
fn a_server_with_too_many_clients_is_unavailable() {
    on_each_server(|name| {
        let server = Server::start(name);
        let admitted = store(&server.unix());
        fill(&*admitted, fresh_namespace(), 1, 10);
        assert_eq!(server.command("CONFIG SET maxclients 1"), "+OK");
        let one_more = store(&server.tcp());
        let error = one_more
            .contains(&[key(fresh_namespace(), 0)], soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(
            admitted
                .contains(&[key(fresh_namespace(), 0)], soon())
                .is_ok()
        );
    });
}
