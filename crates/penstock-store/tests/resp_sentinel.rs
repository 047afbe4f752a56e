//! Sentinel, with real servers and a real sentinel.

use std::sync::Arc;

use penstock_contract::{ErrorKind, Key, Store};
use penstock_store::open;

use crate::behaviour::{bytes, eventually, fresh_namespace, get, key, put, soon};
use crate::resp_server::{Sentinel, Server, free_port, on_each_server, patient};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &patient()).expect("the URL is right")
}

/// A master with a replica that is in step with it.
fn pair(name: &'static str) -> (Server, Server) {
    let master = Server::start(name);
    let port = master.port().to_string();
    let replica = Server::start_with(name, &["--replicaof", "127.0.0.1", &port]);
    eventually("the replica joins", || {
        let said = replica.text("INFO replication");
        said.contains("master_link_status:up")
    });
    (master, replica)
}

/// Puts until the store takes it; whatever it says before is a failure that is expected.
fn put_eventually(store: &dyn Store, key: &Key, value: &[u8]) -> Vec<ErrorKind> {
    let mut refusals = Vec::new();
    eventually("it is put", || {
        let refusal = put(store, key, value).err();
        refusals.extend(refusal.as_ref().map(|error| error.kind()));
        refusal.is_none()
    });
    refusals
}

#[test]
fn behaves_as_a_store_behind_a_sentinel() {
    on_each_server(|name| {
        let master = Server::start(name);
        let sentinel = Sentinel::start(name, "main", master.port());
        crate::behaviour::run_all(|| store(&sentinel.url("main")));
    });
}

#[test]
fn the_second_sentinel_answers_when_the_first_is_gone() {
    on_each_server(|name| {
        let master = Server::start(name);
        let sentinel = Sentinel::start(name, "main", master.port());
        let (gone, here) = (free_port(), sentinel.port());
        let store = store(&format!(
            "redis+sentinel://127.0.0.1:{gone},127.0.0.1:{here}/main"
        ));
        let key = key(fresh_namespace(), 0);
        put(&*store, &key, b"value").unwrap();
        assert_eq!(get(&*store, &key), Some(b"value".to_vec()));
    });
}

#[test]
fn an_unknown_master_is_told() {
    on_each_server(|name| {
        let master = Server::start(name);
        let sentinel = Sentinel::start(name, "main", master.port());
        let error = store(&sentinel.url("other"))
            .contains(&[key(fresh_namespace(), 0)], soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(
            error.to_string().contains(r#"no master named "other""#),
            "{error}"
        );
    });
}

#[test]
fn puts_follow_the_master_when_it_is_changed() {
    on_each_server(|name| {
        let (_old, new) = pair(name);
        let sentinel = Sentinel::start(name, "main", _old.port());
        sentinel.knows_replicas("main");
        let store = store(&sentinel.url("main"));
        let namespace = fresh_namespace();
        put_eventually(&*store, &key(namespace, 0), b"before");
        let is_master = || {
            let text = new.try_text("INFO replication");
            text.is_ok_and(|text| text.contains("role:master"))
        };
        eventually("the replica is the master", || {
            // Refused before it has heard from the replica that it is fit, and while it is at it;
            // where the replica takes too long, on a loaded machine, it gives up.
            let _ = sentinel.command("SENTINEL FAILOVER main");
            is_master()
        });
        // Until Sentinel has demoted it, the old master takes puts that are then lost: misses.
        let direct = self::store(&new.tcp());
        let value = bytes(1, 1000);
        let mut n = 0;
        eventually("puts follow", || {
            n += 1;
            for kind in put_eventually(&*store, &key(namespace, n), &value) {
                // No error of the pool's owner: a retry is what helps.
                assert!(
                    matches!(kind, ErrorKind::Unreachable | ErrorKind::Unavailable),
                    "{kind:?}"
                );
            }
            get(&*direct, &key(namespace, n)).is_some()
        });
        assert!(get(&*direct, &key(namespace, n)) == Some(value));
    });
}

#[test]
fn a_master_that_dies_is_replaced() {
    on_each_server(|name| {
        let (mut old, new) = pair(name);
        let sentinel = Sentinel::start(name, "main", old.port());
        sentinel.knows_replicas("main");
        let store = store(&sentinel.url("main"));
        let namespace = fresh_namespace();
        put_eventually(&*store, &key(namespace, 0), b"before");
        old.kill();
        put_eventually(&*store, &key(namespace, 1), b"after");
        let direct = self::store(&new.tcp());
        assert_eq!(get(&*direct, &key(namespace, 1)), Some(b"after".to_vec()));
    });
}

#[test]
fn a_server_that_is_a_replica_now_is_not_asked_again() {
    on_each_server(|name| {
        let (server, other) = (Server::start(name), Server::start(name));
        let sentinel = Sentinel::start(name, "main", server.port());
        let store = store(&sentinel.url("main"));
        let namespace = fresh_namespace();
        put(&*store, &key(namespace, 0), b"value").unwrap();
        let before = store.stats().connects;
        // Nobody closes our connection.
        server.command(&format!("REPLICAOF 127.0.0.1 {}", other.port()));
        let error = put(&*store, &key(namespace, 1), b"value").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let refused = put(&*store, &key(namespace, 2), b"value").map_err(|error| {
            assert!(error.to_string().contains("not a master"), "{error}");
        });
        // Either Sentinel has made it the master again, or its role is found out.
        assert!(refused.is_err() || store.stats().connects > before);
        server.command("REPLICAOF NO ONE");
        put_eventually(&*store, &key(namespace, 3), b"value");
    });
}

#[test]
fn sentinels_have_passwords_of_their_own() {
    on_each_server(|name| {
        let master = Server::start_with(name, &["--requirepass", "pool"]);
        let sentinel = Sentinel::start(name, "main", master.port());
        let url = sentinel.url("main").replace("://", "://:pool@");
        let guarded = format!("{url}?sentinel_password=watch");
        let error = store(&guarded)
            .contains(&[key(fresh_namespace(), 0)], soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.to_string().contains("sentinel_password"), "{error}");
        assert!(!error.to_string().contains("watch"), "{error}");
        let open = store(&url);
        put(&*open, &key(fresh_namespace(), 0), b"value").unwrap();
    });
}
