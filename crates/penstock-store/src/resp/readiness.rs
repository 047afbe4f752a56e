//! Waiting for sockets, with TLS or without, but not beyond a deadline.

use std::time::Instant;

use rustix::event::PollFd;

use super::failure::Failure;
use crate::readiness;

/// Waits until one of the sockets is ready, or the deadline has passed.
pub(super) fn wait(
    sockets: &mut [PollFd<'_>],
    deadline: Instant,
    doing: &str,
) -> Result<(), Failure> {
    match readiness::wait(sockets, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Failure::timed_out(doing)),
        Err(cause) => Err(Failure::system("polling", cause)),
    }
}
