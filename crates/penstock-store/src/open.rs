//! Opens the store that a URL names: the table of the stores that are built in.

use std::sync::Arc;

use penstock_contract::{Error, ErrorKind, Result, Store};
use url::form_urlencoded;

use crate::layers::{Breaker, BreakerSettings, Quota, Quotas, Tiered};
use crate::{OpenOptions, Registered, file, memory, object, registered, resp, shm};

/// A kind of store that is built in.
struct BuiltIn {
    /// The schemes of its URLs.
    schemes: &'static [&'static str],
    /// How its URLs look, for people.
    usage: &'static str,
    /// Opens the store of a URL, from which quotas were taken out.
    open: fn(&str, &OpenOptions) -> Result<Arc<dyn Store>>,
    /// Nothing if it can keep quotas, or why it does not.
    quotas: std::result::Result<(), &'static str>,
}

/// The built-in stores. A further one is a folder of this crate and a row here.
const BUILT_IN: [BuiltIn; 5] = [
    BuiltIn {
        schemes: &["memory"],
        usage: memory::USAGE,
        open: memory::open,
        quotas: Ok(()),
    },
    BuiltIn {
        schemes: &["shm"],
        usage: shm::USAGE,
        open: shm::open,
        quotas: Ok(()),
    },
    BuiltIn {
        schemes: &["file"],
        usage: file::USAGE,
        open: file::open,
        quotas: Ok(()),
    },
    BuiltIn {
        schemes: &resp::SCHEMES,
        usage: resp::USAGE,
        open: resp::open,
        quotas: Err(
            "a server's pool takes no quotas, because the server itself evicts: give each tenant \
             a server of its own, each with its maxmemory, or use a file:// or shm:// pool",
        ),
    },
    BuiltIn {
        schemes: &object::SCHEMES,
        usage: object::USAGE,
        open: object::open,
        quotas: Err(
            "an object store's pool takes no quotas, because rules of the bucket expire what is \
             in it: give each tenant a prefix or a bucket of its own",
        ),
    },
];

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
/// use penstock_contract::{GetOutcome, Key, Namespace, PutOutcome, Span};
/// use penstock_store::{OpenOptions, open};
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

/// The schemes of all stores that are built in.
pub fn schemes() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().flat_map(|kind| kind.schemes).copied()
}

/// The schemes of a URL, or of several with white space between them, that no built-in store has.
/// They are for [`OpenOptions::registered`].
pub fn unknown_schemes(url: &str) -> Vec<&str> {
    url.split_ascii_whitespace()
        .filter_map(|url| url.split_once("://"))
        .map(|(scheme, _)| scheme)
        .filter(|scheme| built_in(scheme).is_none())
        .collect()
}

fn built_in(scheme: &str) -> Option<&'static BuiltIn> {
    BUILT_IN.iter().find(|kind| kind.schemes.contains(&scheme))
}

fn open_one(url: &str, options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let (scheme, _) = url.split_once(':').unwrap_or_default();
    let Some(kind) = built_in(scheme) else {
        return registered::open(scheme, url, options)
            .unwrap_or_else(|| Err(unknown(scheme, &options.registered)));
    };
    let (url, quotas) = without_quotas(url);
    if quotas.is_empty() {
        return (kind.open)(&url, options);
    }
    kind.quotas
        .map_err(|why| Error::new(ErrorKind::Config, why))?;
    let mut kept = Quotas::default();
    quotas.iter().try_for_each(|quota| kept.add(quota))?;
    let store = (kind.open)(&url, options)?;
    Ok(Arc::new(Quota::new(store, kept)?))
}

/// A URL without its parameters `quota`, and their values. Not every server's URL is one for
/// [`url::Url`].
fn without_quotas(url: &str) -> (String, Vec<String>) {
    let Some((front, query)) = url.split_once('?') else {
        return (url.to_owned(), Vec::new());
    };
    let (mut rest, mut quotas) = (Vec::new(), Vec::new());
    for part in query.split('&') {
        match form_urlencoded::parse(part.as_bytes()).next() {
            Some((name, value)) if name == "quota" => quotas.push(value.into_owned()),
            _ => rest.push(part),
        }
    }
    match rest.as_slice() {
        [] => (front.to_owned(), quotas),
        rest => (format!("{front}?{}", rest.join("&")), quotas),
    }
}

/// The error for a scheme that is neither built in nor registered.
fn unknown(scheme: &str, registered: &[Registered]) -> Error {
    let is_scheme = |c: u8| c.is_ascii_alphanumeric() || b"+-.".contains(&c);
    if scheme.is_empty() || !scheme.bytes().all(is_scheme) {
        return refused("not a pool URL");
    }
    let known: Vec<String> = registered
        .iter()
        .map(|each| format!("{}:// ({})", each.scheme, each.origin))
        .collect();
    let known = match known.as_slice() {
        [] => "none is registered".to_owned(),
        known => format!("registered are {}", known.join(", ")),
    };
    refused(&format!("no store has the scheme {scheme}:// ({known})"))
}

fn refused(problem: &str) -> Error {
    let usages = BUILT_IN.map(|kind| kind.usage).join(", ");
    Error::new(
        ErrorKind::Config,
        format!(
            "{problem}; accepted: {usages}; or several of them, the nearest first, with spaces \
             between"
        ),
    )
}
