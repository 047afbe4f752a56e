//! How a process learns of the packs that others put: it lists what is new in a namespace, and
//! reads the heads of packs that it does not know.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{StreamExt, TryStreamExt};
use parking_lot::Mutex;

use super::bucket::{Bucket, Outcome};
use super::failure::Failure;
use super::index::Index;
use super::pack::{Id, Kind, Name, now_millis, parse_note, parse_pack};
use crate::{Key, Namespace};

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
/// The longest time that a listing may take, whoever waits for it.
const LONGEST: Duration = Duration::from_secs(120);

/// One namespace, as this process knows it.
#[derive(Default)]
pub(super) struct Known {
    pub(super) index: Mutex<Index>,
    /// One listing at a time. Whoever waits takes over what it finds.
    listing: tokio::sync::Mutex<()>,
    /// One removal at a time, so that no value counts twice.
    pub(super) removing: tokio::sync::Mutex<()>,
}

/// Everything that this process knows of the bucket.
pub(super) struct Catalogue {
    pub(super) bucket: Arc<Bucket>,
    namespaces: Mutex<HashMap<Namespace, Arc<Known>>>,
}

impl Catalogue {
    pub(super) fn new(bucket: Arc<Bucket>) -> Self {
        Self {
            bucket,
            namespaces: Mutex::default(),
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
        if known
            .index
            .lock()
            .listings
            .fresh
            .is_some_and(|at| at >= since)
        {
            return Ok(());
        }
        let bucket = Arc::clone(&self.bucket);
        let listing = tokio::spawn(async move {
            let _one = known.listing.lock().await;
            let listings = known.index.lock().listings;
            if listings.fresh.is_some_and(|at| at >= since) {
                return Ok(());
            }
            let is_whole = listings.whole.is_none_or(|at| at.elapsed() > BETWEEN_WHOLE);
            let work = list(&bucket, namespace, &known, is_whole);
            let outcome = tokio::time::timeout(LONGEST, work).await;
            outcome.unwrap_or_else(|_| Err(Failure::late()))
        });
        listing.await.unwrap_or_else(|_| Err(Failure::late()))
    }
}

async fn list(bucket: &Bucket, namespace: Namespace, known: &Known, is_whole: bool) -> Outcome<()> {
    let began = Instant::now();
    let (after, before) = {
        let index = known.index.lock();
        let after = index.newest_id().filter(|_| !is_whole).map(overlapping);
        (
            after,
            if is_whole {
                index.known()
            } else {
                HashSet::new()
            },
        )
    };
    let seen = Mutex::new(HashSet::new());
    let unknown = bucket.list(namespace, after).try_filter(|(name, _)| {
        if is_whole {
            seen.lock().insert(name.id);
        }
        std::future::ready(!known.index.lock().knows(name.id))
    });
    let heads = unknown.map(|object| async {
        let (name, bytes) = object?;
        read_head(bucket, namespace, known, name, bytes).await
    });
    let mut heads = heads.buffer_unordered(HEADS_AT_ONCE);
    while let Some(head) = heads.next().await {
        head?;
    }
    drop(heads);
    let mut index = known.index.lock();
    if is_whole {
        index.whole_listing(&before, &seen.into_inner());
        index.listings.whole = Some(began);
    }
    index.listings.fresh = Some(began);
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
) -> Outcome<()> {
    if object_bytes < name.head_bytes() {
        known.index.lock().add_unreadable(name.id);
        return Ok(());
    }
    let Some(head) = bucket.head(namespace, &name).await? else {
        return Ok(());
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
