//! Clusters of real servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use penstock_contract::{ErrorKind, GetOutcome, Key, Store};
use penstock_store::{OpenOptions, open};

use crate::behaviour::batches::{fetch, fill};
use crate::behaviour::{
    LONG, bytes, eventually, fresh_namespace, get, given_time, key, past, put, soon, within,
};
use crate::resp_server::cluster::Cluster;
use crate::resp_server::{Server, free_port, on_each_server};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &OpenOptions::default()).expect("the URL is right")
}

/// The slot that the servers see a key in.
fn slot_of(cluster: &Cluster, key: &Key) -> usize {
    let reply = cluster.primaries[0].command(&format!("CLUSTER KEYSLOT {key}"));
    reply.strip_prefix(':').unwrap().parse().unwrap()
}

/// Which of three primaries a key lies on.
fn home_of(cluster: &Cluster, key: &Key) -> usize {
    let slot = slot_of(cluster, key);
    (0..3).find(|i| slot < 16384 * (i + 1) / 3).unwrap()
}

/// Looks up until every key is found, for as long as a failover may take.
fn wait_for_hits(store: &dyn Store, keys: &[Key]) {
    let mut time = Duration::from_millis(500);
    eventually("all are found again", || {
        let found = store.contains(keys, within(time));
        time = (2 * time).min(LONG / 8);
        found.is_ok_and(|found| found.iter().all(|&hit| hit))
    });
}

#[test]
fn behaves_as_a_store() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, false);
        crate::behaviour::run_all(|| store(&cluster.url()));
    });
}

#[test]
fn objects_are_spread_over_all_primaries() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, false);
        let store = store(&cluster.url());
        let keys = fill(&*store, fresh_namespace(), 120, 10_000);
        let sizes: Vec<usize> = cluster
            .primaries
            .iter()
            .map(|server| server.command("DBSIZE")[1..].parse().unwrap())
            .collect();
        assert_eq!(sizes.iter().sum::<usize>(), 120);
        assert!(sizes.iter().all(|&size| size > 15), "{sizes:?}");
        assert_eq!(store.contains(&keys, soon()).unwrap(), [true; 120]);
        for outcome in fetch(&*store, &keys, 10_000, soon()) {
            assert_eq!(outcome.unwrap(), GetOutcome::Hit(10_000));
        }
        let facts = store.describe(soon()).unwrap();
        let fact = |name: &str| {
            facts
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| v.as_str())
        };
        assert_eq!(fact("cluster:primaries"), Some("3"));
        assert_eq!(fact("cluster_enabled"), Some("1"));
        assert_eq!(store.remove(&keys, soon()).unwrap(), 120);
    });
}

#[test]
fn any_seed_that_answers_will_do() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, false);
        let (gone, here) = (free_port(), cluster.primaries[2].port());
        let store = store(&format!(
            "valkey+cluster://127.0.0.1:{gone},127.0.0.1:{here}"
        ));
        fill(&*store, fresh_namespace(), 20, 100);
        let nobody = self::store(&format!("valkey+cluster://127.0.0.1:{gone}"));
        let error = nobody.contains(&[key(fresh_namespace(), 0)], soon());
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Unreachable);
    });
}

#[test]
fn a_url_for_the_other_topology_is_told() {
    on_each_server(|name| {
        let alone = Server::start(name);
        let url = format!("redis+cluster://127.0.0.1:{}", alone.port());
        let error = put(&*store(&url), &key(fresh_namespace(), 0), b"v").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("without +cluster"), "{error}");

        let cluster = Cluster::start(name, 3, false);
        let direct = store(&cluster.primaries[0].tcp());
        let namespace = fresh_namespace();
        let elsewhere = (0..).map(|n| key(namespace, n));
        let elsewhere = elsewhere
            .into_iter()
            .find(|key| home_of(&cluster, key) != 0);
        let error = put(&*direct, &elsewhere.unwrap(), b"v").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("valkey+cluster://"), "{error}");
    });
}

#[test]
fn slots_move_under_load() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, false);
        let store = store(&cluster.url());
        let namespace = fresh_namespace();
        // Many keys in the slots that move: those of these objects.
        let keys = fill(&*store, namespace, 60, 3000);
        let moving: Vec<usize> = keys
            .iter()
            .filter(|key| home_of(&cluster, key) == 0)
            .map(|key| slot_of(&cluster, key))
            .collect();
        assert!(moving.len() > 5);
        let done = AtomicBool::new(false);
        let [loaded, stored] = [(); 2].map(|()| AtomicU64::new(0));
        std::thread::scope(|scope| {
            let loads = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(store.contains(&keys, soon()).unwrap(), [true; 60]);
                    for outcome in fetch(&*store, &keys, 3000, soon()) {
                        assert_eq!(outcome.unwrap(), GetOutcome::Hit(3000));
                    }
                    loaded.fetch_add(1, Ordering::Relaxed);
                }
            });
            let stores = scope.spawn(|| {
                let namespace = fresh_namespace();
                let mut n = 0;
                while !done.load(Ordering::Relaxed) {
                    let (key, value) = (key(namespace, n), bytes(n, 5000));
                    put(&*store, &key, &value).unwrap();
                    assert!(get(&*store, &key) == Some(value));
                    assert_eq!(store.remove(&[key], soon()).unwrap(), 1);
                    n = stored.fetch_add(1, Ordering::Relaxed) + 1;
                }
            });
            // The second round of each begins and ends in between.
            let all_is_used = || {
                let rounds =
                    [&loaded, &stored].map(|rounds| (rounds, rounds.load(Ordering::Relaxed)));
                eventually("all is used", || {
                    let mut rounds = rounds.iter();
                    rounds.all(|(rounds, before)| rounds.load(Ordering::Relaxed) > before + 1)
                        || loads.is_finished()
                        || stores.is_finished()
                });
            };
            for &slot in &moving {
                cluster.move_slot(slot, 0, 1, all_is_used);
            }
            // And back, so that the map that was learned is wrong again.
            for &slot in &moving {
                cluster.move_slot(slot, 1, 0, all_is_used);
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn a_new_object_in_a_slot_on_its_way() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, false);
        let store = store(&cluster.url());
        let namespace = fresh_namespace();
        let key = (0..)
            .map(|n| key(namespace, n))
            .find(|key| home_of(&cluster, key) == 0);
        let key = key.unwrap();
        let value = bytes(7, 2_000_000);
        // With nothing in it, each step between has the new object put, found, fetched, removed.
        cluster.move_slot(slot_of(&cluster, &key), 0, 2, || {
            put(&*store, &key, &value).unwrap();
            assert_eq!(store.contains(&[key], soon()).unwrap(), [true]);
            assert!(get(&*store, &key) == Some(value.clone()));
            assert_eq!(store.remove(&[key], soon()).unwrap(), 1);
        });
    });
}

#[test]
fn a_primary_that_dies_is_replaced() {
    on_each_server(|name| {
        let mut cluster = Cluster::start(name, 3, true);
        let store = store(&cluster.url());
        let keys = fill(&*store, fresh_namespace(), 60, 1000);
        let lost: Vec<bool> = keys.iter().map(|key| home_of(&cluster, key) == 0).collect();
        cluster.primaries[0].wait_replicated();
        cluster.primaries[0].kill();
        // What lies on the others is found all the time.
        let found = store.contains(&keys, soon()).unwrap();
        assert!(found.iter().zip(&lost).all(|(&hit, &lost)| hit || lost));
        for (outcome, &lost) in fetch(&*store, &keys, 1000, soon()).into_iter().zip(&lost) {
            match outcome {
                Ok(outcome) => assert_eq!(outcome, GetOutcome::Hit(1000)),
                Err(error) => {
                    assert!(lost, "{error}");
                    let kinds = [ErrorKind::Unreachable, ErrorKind::Unavailable];
                    assert!(kinds.contains(&error.kind()), "{error}");
                }
            }
        }
        // And everything once the replica has taken over, which had a copy of it.
        cluster.replace_the_dead(|| wait_for_hits(&*store, &keys));
        for outcome in fetch(&*store, &keys, 1000, soon()) {
            assert_eq!(outcome.unwrap(), GetOutcome::Hit(1000));
        }
        fill(&*store, fresh_namespace(), 60, 1000);
        // The old primary comes back as a replica.
        cluster.primaries[0].restart();
        wait_for_hits(&*store, &keys);
    });
}

#[test]
fn a_frozen_node_costs_what_lies_there() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, false);
        let store = store(&cluster.url());
        let keys = fill(&*store, fresh_namespace(), 60, 1000);
        let expected: Vec<bool> = keys.iter().map(|key| home_of(&cluster, key) != 1).collect();
        cluster.primaries[1].freeze();
        given_time("the others are asked, and most do not wait", |time| {
            let (mut is_found, mut waited) = (true, 0);
            for _ in 0..12 {
                let until = within(time);
                let Ok(found) = store.contains(&keys, until) else {
                    return false;
                };
                waited += u32::from(past() >= until);
                let mut both = found.iter().zip(&expected);
                assert!(both.all(|(hit, there)| hit <= there), "{found:?}");
                is_found &= found == expected;
            }
            is_found && waited <= 6
        });
        cluster.primaries[1].thaw();
        wait_for_hits(&*store, &keys);
    });
}

#[test]
fn replicas_answer_if_they_are_asked_to() {
    on_each_server(|name| {
        let cluster = Cluster::start(name, 3, true);
        let keys = fill(&*store(&cluster.url()), fresh_namespace(), 60, 1000);
        let gets = |server: &Server| server.text("INFO commandstats").contains("cmdstat_get:");
        let open = || store(&format!("{}?read=replicas", cluster.url()));
        let mut last = None;
        // A node names a replica once it has heard how much that has copied.
        eventually("each replica is asked", || {
            let store = last.insert(open());
            wait_for_hits(&**store, &keys);
            for outcome in fetch(&**store, &keys, 1000, soon()) {
                assert_eq!(outcome.unwrap(), GetOutcome::Hit(1000));
            }
            cluster.replicas.iter().all(gets)
        });
        let store = last.unwrap();
        // While a replica is away its primary answers.
        cluster.replicas[0].freeze();
        wait_for_hits(&*store, &keys);
        cluster.replicas[0].thaw();
    });
}
