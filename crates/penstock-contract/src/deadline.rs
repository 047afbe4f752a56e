//! Deadlines, checked between the steps of an operation.

use std::time::Instant;

use crate::{Error, ErrorKind, Result};

/// Fails if the deadline has passed.
pub fn check(deadline: Instant) -> Result<()> {
    if Instant::now() < deadline {
        return Ok(());
    }
    Err(Error::new(ErrorKind::TimedOut, "the deadline has passed"))
}
