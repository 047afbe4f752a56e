//! Waiting for file descriptors, but not beyond a deadline, nor once the caller is interrupted.

use std::time::{Duration, Instant};

use penstock_value::interrupt;
use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// Waits until one of the descriptors is ready. False if the deadline has passed, or the wait was
/// interrupted.
pub(crate) fn wait(polled: &mut [PollFd<'_>], deadline: Instant) -> Result<bool, Errno> {
    let mut is_due = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || (is_due && interrupt::is_interrupted()) {
            return Ok(false);
        }
        let look = interrupt::next_look(deadline).saturating_duration_since(Instant::now());
        // A far deadline may not fit; waking up early is harmless.
        let left = look.min(Duration::from_secs(3600));
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(polled, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => is_due = true,
            Ok(_) => return Ok(true),
            Err(cause) => return Err(cause),
        }
    }
}
