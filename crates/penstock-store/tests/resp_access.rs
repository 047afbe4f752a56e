//! The RESP store and who may use a server: users, passwords.

use std::sync::Arc;

use penstock_contract::{ErrorKind, Store};
use penstock_store::open;

use crate::behaviour::batches::fill;
use crate::behaviour::{fresh_namespace, get, key, kind_of, put, soon};
use crate::resp_server::{Server, on_each_server, patient};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &patient()).expect("the URL is right")
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
fn a_refusal_costs_no_connection() {
    on_each_server(|name| {
        let server = Server::start(name);
        let namespace = fresh_namespace();
        let keys = fill(&*store(&server.tcp()), namespace, 3000, 10);
        let user = |rules: &str| {
            let line = format!("ACL SETUSER user on >s3cret ~penstock:* resetchannels {rules}");
            assert_eq!(server.command(&line), "+OK");
        };
        user("+get +set");
        let store = store(&server.tcp().replace("//", "//user:s3cret@"));
        assert!(get(&*store, &keys[0]).is_some());

        // Of several commands each is refused.
        assert_eq!(kind_of(store.contains(&keys, soon())), ErrorKind::Denied);
        assert_eq!(kind_of(store.remove(&keys, soon())), ErrorKind::Denied);
        let listed = store.list(None, &mut |_| {}, soon());
        assert_eq!(kind_of(listed), ErrorKind::Denied);
        assert_eq!(kind_of(store.describe(soon())), ErrorKind::Denied);
        assert_eq!(store.stats().errors, 4);
        assert!(get(&*store, &keys[0]).is_some());

        // No later answer is one of theirs.
        user("+exists +unlink");
        assert_eq!(store.contains(&keys, soon()).unwrap(), [true; 3000]);
        assert_eq!(store.remove(&keys[..2], soon()).unwrap(), 2);
        assert!(get(&*store, &keys[2]).is_some());
        assert_eq!(store.stats().connects, 1, "opened no second time");
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
            let test = "resp_access::the_password_may_come_from_the_environment";
            run.args(["--exact", test]);
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
