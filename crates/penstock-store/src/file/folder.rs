//! A folder of the pool, held open. Everything in the pool is reached through one, so a name that
//! somebody bends elsewhere meanwhile does not lead elsewhere.
//!
//! Nothing is opened through a symbolic link, and nothing that waits for another process when it is
//! opened, as a FIFO does.

use std::ffi::CStr;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use penstock_contract::{Error, ErrorKind, Result};
use penstock_value::header::{self, HEADER_BYTES};
#[cfg(target_os = "linux")]
use rustix::fs::StatxFlags;
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT,
};
use rustix::io::Errno;

use super::failure::{self, if_there};
use super::seen::Seen;
use super::trust::{Beliefs, Doubt, Trust, rights_for};

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);
const FILE: OFlags = OFlags::NOFOLLOW
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// How often something is made again that is gone when it is opened.
pub(super) const MOST_TRIES: usize = 100;

/// What lies where a value may lie.
pub(super) enum Judged {
    Nothing,
    Value(Seen),
    /// A value that was damaged: it is longer than it can be. It has not the room that it seems to
    /// have, so its length counts nowhere.
    TooLong,
    /// No file, or not believed.
    Strange,
}

/// A folder that is believed.
pub(super) struct Folder {
    fd: OwnedFd,
    path: PathBuf,
    seen: Seen,
    beliefs: Arc<Beliefs>,
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Folder {
    /// The pool's own folder. If `make` says so, it and the folders above it are made where they are
    /// missing.
    ///
    /// Fails with [`ErrorKind::Denied`] if another user made it or may write into it, and is not
    /// trusted.
    pub(super) fn root(path: &Path, trust: &Trust, make: bool) -> Result<Self> {
        if make {
            make_root(path, trust)
                .map_err(|error| failure::of(error, "create the pool's directory", path))?;
        }
        let fd = match open_folder(CWD, path, OFlags::NOFOLLOW) {
            // Whoever runs the pool may have put it elsewhere by a link. Nobody else may.
            Err(error) if is_no_folder(&error) => {
                let link = look(CWD, path)
                    .map_err(|error| failure::of(error, "look at the pool's directory", path))?;
                if link.is_link && !Beliefs::new(trust, &link).may_lead(link.owner) {
                    let why = format!(
                        "the pool's directory is a symbolic link of user {}, who is not trusted: \
                         name the directory itself",
                        link.owner
                    );
                    return Err(Error::new(ErrorKind::Denied, why).with("path", path.display()));
                }
                open_folder(CWD, path, OFlags::empty())
            }
            opened => opened,
        };
        let failed = |error| failure::of(error, "open the pool's directory", path);
        let fd = fd.map_err(failed)?;
        let seen = look_at(&fd).map_err(failed)?;
        let beliefs = Beliefs::new(trust, &seen);
        if let Some(doubt) = beliefs.doubt(&seen) {
            return Err(refused_root(doubt, &seen).with("path", path.display()));
        }
        if beliefs.is_for_the_group() && seen.mode & 0o2020 != 0o2020 {
            let why = "trust=group needs a directory that its group may write into and that hands \
                       its group on: chmod g+rwxs";
            return Err(Error::new(ErrorKind::Denied, why).with("path", path.display()));
        }
        Ok(Self {
            fd,
            path: path.to_owned(),
            seen,
            beliefs: Arc::new(beliefs),
        })
    }

    /// Where the folder was when it was opened, for people.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Which folder this is, whatever its name is by now.
    pub(super) fn identity(&self) -> (u64, u64) {
        self.seen.identity
    }

    /// The folder of this name in this one. `None` if it is not there.
    ///
    /// Fails with [`ErrorKind::Denied`] if it is not believed.
    pub(super) fn open(&self, name: &str) -> Result<Option<Self>> {
        let path = || self.path.join(name);
        let refused = |what: &str| {
            let why = format!(
                "{what}: find out who did that, then take the right away (chmod -R go-w) or remove it"
            );
            Error::new(ErrorKind::Denied, why).with("path", path().display())
        };
        let fd = match if_there(open_folder(&self.fd, name, OFlags::NOFOLLOW)) {
            Ok(Some(fd)) => fd,
            Ok(None) => return Ok(None),
            Err(error) if is_no_folder(&error) => {
                return Err(refused("what lies in a folder's place is none"));
            }
            Err(error) => return Err(failure::of(error, "open a folder of the pool", &path())),
        };
        let seen = look_at(&fd)
            .map_err(|error| failure::of(error, "look at a folder of the pool", &path()))?;
        if let Some(doubt) = self.beliefs.doubt(&seen) {
            return Err(refused(&format!("a folder of the pool {}", said(doubt))));
        }
        Ok(Some(Self {
            fd,
            path: path(),
            seen,
            beliefs: Arc::clone(&self.beliefs),
        }))
    }

    /// The folder of this name in this one, made if it is not there.
    pub(super) fn make(&self, name: &str) -> Result<Self> {
        if let Some(folder) = self.open(name)? {
            return Ok(folder);
        }
        let failed = |error| failure::of(error, "create a folder", &self.path.join(name));
        let (rights, _) = self.beliefs.rights();
        match rustix::fs::mkdirat(&self.fd, name, rights) {
            // The umask has taken the group's rights away.
            Ok(()) if self.beliefs.is_for_the_group() => {
                rustix::fs::chmodat(&self.fd, name, rights, AtFlags::empty())
                    .map_err(|error| failed(error.into()))?;
            }
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed(error.into())),
        }
        self.open(name)?
            .ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
    }

    /// A new file of this name, to write to. Fails if the name is taken, by whatever.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let (_, rights) = self.beliefs.rights();
        let flags = FILE | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let file = File::from(rustix::fs::openat(&self.fd, name, flags, rights)?);
        if self.beliefs.is_for_the_group() {
            rustix::fs::fchmod(&file, rights)?;
        }
        Ok(file)
    }

    /// The file of this name, which processes share, to read and to write. Made if it is not there.
    ///
    /// Fails with [`ErrorKind::Denied`] if it is not believed. Nothing was written to it then.
    pub(super) fn shared(&self, name: &str, attempt: &str) -> Result<File> {
        let path = || self.path.join(name);
        let failed = |error| failure::of(error, attempt, &path());
        for _ in 0..MOST_TRIES {
            match self.create(name) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(error)),
            }
            let flags = FILE | OFlags::RDWR;
            let what = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
                Ok(fd) => {
                    let file = File::from(fd);
                    let seen = look_at(&file).map_err(failed)?;
                    match self.beliefs.doubt(&seen) {
                        Some(doubt) => said(doubt),
                        None if seen.is_file => return Ok(file),
                        None => "is no file".to_owned(),
                    }
                }
                Err(Errno::LOOP | Errno::MLINK) => "is a symbolic link".to_owned(),
                // A socket, a folder.
                Err(Errno::NXIO | Errno::ISDIR) => "is no file".to_owned(),
                // Removed meanwhile.
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(failed(error.into())),
            };
            let why = format!(
                "cannot {attempt}, as it {what}: find out who put it there, then remove it"
            );
            return Err(Error::new(ErrorKind::Denied, why).with("path", path().display()));
        }
        Err(failed(io::ErrorKind::NotFound.into()))
    }

    /// A file beneath it that is there, to write to, whoever made it.
    pub(super) fn to_write(&self, name: &str) -> io::Result<File> {
        let fd = rustix::fs::openat(&self.fd, name, FILE | OFlags::WRONLY, Mode::empty())?;
        Ok(fd.into())
    }

    /// The value of this name beneath it, and what is seen of it. `None` if there is no value: not
    /// if something else has its name, or somebody who is not trusted has put it there.
    pub(super) fn value(&self, name: &str) -> io::Result<Option<(File, Seen)>> {
        let opened = rustix::fs::openat(&self.fd, name, FILE | OFlags::RDONLY, Mode::empty());
        let file = match opened {
            Ok(fd) => File::from(fd),
            Err(Errno::NOENT | Errno::STALE) => return Ok(None),
            Err(error) => {
                // A link, a socket, another user's file that this one may not read?
                let seen = self.look(name)?;
                return match seen.filter(|seen| seen.is_file && self.believes(seen)) {
                    Some(_) => Err(error.into()),
                    None => Ok(None),
                };
            }
        };
        let Some(seen) = if_there(look_at(&file))? else {
            return Ok(None);
        };
        Ok((seen.is_file && self.believes(&seen)).then_some((file, seen)))
    }

    /// What has this name beneath it.
    pub(super) fn judge(&self, name: &str) -> io::Result<Judged> {
        let Some(seen) = self.look(name)? else {
            return Ok(Judged::Nothing);
        };
        if !seen.is_file || !self.believes(&seen) {
            return Ok(Judged::Strange);
        }
        if seen.is_hollow() {
            return Ok(match self.value(name)? {
                Some((file, seen)) if is_too_long(&file, &seen)? => Judged::TooLong,
                Some((_, seen)) => Judged::Value(seen),
                None => Judged::Strange,
            });
        }
        Ok(Judged::Value(seen))
    }

    /// What is seen of whatever has this name beneath it. A link is not followed.
    pub(super) fn look(&self, name: &str) -> io::Result<Option<Seen>> {
        if_there(look(&self.fd, name))
    }

    /// Whether it is a file that is believed.
    fn believes(&self, seen: &Seen) -> bool {
        self.beliefs.doubt(seen).is_none()
    }

    /// Whether the file of this name beneath it is the one that is open.
    pub(super) fn has(&self, name: &str, file: &File) -> bool {
        let there = self.look(name).ok().flatten();
        let open = look_at(file).ok();
        there
            .zip(open)
            .is_some_and(|(there, open)| there.identity == open.identity)
    }

    /// Whether this path leads to it.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        identity_at(path) == Some(self.identity())
    }

    /// Whether this path leads to another one.
    pub(super) fn is_replaced_at(&self, path: &Path) -> bool {
        identity_at(path).is_some_and(|there| there != self.identity())
    }

    /// Notes when a value beneath it was used. Returns whether it is there.
    pub(super) fn note(&self, name: &str, used_at: SystemTime) -> io::Result<bool> {
        match self.note_exactly(name, used_at) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.set_times(name, &AS_OF_NOW)
            }
            noted => noted,
        }
    }

    /// Notes when a value beneath it was used, but not that it is used now: of what another user has
    /// put, nothing is noted. Returns whether it is there.
    pub(super) fn note_exactly(&self, name: &str, used_at: SystemTime) -> io::Result<bool> {
        self.set_times(name, &as_of(used_at))
    }

    fn set_times(&self, name: &str, times: &Timestamps) -> io::Result<bool> {
        let set = rustix::fs::utimensat(&self.fd, name, times, AtFlags::SYMLINK_NOFOLLOW);
        if_there(set.map_err(io::Error::from)).map(|set| set.is_some())
    }

    /// Removes what has this name, be it an empty folder. Returns whether it was there.
    pub(super) fn remove(&self, name: &str) -> io::Result<bool> {
        let removed = match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            // Linux says the former of a folder.
            Err(Errno::ISDIR | Errno::PERM) => {
                rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR)
            }
            removed => removed,
        };
        if_there(removed.map_err(io::Error::from)).map(|removed| removed.is_some())
    }

    /// Gives a file the name that it has in another folder, unless that name is taken.
    pub(super) fn rename(&self, name: &str, to: &Self, new: &str) -> io::Result<()> {
        match rustix::fs::renameat_with(&self.fd, name, &to.fd, new, RenameFlags::NOREPLACE) {
            // The file system does not know the flag. The plain rename may replace a value without
            // our knowing. That leaves the count too high until the next scan.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                rustix::fs::renameat(&self.fd, name, &to.fd, new).map_err(io::Error::from)
            }
            outcome => outcome.map_err(io::Error::from),
        }
    }

    /// The names in it. None if it was removed.
    pub(super) fn names(&self) -> io::Result<impl Iterator<Item = io::Result<String>> + use<>> {
        let entries = if_there(Dir::read_from(&self.fd).map_err(io::Error::from))?;
        Ok(entries.into_iter().flatten().filter_map(|entry| {
            let entry = if_there(entry.map_err(io::Error::from)).transpose()?;
            // No name of ours is anything but ASCII.
            let name = |entry: rustix::fs::DirEntry| {
                let name: &CStr = entry.file_name();
                let name = name.to_str().ok()?;
                (!matches!(name, "." | "..")).then(|| name.to_owned())
            };
            match entry {
                Ok(entry) => name(entry).map(Ok),
                Err(error) => Some(Err(error)),
            }
        }))
    }
}

/// Notes when an open value was used. This is a hint: if it cannot be noted, nothing is harmed.
pub(super) fn note_use(file: &File, used_at: SystemTime) {
    if let Err(Errno::PERM) = rustix::fs::futimens(file, &as_of(used_at)) {
        let _ = rustix::fs::futimens(file, &AS_OF_NOW);
    }
}

/// All that somebody may note of another user's file who may write to it.
const AS_OF_NOW: Timestamps = Timestamps {
    last_access: only(UTIME_NOW),
    last_modification: only(UTIME_NOW),
};

const fn only(mark: i64) -> Timespec {
    Timespec {
        tv_sec: 0,
        tv_nsec: mark,
    }
}

fn as_of(used_at: SystemTime) -> Timestamps {
    let since = used_at.duration_since(SystemTime::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    Timestamps {
        last_access: only(UTIME_OMIT),
        last_modification: Timespec {
            tv_sec: since.as_secs() as i64,
            tv_nsec: since.subsec_nanos().into(),
        },
    }
}

/// How long an open file is. Another host's change counts, too, though this one still believes what it
/// saw before, as far as its file system can be made to ask.
pub(super) fn fresh_len(file: &File) -> io::Result<u64> {
    #[cfg(target_os = "linux")]
    {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        let fresh = rustix::fs::statx(file, c"", flags, StatxFlags::SIZE);
        if let Ok(fresh) = fresh {
            return Ok(fresh.stx_size);
        }
    }
    look_at(file).map(|seen| seen.bytes)
}

/// Whether a file is longer than the value can be that its header tells of. If it has no header, it
/// is if it is mostly a hole.
///
/// Fails if the header cannot be read: nobody knows then.
pub(super) fn is_too_long(file: &File, seen: &Seen) -> io::Result<bool> {
    let mut header = [0; HEADER_BYTES];
    let longest = match file.read_exact_at(&mut header, 0) {
        Ok(()) => header::longest(&header),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
        Err(error) => return Err(error),
    };
    Ok(match longest {
        Some(longest) => seen.bytes > longest && fresh_len(file)? > longest,
        None => seen.is_hollow(),
    })
}

fn identity_at(path: &Path) -> Option<(u64, u64)> {
    let stat = rustix::fs::stat(path).ok()?;
    Some(Seen::new(&stat).identity)
}

/// What is seen of an open file or folder.
pub(super) fn look_at(fd: impl AsFd) -> io::Result<Seen> {
    Ok(Seen::new(&rustix::fs::fstat(fd)?))
}

fn look(folder: impl AsFd, name: impl rustix::path::Arg) -> io::Result<Seen> {
    let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(Seen::new(&stat))
}

fn open_folder(
    folder: impl AsFd,
    name: impl rustix::path::Arg,
    flags: OFlags,
) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(
        folder,
        name,
        FOLDER | flags,
        Mode::empty(),
    )?)
}

/// Whether this is the error for a symbolic link, or another thing, in a folder's place.
fn is_no_folder(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::LOOP | Errno::MLINK | Errno::NOTDIR))
}

fn make_root(path: &Path, trust: &Trust) -> io::Result<()> {
    if let Some(above) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(above)?;
    }
    let (rights, _) = rights_for(trust);
    match rustix::fs::mkdirat(CWD, path, rights) {
        Ok(()) if rights.contains(Mode::SGID) => {
            Ok(rustix::fs::chmodat(CWD, path, rights, AtFlags::empty())?)
        }
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        // Where nothing may be made, some file systems say that before they say that it is there.
        Err(Errno::NOENT) => Err(Errno::NOENT.into()),
        Err(error) => match rustix::fs::stat(path) {
            Ok(_) => Ok(()),
            Err(_) => Err(error.into()),
        },
    }
}

fn said(doubt: Doubt) -> String {
    match doubt {
        Doubt::Owner(user) => format!("belongs to user {user}, who is not trusted"),
        Doubt::Everybody => "may be written by every user".to_owned(),
        Doubt::Group(group) => format!("may be written by group {group}, which is not trusted"),
    }
}

/// Says what to do about a pool's own folder.
fn refused_root(doubt: Doubt, seen: &Seen) -> Error {
    let mode = seen.mode & 0o777;
    let beneath = "name a directory beneath it, which Penstock makes for this user alone";
    let why = match doubt {
        Doubt::Owner(user) => format!(
            "the pool's directory belongs to user {user}, who is not trusted: {beneath}, run as \
             that user, or add trust={user} to the URL (whoever is trusted chooses what engines load)"
        ),
        Doubt::Everybody => format!(
            "every user may write into the pool's directory (mode {mode:o}): {beneath}, or take \
             that right away (chmod go-w). If its file system has no owners, add trust=all to the URL"
        ),
        Doubt::Group(group) => format!(
            "every user of group {group} may write into the pool's directory (mode {mode:o}): \
             {beneath}, take that right away (chmod -R g-w; where Kubernetes gives it at each start, \
             fsGroupChangePolicy: OnRootMismatch), or add trust=group to the URL (whoever is \
             trusted chooses what engines load)"
        ),
    };
    Error::new(ErrorKind::Denied, why)
}
