//! Who is alive. Every handle holds a lock on one byte of the segment's file for as long as it
//! lives. The other handles know it by that byte's number.
//!
//! The kernel releases the lock when the process dies, however it dies, and not before the last of
//! its threads has run its last instruction. A process that is merely stopped keeps the lock. A
//! process id would tell less: by now it may belong to another process, or to one in another
//! container.
//!
//! The locks belong to the open file description (`F_OFD_SETLK`), not to the process. So two
//! handles of one process do not share them, and closing one file does not drop another's lock.
#![allow(unsafe_code, reason = "no safe wrapper knows these locks")]

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use parking_lot::Mutex;
use penstock_contract::{Error, ErrorKind, Result};

use super::state::OWNERS;

/// The byte whose lock means that the segment is being set up.
pub(super) const SETUP: u16 = 0;

/// The first of the bytes whose locks mean that a value is being brought. They lie far behind the
/// owners'. The file need not have them.
const CLAIMS: u64 = 1 << 32;

/// A lock that this handle has on a byte of the file, until it is dropped or the handle dies.
pub(super) struct ByteLock<'a> {
    file: &'a File,
    byte: u64,
}

impl<'a> ByteLock<'a> {
    /// The lock, if no other handle has it.
    pub(super) fn try_new(file: &'a File, byte: u64) -> io::Result<Option<Self>> {
        Ok(try_lock(file, byte)?.then_some(Self { file, byte }))
    }
}

impl Drop for ByteLock<'_> {
    fn drop(&mut self) {
        // This fails only if the file is no longer open. Then there is no lock either.
        let _ = set(self.file, self.byte, libc::F_UNLCK);
    }
}

fn try_lock(file: &File, byte: u64) -> io::Result<bool> {
    match set(file, byte, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

fn set(file: &File, byte: u64, kind: i32) -> io::Result<()> {
    // SAFETY: the record consists of integers, for which zeros are values.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = byte as libc::off_t;
    lock.l_len = 1;
    // SAFETY: the descriptor is open and the record lives through the call, which only reads it.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// This handle's place among the handles of all processes.
pub(super) struct Owner {
    file: File,
    number: u16,
    /// The process that opened the handle. A fork shares its lock, so a fork must not take part.
    process: u32,
    /// The threads of a handle share its locks, so only one of them at a time may look for the
    /// dead.
    burying: Mutex<()>,
    /// The bytes that this handle's threads have claimed, for the same reason.
    claimed: Mutex<HashSet<u64>>,
}

/// The right to bring a value, until it is dropped or the handle dies.
pub(super) struct Claimed<'a> {
    owner: &'a Owner,
    byte: u64,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        let mut claimed = self.owner.claimed.lock();
        // This fails only if the file is no longer open. Then there is no lock either.
        let _ = set(&self.owner.file, self.byte, libc::F_UNLCK);
        claimed.remove(&self.byte);
    }
}

impl Owner {
    /// The segment's bytes as its file has them now. Somebody may have cut it short.
    pub(super) fn file_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Takes a number that no living handle has. What a dead handle of this number left is still
    /// there.
    pub(super) fn register(file: File) -> Result<Self> {
        for number in 1..=OWNERS {
            match try_lock(&file, number.into()) {
                Ok(false) => {}
                // The lock lives as long as the file.
                Ok(true) => {
                    return Ok(Self {
                        file,
                        number,
                        process: std::process::id(),
                        burying: Mutex::new(()),
                        claimed: Mutex::default(),
                    });
                }
                Err(error) => {
                    return Err(Error::new(ErrorKind::Io, "cannot lock the pool's segment")
                        .caused_by(error));
                }
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            format!("{OWNERS} handles have the pool open, and no more can: close some"),
        ))
    }

    /// What the others know this handle by.
    pub(super) fn number(&self) -> u16 {
        self.number
    }

    /// Whether this is still the process that opened the handle, not a fork of it.
    pub(super) fn is_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// The right to bring the value of this hash, unless another handle has it, or another thread of
    /// this one. Two values of one byte are brought one after the other, which costs time only.
    pub(super) fn claim(&self, hash: u64) -> Option<Claimed<'_>> {
        let byte = CLAIMS + hash % CLAIMS;
        let mut claimed = self.claimed.lock();
        // If the kernel has no room for another lock, two processes may bring the value.
        if claimed.contains(&byte) || !try_lock(&self.file, byte).unwrap_or(true) {
            return None;
        }
        claimed.insert(byte);
        Some(Claimed { owner: self, byte })
    }

    /// Runs `bury` if the owner is dead. The owner stays dead meanwhile, and nobody takes its
    /// number.
    pub(super) fn if_dead<T>(&self, owner: u16, bury: impl FnOnce() -> T) -> Option<T> {
        if owner == self.number || !self.is_this_process() {
            return None;
        }
        let _burying = self.burying.lock();
        // Owners' numbers are never 0. If damage left a 0, no lock is taken.
        let _lock = match owner {
            SETUP => None,
            owner => Some(ByteLock::try_new(&self.file, owner.into()).ok()??),
        };
        Some(bury())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_handle_at_a_time_brings_a_value() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let register = || Owner::register(file.reopen().unwrap()).unwrap();
        let (a, b) = (register(), register());
        let claim = a.claim(7).expect("nobody has it");
        assert!(b.claim(7).is_none());
        assert!(a.claim(7).is_none(), "another thread of the handle has it");
        assert!(b.claim(8).is_some());
        assert_eq!(register().number(), 3, "claims are no owners");
        drop(claim);
        assert!(b.claim(7).is_some());
        std::mem::forget(b.claim(7));
        assert!(a.claim(7).is_none());
        drop(b);
        assert!(a.claim(7).is_some(), "it ended with its handle");
    }

    #[test]
    fn the_living_are_told_from_the_dead() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let register = || Owner::register(file.reopen().unwrap()).unwrap();
        let (a, b) = (register(), register());
        assert_eq!((a.number(), b.number()), (1, 2));
        assert_eq!(a.if_dead(2, || ()), None);
        assert_eq!(a.if_dead(1, || ()), None, "oneself");
        assert_eq!(b.if_dead(7, || ()), Some(()));
        drop(a);
        assert_eq!(b.if_dead(1, || ()), Some(()));
        let c = b.if_dead(1, register).unwrap();
        assert_eq!(
            c.number(),
            3,
            "a number is not taken while its owner is buried"
        );
        assert_eq!(register().number(), 1);
    }
}
