//! What can go wrong with a store.

use std::fmt;

/// Kinds of failure; each asks for a different reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The URL or an option is wrong: nothing will work until it is changed.
    Config,
    /// The store cannot be reached, or went away in the middle of an operation.
    Unreachable,
    /// The deadline passed. The work under way was given up and its connection closed.
    TimedOut,
    /// Credentials are missing, wrong, or do not permit the operation.
    Denied,
    /// The store has no room and its policy does not make any.
    Full,
    /// The account that the object counts for has no room in its quota now. Other accounts are not
    /// concerned.
    OverQuota,
    /// The store answers, but cannot serve now (loading, read-only replica, cluster down).
    Unavailable,
    /// The peer said something the protocol does not allow here.
    Protocol,
    /// The operating system refused (files, directories).
    Io,
    /// The store has no way to do this, now or later.
    Unsupported,
    /// This program panicked, or a store broke its contract in it: no pool and no operator is to
    /// blame. It is to be reported.
    Internal,
}

impl ErrorKind {
    /// Whether the same operation may succeed later without anybody changing anything.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Unreachable
                | Self::TimedOut
                | Self::Full
                | Self::OverQuota
                | Self::Unavailable
                | Self::Io
        )
    }

    /// Stable lower-case name, used in counters and in the Python exceptions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Unreachable => "unreachable",
            Self::TimedOut => "timed_out",
            Self::Denied => "denied",
            Self::Full => "full",
            Self::OverQuota => "over_quota",
            Self::Unavailable => "unavailable",
            Self::Protocol => "protocol",
            Self::Io => "io",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal",
        }
    }

    /// The kind of this [name](Self::name), if there is one.
    pub fn named(name: &str) -> Option<Self> {
        let all = [
            Self::Config,
            Self::Unreachable,
            Self::TimedOut,
            Self::Denied,
            Self::Full,
            Self::OverQuota,
            Self::Unavailable,
            Self::Protocol,
            Self::Io,
            Self::Unsupported,
            Self::Internal,
        ];
        all.into_iter().find(|kind| kind.name() == name)
    }
}

/// A failed operation: what happened, to what, and what was being done.
///
/// A missing key is not an error, nor is a value that fails verification: both are outcomes (see
/// [`crate::GetOutcome`]; what does not verify is for `SealedStore` to reject). Messages never hold
/// credentials.
#[derive(Debug, thiserror::Error)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    #[source]
    source: Option<std::io::Error>,
}

impl Error {
    /// An error of this kind with a message for people.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            context: Vec::new(),
            source: None,
        }
    }

    /// Adds a named fact, such as the store, the operation or the key.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((name, value.to_string()));
        self
    }

    /// Adds the operating system's error.
    #[must_use]
    pub fn caused_by(mut self, source: std::io::Error) -> Self {
        self.source = Some(source);
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        for (i, (name, value)) in self.context.iter().enumerate() {
            write!(f, "{}{name}: {value}", if i == 0 { " (" } else { ", " })?;
        }
        if self.context.is_empty() {
            Ok(())
        } else {
            f.write_str(")")
        }
    }
}

/// Result of a store operation.
pub type Result<T> = std::result::Result<T, Error>;
