//! The HTTP client, with a bound on whatever it reads: a server may answer anything, without end.
//!
//! An answer is as long as it was asked for, or a page of a listing, or a short text. What is longer
//! ends in an error; of an error's text, the beginning is read. No redirect is followed: a server
//! must not send this process elsewhere.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};
use http::header::RANGE;
use http::{HeaderMap, Method};
use http_body::{Body, Frame};
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientOptions, Error};
use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// A page of a listing has up to 1,000 names of up to 1,024 bytes, which may be escaped.
const PAGE_BYTES: u64 = 16 << 20;
/// Other answers are short texts. The longest says what became of 1,000 objects to delete.
const TEXT_BYTES: u64 = 4 << 20;
/// The most bytes that are read of an error's text; it begins with what matters.
const ERROR_BYTES: u64 = 64 << 10;
/// Pages and bytes of one listing.
const LISTING_PAGES: u64 = 1 << 16;
const LISTING_BYTES: u64 = 1 << 30;
/// Every request ends with its caller's deadline. This one is for those that go on.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// A machine's own service of credentials is near, or not there.
const NEAR: Duration = Duration::from_secs(1);

/// What is said of an answer that goes on. [`super::failure`] looks for it.
pub(super) const TOO_LONG: &str = "the answer is longer than it may be";

tokio::task_local! {
    /// What is left of the listing that this task makes.
    static LISTING: Left;
}

struct Left {
    pages: AtomicU64,
    bytes: AtomicU64,
}

/// Bounds all pages of a listing together. They may be without end, each of them short.
pub(super) async fn bounded_listing<T>(listing: impl Future<Output = T>) -> T {
    let left = Left {
        pages: AtomicU64::new(LISTING_PAGES),
        bytes: AtomicU64::new(LISTING_BYTES),
    };
    LISTING.scope(left, listing).await
}

/// Takes from what is left; false if that is too little.
fn take(left: &AtomicU64, some: u64) -> bool {
    left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(some))
        .is_ok()
}

/// Makes clients that read no more than they should.
#[derive(Debug)]
pub(super) struct Connector {
    /// How long a connection may take.
    pub(super) connect_timeout: Duration,
    /// Whether the object store is asked without TLS.
    pub(super) is_plain: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_plain = options
            .get_config_value(&ClientConfigKey::AllowHttp)
            .is_some_and(|allowed| allowed == "true");
        // Only a service of credentials is asked without TLS if the store is not.
        let is_near = allows_plain && !self.is_plain;
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(if is_near { NEAR } else { self.connect_timeout })
            .timeout(REQUEST_TIMEOUT)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .http1_only()
            .https_only(!allows_plain)
            .dns_resolver(Arc::new(InTurn::default()))
            .build()
            .map_err(|error| Error::Generic {
                store: "HTTP",
                source: Box::new(error),
            })?;
        Ok(HttpClient::new(Bounded(HttpClient::new(client))))
    }
}

/// Resolves names. The addresses of a name take turns, so that a store's many servers are all asked.
#[derive(Default)]
struct InTurn {
    turn: Arc<AtomicUsize>,
}

impl Resolve for InTurn {
    fn resolve(&self, name: Name) -> Resolving {
        let turn = self.turn.fetch_add(1, Relaxed);
        Box::pin(async move {
            let mut found: Vec<_> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            if !found.is_empty() {
                let first = turn % found.len();
                found.rotate_left(first);
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[derive(Debug)]
struct Bounded(HttpClient);

#[async_trait::async_trait]
impl HttpService for Bounded {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let asked = ranged(request.headers());
        let is_page = request.method() == Method::GET && asked.is_none();
        if is_page
            && !LISTING
                .try_with(|left| take(&left.pages, 1))
                .unwrap_or(true)
        {
            return Err(too_long());
        }
        let (parts, body) = self.0.execute(request).await?.into_parts();
        let is_error = !parts.status.is_success();
        let most = match asked {
            _ if is_error => ERROR_BYTES,
            Some(bytes) => bytes,
            None if is_page => PAGE_BYTES,
            None => TEXT_BYTES,
        };
        let body = BoundedBody {
            inner: Mutex::new(body.bytes_stream()),
            left: most,
            is_error,
            is_page,
        };
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// The bytes that a request asks for, if it asks for a range.
fn ranged(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get(RANGE)?.to_str().ok()?;
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    last.checked_sub(first)?.checked_add(1)
}

struct BoundedBody {
    /// Behind a lock only so that it can be shared; nobody else has it.
    inner: Mutex<BoxStream<'static, Result<Bytes, HttpError>>>,
    left: u64,
    /// Whether the answer is an error. The beginning of its text will do.
    is_error: bool,
    is_page: bool,
}

impl Body for BoundedBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = self.get_mut();
        if this.is_error && this.left == 0 {
            return Poll::Ready(None);
        }
        let Some(piece) = ready!(this.inner.get_mut().poll_next_unpin(context)) else {
            return Poll::Ready(None);
        };
        let mut piece = piece?;
        let bytes = piece.len() as u64;
        if this.is_error {
            piece.truncate(this.left.min(bytes) as usize);
            this.left -= piece.len() as u64;
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let is_in_listing = !this.is_page
            || LISTING
                .try_with(|left| take(&left.bytes, bytes))
                .unwrap_or(true);
        match this.left.checked_sub(bytes) {
            Some(left) if is_in_listing => {
                this.left = left;
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            _ => Poll::Ready(Some(Err(too_long()))),
        }
    }
}

#[derive(Debug)]
struct TooLong;

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(TOO_LONG)
    }
}

impl std::error::Error for TooLong {}

/// Not to be tried again: it would be too long again.
fn too_long() -> HttpError {
    HttpError::new(HttpErrorKind::Decode, TooLong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_says_how_long_its_answer_is() {
        let headers = |range: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RANGE, range.parse().unwrap());
            headers
        };
        assert_eq!(ranged(&headers("bytes=0-0")), Some(1));
        assert_eq!(ranged(&headers("bytes=10-19")), Some(10));
        for other in ["bytes=5-4", "bytes=0-18446744073709551615", "bytes=-5", "x"] {
            assert_eq!(ranged(&headers(other)), None, "{other}");
        }
        assert_eq!(ranged(&HeaderMap::new()), None);
    }
}
