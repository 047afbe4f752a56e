//! Stores from libraries: the behaviour of stores, and what happens to those that misbehave.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::behaviour::{fresh_namespace, get_one, key, kind_of, past, put, soon};
use penstock_store::layers::{Breaker, BreakerSettings, Tiered};
use penstock_store::{
    BatchBytes, ErrorKind, GetOutcome, MemoryStore, OpenOptions, Place, Registered, Store, open,
    unknown_schemes,
};

/// The example `troubled_store`. Whoever builds all tests has built it beside them. A build from here
/// would keep the cores from all tests that run meanwhile.
fn library() -> PathBuf {
    let binary = std::env::current_exe().unwrap();
    let profile = binary.ancestors().nth(2).unwrap();
    let library = profile.join("examples/libtroubled_store.so");
    assert!(
        library.exists(),
        "{} is not there: cargo build --workspace --example troubled_store",
        library.display()
    );
    library
}

fn options(place: Place) -> OpenOptions {
    let registered = Registered {
        scheme: "troubled".to_owned(),
        origin: "a test 1.0".to_owned(),
        place,
    };
    OpenOptions {
        registered: vec![registered],
        ..OpenOptions::default()
    }
}

fn opened(url: &str) -> Arc<dyn Store> {
    open(url, &options(Place::Library(library()))).unwrap()
}

#[test]
fn a_store_of_a_library_behaves() {
    crate::behaviour::run_all(|| opened("troubled://sound"));
}

#[test]
fn a_library_says_how_large_batches_should_be() {
    let wanted = BatchBytes {
        put: 64 << 20,
        get: 4 << 20,
    };
    assert_eq!(opened("troubled://choosy").batch_bytes(), wanted);
}

#[test]
fn trouble_becomes_an_error_of_each_request() {
    let namespace = fresh_namespace();
    put(&*opened("troubled://shared"), &key(namespace, 0), b"value").unwrap();
    for (trouble, kind) in [
        ("panicking", ErrorKind::Unavailable),
        ("erring", ErrorKind::Unavailable),
        ("silent", ErrorKind::Protocol),
    ] {
        let store = opened(&format!("troubled://shared?trouble={trouble}"));
        assert_eq!(kind_of(get_one(&*store, namespace)), kind, "{trouble}");
        let put = put(&*store, &key(namespace, 1), b"other");
        assert_eq!(kind_of(put), kind, "{trouble}");
        let found = store.contains(&[key(namespace, 0)], soon());
        assert_eq!(kind_of(found), kind, "{trouble}");
        // Whatever it does, the tier behind it has the value.
        let memory = Arc::new(MemoryStore::new(1 << 20));
        crate::behaviour::put(&*memory, &key(namespace, 0), b"value").unwrap();
        let tiers = Tiered::new(vec![store, memory]);
        let got = get_one(&tiers, namespace).unwrap();
        assert_eq!(got, GetOutcome::Hit(5), "{trouble}");
    }
    let said = get_one(&*opened("troubled://shared?trouble=panicking"), namespace);
    let said = said.unwrap_err().to_string();
    assert!(
        said.contains("panicked") && said.contains("on purpose"),
        "{said}"
    );
}

#[test]
fn a_slow_store_is_waited_for_and_the_breaker_is_not_fooled() {
    let store = opened("troubled://slow?trouble=slow");
    let begin = past();
    assert_eq!(
        get_one(&*store, fresh_namespace()).unwrap(),
        GetOutcome::Miss
    );
    assert!(begin.elapsed() >= Duration::from_millis(300));
    // One failure opens it, and for longer than this test takes.
    let settings = BreakerSettings {
        failures: 1,
        first_pause: Duration::from_secs(3600),
        longest_pause: Duration::from_secs(3600),
    };
    let breaker = Breaker::new(store, settings);
    let within = |time| {
        let found = breaker.contains(&[key(fresh_namespace(), 0)], crate::behaviour::within(time));
        kind_of(found)
    };
    // A call that had no time says nothing about the store.
    assert_eq!(within(Duration::ZERO), ErrorKind::TimedOut);
    assert!(!breaker.is_open());
    assert_eq!(within(Duration::from_millis(100)), ErrorKind::TimedOut);
    assert!(breaker.is_open());
}

#[test]
fn a_library_that_does_not_fit_is_refused_in_words() {
    let of = |url: &str, place| {
        let Err(error) = open(url, &options(place)) else {
            panic!("it opened");
        };
        let said = error.to_string();
        assert!(
            said.contains("a test 1.0") && !said.contains("secret"),
            "{said}"
        );
        said
    };
    let said = |place| of("troubled://me:secret@x?trouble=opening", place);
    assert!(said(Place::Library("/nowhere/lib.so".into())).contains("does not load"));
    let other = PathBuf::from("libc.so.6");
    assert!(said(Place::Library(other)).contains("no store for Penstock"));
    assert!(said(Place::Nowhere("two bring it".into())).contains("two bring it"));
    assert!(said(Place::Library(library())).contains("panicked"));
    assert!(said(Place::Program(vec!["/nowhere/program".into()])).contains("does not start"));
    assert!(said(Place::Program(vec!["true".into()])).contains("before it greeted"));
    // It panics with its URL. Of the second one, it does not hear.
    let said = of(
        "troubled://me:1/secret@x?trouble=opening",
        Place::Library(library()),
    );
    assert!(
        said.contains("panicked") && said.contains("me:***@x"),
        "{said}"
    );
    let said = of(
        "troubled://me:one/secret@x?trouble=opening",
        Place::Library(library()),
    );
    assert!(said.contains("%2F") && !said.contains("panicked"), "{said}");
}

#[test]
fn schemes_that_are_not_ours_are_known_or_not() {
    assert_eq!(
        unknown_schemes("memory://?size=1MiB troubled://x valkey+cluster://y"),
        ["troubled"]
    );
    let Err(error) = open("other://x", &options(Place::Nowhere(String::new()))) else {
        panic!("it opened");
    };
    let said = error.to_string();
    assert!(
        said.contains("other://") && said.contains("troubled:// (a test 1.0)"),
        "{said}"
    );
    // Nobody can bring what is built in.
    let mut options = options(Place::Nowhere("taken".into()));
    options.registered[0].scheme = "memory".to_owned();
    assert!(open("memory://?size=1MiB", &options).is_ok());
}
