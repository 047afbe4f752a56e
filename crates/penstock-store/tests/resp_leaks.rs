//! The RESP store leaves nothing behind. One test in one process: it counts what the process holds.

mod behaviour;
mod resp_server;

use std::time::Duration;

use behaviour::{bytes, fresh_namespace, key, put, soon, within};
use penstock_contract::GetOutcome;
use penstock_store::open;
use resp_server::{Server, on_each_server, patient};

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("Linux").count()
}

#[test]
fn reconnecting_leaks_neither_files_nor_threads() {
    on_each_server(|name| {
        let mut server = Server::start(name);
        let before = (open_files(), threads());
        for url in [server.unix(), server.tcp()] {
            let store = open(&url, &patient()).unwrap();
            let key = key(fresh_namespace(), 0);
            let value = bytes(0, 1000);
            let mut into = vec![0; 1000];
            let with_one = |store: &dyn penstock_contract::Store| {
                put(store, &key, &value).unwrap();
                open_files()
            };
            let connected = with_one(&*store);
            for _ in 0..1000 {
                server.command("CLIENT KILL TYPE normal SKIPME yes");
                let mut slices = [std::io::IoSliceMut::new(&mut into)];
                assert_eq!(
                    store.get(&key, &mut slices, soon()).unwrap(),
                    GetOutcome::Hit(1000)
                );
            }
            assert!(store.stats().connects > 1000);
            assert_eq!(open_files(), connected, "one connection before, one after");
            assert_eq!(store.stats().errors, 0);

            // Failing to connect, and giving up in the middle, leave nothing either.
            server.kill();
            for _ in 0..200 {
                put(&*store, &key, &value).unwrap_err();
            }
            server.restart();
            server.freeze();
            for _ in 0..20 {
                let late = within(Duration::from_millis(2));
                store.contains(&[key], late).unwrap_err();
            }
            server.thaw();
            assert_eq!(with_one(&*store), connected);
        }
        assert_eq!(
            (open_files(), threads()),
            before,
            "all closed with the store"
        );
    });
}
