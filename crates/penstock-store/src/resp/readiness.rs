//! Waiting for sockets, with TLS or without, but not beyond a deadline.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use super::failure::Failure;
use crate::interrupt;

/// Waits until one of the sockets is ready, or the deadline has passed.
pub(super) fn wait(
    sockets: &mut [PollFd<'_>],
    deadline: Instant,
    doing: &str,
) -> Result<(), Failure> {
    let mut is_due = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::timed_out(doing));
        }
        if is_due && interrupt::is_interrupted() {
            return Err(Failure::timed_out(doing));
        }
        let look = interrupt::next_look(deadline).saturating_duration_since(Instant::now());
        // A far deadline may not fit; waking up early is harmless.
        let left = look.min(Duration::from_secs(3600));
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(sockets, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => is_due = true,
            Ok(_) => return Ok(()),
            Err(cause) => return Err(Failure::system("polling", cause)),
        }
    }
}
