//! Layers over stores.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{ErrorKind, GetOutcome, Key, PutRequest, Store};
use penstock_store::layers::{Breaker, BreakerCounters, BreakerSettings, Quota, Quotas};
use penstock_value::MemoryStore;

use crate::behaviour::{bytes, eventually, fresh_namespace, key, past, soon, within};

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(32 << 20))
}

fn faulty(faults: Faults) -> Arc<Faulty> {
    Arc::new(Faulty::new(memory(), faults))
}

fn always(kind: ErrorKind) -> Faults {
    Faults {
        errors: vec![(kind, 1.0)],
        ..Faults::default()
    }
}

fn breaker(inner: Arc<dyn Store>, first_pause: Duration) -> Breaker {
    Breaker::new(
        inner,
        BreakerSettings {
            failures: 3,
            first_pause,
            longest_pause: FOR_EVER,
        },
    )
}

const FOR_EVER: Duration = Duration::from_secs(3600);

fn ask(store: &dyn Store) -> Option<ErrorKind> {
    store
        .contains(&[key(fresh_namespace(), 0)], soon())
        .err()
        .map(|error| error.kind())
}

#[test]
fn layers_without_faults_behave() {
    crate::behaviour::run_all(|| {
        let faulty: Arc<dyn Store> = faulty(Faults::default());
        Arc::new(Breaker::new(faulty, BreakerSettings::default()))
    });
}

#[test]
fn what_is_retired_through_layers_goes_first() {
    type Layer = fn(Arc<dyn Store>) -> Arc<dyn Store>;
    let layers: [Layer; 3] = [
        |inner| Arc::new(Faulty::new(inner, Faults::default())),
        |inner| Arc::new(Breaker::new(inner, BreakerSettings::default())),
        |inner| {
            let mut quotas = Quotas::default();
            quotas.add("tenant/other:1MiB").unwrap();
            Arc::new(Quota::new(inner, quotas).unwrap())
        },
    ];
    for layer in layers {
        let open = || layer(Arc::new(MemoryStore::new(1 << 20)));
        crate::behaviour::retired_goes_first(open, 1 << 20);
    }
}

#[test]
fn a_breaker_opens_after_failures_in_a_row() {
    for kind in [ErrorKind::Unreachable, ErrorKind::TimedOut] {
        let breaker = breaker(faulty(always(kind)), FOR_EVER);
        for _ in 0..3 {
            assert!(!breaker.is_open());
            assert_eq!(ask(&breaker), Some(kind));
        }
        assert!(breaker.is_open());
        for _ in 0..5 {
            assert_eq!(ask(&breaker), Some(ErrorKind::Unavailable));
        }
        let value = [IoSlice::new(b"v")];
        let requests = [0, 1].map(|n| key(fresh_namespace(), n));
        let mut batch = requests.map(|key| PutRequest::new(key, &value));
        breaker.put_many(&mut batch, soon());
        for request in batch {
            assert_eq!(
                request.outcome.unwrap().unwrap_err().kind(),
                ErrorKind::Unavailable
            );
        }
        let expected = BreakerCounters {
            opened: 1,
            rejected: 6,
            probes: 0,
        };
        assert_eq!(breaker.counters(), expected);
    }
}

#[test]
fn a_breaker_stays_closed_while_the_store_answers() {
    for kind in [
        ErrorKind::Full,
        ErrorKind::Denied,
        ErrorKind::Unavailable,
        ErrorKind::Protocol,
    ] {
        let breaker = breaker(faulty(always(kind)), FOR_EVER);
        for _ in 0..20 {
            assert_eq!(ask(&breaker), Some(kind));
        }
        assert_eq!(breaker.counters(), BreakerCounters::default());
    }
    // Deadlines that had passed already are not the store's fault.
    let breaker = breaker(memory(), FOR_EVER);
    for _ in 0..20 {
        let late = breaker.contains(&[key(fresh_namespace(), 0)], past());
        assert_eq!(late.unwrap_err().kind(), ErrorKind::TimedOut);
    }
    assert!(!breaker.is_open());
}

#[test]
fn a_breaker_probes_after_its_pause_and_closes_on_success() {
    /// A store that is away until it is told to be back.
    struct Mending(std::sync::atomic::AtomicBool, Arc<dyn Store>);
    impl Mending {
        fn inner(&self) -> penstock_contract::Result<&dyn Store> {
            match self.0.load(std::sync::atomic::Ordering::SeqCst) {
                true => Ok(&*self.1),
                false => Err(penstock_contract::Error::new(
                    ErrorKind::Unreachable,
                    "away",
                )),
            }
        }
    }
    impl Store for Mending {
        fn capabilities(&self) -> penstock_contract::Capabilities {
            self.1.capabilities()
        }
        fn url(&self) -> String {
            self.1.url()
        }
        fn contains(
            &self,
            keys: &[Key],
            deadline: Instant,
        ) -> penstock_contract::Result<Vec<bool>> {
            self.inner()?.contains(keys, deadline)
        }
        fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
            self.1.put_many(batch, deadline);
        }
        fn get_many(&self, batch: &mut [penstock_contract::GetRequest<'_, '_>], deadline: Instant) {
            self.1.get_many(batch, deadline);
        }
        fn touch(
            &self,
            values: &[(Key, u64)],
            deadline: Instant,
        ) -> penstock_contract::Result<Vec<bool>> {
            self.1.touch(values, deadline)
        }
        fn remove(&self, keys: &[Key], deadline: Instant) -> penstock_contract::Result<u64> {
            self.1.remove(keys, deadline)
        }
        fn list(
            &self,
            namespace: Option<penstock_contract::Namespace>,
            visit: &mut dyn FnMut(penstock_contract::Listed),
            deadline: Instant,
        ) -> penstock_contract::Result<()> {
            self.1.list(namespace, visit, deadline)
        }
        fn describe(&self, deadline: Instant) -> penstock_contract::Result<Vec<(String, String)>> {
            self.1.describe(deadline)
        }
        fn stats(&self) -> penstock_contract::StoreStats {
            self.1.stats()
        }
    }

    let mending = Arc::new(Mending(false.into(), memory()));
    let pause = Duration::from_millis(20);
    let breaker = breaker(Arc::clone(&mending) as Arc<dyn Store>, pause);
    for _ in 0..3 {
        assert_eq!(ask(&breaker), Some(ErrorKind::Unreachable));
    }
    // A failed probe opens it again, for longer each time.
    let mut pauses = Vec::new();
    // Before the last probe failed, and so before its pause began.
    let mut last = past();
    for probe in 1..=3 {
        let mut asked = last;
        eventually("it probes", || {
            asked = past();
            let kind = ask(&breaker);
            assert!(matches!(
                kind,
                Some(ErrorKind::Unavailable | ErrorKind::Unreachable)
            ));
            breaker.counters().probes == probe
        });
        assert!(breaker.is_open());
        pauses.push(last.elapsed());
        last = asked;
    }
    assert!(
        pauses[1] >= pause && pauses[2] >= 2 * pause,
        "the pause grows: {pauses:?}"
    );
    mending.0.store(true, std::sync::atomic::Ordering::SeqCst);
    eventually("it closes", || {
        let _ = ask(&breaker);
        !breaker.is_open()
    });
    assert_eq!(ask(&breaker), None);
    assert_eq!(breaker.counters().opened, 4);
}

/// Gets a thousand values through faults and tells what came of each.
fn outcomes(faults: Faults) -> (Arc<Faulty>, Vec<String>) {
    let (store, namespace) = (faulty(faults), crate::behaviour::fresh_namespace());
    let outcomes = (0..1000).map(|n| {
        let (key, value) = (key(namespace, n), bytes(n, 100));
        let put = store.put(&key, &[IoSlice::new(&value)], soon());
        let mut into = [0; 100];
        let got = store.get(&key, &mut [IoSliceMut::new(&mut into)], soon());
        let changed: u32 = into
            .iter()
            .zip(&value)
            .map(|(a, b)| (a ^ b).count_ones())
            .sum();
        match got {
            Ok(GetOutcome::Hit(bytes)) => format!("{} {bytes} {changed}", put.is_ok()),
            other => format!("{} {other:?}", put.is_ok()),
        }
    });
    let outcomes = outcomes.collect();
    (store, outcomes)
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let faults = |seed| Faults {
        seed,
        errors: vec![(ErrorKind::Unreachable, 0.05), (ErrorKind::TimedOut, 0.05)],
        misses: 0.1,
        truncations: 0.1,
        bit_flips: 0.1,
        ..Faults::default()
    };
    let (store, first) = outcomes(faults(1));
    assert_eq!(first, outcomes(faults(1)).1);
    assert_ne!(first, outcomes(faults(2)).1);
    let injected = store.injected();
    // Loose bounds around the expected counts: 2000 requests for errors, 1000 gets for the rest.
    assert!((100..320).contains(&injected.errors), "{injected:?}");
    for count in [injected.misses, injected.truncations, injected.bit_flips] {
        assert!((40..170).contains(&count), "{injected:?}");
    }
    let seen = |end: &str| {
        first
            .iter()
            .filter(|outcome| outcome.ends_with(end))
            .count() as u64
    };
    assert_eq!(seen("Ok(Miss)"), injected.misses);
    assert_eq!(
        seen(" 1"),
        injected.bit_flips,
        "one bit each, in what was delivered or cut"
    );
}

#[test]
fn delays_do_not_outlast_the_deadline() {
    let store = faulty(Faults {
        delay: FOR_EVER,
        delays: 1.0,
        ..Faults::default()
    });
    let deadline = within(Duration::from_millis(5));
    let key = key(fresh_namespace(), 0);
    let put = store
        .put(&key, &[IoSlice::new(b"value")], deadline)
        .unwrap_err();
    assert_eq!(put.kind(), ErrorKind::TimedOut);
    let looked = store.contains(&[key], deadline).unwrap_err();
    assert_eq!(looked.kind(), ErrorKind::TimedOut);
    assert_eq!(store.injected().delays, 2);
}
