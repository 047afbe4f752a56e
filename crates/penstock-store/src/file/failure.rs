//! Turns the operating system's errors into ours.

use std::error::Error as _;
use std::io;
use std::path::Path;

use penstock_contract::{Error, ErrorKind};

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

/// Whether the disk, or its quota for this user, had no room left.
pub(super) fn is_of_a_full_disk(error: &Error) -> bool {
    let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    kind_of(error).is_some_and(|kind| kinds.contains(&kind))
}

/// Whether what the operation needed was gone.
pub(super) fn is_of_what_is_gone(error: &Error) -> bool {
    kind_of(error).is_some_and(is_gone)
}

fn kind_of(error: &Error) -> Option<io::ErrorKind> {
    let source = error.source()?.downcast_ref::<io::Error>()?;
    Some(source.kind())
}

/// Turns the error for what is not there, or that another host has removed, into `None`.
pub(super) fn if_there<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(error.kind()) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_gone(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{NotFound, StaleNetworkFileHandle};
    matches!(kind, NotFound | StaleNetworkFileHandle)
}
