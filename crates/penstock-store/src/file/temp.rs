//! Temporary files: values in the making.
//!
//! Each handle is a *writer*. It holds a lock on a file of its own, `tmp/<writer>.writer`, for as
//! long as it lives. Its temporary files are `tmp/<writer>.<pid>.<n>.<bytes>`. When the process
//! dies, however it dies, the kernel releases the lock. This tells the others that the files are
//! left over. (A process id would not tell them: by now it may belong to another process, or to one
//! in another container.)
//!
//! If several hosts have mounted the directory, locks tell only about writers of this host. Files of
//! other hosts are left over if nobody has written to them for long.

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use penstock_contract::{Error, ErrorKind, Result};

use super::failure;
use super::folder::{Folder, MOST_TRIES};
use super::reach::{Hosts, Reach};

const WRITER: &str = "writer";
/// After this time without a write, what another host was writing is left over. Clocks of hosts may
/// differ by less.
const UNWRITTEN: Duration = Duration::from_secs(3600);
/// After this time without a change, another host's locks and count are left over: each host changes
/// its own every day. If it does come back, it makes them anew.
const ABSENT: Duration = Duration::from_secs(30 * 24 * 3600);

/// One handle's presence in the directory of temporary files.
pub(super) struct Writer {
    folder: Folder,
    name: String,
    hosts: Hosts,
    /// What the names of this host's writers begin with.
    prefix: String,
    next: AtomicU64,
    /// The process that made this writer. A fork of that process must not end the writer.
    pid: u32,
    lock: File,
}

impl Writer {
    pub(super) fn register(folder: Folder, reach: &Reach) -> Result<Self> {
        let (pid, prefix) = (std::process::id(), reach.prefix());
        for attempt in 0..MOST_TRIES {
            let name = format!("{prefix}{pid}-{attempt}");
            let file = file_of(&name);
            let lock = match folder.create(&file) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => {
                    let path = folder.path().join(file);
                    return Err(failure::of(error, "register in the pool", &path));
                }
            };
            match lock.try_lock() {
                Ok(()) if folder.has(&file, &lock) => {
                    return Ok(Self {
                        folder,
                        name,
                        hosts: reach.hosts(),
                        prefix,
                        next: AtomicU64::new(0),
                        pid,
                        lock,
                    });
                }
                // A cleaner that came between creation and lock took the file for a dead writer's.
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => {
                    let _ = folder.remove(&file);
                    let attempt = "lock a file of the pool: mount its directory with locks, if only \
                                   with those of this host (Lustre: localflock; NFS: local_lock=all)";
                    return Err(failure::of(error, attempt, &folder.path().join(file)));
                }
            }
        }
        let why = "no file of the pool stays under its name: is its directory on a file system that names \
                   each file by one inode number?";
        Err(Error::new(ErrorKind::Io, why).with("path", folder.path().display()))
    }

    /// Tells other hosts that this one is still there.
    pub(super) fn show_life(&self) {
        let _ = self.lock.set_modified(SystemTime::now());
    }

    /// The folder of the temporary files.
    pub(super) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Whether the others still see that this writer lives.
    pub(super) fn is_registered(&self) -> bool {
        self.folder.has(&file_of(&self.name), &self.lock)
    }

    /// A new name for a file that will have so many bytes.
    pub(super) fn temporary(&self, bytes: u64) -> String {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{}.{}.{n}.{bytes}", self.name, std::process::id())
    }

    /// Removes what dead writers left. Returns the files that living writers are making: their
    /// inode numbers, with the bytes that they will be charged with.
    pub(super) fn sweep(&self) -> io::Result<HashMap<u64, u64>> {
        let mut making = HashMap::new();
        let mut dead = Vec::new();
        let mut temporaries = Vec::new();
        for file in self.folder.names()? {
            let file = file?;
            if self.hosts == Hosts::Several && !self.is_own(&file) {
                if let Some((inode, bytes)) = self.sweep_other(&file)? {
                    making.insert(inode, bytes);
                }
                continue;
            }
            match Name::parse(&file) {
                Some(Name::Writer(name)) if name != self.name => {
                    if let Some(lock) = self.lock_of_the_dead(&file) {
                        dead.push((name.to_owned(), lock));
                    }
                }
                Some(Name::Temporary { .. }) => temporaries.push(file),
                _ => {}
            }
        }
        for file in temporaries {
            let Some(Name::Temporary { writer, bytes }) = Name::parse(&file) else {
                unreachable!("it was parsed before");
            };
            let is_dead = dead.iter().any(|(name, _)| *name == writer);
            if is_dead || self.folder.look(&file_of(writer))?.is_none() {
                self.folder.remove(&file)?;
            } else if let Some(seen) = self.folder.look(&file)? {
                making.insert(seen.identity.1, bytes);
            }
        }
        // Remove these last: if this sweep dies half-way, the next one does it over.
        for (name, _lock) in &dead {
            self.folder.remove(&file_of(name))?;
        }
        Ok(making)
    }

    fn is_own(&self, file: &str) -> bool {
        file.starts_with(self.prefix.trim_end_matches('-'))
    }

    /// Removes a file of another host if it is left over. Returns its inode number and the bytes
    /// that it will be charged with, if it is being made.
    fn sweep_other(&self, file: &str) -> io::Result<Option<(u64, u64)>> {
        let name = Name::parse(file);
        let limit = match name {
            Some(Name::Temporary { .. }) => UNWRITTEN,
            Some(Name::Writer(_)) => ABSENT,
            None if is_of_a_host(file) => ABSENT,
            None => return Ok(None),
        };
        let Some(seen) = self.folder.look(file)? else {
            return Ok(None);
        };
        let unchanged = SystemTime::now().duration_since(seen.modified());
        if unchanged.is_ok_and(|time| time > limit) {
            self.folder.remove(file)?;
            return Ok(None);
        }
        match name {
            Some(Name::Temporary { bytes, .. }) => Ok(Some((seen.identity.1, bytes))),
            _ => Ok(None),
        }
    }

    /// The lock on a writer's file, if its writer does not hold the lock any more.
    fn lock_of_the_dead(&self, file: &str) -> Option<File> {
        // NFS has exclusive locks only of files that are open for writing.
        let file = self.folder.to_write(file).ok()?;
        file.try_lock().ok()?;
        Some(file)
    }
}

/// Whether it is a host's count, or the lock for its turn to evict.
fn is_of_a_host(file: &str) -> bool {
    let parts = file.split_once('.');
    parts.is_some_and(|(host, what)| Reach::is_host(host) && matches!(what, "usage" | "evict"))
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // If the file stays, the next sweep takes it for a dead writer's.
            let _ = self.folder.remove(&file_of(&self.name));
        }
    }
}

/// What a file's name says.
enum Name<'a> {
    Writer(&'a str),
    Temporary { writer: &'a str, bytes: u64 },
}

impl<'a> Name<'a> {
    fn parse(file: &'a str) -> Option<Self> {
        let (writer, rest) = file.split_once('.')?;
        if rest == WRITER {
            return Some(Self::Writer(writer));
        }
        let bytes = rest.rsplit_once('.')?.1.parse().ok()?;
        Some(Self::Temporary { writer, bytes })
    }
}

/// The file whose lock a writer holds.
fn file_of(writer: &str) -> String {
    format!("{writer}.{WRITER}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::trust::Trust;
    use super::*;

    fn folder(path: &Path) -> Folder {
        Folder::root(path, &Trust::default(), false).unwrap()
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_sweep_spares_the_living_and_buries_the_dead() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let register = || Writer::register(folder(path), &Reach::Machine).unwrap();
        let (living, mine) = (register(), register());
        fs::write(path.join(living.temporary(4096)), b"under way").unwrap();
        fs::write(path.join(mine.temporary(8192)), b"under way").unwrap();
        // A writer that died: its file is there and not locked. Then a writer without even that
        // file.
        for name in [
            "7-0.writer",
            "7-0.7.0.4096",
            "8-0.8.3.4096",
            "notes",
            "not.ours",
        ] {
            fs::write(path.join(name), b"").unwrap();
        }
        let making = mine.sweep().unwrap();
        assert_eq!(
            (making.len(), making.values().sum::<u64>()),
            (2, 4096 + 8192)
        );
        let left = names(path);
        assert!(
            !left
                .iter()
                .any(|name| name.starts_with("7-") || name.starts_with("8-"))
        );
        assert!(left.contains(&"notes".to_owned()) && left.contains(&"not.ours".to_owned()));
        drop(living);
        assert_eq!(
            mine.sweep().unwrap().into_values().collect::<Vec<_>>(),
            [8192]
        );
        drop(mine);
        let last = register();
        assert!(last.sweep().unwrap().is_empty());
        drop(last);
        assert_eq!(names(path), ["not.ours", "notes"].map(String::from));
    }

    #[test]
    fn of_other_hosts_only_what_nobody_writes_any_more_is_swept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let register = |host: &str| {
            let reach = Reach::Host(host.repeat(16));
            Writer::register(folder(path), &reach).unwrap()
        };
        let (mine, other) = (register("a"), register("b"));
        let under_way = path.join(other.temporary(4096));
        fs::write(&under_way, b"under way").unwrap();
        // Without its lock: another host cannot see who holds it.
        let dead = format!("{}-1-0", "b".repeat(16));
        let [left, lock] = [format!("{dead}.1.0.4096"), format!("{dead}.writer")];
        let [count, strange] = [format!("{}.usage", "c".repeat(16)), "notes.usage".into()];
        let age = |name: &str, age: Duration| {
            fs::write(path.join(name), b"").unwrap();
            let file = File::options().write(true).open(path.join(name)).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        };
        age(&left, UNWRITTEN * 2);
        age(&lock, UNWRITTEN * 2);
        age(&count, ABSENT * 2);
        age(&strange, ABSENT * 2);
        assert_eq!(
            mine.sweep().unwrap().into_values().collect::<Vec<_>>(),
            [4096]
        );
        let there = names(path);
        assert!(under_way.exists() && there.contains(&lock) && there.contains(&strange));
        assert!(!there.contains(&left) && !there.contains(&count));
        // This host's own are judged by their locks, however young they are.
        let dead = format!("{}-1-0", "a".repeat(16));
        fs::write(path.join(format!("{dead}.1.0.4096")), b"").unwrap();
        mine.sweep().unwrap();
        assert!(!path.join(format!("{dead}.1.0.4096")).exists());
    }
}
