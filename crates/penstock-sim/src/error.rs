//! What can be wrong with a trace, or with what a replay is asked to do.

use std::path::PathBuf;

/// Why a trace could not be read, or could not be replayed as asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be opened, read or unpacked.
    #[error("cannot read the trace {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line does not have what its format asks for.
    #[error("trace {}, line {line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// What is wrong with the line.
        what: String,
    },
    /// The file as a whole is not a trace.
    #[error("trace {}: {what}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// A replay that makes no sense.
    #[error("{0}")]
    Config(String),
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, Error>;
