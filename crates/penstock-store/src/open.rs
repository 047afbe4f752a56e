//! Opens the store that a URL names.

use std::sync::Arc;

use url::Url;

use crate::file::{FileStore, Hosts, Trust};
use crate::layers::{Breaker, BreakerSettings, Quota, Quotas, Tiered};
use crate::memory::MemoryStore;
use crate::object;
use crate::shm::ShmStore;
use crate::{
    Error, ErrorKind, OpenOptions, Registered, Result, Store, parse_size, registered, resp,
};

const ACCEPTED: &str = "memory://?size=1GiB, shm://NAME?size=1GiB, file:///absolute/path?size=10GiB[&hosts=several][&trust=UID,group], \
     valkey://[user[:password]@]host[:port][/db] (or redis://; valkeys:// and rediss:// with TLS; \
     valkey+sentinel://host[,host]/master, valkey+cluster://host[,host]), unix:///path.sock[?db=N], \
     s3://bucket[/prefix] (or gs://, az://); \
     or several of them, the nearest first, with spaces between";

/// Opens the store that a URL names. Several URLs with white space between them, the nearest first,
/// open as one store ([`Tiered`]).
///
/// Stores that this crate bounds (memory, directories, shared memory) keep quotas: `&quota=` with
/// what [`Quotas::add`] takes, as often as needed.
///
/// Opening checks the URL. For a directory or shared memory, it also checks that this can be used.
/// It does not wait for a server, which may come up later. Fails with [`ErrorKind::Config`] on
/// anything wrong in the URL. No error repeats the URL, which may hold a password.
///
/// ```
/// use std::io::{IoSlice, IoSliceMut};
/// use std::time::{Duration, Instant};
///
/// use penstock_layout::Span;
/// use penstock_store::{GetOutcome, Key, Namespace, OpenOptions, PutOutcome, open};
///
/// let store = open("memory://?size=64MiB", &OpenOptions::default())?;
/// let key = Key::new(Namespace(*b"who may share it"), b"which tokens", Span::new(0..32, 0..8)?)?;
/// let soon = || Instant::now() + Duration::from_secs(1);
///
/// let value = [IoSlice::new(b"header"), IoSlice::new(b"payload")];
/// assert_eq!(store.put(&key, &value, soon())?, PutOutcome::Stored);
/// assert_eq!(store.contains(&[key], soon())?, [true]);
///
/// let (mut header, mut payload) = ([0; 6], [0; 100]);
/// let mut into = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut payload)];
/// assert_eq!(store.get(&key, &mut into, soon())?, GetOutcome::Hit(13));
/// assert_eq!((&header, &payload[..7]), (b"header", &b"payload"[..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let urls: Vec<&str> = url.split_ascii_whitespace().collect();
    let [_, _, ..] = urls[..] else {
        return open_one(url.trim_ascii(), options);
    };
    let guarded = |url: &&str| -> Result<Arc<dyn Store>> {
        let store = open_one(url, options)?;
        Ok(Arc::new(Breaker::new(store, BreakerSettings::default())))
    };
    let tiers = urls.iter().map(guarded).collect::<Result<_>>()?;
    Ok(Arc::new(Tiered::new(tiers)))
}

/// Schemes in a URL that are not this crate's, for [`OpenOptions::registered`]. Several URLs may be
/// given, with white space between them.
pub fn unknown_schemes(url: &str) -> Vec<&str> {
    url.split_ascii_whitespace()
        .filter_map(|url| url.split_once("://"))
        .map(|(scheme, _)| scheme)
        .filter(|scheme| !is_built_in(scheme))
        .collect()
}

fn is_built_in(scheme: &str) -> bool {
    matches!(scheme, "memory" | "file" | "shm" | "s3" | "gs" | "az") || is_server(scheme)
}

fn open_one(url: &str, options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let (scheme, _) = url.split_once(':').unwrap_or_default();
    match scheme {
        "memory" => open_memory(&parse(url)?),
        "file" => open_file(url),
        "shm" => open_shm(&parse(url)?),
        _ if is_server(scheme) && has_quota(url) => Err(Error::new(
            ErrorKind::Config,
            "a server's pool takes no quotas, because the server itself evicts: give each tenant \
             a server of its own, each with its maxmemory, or use a file:// or shm:// pool",
        )),
        _ if is_server(scheme) => resp::open(url, options),
        _ if object::SCHEMES.contains(&scheme) && has_quota(url) => Err(Error::new(
            ErrorKind::Config,
            "an object store's pool takes no quotas, because rules of the bucket expire what is in \
             it: give each tenant a prefix or a bucket of its own",
        )),
        _ if object::SCHEMES.contains(&scheme) => object::open(url, options),
        _ => registered::open(scheme, url, options)
            .unwrap_or_else(|| Err(unknown(scheme, &options.registered))),
    }
}

/// The error for a scheme that is neither built in nor registered.
fn unknown(scheme: &str, registered: &[Registered]) -> Error {
    let is_scheme = |c: u8| c.is_ascii_alphanumeric() || b"+-.".contains(&c);
    if scheme.is_empty() || !scheme.bytes().all(is_scheme) {
        return config("not a pool URL");
    }
    let known: Vec<String> = registered
        .iter()
        .map(|each| format!("{}:// ({})", each.scheme, each.origin))
        .collect();
    let known = match known.as_slice() {
        [] => "none is registered".to_owned(),
        known => format!("registered are {}", known.join(", ")),
    };
    config(&format!("no store has the scheme {scheme}:// ({known})"))
}

fn is_server(scheme: &str) -> bool {
    let topology_aside = scheme
        .trim_end_matches("+sentinel")
        .trim_end_matches("+cluster");
    matches!(scheme, "unix" | "redis+unix" | "valkey+unix")
        || matches!(topology_aside, "redis" | "valkey" | "rediss" | "valkeys")
}

fn open_memory(url: &Url) -> Result<Arc<dyn Store>> {
    if url.has_host() || !matches!(url.path(), "" | "/") {
        return Err(config("a memory pool has neither host nor path"));
    }
    let Bounds { size, quotas } = bounds_of(url)?;
    let size = size.ok_or_else(|| config("a memory pool needs a size"))?;
    with_quotas(Arc::new(MemoryStore::new(size)), quotas)
}

fn open_file(text: &str) -> Result<Arc<dyn Store>> {
    let url = parse(text)?;
    // A parsed URL is always absolute: `file:pool` would become `/pool`.
    let path = (text.starts_with("file://") && !url.has_host() && url.path().len() > 1)
        .then(|| url.to_file_path().ok())
        .flatten()
        .ok_or_else(|| config("a file pool's URL has three slashes and an absolute path"))?;
    let (mut hosts, mut trust) = (None, None);
    let Bounds { size, quotas } = bounds_with(&url, &mut |name, value| match name {
        "hosts" if hosts.is_none() => {
            hosts = Hosts::parse(value);
            hosts.is_some()
        }
        "trust" if trust.is_none() => {
            trust = Trust::parse(value);
            trust.is_some()
        }
        _ => false,
    })?;
    let store = FileStore::open(&path, size, hosts, &trust.unwrap_or_default())?;
    with_quotas(Arc::new(store), quotas)
}

fn open_shm(url: &Url) -> Result<Arc<dyn Store>> {
    let is_name = url.username().is_empty() && url.password().is_none() && url.port().is_none();
    let name = url
        .host_str()
        .filter(|_| is_name && matches!(url.path(), "" | "/"))
        .ok_or_else(|| config("a shared-memory pool's URL has a name and no path"))?;
    let Bounds { size, quotas } = bounds_of(url)?;
    with_quotas(Arc::new(ShmStore::open(name, size)?), quotas)
}

fn parse(url: &str) -> Result<Url> {
    let url = Url::parse(url).map_err(|error| config(&format!("not a pool URL: {error}")))?;
    if url.fragment().is_some() {
        return Err(config(
            "a pool URL has no fragment: write '#' in a path as %23",
        ));
    }
    Ok(url)
}

fn with_quotas(store: Arc<dyn Store>, quotas: Quotas) -> Result<Arc<dyn Store>> {
    if quotas.is_empty() {
        return Ok(store);
    }
    Ok(Arc::new(Quota::new(store, quotas)?))
}

/// What a URL of a store that this crate bounds says about its bounds.
#[derive(Default)]
struct Bounds {
    size: Option<u64>,
    quotas: Quotas,
}

/// The parameters `size` and `quota`, the only ones there are.
fn bounds_of(url: &Url) -> Result<Bounds> {
    bounds_with(url, &mut |_, _| false)
}

/// The parameters `size` and `quota`, beside parameters of other names that `takes` takes.
fn bounds_with(url: &Url, takes: &mut dyn FnMut(&str, &str) -> bool) -> Result<Bounds> {
    let mut bounds = Bounds::default();
    for (name, value) in url.query_pairs() {
        match &*name {
            "size" if bounds.size.is_none() => {
                bounds.size = Some(parse_size(&value)?).filter(|&size| size > 0);
                if bounds.size.is_none() {
                    return Err(config("a pool of no bytes holds nothing"));
                }
            }
            "quota" => bounds.quotas.add(&value)?,
            _ if takes(&name, &value) => {}
            _ => {
                return Err(config(&format!(
                    "parameter {name:?} is unknown, given twice, or has a value that it cannot have"
                )));
            }
        }
    }
    Ok(bounds)
}

/// Whether a URL has a quota among its parameters. Not every server's URL is one for [`Url`].
fn has_quota(url: &str) -> bool {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    query.split('&').any(|part| part.starts_with("quota="))
}

fn config(problem: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        format!("{problem}; accepted: {ACCEPTED}"),
    )
}
