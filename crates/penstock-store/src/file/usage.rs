//! The bytes in use. All processes that share the directory count them together.
//!
//! The count is one small record in the file `usage`. It is read and written under an exclusive
//! lock on that file. One invariant keeps the bound strict: the count is never below what lies in
//! the directory. Room is taken before a value is written, and given back after the value is gone.
//! If a process dies in between, the count stays too high until the next scan settles it.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use penstock_contract::{Error, ErrorKind, Result};
use penstock_value::header::Checksum;

use super::failure;
use super::folder::Folder;

const MAGIC: u64 = u64::from_le_bytes(*b"PNSKUSE1");
const RECORD_BYTES: usize = 40;
/// How long to wait before trying again to take a lock that another process holds. The holder needs
/// only a few system calls. Each wait is twice as long as the one before, up to the longest: a holder
/// may be stopped.
const RETRY: Duration = Duration::from_micros(50);
const LONGEST_RETRY: Duration = Duration::from_millis(1);
/// How often who waits for another thread of its handle asks whether to go on.
const ASKS: Duration = Duration::from_millis(10);
/// How often a look without the lock is repeated, if somebody wrote meanwhile.
const LOOKS: usize = 8;

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
    path: PathBuf,
    /// The file's lock excludes other handles. This mutex excludes other threads of this handle.
    threads: Mutex<()>,
}

/// The count while nobody else can change it. Only [`Locked::save`] writes it back.
pub(super) struct Locked<'a> {
    usage: &'a Usage,
    _threads: parking_lot::MutexGuard<'a, ()>,
    /// What the processes have counted; `None` if no scan has established it: the directory is new,
    /// or the record is damaged.
    pub(super) count: Option<Count>,
}

impl Usage {
    pub(super) fn open(folder: &Folder, name: &str) -> Result<Self> {
        Ok(Self {
            file: folder.shared(name, "open the pool's usage count")?,
            path: folder.path().join(name),
            threads: Mutex::new(()),
        })
    }

    /// Whether the folder still has it under this name.
    pub(super) fn is_at(&self, folder: &Folder, name: &str) -> bool {
        folder.has(name, &self.file)
    }

    /// Tells other hosts that this one is still there.
    pub(super) fn show_life(&self) {
        let _ = self.file.set_modified(SystemTime::now());
    }

    /// The count as it is at some moment, without the lock. For who only looks: it may have changed
    /// since. `None` as in [`Locked::count`], or if it changes all the time.
    pub(super) fn peek(&self) -> Option<Count> {
        (0..LOOKS).find_map(|_| self.read().ok().flatten())
    }

    /// Waits for the lock until the deadline; tries once even if that has passed.
    pub(super) fn lock(&self, deadline: Instant) -> Result<Locked<'_>> {
        self.lock_while(deadline, &|| true)
    }

    /// Waits for the lock until the deadline, as long as `go_on` says so; tries once even if it
    /// does not, or the deadline has passed.
    pub(super) fn lock_while(
        &self,
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Locked<'_>> {
        let is_late = || Instant::now() >= deadline || !go_on();
        let late = || {
            Error::new(
                ErrorKind::TimedOut,
                "the pool's usage count stayed locked: does a process that holds it stand still?",
            )
            .with("path", self.path.display())
        };
        let threads = loop {
            let until = deadline.min(Instant::now() + ASKS);
            if let Some(threads) = self.threads.try_lock_until(until) {
                break threads;
            }
            if is_late() {
                return Err(late());
            }
        };
        let mut pause = RETRY;
        loop {
            match self.file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if is_late() => return Err(late()),
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(pause);
                    pause = LONGEST_RETRY.min(pause * 2);
                }
                Err(TryLockError::Error(error)) => return Err(self.unusable(error)),
            }
        }
        let mut locked = Locked {
            usage: self,
            _threads: threads,
            count: None,
        };
        locked.count = self.read()?;
        Ok(locked)
    }

    fn read(&self) -> Result<Option<Count>> {
        let mut record = [0; RECORD_BYTES];
        match self.file.read_exact_at(&mut record, 0) {
            Ok(()) => Ok(decode(&record)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(self.unusable(error)),
        }
    }

    fn unusable(&self, error: io::Error) -> Error {
        failure::of(error, "use the pool's usage count", &self.path)
    }

    /// Takes room if there is enough below the capacity. Before the first scan, there is none.
    ///
    /// Fails as for what is gone if somebody has removed the file: others count in a new one.
    pub(super) fn take(&self, bytes: u64, capacity: u64, deadline: Instant) -> Result<Room> {
        let mut locked = self.lock(deadline)?;
        if rustix::fs::fstat(&self.file).is_ok_and(|file| file.st_nlink == 0) {
            return Err(self.unusable(io::ErrorKind::NotFound.into()));
        }
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
            .map_err(|error| self.usage.unusable(error))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // This fails only if the file is no longer open. Then there is no lock either.
        let _ = self.usage.file.unlock();
    }
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
    use std::path::Path;

    use penstock_contract::testing::{past, soon, within};

    use super::super::trust::Trust;
    use super::*;

    fn usage(folder: &Path) -> Usage {
        let folder = Folder::root(folder, &Trust::default(), false).unwrap();
        Usage::open(&folder, "usage").unwrap()
    }

    #[test]
    fn room_is_taken_up_to_the_capacity_and_shared_by_handles() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = (usage(directory.path()), usage(directory.path()));
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
        let (a, b) = (usage(directory.path()), usage(directory.path()));
        let held = a.lock(soon()).unwrap();
        let late = b.lock(within(Duration::from_millis(5))).err().unwrap();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        // Who is told to stop does not wait for the deadline.
        let late = b.lock_while(soon(), &|| false).err().unwrap();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        assert_eq!(b.peek(), None, "nothing was counted");
        drop(held);
        assert!(b.lock(past()).is_ok());
    }

    #[test]
    fn settling_believes_the_scan_as_far_as_traffic_leaves_it_sure() {
        let directory = tempfile::tempdir().unwrap();
        let usage = usage(directory.path());
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
