//! Requests to one bucket: their names, how many are under way, and how many there were.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload,
    WriteMultipart,
};
use penstock_contract::{ErrorKind, Namespace};
use tokio::sync::Semaphore;

use super::failure::Failure;
use super::pack::{Id, Name};
use super::transport::bounded_listing;

/// Objects longer than this are sent in parts, several at once.
const ONE_PUT: usize = 32 << 20;
/// Bytes of a part, and how many parts of one object are under way at once.
const PART: usize = 16 << 20;
const PARTS_AT_ONCE: usize = 4;
/// Objects in one page of a listing, and in one request that deletes.
const PAGE: u64 = 1000;

pub(super) type Outcome<T> = Result<T, Failure>;

/// Requests since the store was opened.
#[derive(Debug, Default)]
pub(super) struct Requests {
    pub(super) puts: AtomicU64,
    pub(super) gets: AtomicU64,
    pub(super) lists: AtomicU64,
    pub(super) deletes: AtomicU64,
    /// Bytes that gets received, those between values included.
    pub(super) bytes_received: AtomicU64,
}

/// A place in a bucket.
pub(super) struct Bucket {
    client: Arc<dyn ObjectStore>,
    prefix: Path,
    permits: Semaphore,
    pub(super) requests: Requests,
}

impl Bucket {
    pub(super) fn new(client: Arc<dyn ObjectStore>, prefix: Path, requests: usize) -> Self {
        Self {
            client,
            prefix,
            permits: Semaphore::new(requests),
            requests: Requests::default(),
        }
    }

    fn folder(&self, namespace: Namespace) -> Path {
        self.prefix.clone().join(namespace.to_string())
    }

    fn path(&self, namespace: Namespace, name: &Name) -> Path {
        self.folder(namespace).join(name.to_string())
    }

    /// Makes an object of these pieces. The object appears whole or not at all.
    pub(super) async fn put(
        &self,
        namespace: Namespace,
        name: &Name,
        pieces: Vec<Bytes>,
    ) -> Outcome<()> {
        let path = self.path(namespace, name);
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        let _permit = self.permits.acquire().await;
        let outcome = if bytes <= ONE_PUT {
            self.requests.puts.fetch_add(1, Relaxed);
            let payload = PutPayload::from_iter(pieces);
            self.client.put(&path, payload).await.map(|_| ())
        } else {
            // One request begins the upload and one completes it.
            let requests = bytes.div_ceil(PART) as u64 + 2;
            self.requests.puts.fetch_add(requests, Relaxed);
            self.put_in_parts(&path, pieces).await
        };
        outcome.map_err(|error| Failure::of(&error))
    }

    async fn put_in_parts(&self, path: &Path, pieces: Vec<Bytes>) -> object_store::Result<()> {
        let upload = self.client.put_multipart(path).await?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, PART);
        for piece in pieces {
            upload.wait_for_capacity(PARTS_AT_ONCE).await?;
            upload.put(piece);
        }
        upload.finish().await.map(|_| ())
    }

    /// Reads a range of an object, piece by piece. False if there is no such object.
    pub(super) async fn read(
        &self,
        namespace: Namespace,
        name: &Name,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Outcome<bool> {
        let path = self.path(namespace, name);
        let _permit = self.permits.acquire().await;
        self.requests.gets.fetch_add(1, Relaxed);
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let answer: GetResult = match self.client.get_opts(&path, options).await {
            Ok(answer) => answer,
            Err(error) if Failure::is_missing_object(&error) => return Ok(false),
            Err(error) => return Err(Failure::of(&error)),
        };
        let mut pieces = answer.into_stream();
        let mut left = range.end - range.start;
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| Failure::of(&error))?;
            self.requests
                .bytes_received
                .fetch_add(piece.len() as u64, Relaxed);
            left = left.checked_sub(piece.len() as u64).ok_or_else(|| {
                Failure::new(ErrorKind::Protocol, "more bytes came than were asked for")
            })?;
            take(&piece);
        }
        if left > 0 {
            return Err(Failure::new(
                ErrorKind::Unreachable,
                "an answer ended before it was whole",
            ));
        }
        Ok(true)
    }

    /// The head of an object. None if there is no such object.
    pub(super) async fn head(&self, namespace: Namespace, name: &Name) -> Outcome<Option<Vec<u8>>> {
        let mut head = Vec::with_capacity(name.head_bytes() as usize);
        let take = |piece: &[u8]| head.extend_from_slice(piece);
        let is_there = self
            .read(namespace, name, 0..name.head_bytes(), take)
            .await?;
        Ok(is_there.then_some(head))
    }

    /// Objects of a namespace, with their lengths, in the order of their names: all, or those whose
    /// identity is above one.
    pub(super) fn list(
        &self,
        namespace: Namespace,
        after: Option<Id>,
    ) -> BoxStream<'_, Outcome<(Name, u64)>> {
        let folder = self.folder(namespace);
        let listing = match after {
            Some(id) => {
                let offset = folder.clone().join(id.to_string());
                self.client.list_with_offset(Some(&folder), &offset)
            }
            None => self.client.list(Some(&folder)),
        };
        self.requests.lists.fetch_add(1, Relaxed);
        let mut seen = 0;
        let ours = listing.filter_map(move |object| {
            let object = match object {
                Ok(object) => {
                    // A page more for each thousand objects.
                    seen += 1;
                    if seen % PAGE == 1 && seen > 1 {
                        self.requests.lists.fetch_add(1, Relaxed);
                    }
                    named(&object).map(Ok)
                }
                Err(error) => Some(Err(Failure::of(&error))),
            };
            std::future::ready(object)
        });
        ours.boxed()
    }

    /// The namespaces that have objects.
    pub(super) async fn namespaces(&self) -> Outcome<Vec<Namespace>> {
        self.requests.lists.fetch_add(1, Relaxed);
        let root = (!self.prefix.is_root()).then_some(&self.prefix);
        let listing = bounded_listing(self.client.list_with_delimiter(root)).await;
        let listing = listing.map_err(|error| Failure::of(&error))?;
        let folders = listing.common_prefixes.iter().filter_map(Path::filename);
        Ok(folders
            .filter_map(|name| Namespace::parse(name).ok())
            .collect())
    }

    /// Deletes objects. Those that are not there count as deleted.
    pub(super) async fn delete(&self, namespace: Namespace, names: &[Name]) -> Outcome<()> {
        if names.is_empty() {
            return Ok(());
        }
        let requests = (names.len() as u64).div_ceil(PAGE);
        self.requests.deletes.fetch_add(requests, Relaxed);
        let paths: Vec<_> = names
            .iter()
            .map(|name| Ok(self.path(namespace, name)))
            .collect();
        let mut deleted = self.client.delete_stream(stream::iter(paths).boxed());
        while let Some(outcome) = deleted.next().await {
            match outcome {
                Err(error) if !Failure::is_missing_object(&error) => {
                    return Err(Failure::of(&error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn named(object: &ObjectMeta) -> Option<(Name, u64)> {
    let name = Name::parse(object.location.filename()?)?;
    Some((name, object.size))
}
