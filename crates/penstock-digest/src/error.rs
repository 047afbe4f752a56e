use std::io;
use std::path::PathBuf;

/// Why a digest cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file was changed while it was read, so nobody knows what was loaded.
    #[error("{0} was changed while it was read: start again once nothing writes to it")]
    Changed(PathBuf),
    /// The system gives no thread.
    #[error("cannot start a thread to digest files: {0}; raise the limit of processes (pids)")]
    NoThread(io::Error),
    /// The thread that digests has panicked.
    #[error("the thread that digests files panicked: see the log, and report it")]
    Panicked,
    /// Whoever asked for the digests no longer wants them.
    #[error("given up")]
    GivenUp,
}

/// A result whose error is a [`DigestError`].
pub type Result<T> = std::result::Result<T, DigestError>;

impl DigestError {
    pub(crate) fn read(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Read { path, source }
    }
}
