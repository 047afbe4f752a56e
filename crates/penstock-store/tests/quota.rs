//! Quotas of tenants and namespaces, over each store that is bounded.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{
    Capabilities, ErrorKind, GetRequest, Key, Listed, Namespace, PutOutcome, PutRequest, Result,
    Store, StoreStats, Tenancy, Tenant,
};
use penstock_store::layers::{Quota, Quotas};
use penstock_store::{OpenOptions, open};
use penstock_value::{Keyring, MemoryStore, SealedStore};
use proptest::prelude::*;

use crate::behaviour::sealed::listed;
use crate::behaviour::{LONG, bytes, eventually, get, given_time, key, kind_of, past, put, soon};

const POOL_BYTES: u64 = 64 << 20;
const QUOTA: u64 = 1 << 20;
/// About fifty of them make a quota.
const VALUE: usize = 20_000;

/// The three stores that are bounded, each with nothing in it.
struct Pool {
    url: String,
    _folder: tempfile::TempDir,
    segment: Option<String>,
}

impl Pool {
    fn each() -> [Self; 3] {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("test-quota-{}-{n}", std::process::id());
        ["memory", "file", "shm"].map(|kind| {
            let folder = tempfile::tempdir().unwrap();
            let place = match kind {
                "file" => folder.path().display().to_string(),
                "shm" => name.clone(),
                _ => String::new(),
            };
            Self {
                url: format!("{kind}://{place}?size={POOL_BYTES}"),
                _folder: folder,
                segment: (kind == "shm").then(|| format!("/dev/shm/penstock-{name}")),
            }
        })
    }

    /// The store without quotas.
    fn plain(&self) -> Arc<dyn Store> {
        open(&self.url, &OpenOptions::default()).unwrap()
    }

    /// The store with quotas, and the same without.
    fn with(&self, quotas: &[&str]) -> (Arc<Quota>, Arc<dyn Store>) {
        let inner = self.plain();
        (with(&inner, quotas), inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(segment) = &self.segment {
            let _ = std::fs::remove_file(segment);
        }
    }
}

fn with(inner: &Arc<dyn Store>, given: &[&str]) -> Arc<Quota> {
    Arc::new(quota(inner, given))
}

/// A store with quotas whose puts wait also on a machine that stands still for seconds.
fn patient(inner: &Arc<dyn Store>, given: &[&str]) -> Quota {
    quota(inner, given).with_patience(LONG)
}

fn quota(inner: &Arc<dyn Store>, given: &[&str]) -> Quota {
    let mut quotas = Quotas::default();
    given.iter().for_each(|quota| quotas.add(quota).unwrap());
    Quota::new(Arc::clone(inner), quotas).unwrap()
}

/// A namespace of a tenant; the same for the same number.
fn of(tenant: &str, n: u8) -> Namespace {
    Namespace([n; 16]).of_tenant(Tenant::named(tenant).unwrap())
}

/// What a store is charged for the objects that are `ours`.
fn held(store: &dyn Store, ours: impl Fn(Namespace) -> bool) -> u64 {
    let objects = listed(store);
    let ours = objects.iter().filter(|object| ours(object.key.namespace));
    ours.map(|object| store.charge(object.bytes)).sum()
}

fn held_by(store: &dyn Store, tenant: &str) -> u64 {
    let tenant = Some(Tenant::named(tenant).unwrap());
    held(store, |namespace| namespace.tenant() == tenant)
}

/// Puts a value, again and again while the thread makes room for it.
fn put_in_time(store: &dyn Store, key: &Key, value: &[u8]) -> PutOutcome {
    put_at_in_time(store, *key, value, 0)
}

fn put_at_in_time(store: &dyn Store, key: Key, value: &[u8], position: u64) -> PutOutcome {
    let mut outcome = None;
    eventually("there is room", || {
        let answer = put_at(store, key, value, position);
        let has_failed = answer.as_ref().err().map(penstock_contract::Error::kind);
        assert_ne!(has_failed, Some(ErrorKind::Config));
        outcome = answer.ok();
        outcome.is_some()
    });
    outcome.unwrap()
}

/// Puts a value that counts as used before those with a smaller position: `n` first.
fn put_at(store: &dyn Store, key: Key, value: &[u8], position: u64) -> Result<PutOutcome> {
    let slices = [IoSlice::new(value)];
    let mut batch = [PutRequest {
        position,
        ..PutRequest::new(key, &slices)
    }];
    store.put_many(&mut batch, soon());
    let [request] = batch;
    request.outcome.unwrap()
}

fn fact(store: &dyn Store, name: &str) -> Option<String> {
    let facts = store.describe(soon()).unwrap();
    facts
        .into_iter()
        .find(|(each, _)| each == name)
        .map(|(_, fact)| fact)
}

#[test]
fn stores_with_quotas_behave_as_stores() {
    // In this process, no other test asks for a fresh namespace.
    crate::behaviour::ADAPT
        .get_or_init(|| |shared| shared.of_tenant(Tenant::named("red").unwrap()));
    assert!(crate::behaviour::fresh_namespace().tenant().is_some());
    for pool in Pool::each() {
        let url = format!("{}&quota=tenant/red:64GiB", pool.url);
        crate::behaviour::run_all(|| open(&url, &OpenOptions::default()).unwrap());
    }
}

/// Puts values of a tenant from several threads at once, each thread by its own handle. Returns
/// how many were stored. Nothing is being put when this returns.
fn put_at_once(handles: &[&Quota], tenant: &str, round: u64) -> u64 {
    let stored = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (writer, store) in (0..).zip(handles) {
            let stored = &stored;
            scope.spawn(move || {
                for n in 0..20 {
                    let n = (writer * 1_000_000 + round) * 20 + n;
                    let size = 500 + (n * 7919 % VALUE as u64) as usize;
                    let key = key(of(tenant, (n % 3) as u8), n);
                    match put(&**store, &key, &bytes(n, size)) {
                        Ok(_) => _ = stored.fetch_add(1, Ordering::Relaxed),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::OverQuota),
                    }
                }
            });
        }
    });
    stored.into_inner()
}

#[test]
fn one_handle_never_exceeds_a_quota() {
    for pool in Pool::each() {
        let (store, inner) = pool.with(&["tenant/red:1MiB"]);
        // The thread makes room. On a busy machine it may not do so before all rounds are over.
        let (mut stored, mut rounds) = (0, 0..);
        eventually("enough is stored", || {
            let round = rounds.next().unwrap();
            stored += put_at_once(&[&*store; 4], "red", round);
            // The thread may be evicting: the listing then shows more than there is at the end, but
            // never more than there was at its beginning.
            let held = held_by(&*inner, "red");
            assert!(held <= QUOTA, "{}: {held}", pool.url);
            round >= 29 && stored > 300
        });
        let held = held_by(&*inner, "red");
        assert!(
            held > QUOTA / 2,
            "{}: not emptied for room: {held}",
            pool.url
        );
        assert!(store.stats().evictions > 0);
    }
}

#[test]
fn the_least_recently_used_values_of_the_account_go_first() {
    for pool in Pool::each() {
        let (store, inner) = pool.with(&["tenant/red:1MiB"]);
        let strangers = [of("blue", 0), Namespace([9; 16])];
        for namespace in strangers {
            for n in 0..60 {
                put_at(&*store, key(namespace, n), &bytes(n, VALUE), 1_000_000).unwrap();
            }
        }
        let red = |n| key(of("red", (n % 3) as u8), n);
        for n in 0..70 {
            // File systems and clocks tell these times of use apart.
            put_at_in_time(&*store, red(n), &bytes(n, VALUE), (70 - n) * 10_000);
            assert!(get(&*store, &red(0)).is_some(), "used all the time, {n}");
        }
        let keys: Vec<Key> = (1..70).map(red).collect();
        let (mut there, mut gone) = (Vec::new(), 0);
        eventually("room is made, and all that went is counted", || {
            // First, as more may go at any moment.
            let is_made = held_by(&*inner, "red") <= QUOTA / 20 * 19;
            there = inner.contains(&keys, soon()).unwrap();
            gone = there.iter().filter(|&&there| !there).count();
            is_made && store.stats().evictions == gone as u64
        });
        assert!((20..40).contains(&gone), "{}: {gone}", pool.url);
        assert!(there.is_sorted(), "{}: {there:?}", pool.url);
        for namespace in strangers {
            let keys: Vec<Key> = (0..60).map(|n| key(namespace, n)).collect();
            assert_eq!(inner.contains(&keys, soon()).unwrap(), [true; 60]);
        }
    }
}

#[test]
fn each_tenant_has_its_own_and_a_quota_of_its_own_comes_first() {
    for pool in Pool::each() {
        let (store, inner) = pool.with(&["tenant/*:1MiB", "tenant/big:4MiB"]);
        for tenant in ["red", "blue", "big"] {
            for n in 0..120 {
                let key = key(of(tenant, (n % 2) as u8), n);
                put_in_time(&*store, &key, &bytes(n, VALUE));
            }
        }
        for tenant in ["red", "blue"] {
            let held = held_by(&*inner, tenant);
            assert!((QUOTA / 2..=QUOTA).contains(&held), "{tenant}: {held}");
        }
        assert_eq!(held_by(&*inner, "big"), 120 * inner.charge(VALUE as u64));
        let counted = |name: &str| fact(&*store, name).unwrap().parse::<u64>().unwrap();
        assert_eq!(counted("quota_bytes:tenant/big"), 4 << 20);
        assert_eq!(counted("quota_bytes:tenant/*"), QUOTA);
        assert!(counted("quota_used_bytes:tenant/big") >= held_by(&*inner, "big"));
        let red = format!("tenant/*/{}", Tenant::named("red").unwrap());
        assert_eq!(counted(&format!("quota_bytes:{red}")), QUOTA);
        assert!(counted(&format!("quota_used_bytes:{red}")) > 0);
    }
}

#[test]
fn a_namespace_and_its_tenant_may_both_have_a_quota() {
    for pool in Pool::each() {
        let (small, other) = (of("red", 0), of("red", 1));
        let of_namespace = format!("namespace/{small}:512KiB");
        let (store, inner) = pool.with(&[&of_namespace, "tenant/red:1MiB"]);
        for n in 0..100 {
            put_in_time(&*store, &key(small, n), &bytes(n, VALUE));
            put_in_time(&*store, &key(other, n), &bytes(n, VALUE));
            assert!(held(&*inner, |namespace| namespace == small) <= QUOTA / 2);
            assert!(held_by(&*inner, "red") <= QUOTA);
        }
        assert!(held_by(&*inner, "red") > QUOTA / 2);
    }
}

#[test]
fn a_quota_of_a_namespace_alone() {
    for pool in Pool::each() {
        let (ours, other) = (Namespace([1; 16]), Namespace([2; 16]));
        let (store, inner) = pool.with(&[&format!("namespace/{ours}:1MiB")]);
        for n in 0..100 {
            put_in_time(&*store, &key(ours, n), &bytes(n, VALUE));
            put(&*store, &key(other, n), &bytes(n, VALUE)).unwrap();
            assert!(held(&*inner, |namespace| namespace == ours) <= QUOTA);
        }
        let all = 100 * inner.charge(VALUE as u64);
        assert_eq!(held(&*inner, |namespace| namespace == other), all);
    }
}

#[test]
fn each_further_handle_may_exceed_a_quota_by_a_twentieth() {
    for pool in Pool::each() {
        let inner = pool.plain();
        let handles = [(); 3].map(|()| with(&inner, &["tenant/red:1MiB"]));
        let mut rounds = 0..;
        eventually("enough is evicted", || {
            let round = rounds.next().unwrap();
            put_at_once(&handles.each_ref().map(|store| &**store), "red", round);
            let held = held_by(&*inner, "red");
            assert!(held <= QUOTA + 2 * QUOTA / 20, "{}: {held}", pool.url);
            let evictions = handles.iter().map(|store| store.stats().evictions);
            round >= 29 && evictions.sum::<u64>() > 100
        });
        let held = held_by(&*inner, "red");
        assert!(
            held > QUOTA / 2,
            "{}: not emptied for room: {held}",
            pool.url
        );
    }
}

#[test]
fn what_is_in_the_pool_before_counts() {
    for pool in Pool::each() {
        let inner = pool.plain();
        for n in 0..80 {
            put_at(
                &*inner,
                key(of("red", 0), n),
                &bytes(n, VALUE),
                (80 - n) * 10_000,
            )
            .unwrap();
        }
        assert!(held_by(&*inner, "red") > QUOTA);
        let _store = with(&inner, &["tenant/*:1MiB"]);
        eventually("room is made", || held_by(&*inner, "red") <= QUOTA / 10 * 9);
        let keys: Vec<Key> = (0..80).map(|n| key(of("red", 0), n)).collect();
        assert!(inner.contains(&keys, soon()).unwrap().is_sorted());
    }
}

#[test]
fn a_value_larger_than_its_quota_is_refused() {
    for pool in Pool::each() {
        let (store, inner) = pool.with(&["tenant/red:1MiB"]);
        let (red, blue) = (key(of("red", 0), 0), key(of("blue", 0), 0));
        let value = bytes(0, QUOTA as usize + 1);
        let error = put(&*store, &red, &value).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("account: tenant/red"), "{error}");
        assert_eq!(put(&*store, &blue, &value).unwrap(), PutOutcome::Stored);
        // One that just fits makes the others go.
        put_in_time(&*store, &red, &bytes(1, QUOTA as usize / 2));
        let largest = key(of("red", 0), 2);
        put_in_time(&*store, &largest, &bytes(2, QUOTA as usize / 8 * 7));
        assert_eq!(
            inner.contains(&[red, largest], soon()).unwrap(),
            [false, true]
        );
    }
}

/// In one batch, each value has its own outcome.
#[test]
fn a_batch_larger_than_a_quota_is_put_as_room_is_made() {
    for pool in Pool::each() {
        let inner = pool.plain();
        let store = patient(&inner, &["tenant/red:1MiB"]);
        let value = bytes(0, VALUE);
        let slices = [IoSlice::new(&value)];
        let tenant = |n| ["red", "blue", "red"][n as usize % 3];
        let requests = (0..150).map(|n| PutRequest::new(key(of(tenant(n), 0), n), &slices));
        let mut batch: Vec<_> = requests.collect();
        // Without waiting, 51 of the 100 red values would find room at most.
        store.put_many(&mut batch, soon());
        for request in &batch {
            let outcome = request.outcome.as_ref().unwrap();
            assert_eq!(*outcome.as_ref().unwrap(), PutOutcome::Stored);
        }
        let red = held_by(&*inner, "red");
        assert!((QUOTA / 2..=QUOTA).contains(&red), "{red}");
        assert_eq!(held_by(&*inner, "blue"), 50 * inner.charge(VALUE as u64));
    }
}

/// A store whose listings, and so all censuses, wait for their deadline or fail.
struct Stuck {
    inner: Arc<dyn Store>,
    is_stuck: AtomicBool,
    lists: AtomicU64,
}

impl Stuck {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: Arc::new(MemoryStore::new(POOL_BYTES)),
            is_stuck: true.into(),
            lists: 0.into(),
        })
    }

    fn quota(self: &Arc<Self>, quotas: &[&str]) -> Quota {
        let store: Arc<dyn Store> = Arc::clone(self) as _;
        quota(&store, quotas)
    }
}

impl Store for Stuck {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn url(&self) -> String {
        self.inner.url()
    }
    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.inner.contains(keys, deadline)
    }
    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        self.inner.put_many(batch, deadline);
    }
    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        self.inner.get_many(batch, deadline);
    }
    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        self.inner.touch(values, deadline)
    }
    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.inner.remove(keys, deadline)
    }
    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        while self.is_stuck.load(Ordering::Relaxed) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner.list(namespace, visit, deadline)
    }
    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.inner.describe(deadline)
    }
    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
    fn charge(&self, value_bytes: u64) -> u64 {
        self.inner.charge(value_bytes)
    }
}

#[test]
fn a_census_that_is_stuck_costs_puts_of_its_accounts_only() {
    let stuck = Stuck::new();
    let (red, blue) = (key(of("red", 0), 0), key(of("blue", 0), 0));
    put(&*stuck, &key(of("red", 0), 1), b"from before").unwrap();
    let mut last = None;
    given_time(
        "no put waits for a thread that is behind for longer",
        |patience| {
            let quota = stuck.quota(&["tenant/red:1MiB"]);
            let store = last.insert(quota.with_patience(patience));
            let refused = || assert_eq!(kind_of(put(store, &red, b"value")), ErrorKind::OverQuota);
            refused();
            let begin = past();
            for _ in 0..100 {
                refused();
                put(store, &blue, b"value").unwrap();
                assert!(get(store, &key(of("red", 0), 1)).is_some());
                assert_eq!(store.contains(&[red, blue], soon()).unwrap(), [false, true]);
                store.remove(&[blue], soon()).unwrap();
            }
            // Each that waited took that long.
            begin.elapsed() < 100 * patience
        },
    );
    let store = last.unwrap();
    assert_eq!(
        fact(&store, "quota_used_bytes:tenant/red").as_deref(),
        Some("unknown")
    );
    stuck.is_stuck.store(false, Ordering::Relaxed);
    eventually("puts are let in", || put(&store, &red, b"value").is_ok());
}

#[test]
fn a_handle_closes_while_a_census_is_stuck() {
    let stuck = Stuck::new();
    let store = stuck.quota(&["tenant/red:1MiB"]);
    eventually("a census begins", || {
        stuck.lists.load(Ordering::Relaxed) > 0
    });
    drop(store);
    assert_eq!(Arc::strong_count(&stuck), 1, "the thread has ended");
}

#[test]
fn a_handle_closes_while_puts_made_the_thread_work() {
    for pool in Pool::each() {
        let (store, inner) = pool.with(&["tenant/*:1MiB"]);
        for n in 0..60 {
            let _ = put(&*store, &key(of("red", 0), n), &bytes(n, VALUE));
        }
        drop(store);
        assert_eq!(Arc::strong_count(&inner), 1, "the thread has ended");
    }
}

#[test]
fn a_quota_holds_over_a_store_that_fails() {
    for pool in Pool::each() {
        let inner = pool.plain();
        let faulty: Arc<dyn Store> = Arc::new(Faulty::new(
            Arc::clone(&inner),
            Faults {
                seed: 1,
                errors: vec![(ErrorKind::Unavailable, 0.2), (ErrorKind::TimedOut, 0.05)],
                ..Faults::default()
            },
        ));
        let store = with(&faulty, &["tenant/red:1MiB"]);
        for n in 0..80 {
            put_in_time(&*store, &key(of("red", 0), n), &bytes(n, VALUE));
            let held = held_by(&*inner, "red");
            assert!(held <= QUOTA, "{}: {held}", pool.url);
        }
        assert!(store.stats().errors > 0);
    }
}

#[test]
fn urls_with_quotas() {
    for pool in Pool::each() {
        let of_namespace = format!("quota=namespace/{}:1MiB", Namespace([0xab; 16]));
        let given = format!(
            "{}&quota=tenant/*:64MiB&quota=tenant/red:1G&{of_namespace}",
            pool.url
        );
        let store = open(&given, &OpenOptions::default()).unwrap();
        let normal = format!(
            "{}&quota=namespace/{}:1048576&quota=tenant/red:1073741824&quota=tenant/*:67108864",
            pool.plain().url(),
            "ab".repeat(16)
        );
        assert_eq!(store.url(), normal);
        assert_eq!(store.capabilities(), pool.plain().capabilities());
        // What a store calls itself opens it; also as one of several tiers.
        assert_eq!(
            open(&normal, &OpenOptions::default()).unwrap().url(),
            normal
        );
        let tiers = open(
            &format!("memory://?size=1MiB {normal}"),
            &OpenOptions::default(),
        )
        .unwrap();
        assert_eq!(tiers.url(), format!("memory://?size=1048576 {normal}"));
        assert_eq!(
            fact(&*tiers, "tier2:quota_bytes:tenant/red").as_deref(),
            Some("1073741824")
        );
    }
}

#[test]
fn each_tier_keeps_its_own_quotas() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!(
        "memory://?size=64MiB&quota=tenant/red:1MiB file://{}?size=64MiB&quota=tenant/red:4MiB",
        folder.path().display()
    );
    let keys = Keyring::parse(&format!("one:{}=", "A".repeat(43))).unwrap();
    let tiers = open(&url, &OpenOptions::default()).unwrap();
    let sealed = SealedStore::new(Arc::clone(&tiers), Some(Arc::new(keys)));
    let file = open(
        &format!("file://{}?size=64MiB", folder.path().display()),
        &OpenOptions::default(),
    );
    let file = file.unwrap();
    let (mut numbers, mut last) = (0.., 0);
    // A tier that is behind lets the other one have the value alone.
    eventually("the nearer tier evicts", || {
        let n = numbers.next().unwrap();
        last = n;
        let key = key(of("red", 0), n);
        eventually("both tiers let it in", || {
            put(&**sealed.store(), &key, &bytes(n, VALUE)).is_ok()
                && file.contains(&[key], soon()).unwrap()[0]
        });
        n >= 99 && tiers.stats().evictions > 0
    });
    let near = fact(&*tiers, "tier1:quota_used_bytes:tenant/red").unwrap();
    assert!(near.parse::<u64>().unwrap() <= QUOTA);
    // The nearer tier holds about fifty values, the other one two hundred.
    let old = last - 99;
    let value = bytes(old, VALUE);
    let mut into = vec![0; VALUE];
    let got = tiers.get(
        &key(of("red", 0), old),
        &mut [IoSliceMut::new(&mut into)],
        soon(),
    );
    assert!(got.is_ok() && into == value, "the far tier has it");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever is put, used and removed by whom: no account of one handle is over, and nothing is
    /// evicted of others.
    #[test]
    fn quotas_hold(steps in prop::collection::vec((0..4_u8, 0..3_usize, 0..60_u64, 1..30_000_usize), 1..200)) {
        let inner: Arc<dyn Store> = Arc::new(MemoryStore::new(POOL_BYTES));
        let store = with(&inner, &["tenant/red:300KiB", "tenant/*:200KiB"]);
        let tenants = ["red", "blue", ""];
        let mut free = std::collections::HashSet::new();
        for (what, whose, n, size) in steps {
            let namespace = if whose == 2 { Namespace([5; 16]) } else { of(tenants[whose], (n % 3) as u8) };
            let key = key(namespace, n);
            match what {
                0 | 1 => {
                    put_in_time(&*store, &key, &bytes(n, size));
                    if whose == 2 {
                        free.insert(key);
                    }
                }
                2 => {
                    get(&*store, &key);
                }
                _ => {
                    store.remove(&[key], soon()).unwrap();
                    free.remove(&key);
                }
            }
            prop_assert!(held_by(&*inner, "red") <= 300 << 10);
            prop_assert!(held_by(&*inner, "blue") <= 200 << 10);
        }
        let kept: Vec<Key> = free.into_iter().collect();
        prop_assert!(inner.contains(&kept, soon()).unwrap().iter().all(|&there| there));
    }
}
