//! The RESP store against real servers: what it does while all is well.

use std::io::IoSliceMut;
use std::sync::Arc;

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{ErrorKind, GetOutcome, GetRequest, Store};
use penstock_store::layers::Tiered;
use penstock_store::open;
use penstock_value::MemoryStore;
use penstock_value::header::{Checksum, HEADER_BYTES};

use crate::behaviour::batches::{fetch, fill};
use crate::behaviour::{bytes, eventually, fresh_namespace, get, key, put, soon};
use crate::resp_server::{Server, on_each_server, patient};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &patient()).expect("the URL is right")
}

#[test]
fn behaves_as_a_store_over_tcp() {
    on_each_server(|name| {
        let server = Server::start(name);
        crate::behaviour::run_all(|| store(&server.tcp()));
    });
}

#[test]
fn behaves_as_a_store_over_a_unix_socket() {
    on_each_server(|name| {
        let server = Server::start(name);
        crate::behaviour::run_all(|| store(&server.unix()));
    });
}

#[test]
fn behaves_as_a_store_in_version_3_of_the_protocol() {
    on_each_server(|name| {
        let server = Server::start_with(name, &["--requirepass", "secret"]);
        let url = |user: &str| format!("{}?protocol=3", server.tcp().replace("//", user));
        crate::behaviour::run_all(|| store(&url("//:secret@")));
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
fn a_touch_is_a_use_to_the_server() {
    on_each_server(|name| {
        let server = Server::start(name);
        let (store, namespace) = (store(&server.tcp()), fresh_namespace());
        let [touched, left] = [0, 1].map(|n| key(namespace, n));
        for key in [&touched, &left] {
            put(&*store, key, b"value").unwrap();
        }
        let idle = |key: &penstock_contract::Key| {
            let reply = &server.commands(&[&format!("OBJECT IDLETIME {key}")])[0];
            reply.trim_start_matches(':').parse::<u64>().unwrap()
        };
        // The server's clock counts seconds.
        eventually("its clock goes on", || idle(&left) > 0);
        store.touch(&[(touched, 0)], soon()).unwrap();
        store.contains(&[left], soon()).unwrap();
        assert!(idle(&touched) < idle(&left));
    });
}

#[test]
fn values_come_with_their_checksums_unless_something_changed_them() {
    on_each_server(|name| {
        let server = Server::start(name);
        let server = store(&server.tcp());
        let nothing: Arc<dyn Store> = Arc::new(MemoryStore::new(1 << 20));
        let tiers = Tiered::new(vec![nothing, Arc::clone(&server)]);
        let faulty = Faulty::new(
            Arc::clone(&server),
            Faults {
                bit_flips: 1.0,
                ..Faults::default()
            },
        );
        let namespace = fresh_namespace();
        for (n, size) in [10, 64, 65, 300_000].into_iter().enumerate() {
            let (key, value) = (key(namespace, n as u64), bytes(n as u64, size));
            put(&*server, &key, &value).unwrap();
            let checksum = |store: &dyn Store, wants_checksum: bool| {
                let mut buffers = [vec![0; 50], vec![0; size]];
                let mut into = buffers.each_mut().map(|buffer| IoSliceMut::new(buffer));
                let mut batch = [GetRequest {
                    wants_checksum,
                    ..GetRequest::new(key, &mut into)
                }];
                store.get_many(&mut batch, soon());
                let [request] = batch;
                assert_eq!(
                    request.outcome.unwrap().unwrap(),
                    GetOutcome::Hit(size as u64)
                );
                request.checksum
            };
            let payload = value.get(HEADER_BYTES..).unwrap_or_default();
            assert_eq!(checksum(&*server, true), Some(Checksum::of(payload)));
            assert_eq!(checksum(&tiers, true), Some(Checksum::of(payload)));
            assert_eq!(checksum(&*server, false), None);
            assert_eq!(checksum(&faulty, true), None);
        }
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
