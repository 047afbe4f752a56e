//! How a process learns of the packs that others put: it lists what is new in a namespace, and
//! reads the heads of packs that it does not know.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use penstock_contract::{ErrorKind, Key, Namespace};
use tokio::select;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::bucket::{Bucket, Outcome};
use super::failure::Failure;
use super::index::{Index, Listings};
use super::pack::{Id, Kind, Name, now_millis, parse_note, parse_pack};
use super::transport::bounded_listing;

/// Objects of a namespace that one listing may have. Their names are kept while it goes on.
const MOST_OBJECTS: usize = 1 << 20;
/// Values of a namespace that a process knows of, and places of notes. Packs and notes beyond are
/// passed over: their values are misses here.
const MOST_KNOWN: usize = 1 << 24;
/// Heads that are read at once.
const HEADS_AT_ONCE: usize = 16;
/// A listing of what is new begins so far before the newest known object. Objects appear this much
/// after they were named at the most, clocks that differ included. What is later still is found by
/// the next listing of all.
const OVERLAP: Duration = Duration::from_secs(60);
/// How old an answer may be that says that a key is there, if no key is missing.
pub(super) const OLDEST: Duration = Duration::from_secs(30);
/// The time between two listings of all, which find what was deleted or came very late.
const BETWEEN_WHOLE: Duration = Duration::from_secs(600);
/// When a listing of all that failed is tried again.
const WHOLE_AGAIN: Duration = Duration::from_secs(60);
/// How long a listing waits for a page or for a head. It may take as long as it likes while these
/// come.
const STALLED: Duration = Duration::from_secs(15);
/// If nothing comes for so long, nobody else waits for the listing. It may hang on a connection, while
/// another one would not.
const OVERDUE: Duration = Duration::from_secs(2);

/// One namespace, as this process knows it.
#[derive(Default)]
pub(super) struct Known {
    pub(super) index: Mutex<Index>,
    /// The last listing that look-ups wait for.
    listing: Mutex<Option<Listing>>,
    /// The last listing of all that was begun beside the others.
    beside: Mutex<Option<JoinHandle<Outcome<()>>>>,
    /// One removal at a time, so that no value counts twice.
    pub(super) removing: tokio::sync::Mutex<()>,
}

impl Listings {
    /// Whether to list all again, to find what was deleted or came very late.
    fn is_whole_due(&self, between: Duration) -> bool {
        let is_old = |at: Instant, age| at.elapsed() > age;
        self.whole.is_some_and(|at| is_old(at, between))
            && self
                .tried
                .is_none_or(|at| is_old(at, between.min(WHOLE_AGAIN)))
    }
}

/// A listing under way, or over. All who wait share its outcome.
#[derive(Clone)]
struct Listing {
    began: Instant,
    /// When a page or a head last came.
    came: Arc<Mutex<Instant>>,
    end: Shared<BoxFuture<'static, Outcome<()>>>,
}

/// Everything that this process knows of the bucket.
pub(super) struct Catalogue {
    pub(super) bucket: Arc<Bucket>,
    namespaces: Mutex<HashMap<Namespace, Arc<Known>>>,
    /// See [`BETWEEN_WHOLE`].
    between_whole: Duration,
    /// See [`OVERDUE`].
    overdue: Duration,
    /// See [`STALLED`].
    stalled: Duration,
}

impl Catalogue {
    pub(super) fn new(bucket: Arc<Bucket>) -> Self {
        Self {
            bucket,
            namespaces: Mutex::default(),
            between_whole: BETWEEN_WHOLE,
            overdue: OVERDUE,
            stalled: STALLED,
        }
    }

    pub(super) fn of(&self, namespace: Namespace) -> Arc<Known> {
        Arc::clone(self.namespaces.lock().entry(namespace).or_default())
    }

    /// The namespaces of some keys.
    pub(super) fn of_keys<'k>(
        &self,
        keys: impl Iterator<Item = &'k Key>,
    ) -> HashMap<Namespace, Arc<Known>> {
        let namespaces: HashSet<Namespace> = keys.map(|key| key.namespace).collect();
        let known = namespaces
            .into_iter()
            .map(|namespace| (namespace, self.of(namespace)));
        known.collect()
    }

    /// Packs, keys and damaged objects of all namespaces.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let namespaces: Vec<Arc<Known>> = self.namespaces.lock().values().cloned().collect();
        namespaces.iter().fold((0, 0, 0), |sum, known| {
            let counts = known.index.lock().counts();
            (sum.0 + counts.0, sum.1 + counts.1, sum.2 + counts.2)
        })
    }

    /// Brings what is known of a namespace up to `since`: afterwards, every object is known that
    /// was there then. The listing goes on if this is dropped, so that its progress is not lost.
    pub(super) async fn refresh(&self, namespace: Namespace, since: Instant) -> Outcome<()> {
        let known = self.of(namespace);
        loop {
            self.list_all_beside(namespace, &known);
            let Some(listing) = self.join(namespace, &known, since) else {
                return Ok(());
            };
            let outcome = listing.end.await;
            if listing.began >= since {
                return outcome;
            }
        }
    }

    /// Begins a listing of all if it is time. Nobody waits for it: what it finds besides is not urgent,
    /// and it is long. There is one at a time, however long it takes.
    fn list_all_beside(&self, namespace: Namespace, known: &Known) {
        let is_due = || {
            let listings = known.index.lock().listings;
            listings.is_whole_due(self.between_whole)
        };
        if !is_due() {
            return;
        }
        let mut last = known.beside.lock();
        let is_over = last.as_ref().is_none_or(JoinHandle::is_finished);
        // Another one may have begun and ended meanwhile.
        if is_over && is_due() {
            known.index.lock().listings.tried = Some(Instant::now());
            let came = Arc::new(Mutex::new(Instant::now()));
            *last = Some(tokio::spawn(self.list(namespace, Scope::All, came)));
        }
    }

    /// The listing under way; a new one if there is none, or if it hangs. None if what is known is
    /// as fresh as `since`.
    fn join(&self, namespace: Namespace, known: &Known, since: Instant) -> Option<Listing> {
        let goes_on = |listing: &&Listing| {
            listing.end.peek().is_none() && listing.came.lock().elapsed() < self.overdue
        };
        let mut last = known.listing.lock();
        let under_way = last.as_ref().filter(goes_on).cloned();
        // A listing says what it found before it ends. Asked in this order, one that ends meanwhile is
        // either joined or known, so that it is not made twice.
        let fresh = known.index.lock().listings.fresh;
        if fresh.is_some_and(|at| at >= since) {
            return None;
        }
        if under_way.is_some() {
            return under_way;
        }
        // Before anything is known, all is new.
        let scope = match fresh {
            None => Scope::All,
            Some(_) => Scope::New,
        };
        let began = Instant::now();
        let came = Arc::new(Mutex::new(began));
        let task = tokio::spawn(self.list(namespace, scope, Arc::clone(&came)));
        let end = async { task.await.unwrap_or_else(|_| Err(Failure::late())) };
        let end = end.boxed().shared();
        Some(last.insert(Listing { began, came, end }).clone())
    }

    fn list(
        &self,
        namespace: Namespace,
        scope: Scope,
        came: Arc<Mutex<Instant>>,
    ) -> impl Future<Output = Outcome<()>> + Send + use<> {
        let (bucket, known) = (Arc::clone(&self.bucket), self.of(namespace));
        let stalled = self.stalled;
        async move { bounded_listing(list(&bucket, namespace, &known, scope, &came, stalled)).await }
    }
}

/// What a listing covers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    New,
    All,
}

async fn list(
    bucket: &Bucket,
    namespace: Namespace,
    known: &Known,
    scope: Scope,
    came: &Mutex<Instant>,
    stalled: Duration,
) -> Outcome<()> {
    let began = Instant::now();
    let is_whole = scope == Scope::All;
    let (after, before) = {
        let mut index = known.index.lock();
        if is_whole {
            index.forget_refused();
            (None, index.known())
        } else {
            (index.newest_id().map(overlapping), HashSet::new())
        }
    };
    let mut seen = HashSet::new();
    let mut names = bucket.list(namespace, after);
    let mut heads = FuturesUnordered::new();
    let mut is_listed = false;
    let mut objects = 0;
    while !is_listed || !heads.is_empty() {
        // Heads go on while names come, so that none keeps a permit that nobody uses.
        select! {
            Some(read) = heads.next() => read?,
            next = timeout(stalled, names.next()), if !is_listed && heads.len() < HEADS_AT_ONCE => {
                match next.map_err(|_| Failure::late())?.transpose()? {
                    None => is_listed = true,
                    Some((name, bytes)) => {
                        objects += 1;
                        if objects > MOST_OBJECTS {
                            return Err(Failure::new(
                                ErrorKind::Protocol,
                                "the bucket lists more objects than a namespace may have",
                            ));
                        }
                        if is_whole {
                            seen.insert(name.id);
                        }
                        if !known.index.lock().knows(name.id) {
                            heads.push(read_head(bucket, namespace, known, name, bytes, stalled));
                        }
                    }
                }
            }
        }
        *came.lock() = Instant::now();
    }
    let mut index = known.index.lock();
    if is_whole {
        index.whole_listing(&before, &seen);
        index.listings.whole = Some(Instant::now());
    }
    index.listings.fresh = index.listings.fresh.max(Some(began));
    Ok(())
}

/// The identity after which a listing begins. Another clock may be far ahead of this one.
fn overlapping(newest: Id) -> Id {
    let millis = newest.millis.min(now_millis());
    Id {
        millis: millis.saturating_sub(OVERLAP.as_millis() as u64),
        random: 0,
    }
}

async fn read_head(
    bucket: &Bucket,
    namespace: Namespace,
    known: &Known,
    name: Name,
    object_bytes: u64,
    stalled: Duration,
) -> Outcome<()> {
    if object_bytes < name.head_bytes() {
        known.index.lock().add_unreadable(name.id);
        return Ok(());
    }
    {
        let mut index = known.index.lock();
        if index.held() + name.count as usize > MOST_KNOWN {
            index.add_refused(name.id);
            return Ok(());
        }
    }
    let head = timeout(stalled, bucket.head(namespace, &name)).await;
    let head = match head.unwrap_or_else(|_| Err(Failure::late())) {
        Ok(Some(head)) => head,
        Ok(None) => return Ok(()),
        // It may be in an archive, or another account's. The others can be used all the same.
        Err(failure) if matches!(failure.kind, ErrorKind::Denied | ErrorKind::Protocol) => {
            known.index.lock().add_refused(name.id);
            return Ok(());
        }
        Err(failure) => return Err(failure),
    };
    let mut index = known.index.lock();
    match name.kind {
        Kind::Pack => match parse_pack(&head, namespace, name.count, object_bytes) {
            Some(entries) => index.add_pack(name, &entries),
            None => index.add_unreadable(name.id),
        },
        Kind::Note => match parse_note(&head, name.count) {
            Some(places) => index.add_note(name.id, places),
            None => index.add_unreadable(name.id),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fmt::{self, Display, Formatter};
    use std::sync::atomic::Ordering::Relaxed;

    use bytes::Bytes;
    use futures_util::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{
        CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
        ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    };
    use tokio::runtime::{Builder, Runtime};
    use tokio::sync::Semaphore;
    use tokio::task::yield_now;

    use super::super::pack::{Local, pack_head};
    use super::*;

    const NAMESPACE: Namespace = Namespace(*b"0123456789abcdef");
    /// Far more than a test takes: it only ends one that would hang.
    const LIMIT: Duration = Duration::from_secs(120);

    fn one_thread() -> Runtime {
        Builder::new_current_thread().enable_time().build().unwrap()
    }

    /// What a store has, for a machine that may stand still for as long as it likes.
    fn patient(store: Arc<dyn ObjectStore>) -> Catalogue {
        let bucket = Bucket::new(store, Path::default(), HEADS_AT_ONCE);
        let mut catalogue = Catalogue::new(Arc::new(bucket));
        catalogue.between_whole = LIMIT * 10;
        catalogue.overdue = LIMIT * 10;
        catalogue.stalled = LIMIT * 10;
        catalogue
    }

    /// A store whose listings stand still until the next name may come.
    #[derive(Debug)]
    struct Held {
        store: InMemory,
        /// Permits, one for each name that may still come.
        names: Arc<Semaphore>,
    }

    /// A store that is held, what it has, and what lets names come.
    fn held() -> (Catalogue, Arc<Semaphore>) {
        let names = Arc::new(Semaphore::new(0));
        let store = Held {
            store: InMemory::new(),
            names: Arc::clone(&names),
        };
        (patient(Arc::new(store)), names)
    }

    impl Display for Held {
        fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
            self.store.fmt(f)
        }
    }

    // Written as the trait's macro would have it.
    impl ObjectStore for Held {
        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta, Error>> {
            let names = Arc::clone(&self.names);
            let hold = move |object| {
                let names = Arc::clone(&names);
                async move {
                    names.acquire().await.unwrap().forget();
                    object
                }
            };
            self.store.list(prefix).then(hold).boxed()
        }

        fn put_opts<'s: 'f, 'p: 'f, 'f>(
            &'s self,
            location: &'p Path,
            payload: PutPayload,
            options: PutOptions,
        ) -> BoxFuture<'f, Result<PutResult, Error>> {
            self.store.put_opts(location, payload, options)
        }

        fn put_multipart_opts<'s: 'f, 'p: 'f, 'f>(
            &'s self,
            location: &'p Path,
            options: PutMultipartOptions,
        ) -> BoxFuture<'f, Result<Box<dyn MultipartUpload>, Error>> {
            self.store.put_multipart_opts(location, options)
        }

        fn get_opts<'s: 'f, 'p: 'f, 'f>(
            &'s self,
            location: &'p Path,
            options: GetOptions,
        ) -> BoxFuture<'f, Result<GetResult, Error>> {
            self.store.get_opts(location, options)
        }

        fn delete_stream(
            &self,
            locations: BoxStream<'static, Result<Path, Error>>,
        ) -> BoxStream<'static, Result<Path, Error>> {
            self.store.delete_stream(locations)
        }

        fn list_with_delimiter<'s: 'f, 'p: 'f, 'f>(
            &'s self,
            prefix: Option<&'p Path>,
        ) -> BoxFuture<'f, Result<ListResult, Error>> {
            self.store.list_with_delimiter(prefix)
        }

        fn copy_opts<'s: 'f, 'p: 'f, 't: 'f, 'f>(
            &'s self,
            from: &'p Path,
            to: &'t Path,
            options: CopyOptions,
        ) -> BoxFuture<'f, Result<(), Error>> {
            self.store.copy_opts(from, to, options)
        }
    }

    async fn put_pack(bucket: &Bucket) -> Name {
        put_pack_named(bucket, Id::fresh()).await
    }

    async fn put_pack_named(bucket: &Bucket, id: Id) -> Name {
        let span = penstock_layout::Span::new(0..4, 0..2).unwrap();
        let key = Key::new(NAMESPACE, &[1], span).unwrap();
        let (head, _) = pack_head(NAMESPACE, &[(Local::of(&key), 5)]);
        let name = Name {
            id,
            kind: Kind::Pack,
            count: 1,
        };
        let pieces = vec![Bytes::from(head), Bytes::from_static(b"value")];
        bucket.put(NAMESPACE, &name, pieces).await.unwrap();
        name
    }

    #[test]
    fn who_comes_as_a_listing_ends_makes_no_other() {
        let runtime = Builder::new_multi_thread()
            .worker_threads(4)
            .enable_time()
            .build()
            .unwrap();
        let catalogue = Arc::new(patient(Arc::new(InMemory::new())));
        runtime.block_on(async {
            let known = catalogue.of(NAMESPACE);
            for _ in 0..20_000 {
                let since = Instant::now();
                let askers = (0..8).map(|_| {
                    let (catalogue, known) = (Arc::clone(&catalogue), Arc::clone(&known));
                    tokio::spawn(async move {
                        catalogue.refresh(NAMESPACE, since).await.unwrap();
                        let last = known.listing.lock();
                        last.as_ref().map(|listing| listing.began)
                    })
                });
                let began = futures_util::future::join_all(askers).await;
                let began: HashSet<_> = began.into_iter().map(Result::unwrap).collect();
                assert_eq!(began.len(), 1, "all share one listing");
            }
        });
    }

    #[test]
    fn heads_are_read_while_names_come() {
        one_thread().block_on(async {
            let (catalogue, names) = held();
            for _ in 0..50 {
                put_pack(&catalogue.bucket).await;
            }
            names.add_permits(50);
            catalogue.refresh(NAMESPACE, Instant::now()).await.unwrap();
            // They come first in the next listing, and then those that are known.
            for millis in 1..=HEADS_AT_ONCE as u64 {
                put_pack_named(&catalogue.bucket, Id { millis, random: 0 }).await;
            }
            let came = Arc::new(Mutex::new(Instant::now()));
            let listing = tokio::spawn(catalogue.list(NAMESPACE, Scope::All, came));
            // The names of those that are known do not come before all heads were read.
            names.add_permits(HEADS_AT_ONCE);
            let all_heads = async {
                while catalogue.counts().0 < 50 + HEADS_AT_ONCE {
                    yield_now().await;
                }
            };
            let read = timeout(LIMIT, all_heads).await;
            read.expect("the heads waited for all names");
            assert!(!listing.is_finished());
            names.add_permits(50);
            listing.await.unwrap().unwrap();
        });
    }

    #[test]
    fn all_is_listed_once_at_a_time_however_long_that_takes() {
        one_thread().block_on(async {
            let (mut catalogue, names) = held();
            catalogue.between_whole = Duration::ZERO;
            for _ in 0..20 {
                put_pack(&catalogue.bucket).await;
            }
            names.add_permits(20);
            catalogue.refresh(NAMESPACE, Instant::now()).await.unwrap();
            let known = catalogue.of(NAMESPACE);
            let is_over = || {
                known
                    .beside
                    .lock()
                    .as_ref()
                    .is_none_or(JoinHandle::is_finished)
            };
            let lists = || catalogue.bucket.requests.lists.load(Relaxed);
            for listings in 1..=3 {
                assert!(is_over());
                let before = lists();
                // It is due as soon as the clock has gone on.
                while is_over() {
                    catalogue.list_all_beside(NAMESPACE, &known);
                }
                for _ in 0..5 {
                    yield_now().await;
                    catalogue.list_all_beside(NAMESPACE, &known);
                    assert!(!is_over(), "{listings}");
                }
                yield_now().await;
                assert_eq!(lists() - before, 1, "{listings}");
                names.add_permits(20);
                while !is_over() {
                    yield_now().await;
                }
                assert_eq!(lists() - before, 1, "{listings}");
            }
        });
    }

    #[test]
    fn what_others_deleted_is_forgotten_though_nobody_waits_for_that() {
        one_thread().block_on(async {
            let mut catalogue = patient(Arc::new(InMemory::new()));
            let packs = |catalogue: &Catalogue| catalogue.counts().0;
            let refresh = async |catalogue: &Catalogue| {
                let now = Instant::now();
                catalogue.refresh(NAMESPACE, now).await.unwrap();
            };
            let name = put_pack(&catalogue.bucket).await;
            refresh(&catalogue).await;
            assert_eq!(packs(&catalogue), 1);
            catalogue.bucket.delete(NAMESPACE, &[name]).await.unwrap();
            refresh(&catalogue).await;
            assert_eq!(packs(&catalogue), 1, "it is not time yet to list all");
            put_pack(&catalogue.bucket).await;
            refresh(&catalogue).await;
            assert_eq!(packs(&catalogue), 2, "what is new is found at once");
            catalogue.between_whole = Duration::ZERO;
            let forgotten = async {
                while packs(&catalogue) > 1 {
                    refresh(&catalogue).await;
                }
            };
            timeout(LIMIT, forgotten).await.expect("never forgotten");
        });
    }
}
