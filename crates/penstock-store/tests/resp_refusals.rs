//! The RESP store and servers that answer, but do not serve.

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, GetOutcome, PutOutcome, Store};
use penstock_store::open;

use crate::behaviour::batches::{fetch, fill};
use crate::behaviour::{
    bytes, eventually, fresh_namespace, get, get_one, key, kind_of, put, soon, within,
};
use crate::resp_server::{Server, free_port, on_each_server, patient};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &patient()).expect("the URL is right")
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
        eventually("the cluster forms", || {
            cluster.text("CLUSTER INFO").contains("cluster_state:ok")
        });
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
            // Until the script has run for its time nobody is answered at all.
            let mut error = None;
            eventually("it is busy", || {
                let found =
                    store.contains(&[key(namespace, 0)], within(Duration::from_millis(500)));
                error = found.err();
                let kind = error.as_ref().map(|error| error.kind());
                kind == Some(ErrorKind::Unavailable)
            });
            let error = error.unwrap();
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
fn a_server_that_cannot_save_takes_nothing_and_still_gives() {
    on_each_server(|name| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let saving = ["--dir", path, "--save", "3600 1000000"];
        let server = Server::start_with(name, &saving);
        // Where its file should go there is a directory.
        let obstacle = directory.path().join("dump.rdb");
        std::fs::create_dir(&obstacle).unwrap();
        let store = store(&server.tcp());
        let namespace = fresh_namespace();
        let keys = fill(&*store, namespace, 2, 10);
        let save = || assert!(server.command("BGSAVE").starts_with("+Background"));

        save();
        let mut error = None;
        eventually("a put is refused", || {
            error = put(&*store, &key(namespace, 9), b"x").err();
            error.is_some()
        });
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.kind().is_retryable());
        assert!(error.to_string().contains("MISCONF"), "{error}");
        assert_eq!(store.stats().connects, 1, "a refusal costs no connection");
        let removed = store.remove(&keys, soon());
        assert_eq!(kind_of(removed), ErrorKind::Unavailable);
        assert_eq!(store.stats().errors, 2);
        assert_eq!(store.contains(&keys, soon()).unwrap(), [true; 2]);
        assert!(get(&*store, &keys[0]).is_some());

        std::fs::remove_dir(&obstacle).unwrap();
        save();
        eventually("puts are taken again", || {
            put(&*store, &key(namespace, 8), b"x").is_ok()
        });
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
        // A tenth of a second a key, until that was seen.
        let slowly = [
            "--key-load-delay",
            "100000",
            "--loading-process-events-interval-bytes",
            "1024",
        ];
        server.restart_with(&slowly);
        let mut loading = 0;
        eventually("it has loaded", || {
            let Err(error) = store.contains(&keys, soon()) else {
                return true;
            };
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains("LOADING"), "{error}");
            server.command("CONFIG SET key-load-delay 0");
            loading += 1;
            false
        });
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
