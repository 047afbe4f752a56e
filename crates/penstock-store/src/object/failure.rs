//! What the requests of an object store say when they fail, without anything secret.

use std::error::Error as _;
use std::fmt;

use object_store::client::{HttpError, HttpErrorKind};
use penstock_contract::{Error, ErrorKind};

use super::transport::TOO_LONG;

/// Parts of the URLs at which the client asks for credentials: those of machines, of tasks, and of
/// web identities.
const CREDENTIAL_SOURCES: [&str; 5] = [
    "/latest/api/token",
    "/iam/security-credentials",
    "//169.254.",
    "WebIdentity",
    "//metadata.google.internal",
];

/// A request that failed. Several calls may have waited for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    message: String,
}

impl Failure {
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// The failure if the deadline passed.
    pub(super) fn late() -> Self {
        Self::new(ErrorKind::TimedOut, "the deadline has passed")
    }

    /// Whether the object is not there, though its bucket is.
    pub(super) fn is_missing_object(error: &object_store::Error) -> bool {
        matches!(error, object_store::Error::NotFound { .. }) && !is_no_bucket(code(&chain(error)))
    }

    /// Takes from an error what may be shown. A server's answer can repeat what was signed, session
    /// tokens included, so only its code and its message are taken.
    pub(super) fn of(error: &object_store::Error) -> Self {
        let chain = chain(error);
        if CREDENTIAL_SOURCES
            .iter()
            .any(|source| chain.contains(source))
        {
            return Self::new(
                ErrorKind::Denied,
                "no credentials could be had: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give \
                 the machine or the pod a role, or add unsigned=true to the URL if the store wants none",
            );
        }
        if let Some(failure) = answered(error, &chain) {
            return failure;
        }
        if chain.contains(TOO_LONG) {
            return Self::new(
                ErrorKind::Protocol,
                "the object store's answer is longer than it may be",
            );
        }
        if chain.contains("Received redirect") {
            return elsewhere();
        }
        match transport(error) {
            Some(HttpErrorKind::Timeout) => {
                Self::new(ErrorKind::TimedOut, "no answer came in time")
            }
            // The innermost reason is that of the socket or of TLS.
            Some(HttpErrorKind::Connect) => {
                let reason = chain.lines().last().unwrap_or_default();
                let reason: String = reason.chars().take(200).collect();
                Self::new(
                    ErrorKind::Unreachable,
                    format!("the object store cannot be reached: {reason}"),
                )
            }
            Some(_) => Self::new(
                ErrorKind::Unreachable,
                "the connection ended in the middle of an answer",
            ),
            None => Self::new(
                ErrorKind::Protocol,
                "the object store's answer makes no sense",
            ),
        }
    }

    pub(super) fn error(&self, store: &str, operation: &'static str) -> Error {
        Error::new(self.kind, self.message.clone())
            .with("store", store)
            .with("operation", operation)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// A failure that the server told by a status.
fn answered(error: &object_store::Error, chain: &str) -> Option<Failure> {
    use object_store::Error as E;
    let status = status(chain);
    let code = code(chain);
    let kind = match (error, status, code) {
        (_, _, code) if is_no_bucket(code) => {
            return Some(Failure::new(
                ErrorKind::Unavailable,
                "there is no such bucket: create it, or correct the URL",
            ));
        }
        (_, _, Some("ExpiredToken" | "InvalidToken" | "TokenRefreshRequired")) => ErrorKind::Denied,
        (_, _, Some("SlowDown" | "InternalError" | "ServiceUnavailable" | "RequestTimeout")) => {
            ErrorKind::Unavailable
        }
        (E::PermissionDenied { .. } | E::Unauthenticated { .. }, ..) => ErrorKind::Denied,
        (_, Some(401 | 403), _) => ErrorKind::Denied,
        (_, Some(408 | 429 | 500..), _) => ErrorKind::Unavailable,
        (_, Some(301 | 302 | 303 | 307 | 308), _) => return Some(elsewhere()),
        (E::NotFound { .. }, ..) => ErrorKind::Unavailable,
        (_, Some(_), _) => ErrorKind::Protocol,
        _ => return None,
    };
    let mut message = "the object store answered".to_owned();
    for part in [
        status.map(|status| status.to_string()),
        code.map(str::to_owned),
        between(chain, "<Message>", "</Message>").map(str::to_owned),
    ]
    .into_iter()
    .flatten()
    {
        message.push(' ');
        message.extend(part.chars().filter(|char| !char.is_control()).take(200));
    }
    Some(Failure::new(kind, message))
}

/// Whether the answer is that there is no such bucket; Azure calls it a container.
fn is_no_bucket(code: Option<&str>) -> bool {
    matches!(code, Some("NoSuchBucket" | "ContainerNotFound"))
}

fn elsewhere() -> Failure {
    Failure::new(
        ErrorKind::Config,
        "the bucket is elsewhere: give its region or endpoint in the URL",
    )
}

/// All that the error and its sources say. To be searched, never to be shown.
fn chain(error: &object_store::Error) -> String {
    let mut chain = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        chain.push('\n');
        chain.push_str(&error.to_string());
        source = error.source();
    }
    chain
}

fn transport(error: &object_store::Error) -> Option<HttpErrorKind> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = error.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            return Some(error.kind());
        }
        source = error.source();
    }
    None
}

/// The status of the server's answer, which the client keeps in its errors' text alone.
fn status(chain: &str) -> Option<u16> {
    let (_, rest) = chain.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

fn code(chain: &str) -> Option<&str> {
    between(chain, "<Code>", "</Code>")
}

pub(super) fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(said: &str) -> Failure {
        Failure::of(&object_store::Error::Generic {
            store: "S3",
            source: said.into(),
        })
    }

    #[test]
    fn who_has_no_credentials_is_told_where_they_come_from() {
        for said in [
            "Error performing PUT http://169.254.169.254/latest/api/token in 1ms - Server returned \
             non-2xx status code: 403 Forbidden: ",
            "Error performing GET http://metadata.google.internal/computeMetadata/v1/x in 3s",
        ] {
            let failure = of(said);
            assert_eq!(failure.kind, ErrorKind::Denied, "{failure}");
            assert!(failure.to_string().contains("AWS_ACCESS_KEY_ID"));
        }
        let named_so = of("GET http://h/b/credentials/metadata: status code: 503 SlowDown");
        assert_eq!(named_so.kind, ErrorKind::Unavailable);
    }
}
