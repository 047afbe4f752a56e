//! Temporary files: values in the making.
//!
//! Each handle is a *writer*. It holds a lock on a file of its own, `tmp/<writer>.writer`, for as
//! long as it lives. Its temporary files are `tmp/<writer>.<pid>.<n>.<bytes>`. When the process
//! dies, however it dies, the kernel releases the lock. This tells the others that the files are
//! left over. (A process id would not tell them: by now it may belong to another process, or to one
//! in another container.)

use std::collections::HashMap;
use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::failure;
use crate::Result;

const WRITER: &str = "writer";

/// One handle's presence in the directory of temporary files.
pub(super) struct Writer {
    directory: PathBuf,
    name: String,
    next: AtomicU64,
    /// The process that made this writer. A fork of that process must not end the writer.
    pid: u32,
    _lock: File,
}

impl Writer {
    pub(super) fn register(directory: PathBuf) -> Result<Self> {
        let pid = std::process::id();
        for attempt in 0_u64.. {
            let name = format!("{pid}-{attempt}");
            let path = writer_path(&directory, &name);
            let lock = match super::create_options().create_new(true).open(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(failure::of(error, "register in the pool", &path)),
            };
            // A cleaner that came between creation and lock took the file for a dead writer's.
            if lock.try_lock().is_ok() && lock.metadata().is_ok_and(|file| file.nlink() > 0) {
                return Ok(Self {
                    directory,
                    name,
                    next: AtomicU64::new(0),
                    pid,
                    _lock: lock,
                });
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// A new name for a file that will have so many bytes.
    pub(super) fn temporary(&self, bytes: u64) -> PathBuf {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        self.directory
            .join(format!("{}.{}.{n}.{bytes}", self.name, std::process::id()))
    }

    /// Removes what dead writers left. Returns the files that living writers are making: their
    /// inode numbers, with the bytes that they will be charged with.
    pub(super) fn sweep(&self) -> io::Result<HashMap<u64, u64>> {
        let mut making = HashMap::new();
        let mut dead = Vec::new();
        let mut temporaries = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            match Name::parse(&entry) {
                Some(Name::Writer(name)) if name != self.name => {
                    if let Some(lock) = lock_of_the_dead(&entry.path()) {
                        dead.push((name, lock));
                    }
                }
                Some(Name::Temporary { writer, bytes }) => {
                    temporaries.push((writer, bytes, entry.ino(), entry.path()));
                }
                _ => {}
            }
        }
        for (writer, bytes, inode, path) in temporaries {
            let is_dead = dead.iter().any(|(name, _)| *name == writer);
            if is_dead || !writer_path(&self.directory, &writer).exists() {
                remove_if_there(&path)?;
            } else {
                making.insert(inode, bytes);
            }
        }
        // Remove these last: if this sweep dies half-way, the next one does it over.
        for (name, _lock) in &dead {
            remove_if_there(&writer_path(&self.directory, name))?;
        }
        Ok(making)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // If the file stays, the next sweep takes it for a dead writer's.
            let _ = fs::remove_file(writer_path(&self.directory, &self.name));
        }
    }
}

enum Name {
    Writer(String),
    Temporary { writer: String, bytes: u64 },
}

impl Name {
    fn parse(entry: &DirEntry) -> Option<Self> {
        let name = entry.file_name();
        let (writer, rest) = name.to_str()?.split_once('.')?;
        let writer = writer.to_owned();
        if rest == WRITER {
            return Some(Self::Writer(writer));
        }
        let bytes = rest.rsplit_once('.')?.1.parse().ok()?;
        Some(Self::Temporary { writer, bytes })
    }
}

fn writer_path(directory: &Path, writer: &str) -> PathBuf {
    directory.join(format!("{writer}.{WRITER}"))
}

/// The lock on a writer's file, if its writer does not hold the lock any more.
fn lock_of_the_dead(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    file.try_lock().ok()?;
    Some(file)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let living = Writer::register(path.to_owned()).unwrap();
        let mine = Writer::register(path.to_owned()).unwrap();
        fs::write(living.temporary(4096), b"under way").unwrap();
        fs::write(mine.temporary(8192), b"under way").unwrap();
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
        let last = Writer::register(path.to_owned()).unwrap();
        assert!(last.sweep().unwrap().is_empty());
        drop(last);
        assert_eq!(names(path), ["not.ours", "notes"].map(String::from));
    }
}
