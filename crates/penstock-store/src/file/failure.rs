//! Turns the operating system's errors into ours.

use std::io;
use std::path::Path;

use crate::{Error, ErrorKind};

/// The error for a failed attempt to do something with a path.
pub(super) fn of(error: io::Error, attempt: &str, path: &Path) -> Error {
    use io::ErrorKind as Os;
    let kind = match error.kind() {
        Os::StorageFull | Os::QuotaExceeded | Os::FileTooLarge => ErrorKind::Full,
        Os::PermissionDenied | Os::ReadOnlyFilesystem => ErrorKind::Denied,
        // The pool's directory is gone; it may be mounted again.
        Os::NotFound | Os::StaleNetworkFileHandle => ErrorKind::Unavailable,
        // A server of the file system, mounted so that this ends.
        Os::TimedOut => ErrorKind::TimedOut,
        Os::HostUnreachable | Os::NetworkUnreachable | Os::NetworkDown | Os::NotConnected => {
            ErrorKind::Unreachable
        }
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("cannot {attempt}"))
        .with("path", path.display())
        .caused_by(error)
}
