//! Object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.
//!
//! Requests to such stores are slow and each one costs, so values are gathered into *packs* of many
//! megabytes. A pack is one object and never changes. Its head lists its values.
//!
//! A process knows where values lie from the heads of packs. It lists the bucket for packs that it
//! does not know yet, at most once in a while ([`address::Settings::fresh`]), and reads their heads.
//!
//! The modules, from the address to the bytes:
//!
//! - `address` reads the URL and makes the client.
//! - `rules` asks the bucket after how many days objects expire.
//! - `transport` is the HTTP client, which bounds all that it reads.
//! - `bucket` makes requests, and `failure` says why they failed.
//! - `pack` knows how packs are laid out, and `index` which values they have.
//! - `listing` finds new packs, `writing` makes packs, and `reading` gets values out of them.

mod address;
mod bucket;
mod failure;
#[cfg(test)]
pub(crate) mod fuzz;
mod index;
mod listing;
mod pack;
mod reading;
mod rules;
mod transport;
mod writing;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::runtime::Runtime;
use tokio::time::timeout_at;

use address::{Address, Settings};
pub(crate) use address::{SCHEMES, USAGE};
use bucket::{Bucket, Outcome};
use failure::Failure;
use listing::{Catalogue, Known, OLDEST};
use pack::{Id, Kind, Local, MOST_VALUES, Name, Place, note};
use penstock_contract::{
    BatchBytes, Capabilities, Counters, Error, ErrorKind, GetOutcome, GetRequest, Key, Listed,
    Namespace, PutRequest, Result, Store, StoreStats,
};
use penstock_value::interrupt;
use rules::{Lifetimes, Rules};
use writing::{MOST_VALUE_BYTES, Writer};

use crate::OpenOptions;

/// How often a get whose pack is gone looks for its value elsewhere.
const ROUNDS: usize = 3;
/// How old a listing may be that says that a value to get is not there. Whoever asks for the value has
/// just found it, by a listing of another process.
const FRESH_FOR_GETS: Duration = Duration::from_millis(100);

/// Opens an object store. Does not connect yet.
pub(crate) fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let address = Address::parse(url)?;
    let (client, rules) = address.client(options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("penstock-object")
        .enable_all()
        .build()
        .map_err(|error| {
            Error::new(ErrorKind::Io, "no threads for the object store").caused_by(error)
        })?;
    let settings = address.settings;
    let bucket = Bucket::new(client, address.prefix.clone(), settings.requests);
    let catalogue = Arc::new(Catalogue::new(Arc::new(bucket)));
    Ok(Arc::new(ObjectPool {
        url: address.url(),
        settings,
        rules,
        writer: Arc::new(Writer::new(settings, Arc::clone(&catalogue))),
        catalogue,
        runtime: Some(runtime),
        owner: std::process::id(),
        counters: Counters::default(),
    }))
}

struct ObjectPool {
    url: String,
    settings: Settings,
    rules: Option<Rules>,
    catalogue: Arc<Catalogue>,
    writer: Arc<Writer>,
    /// The threads for requests, there until the store is dropped.
    runtime: Option<Runtime>,
    /// The process that opened it. Another one, after a fork, has no threads for it.
    owner: u32,
    counters: Counters,
}

impl Drop for ObjectPool {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            if self.owner == std::process::id() {
                // Requests that nobody waits for are given up. To wait for them could take long.
                runtime.shutdown_background();
            } else {
                // Its locks may be held by threads that are not here.
                std::mem::forget(runtime);
            }
        }
    }
}

impl ObjectPool {
    fn runtime(&self) -> Result<&Runtime> {
        if self.owner != std::process::id() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the store was opened before this process was forked: open it anew",
            ));
        }
        self.runtime
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::Unavailable, "the store is closed"))
    }

    /// Runs work on this thread until it is done, the deadline passes or the caller interrupts it.
    /// The requests' input and output are on the runtime's threads.
    fn run<T>(
        &self,
        operation: &'static str,
        deadline: Instant,
        work: impl Future<Output = Outcome<T>>,
    ) -> Result<T> {
        let describe = |failure: Failure| failure.error(&self.url, operation);
        if Instant::now() >= deadline {
            return Err(describe(Failure::late()));
        }
        let runtime = self.runtime()?;
        let mut work = std::pin::pin!(work);
        loop {
            let look = interrupt::next_look(deadline);
            let waited = runtime.block_on(async { timeout_at(look.into(), &mut work).await });
            match waited {
                Ok(outcome) => return outcome.map_err(describe),
                // Asked outside of the runtime: the answer may come from code that uses a pool.
                Err(_) if look == deadline || interrupt::is_interrupted() => {
                    return Err(describe(Failure::late()));
                }
                Err(_) => {}
            }
        }
    }

    /// Which keys are there. Lists first what is new if that has not been done for `OLDEST`, or if a
    /// key is missing and that has not been done for the time in the settings. If that fails, or takes
    /// too long, what is known is told, unless that is nothing.
    fn which(&self, operation: &'static str, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        let namespaces = self.catalogue.of_keys(keys.iter());
        let look = || -> Vec<bool> {
            let find = |key: &Key| {
                let known = &namespaces[&key.namespace];
                known.index.lock().find(&Local::of(key)).is_some()
            };
            keys.iter().map(find).collect()
        };
        self.run(operation, deadline, async {
            let now = Instant::now();
            let before = look();
            let missing = keys.iter().zip(&before).filter(|(_, found)| !**found);
            let missing: HashSet<Namespace> = missing.map(|(key, _)| key.namespace).collect();
            let refreshed = join_all(namespaces.keys().map(|namespace| {
                let age = if missing.contains(namespace) {
                    self.settings.fresh
                } else {
                    OLDEST
                };
                self.catalogue.refresh(*namespace, ago(now, age))
            }));
            let in_time = now + deadline.saturating_duration_since(now) / 10 * 9;
            let refreshed = timeout_at(in_time.into(), refreshed).await;
            let refreshed = refreshed.unwrap_or_else(|_| vec![Err(Failure::late())]);
            let refreshed: Outcome<()> = refreshed.into_iter().collect();
            let found = look();
            match refreshed {
                Err(failure) if !found.contains(&true) => Err(failure),
                _ => Ok(found),
            }
        })
    }

    /// Gets values. Outcomes that are not filled in when this ends are late.
    async fn get(&self, batch: &mut [GetRequest<'_, '_>]) {
        let describe = |failure: &Failure| failure.error(&self.url, "get");
        let namespaces = self
            .catalogue
            .of_keys(batch.iter().map(|request| &request.key));
        let since = ago(Instant::now(), FRESH_FOR_GETS.min(self.settings.fresh));
        self.get_known(&namespaces, batch, &describe).await;
        let missing: HashSet<Namespace> = batch
            .iter()
            .filter(|request| request.outcome.is_none())
            .map(|request| request.key.namespace)
            .collect();
        let refreshed = join_all(
            missing
                .iter()
                .map(|namespace| self.catalogue.refresh(*namespace, since)),
        );
        let failure = refreshed.await.into_iter().find_map(Outcome::err);
        if !missing.is_empty() {
            self.get_known(&namespaces, batch, &describe).await;
        }
        for request in batch {
            request.outcome.get_or_insert_with(|| match &failure {
                Some(failure) => Err(describe(failure).with("key", request.key)),
                None => Ok(GetOutcome::Miss),
            });
        }
    }

    /// Gets the values of which it is known where they lie. Whoever removes values all the time leaves
    /// none to be found.
    async fn get_known(
        &self,
        namespaces: &HashMap<Namespace, Arc<Known>>,
        batch: &mut [GetRequest<'_, '_>],
        describe: &impl Fn(&Failure) -> Error,
    ) {
        for _ in 0..ROUNDS {
            let open = batch.iter_mut().filter(|request| request.outcome.is_none());
            let wanted = reading::locate(namespaces, open);
            if wanted.is_empty() {
                break;
            }
            let gone = reading::read_all(
                &self.catalogue.bucket,
                wanted,
                self.settings.range_bytes,
                self.settings.requests,
                describe,
            )
            .await;
            if gone.is_empty() {
                break;
            }
            for (namespace, packs) in gone {
                namespaces[&namespace].index.lock().drop_packs(&packs);
            }
        }
    }

    /// Removes keys of one namespace.
    async fn remove_in(&self, namespace: Namespace, keys: HashSet<Local>) -> Outcome<u64> {
        let known = self.catalogue.of(namespace);
        let _one = known.removing.lock().await;
        // What was put until now is removed too.
        self.catalogue.refresh(namespace, Instant::now()).await?;
        let removal = known.index.lock().plan_removal(&keys);
        // First the notes: if the rest fails, no value comes back.
        for places in removal.noted.chunks(MOST_VALUES as usize) {
            self.put_note(namespace, places).await?;
        }
        self.catalogue
            .bucket
            .delete(namespace, &removal.packs)
            .await?;
        let deleted = removal.packs.iter().map(|pack| pack.id).collect();
        known.index.lock().drop_packs(&deleted);
        Ok(removal.keys)
    }

    async fn put_note(&self, namespace: Namespace, places: &[Place]) -> Outcome<()> {
        let name = Name {
            id: Id::fresh(),
            kind: Kind::Note,
            count: places.len() as u32,
        };
        let bytes = vec![Bytes::from(note(places))];
        self.catalogue.bucket.put(namespace, &name, bytes).await?;
        let known = self.catalogue.of(namespace);
        known.index.lock().add_note(name.id, places.to_vec());
        Ok(())
    }

    async fn all_of(&self, namespace: Option<Namespace>) -> Outcome<Vec<Listed>> {
        let namespaces = match namespace {
            Some(namespace) => vec![namespace],
            None => self.catalogue.bucket.namespaces().await?,
        };
        let mut all = Vec::new();
        let now = Instant::now();
        for namespace in namespaces {
            self.catalogue.refresh(namespace, now).await?;
            let known = self.catalogue.of(namespace);
            let index = known.index.lock();
            all.extend(index.keys().into_iter().filter_map(|(local, bytes)| {
                Some(Listed {
                    key: local.in_namespace(namespace)?,
                    bytes: u64::from(bytes),
                    last_use: 0,
                })
            }));
        }
        Ok(all)
    }
}

fn ago(now: Instant, age: Duration) -> Instant {
    now.checked_sub(age).unwrap_or(now)
}

impl Store for ObjectPool {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shared: true,
            persistent: true,
            bounded: false,
            pipelined: true,
            max_value_bytes: MOST_VALUE_BYTES,
        }
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn batch_bytes(&self) -> BatchBytes {
        BatchBytes {
            put: self.settings.pack_bytes,
            get: 4 * self.settings.range_bytes,
        }
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.which("contains", keys, deadline);
        self.counters.looked_up(&found);
        found
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        let describe = |failure: &Failure, request: &PutRequest<'_>| {
            failure.error(&self.url, "put").with("key", request.key)
        };
        if let Ok(runtime) = self.runtime() {
            self.writer
                .put_many(runtime.handle(), batch, deadline, describe);
        }
        self.counters.put_batch(batch);
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        for request in &mut *batch {
            request.outcome = None;
        }
        let outcome = if batch.is_empty() {
            Ok(())
        } else {
            self.run("get", deadline, async {
                self.get(batch).await;
                Ok(())
            })
        };
        let failure = outcome
            .err()
            .unwrap_or_else(|| Failure::late().error(&self.url, "get"));
        for request in &mut *batch {
            request.outcome.get_or_insert_with(|| {
                Err(Error::new(failure.kind(), failure.to_string()).with("key", request.key))
            });
        }
        self.counters.got_batch(batch);
    }

    /// A bucket does not know when objects were used. What is there is told, and nothing is kept
    /// longer for it.
    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        if values.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<Key> = values.iter().map(|&(key, _)| key).collect();
        self.which("touch", &keys, deadline)
            .inspect_err(|_| self.counters.failed())
    }

    /// A pack that has no other values is deleted. Of other packs, a note says which values count no
    /// more. Their bytes stay until the bucket's own rules expire the pack.
    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        let mut of_namespaces: HashMap<Namespace, HashSet<Local>> = HashMap::new();
        for key in keys {
            let locals = of_namespaces.entry(key.namespace).or_default();
            locals.insert(Local::of(key));
        }
        if keys.is_empty() {
            return Ok(0);
        }
        let removed = self.run("remove", deadline, async {
            let mut removed = 0;
            for (namespace, keys) in of_namespaces {
                removed += self.remove_in(namespace, keys).await?;
            }
            Ok(removed)
        });
        removed.inspect_err(|_| self.counters.failed())
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        let all = self.run("list", deadline, self.all_of(namespace));
        all.map(|all| all.into_iter().for_each(visit))
            .inspect_err(|_| self.counters.failed())
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        let described = self.run("describe", deadline, async {
            let namespaces = self.catalogue.bucket.namespaces().await?;
            let lifetimes = match &self.rules {
                Some(rules) => rules.ask().await,
                None => None,
            };
            Ok((namespaces.len() as u64, lifetimes))
        });
        let (namespaces, lifetimes) = described.inspect_err(|_| self.counters.failed())?;
        let (packs, keys, damaged) = self.catalogue.counts();
        let requests = &self.catalogue.bucket.requests;
        let facts = [
            ("namespaces", namespaces),
            ("known_packs", packs as u64),
            ("known_keys", keys as u64),
            ("damaged_packs", damaged as u64),
            ("requests:put", requests.puts.load(Relaxed)),
            ("requests:get", requests.gets.load(Relaxed)),
            ("requests:list", requests.lists.load(Relaxed)),
            ("requests:delete", requests.deletes.load(Relaxed)),
            ("bytes_received", requests.bytes_received.load(Relaxed)),
            ("pack_bytes", self.settings.pack_bytes),
        ];
        let mut facts: Vec<_> = facts
            .map(|(name, value)| (name.to_owned(), value.to_string()))
            .into();
        // If the bucket does not tell, neither is there.
        if let Some(Lifetimes {
            expire_days,
            parts_days,
        }) = lifetimes
        {
            for (name, days) in [("expire_days", expire_days), ("parts_days", parts_days)] {
                let days = days.map_or("never".to_owned(), |days| days.to_string());
                facts.push((name.to_owned(), days));
            }
        }
        Ok(facts)
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }
}
