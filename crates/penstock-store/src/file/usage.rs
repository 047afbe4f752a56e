//! The bytes in use. All processes that share the directory count them together.
//!
//! The count is one small record in the file `usage`. It is read and written under an exclusive
//! lock on that file. One invariant keeps the bound strict: the count is never below what lies in
//! the directory. Room is taken before a value is written, and given back after the value is gone.
//! If a process dies in between, the count stays too high until the next scan settles it.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;

use super::failure;
use crate::value::Checksum;
use crate::{Error, ErrorKind, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"PNSKUSE1");
const RECORD_BYTES: usize = 40;
/// How long to wait before trying again to take a lock that another process holds. The holder needs
/// only a few system calls.
const RETRY: Duration = Duration::from_micros(50);

/// What the processes have counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Bytes in use, or more.
    pub(super) used: u64,
    /// Bytes ever taken, modulo 2^64: tells a scan what came meanwhile.
    pub(super) taken: u64,
    /// Bytes ever given back, modulo 2^64: tells a scan what went meanwhile.
    pub(super) given_back: u64,
}

/// An answer to a request for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// The room is taken. This many bytes are in use now.
    Taken(u64),
    /// There is not enough room.
    None,
}

/// This handle's access to the shared count.
pub(super) struct Usage {
    file: File,
    /// The file's lock excludes other handles. This mutex excludes other threads of this handle.
    threads: Mutex<()>,
}

/// The count while nobody else can change it. Only [`Locked::save`] writes it back.
pub(super) struct Locked<'a> {
    usage: &'a Usage,
    _threads: parking_lot::MutexGuard<'a, ()>,
    /// `None` if no scan has established it: the directory is new, or the record is damaged.
    pub(super) count: Option<Count>,
}

impl Usage {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = super::create_options()
            .read(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|error| failure::of(error, "open the pool's usage count", path))?;
        Ok(Self {
            file,
            threads: Mutex::new(()),
        })
    }

    /// Tells other hosts that this one is still there.
    pub(super) fn show_life(&self) {
        let _ = self.file.set_modified(SystemTime::now());
    }

    /// Waits for the lock until the deadline; tries once even if that has passed.
    pub(super) fn lock(&self, deadline: Instant) -> Result<Locked<'_>> {
        let late = || Error::new(ErrorKind::TimedOut, "the pool's usage count stayed locked");
        let threads = self.threads.try_lock_until(deadline).ok_or_else(late)?;
        loop {
            match self.file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(RETRY);
                }
                Err(TryLockError::WouldBlock) => return Err(late()),
                Err(TryLockError::Error(error)) => return Err(unusable(error)),
            }
        }
        let mut locked = Locked {
            usage: self,
            _threads: threads,
            count: None,
        };
        let mut record = [0; RECORD_BYTES];
        match self.file.read_exact_at(&mut record, 0) {
            Ok(()) => locked.count = decode(&record),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => return Err(unusable(error)),
        }
        Ok(locked)
    }

    /// Takes room if there is enough below the capacity. Before the first scan, there is none.
    pub(super) fn take(&self, bytes: u64, capacity: u64, deadline: Instant) -> Result<Room> {
        let mut locked = self.lock(deadline)?;
        let Some(count) = &mut locked.count else {
            return Ok(Room::None);
        };
        let used = count.used.saturating_add(bytes);
        if used > capacity {
            return Ok(Room::None);
        }
        count.used = used;
        count.taken = count.taken.wrapping_add(bytes);
        locked.save()?;
        Ok(Room::Taken(used))
    }
}

impl Locked<'_> {
    /// Counts bytes that are gone from the directory.
    pub(super) fn give_back(&mut self, bytes: u64) {
        if let Some(count) = &mut self.count {
            count.used = count.used.saturating_sub(bytes);
            count.given_back = count.given_back.wrapping_add(bytes);
        }
    }

    /// Corrects the count by what a scan saw: `values`, and `pending` files in the making, for
    /// which room may or may not be taken yet. `before` is the count when the scan began.
    ///
    /// The scan may have missed what was taken while it ran, and may have seen what was given back
    /// while it ran. So the truth lies between two bounds. The count is moved between these bounds
    /// and no further.
    pub(super) fn settle(&mut self, before: Option<Count>, values: u64, pending: u64) -> Count {
        let now = self.count.unwrap_or_default();
        let before = before.unwrap_or(now);
        let came = now.taken.wrapping_sub(before.taken);
        let went = now.given_back.wrapping_sub(before.given_back);
        let most = values.saturating_add(pending).saturating_add(came);
        let least = values.saturating_sub(went);
        let used = if self.count.is_some() {
            now.used.clamp(least, most)
        } else {
            most
        };
        let settled = Count { used, ..now };
        self.count = Some(settled);
        settled
    }

    /// Writes the count back.
    pub(super) fn save(&self) -> Result<()> {
        let Some(count) = &self.count else {
            return Ok(());
        };
        self.usage
            .file
            .write_all_at(&encode(count), 0)
            .map_err(unusable)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // This fails only if the file is no longer open. Then there is no lock either.
        let _ = self.usage.file.unlock();
    }
}

fn unusable(error: io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot use the pool's usage count").caused_by(error)
}

fn encode(count: &Count) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    let words = [MAGIC, count.used, count.taken, count.given_back];
    for (bytes, word) in record.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let checksum = Checksum::of(&record[..RECORD_BYTES - 8]);
    record[RECORD_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
    record
}

fn decode(record: &[u8; RECORD_BYTES]) -> Option<Count> {
    let mut words = [0; RECORD_BYTES / 8];
    for (word, bytes) in words.iter_mut().zip(record.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [magic, used, taken, given_back, checksum] = words;
    (magic == MAGIC && checksum == Checksum::of(&record[..RECORD_BYTES - 8])).then_some(Count {
        used,
        taken,
        given_back,
    })
}

/// For fuzzing: a record that can be read is the record that would be written.
#[cfg(test)]
pub(super) fn check_record(record: &[u8; RECORD_BYTES]) {
    if let Some(count) = decode(record) {
        assert_eq!(encode(&count), *record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn room_is_taken_up_to_the_capacity_and_shared_by_handles() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("usage");
        let (a, b) = (Usage::open(&path).unwrap(), Usage::open(&path).unwrap());
        assert_eq!(
            a.take(1, 100, soon()).unwrap(),
            Room::None,
            "not scanned yet"
        );
        {
            let mut locked = a.lock(soon()).unwrap();
            assert_eq!(locked.settle(None, 7, 3).used, 10);
            locked.save().unwrap();
        }
        assert_eq!(b.take(60, 100, soon()).unwrap(), Room::Taken(70));
        assert_eq!(a.take(31, 100, soon()).unwrap(), Room::None);
        assert_eq!(a.take(30, 100, soon()).unwrap(), Room::Taken(100));
        {
            let mut locked = b.lock(soon()).unwrap();
            locked.give_back(50);
            locked.save().unwrap();
        }
        let count = a.lock(soon()).unwrap().count;
        assert_eq!(
            count,
            Some(Count {
                used: 50,
                taken: 90,
                given_back: 50
            })
        );
    }

    #[test]
    fn a_damaged_record_is_unknown() {
        let record = encode(&Count {
            used: 1,
            taken: 2,
            given_back: 3,
        });
        assert!(decode(&record).is_some());
        for bit in 0..RECORD_BYTES * 8 {
            let mut damaged = record;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&damaged), None, "bit {bit}");
        }
    }

    #[test]
    fn a_lock_that_is_held_elsewhere_is_waited_for_until_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("usage");
        let (a, b) = (Usage::open(&path).unwrap(), Usage::open(&path).unwrap());
        let held = a.lock(soon()).unwrap();
        let late = b
            .lock(Instant::now() + Duration::from_millis(5))
            .err()
            .unwrap();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        drop(held);
        assert!(b.lock(Instant::now()).is_ok());
    }

    #[test]
    fn settling_believes_the_scan_as_far_as_traffic_leaves_it_sure() {
        let directory = tempfile::tempdir().unwrap();
        let usage = Usage::open(&directory.path().join("usage")).unwrap();
        let settle = |before: Count, now: Count, values| {
            let mut locked = usage.lock(soon()).unwrap();
            locked.count = Some(now);
            locked.settle(Some(before), values, 0).used
        };
        let before = Count {
            used: 500,
            taken: 1000,
            given_back: 500,
        };
        assert_eq!(
            settle(before, before, 300),
            300,
            "quiet: what was seen, lower"
        );
        assert_eq!(
            settle(before, before, 700),
            700,
            "quiet: what was seen, higher"
        );
        let busy = Count {
            used: 560,
            taken: 1100,
            given_back: 540,
        };
        assert_eq!(
            settle(before, busy, 520),
            560,
            "within what traffic explains"
        );
        assert_eq!(
            settle(before, busy, 300),
            400,
            "no higher than seen and all that came"
        );
        assert_eq!(
            settle(before, busy, 900),
            860,
            "no lower than seen less all that went"
        );
        let mut locked = usage.lock(soon()).unwrap();
        locked.count = Some(before);
        assert_eq!(
            locked.settle(Some(before), 100, 50).used,
            150,
            "room may be taken for them"
        );
        assert_eq!(locked.settle(Some(before), 140, 50).used, 150, "or not");
    }
}
