//! Object stores against a real S3 server. It takes some seconds to start, so one test has all.

use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use penstock_contract::{ErrorKind, GetOutcome, GetRequest, Key, PutOutcome, Result, Store};
use penstock_store::{OpenOptions, open};
use penstock_value::SealedStore;
use penstock_value::sealed::Got;

use crate::behaviour::batches::{fetch, fill};
use crate::behaviour::slots::{self, Slot};
use crate::behaviour::{
    bytes, fresh_namespace, get, get_one, given_time, key, kind_of, past, put, soon, within,
};
use crate::object_server::{Fault, Proxy, Server, url};

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &OpenOptions::default()).expect("the URL is right")
}

/// A check and its name.
type Check = (&'static str, fn(&Server));

#[test]
fn against_a_real_server() {
    let Some(server) = Server::start() else {
        return;
    };
    let checks: [Check; 14] = [
        (
            "requests that were given up are known",
            requests_that_were_given_up_are_known,
        ),
        ("behaves", behaves),
        ("values go in packs", values_go_in_packs),
        ("callers share a pack", callers_share_a_pack),
        ("long values go in parts", long_values_go_in_parts),
        (
            "what others put is found in time",
            what_others_put_is_found_in_time,
        ),
        ("removals reach everybody", removals_reach_everybody),
        ("refusals are kinds of errors", refusals_are_kinds_of_errors),
        ("throttling is waited out", throttling_is_waited_out),
        ("nothing hangs", nothing_hangs),
        (
            "listings that fail hide nothing",
            listings_that_fail_hide_nothing,
        ),
        (
            "a refused head hides no other pack",
            a_refused_head_hides_no_other_pack,
        ),
        ("damage is never loaded", damage_is_never_loaded),
        ("packs may go at any time", packs_may_go_at_any_time),
    ];
    for (name, check) in checks {
        eprintln!("{name}");
        check(&server);
    }
}

/// What the other checks count does not depend on when a request comes that nobody waits for.
fn requests_that_were_given_up_are_known(server: &Server) {
    let proxy = Proxy::start(server);
    proxy.set(Fault::Closed);
    for n in 0..200 {
        let path = format!("/{n}");
        proxy.send_and_go(&path);
        assert_eq!(proxy.seen(), [format!("GET {path} ")]);
    }
}

fn behaves(server: &Server) {
    let url = server.url("suite/of/all", "&linger=1ms");
    crate::behaviour::run_all(|| store(&url));
    assert_eq!(store(&url).url(), store(&store(&url).url()).url());
    let facts = store(&url).describe(soon()).unwrap();
    let never = ("expire_days".to_owned(), "never".to_owned());
    assert!(facts.contains(&never), "{facts:?}");
}

fn requests(proxy: &Proxy) -> (usize, usize, usize) {
    let seen = proxy.seen();
    let count = |is: fn(&str) -> bool| seen.iter().filter(|line| is(line)).count();
    let is_list = |line: &str| line.contains("list-type");
    (
        count(|line| line.starts_with("PUT")),
        count(|line| line.starts_with("GET") && !line.contains("list-type")),
        count(is_list),
    )
}

fn values_go_in_packs(server: &Server) {
    let proxy = Proxy::start(server);
    let url = proxy.url("packs", "&linger=500ms");
    let (writer, namespace) = (store(&url), fresh_namespace());
    let keys = fill(&*writer, namespace, 200, 10_000);
    assert_eq!(requests(&proxy), (1, 0, 0), "one pack");
    let reader = store(&url);
    assert_eq!(reader.contains(&keys, soon()).unwrap(), [true; 200]);
    assert_eq!(requests(&proxy), (0, 1, 1), "one listing, one head");
    for outcome in fetch(&*reader, &keys, 10_000, soon()) {
        assert_eq!(outcome.unwrap(), GetOutcome::Hit(10_000));
    }
    assert_eq!(
        requests(&proxy),
        (0, 1, 0),
        "neighbours come in one request"
    );
    assert_eq!(reader.contains(&keys, soon()).unwrap(), [true; 200]);
    assert_eq!(
        requests(&proxy),
        (0, 0, 0),
        "what is known needs no request"
    );
    let mut buffers = [vec![0; 10_000], vec![0; 10_000]];
    let mut slices = buffers.each_mut().map(|buffer| [IoSliceMut::new(buffer)]);
    let mut both: Vec<_> = [keys[0], keys[199]]
        .into_iter()
        .zip(&mut slices)
        .map(|(key, into)| GetRequest::new(key, into))
        .collect();
    reader.get_many(&mut both, soon());
    assert!(buffers == [bytes(0, 10_000), bytes(199, 10_000)]);
    assert_eq!(
        requests(&proxy),
        (0, 2, 0),
        "values far from each other do not"
    );

    let small = store(&proxy.url("packs", "&linger=500ms&pack=100KiB&range=64KiB"));
    let keys = fill(&*small, fresh_namespace(), 40, 20_000);
    assert_eq!(requests(&proxy).0, 7, "six values fill a pack");
    fetch(&*small, &keys, 20_000, soon())
        .into_iter()
        .for_each(|outcome| {
            outcome.unwrap();
        });
    assert_eq!(requests(&proxy).1, 14, "a range has three values");
}

fn callers_share_a_pack(server: &Server) {
    let proxy = Proxy::start(server);
    // Eight of the values below are a pack, which waits for no more.
    let url = proxy.url("shared", "&linger=10s&pack=8000");
    let (store, namespace) = (store(&url), fresh_namespace());
    let all = Barrier::new(8);
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (store, all) = (&store, &all);
            scope.spawn(move || {
                all.wait();
                put(&**store, &key(namespace, n), &bytes(n, 1000)).unwrap()
            });
        }
    });
    assert_eq!(requests(&proxy), (1, 0, 0));
    // Nobody says that a value is stored before its pack has landed.
    let quick = self::store(&proxy.url("shared", "&linger=1ms"));
    proxy.set(Fault::Hang);
    given_time("its pack is sent", |time| {
        let late = quick.put(&key(namespace, 9), &[IoSlice::new(b"x")], within(time));
        assert_eq!(kind_of(late), ErrorKind::TimedOut);
        // That request is one that hangs.
        requests(&proxy).0 > 0
    });
    proxy.set(Fault::None);
    assert_eq!(get(&*quick, &key(namespace, 9)), None);
    assert_eq!(get(&*store, &key(namespace, 9)), None);
    assert_eq!(get(&*store, &key(namespace, 5)).unwrap(), bytes(5, 1000));
}

fn long_values_go_in_parts(server: &Server) {
    let proxy = Proxy::start(server);
    let (store, namespace) = (store(&proxy.url("long", "&linger=1ms")), fresh_namespace());
    let keys = fill(&*store, namespace, 1, 40 << 20);
    // Three parts. To begin and to end them are POSTs.
    assert_eq!(requests(&proxy).0, 3);
    let outcome = fetch(&*store, &keys, 40 << 20, soon()).remove(0);
    assert_eq!(outcome.unwrap(), GetOutcome::Hit(40 << 20));
}

fn what_others_put_is_found_in_time(server: &Server) {
    let proxy = Proxy::start(server);
    let open = |fresh: &str| store(&proxy.url("fresh", &format!("&linger=1ms&fresh={fresh}")));
    let (writer, reader, namespace) = (open("2s"), open("2s"), fresh_namespace());
    let key = key(namespace, 0);
    let there = || reader.contains(&[key], soon()).unwrap()[0];
    assert!(!there());
    put(&*writer, &key, b"value").unwrap();
    requests(&proxy);
    crate::behaviour::eventually("it is found", there);
    assert_eq!(requests(&proxy).2, 1, "all look-ups took one listing");
    // Who asks for what is not there does not list each time.
    let reader = open("3600s");
    for _ in 0..20 {
        let absent = crate::behaviour::key(namespace, 500);
        assert_eq!(reader.contains(&[absent], soon()).unwrap(), [false]);
    }
    assert_eq!(requests(&proxy).2, 1);
    // Everybody who asks at one time shares a listing.
    let (reader, all) = (open("3600s"), Barrier::new(8));
    std::thread::scope(|scope| {
        for n in 1..9 {
            let (reader, all) = (&reader, &all);
            scope.spawn(move || {
                all.wait();
                reader
                    .contains(&[crate::behaviour::key(namespace, n)], soon())
                    .unwrap()
            });
        }
    });
    assert_eq!(requests(&proxy).2, 1);
}

fn removals_reach_everybody(server: &Server) {
    let proxy = Proxy::start(server);
    let open = || store(&proxy.url("removed", "&linger=20ms&fresh=0ms"));
    let (one, other, namespace) = (open(), open(), fresh_namespace());
    let keys = fill(&*one, namespace, 10, 100);
    assert_eq!(other.contains(&keys, soon()).unwrap(), [true; 10]);
    assert_eq!(one.remove(&keys[..4], soon()).unwrap(), 4);
    // A look-up that misses lists, and so does a new handle.
    let unknown = key(namespace, 99);
    other.contains(&[unknown], soon()).unwrap();
    for handle in [&one, &other, &open()] {
        let there = handle.contains(&keys, soon()).unwrap();
        assert_eq!(there, [vec![false; 4], vec![true; 6]].concat());
        assert_eq!(get_one(&**handle, namespace).unwrap(), GetOutcome::Miss);
        let mut listed = 0;
        handle
            .list(Some(namespace), &mut |_| listed += 1, soon())
            .unwrap();
        assert_eq!(listed, 6);
    }
    // Removed and put anew.
    assert_eq!(
        put(&*other, &keys[0], &bytes(0, 100)).unwrap(),
        PutOutcome::Stored
    );
    assert!(open().contains(&keys[..1], soon()).unwrap()[0]);
    proxy.seen();
    assert_eq!(other.remove(&keys, soon()).unwrap(), 7);
    let seen = proxy.seen();
    let deleted = seen
        .iter()
        .filter(|line| line.starts_with("POST") && line.contains("delete"));
    assert_eq!(
        deleted.count(),
        1,
        "both packs have no other values: {seen:?}"
    );
    assert_eq!(get(&*one, &keys[9]), None, "its pack is gone");
    assert_eq!(open().contains(&keys, soon()).unwrap(), [false; 10]);
}

fn refusals_are_kinds_of_errors(server: &Server) {
    let proxy = Proxy::start(server);
    let url_of = |proxy: &Proxy| proxy.url("refused", "&linger=1ms&fresh=0ms");
    let (store, namespace) = (store(&url_of(&proxy)), fresh_namespace());
    for (status, code, kind) in [
        (403, "AccessDenied", ErrorKind::Denied),
        (403, "SignatureDoesNotMatch", ErrorKind::Denied),
        (400, "ExpiredToken", ErrorKind::Denied),
        (401, "Unauthorized", ErrorKind::Denied),
        (404, "NoSuchBucket", ErrorKind::Unavailable),
        (301, "PermanentRedirect", ErrorKind::Config),
        (400, "InvalidRequest", ErrorKind::Protocol),
    ] {
        proxy.set(Fault::Refused(usize::MAX, status, code));
        let errors = [
            store.contains(&[key(namespace, 0)], soon()).unwrap_err(),
            put(&*store, &key(namespace, 0), b"value").unwrap_err(),
            get_one(&*store, namespace).unwrap_err(),
            store.remove(&[key(namespace, 0)], soon()).unwrap_err(),
            store.list(None, &mut |_| {}, soon()).unwrap_err(),
            store.describe(soon()).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), kind, "{code}: {error}");
            let text = format!("{error} {error:?}");
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
    // The same of a real server, for a bucket that is not there.
    proxy.set(Fault::None);
    let gone = self::store(
        &proxy
            .url("x", "")
            .replace(crate::object_server::BUCKET, "no-such-bucket"),
    );
    let error = gone.contains(&[key(namespace, 0)], soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("no such bucket"), "{error}");
}

fn throttling_is_waited_out(server: &Server) {
    let proxy = Proxy::start(server);
    let store = store(&proxy.url("throttled", "&linger=1ms&fresh=0ms"));
    let namespace = fresh_namespace();
    proxy.set(Fault::Refused(2, 503, "SlowDown"));
    assert_eq!(
        put(&*store, &key(namespace, 0), b"value").unwrap(),
        PutOutcome::Stored
    );
    assert_eq!(requests(&proxy).0, 3);
    proxy.set(Fault::Refused(2, 503, "SlowDown"));
    assert_eq!(get(&*store, &key(namespace, 0)).unwrap(), b"value");
    let errors = store.stats().errors;
    // For ever: the deadline ends it, and the requests become rare.
    proxy.set(Fault::Refused(usize::MAX, 503, "SlowDown"));
    proxy.seen();
    let mut tries = 0;
    given_time("it is tried again", |time| {
        tries += 1;
        let start = past();
        let late = store.put(&key(namespace, 1), &[IoSlice::new(b"x")], within(time));
        let (kind, took) = (kind_of(late), start.elapsed());
        assert!(
            matches!(kind, ErrorKind::TimedOut | ErrorKind::Unavailable),
            "{kind:?}"
        );
        let puts = requests(&proxy).0;
        // The first pause is 100 ms, and the others are longer.
        let most = 1 + took.as_millis() as usize / 100;
        assert!(puts <= most, "{puts} requests in {took:?}");
        puts > 1
    });
    assert_eq!(store.stats().errors, errors + tries);
}

fn nothing_hangs(server: &Server) {
    let proxy = Proxy::start(server);
    let (store, namespace) = (
        store(&proxy.url("hangs", "&linger=1ms&fresh=0ms")),
        fresh_namespace(),
    );
    let keys = fill(&*store, namespace, 3, 100_000);
    for (fault, kinds) in [
        (Fault::Hang, &[ErrorKind::TimedOut][..]),
        (
            Fault::Closed,
            &[ErrorKind::Unreachable, ErrorKind::TimedOut][..],
        ),
    ] {
        proxy.set(fault.clone());
        let deadline = || within(Duration::from_millis(300));
        let mut failed = vec![
            kind_of(store.contains(&[key(namespace, 9)], deadline())),
            kind_of(store.put(&key(namespace, 9), &[IoSlice::new(b"x")], deadline())),
            kind_of(store.remove(&keys, deadline())),
            kind_of(store.list(Some(namespace), &mut |_| {}, deadline())),
            kind_of(store.describe(deadline())),
        ];
        failed.extend(
            fetch(&*store, &keys, 100_000, deadline())
                .into_iter()
                .map(kind_of),
        );
        assert!(
            failed.iter().all(|kind| kinds.contains(kind)),
            "{fault:?}: {failed:?}"
        );
    }
    // A server that is not there.
    let nowhere = self::store(&url(1, "bucket", "x", ""));
    let kind = kind_of(nowhere.contains(&keys, within(Duration::from_millis(500))));
    assert!(
        matches!(kind, ErrorKind::Unreachable | ErrorKind::TimedOut),
        "{kind:?}"
    );
    // Afterwards all is well.
    proxy.set(Fault::None);
    assert_eq!(
        store.contains(&[key(namespace, 9)], soon()).unwrap(),
        [false]
    );
    for outcome in fetch(&*store, &keys, 100_000, soon()) {
        assert_eq!(outcome.unwrap(), GetOutcome::Hit(100_000));
    }
}

/// What came, if it came in time. Nothing else may be wrong with it.
fn in_time<T>(result: Result<T>) -> Option<T> {
    result
        .inspect_err(|error| assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}"))
        .ok()
}

fn listings_that_fail_hide_nothing(server: &Server) {
    let proxy = Proxy::start(server);
    let store = store(&proxy.url("unlisted", "&linger=1ms&fresh=0ms"));
    let namespace = fresh_namespace();
    let mut keys = fill(&*store, namespace, 5, 1000);
    let unknown = key(namespace, 99);
    assert_eq!(store.contains(&[unknown], soon()).unwrap(), [false]);
    keys.push(unknown);
    for (fault, kind) in [
        (Fault::Hang, ErrorKind::TimedOut),
        (
            Fault::Refused(usize::MAX, 403, "AccessDenied"),
            ErrorKind::Denied,
        ),
    ] {
        proxy.set(Fault::Only("list-type", Box::new(fault)));
        given_time("what is known is found", |time| {
            let there = in_time(store.contains(&keys, within(time)));
            let mut got = fetch(&*store, &keys, 1000, within(time));
            let of_unknown = got.pop().unwrap().map(drop);
            let alone = store.contains(&[unknown], within(time)).map(drop);
            let told = [of_unknown, alone].map(kind_of);
            let got: Vec<_> = got.into_iter().filter_map(in_time).collect();
            let expected = [true, true, true, true, true, false];
            assert!(there.as_ref().is_none_or(|there| *there == expected));
            assert!(got.iter().all(|outcome| *outcome == GetOutcome::Hit(1000)));
            let kinds = [kind, ErrorKind::TimedOut];
            assert!(told.iter().all(|kind| kinds.contains(kind)), "{told:?}");
            there.is_some() && got.len() == 5 && told == [kind; 2]
        });
    }
    proxy.set(Fault::None);
    assert_eq!(store.contains(&[unknown], soon()).unwrap(), [false]);
}

fn a_refused_head_hides_no_other_pack(server: &Server) {
    let proxy = Proxy::start(server);
    let url = proxy.url("archived", "&linger=1ms&fresh=0ms");
    let (writer, namespace) = (store(&url), fresh_namespace());
    let keys: Vec<Key> = (0..6).map(|n| key(namespace, n)).collect();
    for (n, key) in (0..).zip(&keys) {
        put(&*writer, key, &bytes(n, 1000)).unwrap();
    }
    // Heads are at the beginning.
    let refused = Fault::Refused(1, 403, "InvalidObjectState");
    proxy.set(Fault::Only("bytes=0-", Box::new(refused)));
    let reader = store(&url);
    for _ in 0..2 {
        let there = reader.contains(&keys, soon()).unwrap();
        assert_eq!(there.iter().filter(|&&there| there).count(), 5);
        assert_eq!(damaged(&*reader), "1");
    }
}

fn damage_is_never_loaded(server: &Server) {
    let proxy = Proxy::start(server);
    let url = proxy.url("damaged", "&linger=1ms&fresh=0ms");
    let namespace = fresh_namespace();
    let sealed = |store: &Arc<dyn Store>| SealedStore::new(Arc::clone(store), None);
    let writer = store(&url);
    let (object, payload) = (key(namespace, 0), bytes(0, 50_000));
    slots::put(&sealed(&writer), &object, &payload).unwrap();
    // A changed byte of the value is found out by the layer above.
    proxy.set(Fault::Flipped(30_000));
    let arrival = sealed(&writer).fetch(vec![Slot::of(object, payload.len())], soon());
    for arrival in arrival {
        assert!(
            sealed(&writer).verify(arrival).is_err(),
            "a changed byte was not noticed"
        );
    }
    // Of an answer that ends early, the rest is asked for. Without any progress, it is no hit.
    proxy.set(Fault::Cut(20_000));
    let whole = fetch_sealed(&sealed(&writer), object, payload.len(), soon());
    assert!(matches!(whole, Got::Payload(_)), "{whole:?}");
    proxy.set(Fault::Cut(0));
    let late = within(Duration::from_millis(300));
    let cut = fetch_sealed(&sealed(&writer), object, payload.len(), late);
    assert!(matches!(cut, Got::Failed(_)), "{cut:?}");
    // A pack with a changed byte in its head is not used, and counted. Too short an answer fails.
    for fault in [Fault::Flipped(40), Fault::Cut(30)] {
        proxy.set(fault.clone());
        if let Fault::Flipped(_) = fault {
            let reader = store(&url);
            assert_eq!(reader.contains(&[object], soon()).unwrap(), [false]);
            proxy.set(Fault::None);
            assert_eq!(damaged(&*reader), "1");
        } else {
            given_time("it is tried for long enough", |time| {
                let kind = kind_of(store(&url).contains(&[object], within(time)));
                let kinds = [ErrorKind::TimedOut, ErrorKind::Unreachable];
                assert!(kinds.contains(&kind), "{kind:?}");
                kind == ErrorKind::Unreachable
            });
            proxy.set(Fault::None);
        }
    }
    slots::assert_payload(&sealed(&store(&url)), object, &payload);
}

fn damaged(store: &dyn Store) -> String {
    let facts = store.describe(soon()).unwrap();
    let (_, damaged) = facts
        .into_iter()
        .find(|(name, _)| name == "damaged_packs")
        .unwrap();
    damaged
}

fn fetch_sealed(store: &SealedStore, key: Key, bytes: usize, deadline: Instant) -> Got {
    let arrival = store.fetch(vec![Slot::of(key, bytes)], deadline).remove(0);
    let verified = store.verify(arrival);
    verified.map_or_else(
        |rejected| store.mend(rejected, deadline, deadline).1,
        |(_, got)| got,
    )
}

fn packs_may_go_at_any_time(server: &Server) {
    let url = server.url("expired", "&linger=1ms&fresh=0ms");
    let (ours, others, namespace) = (store(&url), store(&url), fresh_namespace());
    let keys = fill(&*ours, namespace, 5, 1000);
    assert_eq!(ours.contains(&keys, soon()).unwrap(), [true; 5]);
    // As the bucket's rules would, behind our back.
    assert_eq!(others.remove(&keys, soon()).unwrap(), 5);
    assert_eq!(
        ours.contains(&keys, soon()).unwrap(),
        [true; 5],
        "it cannot know yet"
    );
    for outcome in fetch(&*ours, &keys, 1000, soon()) {
        assert_eq!(outcome.unwrap(), GetOutcome::Miss);
    }
    assert_eq!(
        ours.contains(&keys, soon()).unwrap(),
        [false; 5],
        "now it knows"
    );
    fill(&*ours, namespace, 5, 1000);
}
