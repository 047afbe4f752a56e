//! Whose directory it is: this machine's alone, or one that several hosts have mounted.
//!
//! Locks of a network file system may be seen by one host only (NFS with `nolock` or `local_lock`,
//! Lustre with `localflock`, most of FUSE), and what one host writes into an open file others may see
//! late. So hosts share values and nothing else. Each has a count, a turn to evict and writers of its
//! own, in files that only its own processes open. Two mounts on one machine may not see each other's
//! locks either, and count as two hosts.

use std::fs;

use penstock_contract::{Error, ErrorKind, Result};
use penstock_value::header::Checksum;

use super::folder::Folder;
use super::names::TEMPORARIES;

/// The file systems that may be mounted by several hosts: the numbers that `statfs` gives for AFS,
/// BeeGFS, Ceph, CIFS and SMB (three numbers), FUSE (virtiofs and GlusterFS, too), GFS2, GPFS, Lustre,
/// NFS, OCFS2, 9P.
const NETWORK: [u32; 13] = [
    0x5346_414f,
    0x1983_0326,
    0x00c3_6400,
    0x0000_517b,
    0xfe53_4d42,
    0xff53_4d42,
    0x6573_5546,
    0x0116_1970,
    0x4750_4653,
    0x0bd0_0bd0,
    0x0000_6969,
    0x7461_636f,
    0x0102_1997,
];

/// Who has mounted a pool's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// This machine alone.
    One,
    /// This machine and others.
    Several,
}

impl Hosts {
    /// Reads the value of a URL's parameter.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "one" => Some(Self::One),
            "several" => Some(Self::Several),
            _ => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Several => "several",
        }
    }
}

/// Which processes share the directory's locks and counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// All processes that use the directory.
    Machine,
    /// Processes of this host, which has this name among the hosts.
    Host(String),
}

impl Reach {
    /// Which processes share locks and counts, as the file system suggests unless the pool's URL
    /// says it.
    pub(super) fn of(root: &Folder, hosts: Option<Hosts>) -> Result<Self> {
        let is_shared = match hosts {
            Some(hosts) => hosts == Hosts::Several,
            None => is_on_network(root),
        };
        if is_shared {
            Ok(Self::Host(host_name(root)?))
        } else {
            Ok(Self::Machine)
        }
    }

    pub(super) fn hosts(&self) -> Hosts {
        match self {
            Self::Machine => Hosts::One,
            Self::Host(_) => Hosts::Several,
        }
    }

    /// Where the count lies in the pool's directory.
    pub(super) fn usage(&self) -> String {
        match self {
            Self::Machine => "usage".to_owned(),
            Self::Host(host) => format!("{TEMPORARIES}/{host}.usage"),
        }
    }

    /// The file whose lock is the turn to evict.
    pub(super) fn turn(&self) -> String {
        match self {
            Self::Machine => "evict.lock".to_owned(),
            Self::Host(host) => format!("{TEMPORARIES}/{host}.evict"),
        }
    }

    /// Whether a host has this name.
    pub(super) fn is_host(name: &str) -> bool {
        name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    /// What writers' names begin with.
    pub(super) fn prefix(&self) -> String {
        match self {
            Self::Machine => String::new(),
            Self::Host(host) => format!("{host}-"),
        }
    }
}

fn is_on_network(root: &Folder) -> bool {
    #[cfg(target_os = "linux")]
    return rustix::fs::fstatfs(root).is_ok_and(|system| NETWORK.contains(&(system.f_type as u32)));
    #[cfg(not(target_os = "linux"))]
    return false;
}

/// A name that no other host has, nor this one after its next start, nor another mount on this one.
/// Containers with host names of their own count as hosts.
fn host_name(root: &Folder) -> Result<String> {
    let unknown = |error| {
        Error::new(
            ErrorKind::Config,
            "cannot tell this host from others; is /proc mounted?",
        )
        .caused_by(error)
    };
    let boot = fs::read("/proc/sys/kernel/random/boot_id").map_err(unknown)?;
    // Two mounts have two numbers, unless the kernel makes them one and with it their locks, as it
    // does for NFS.
    let (mount, _) = root.identity();
    let name = rustix::system::uname();
    let name = name.nodename().to_bytes();
    let digest = Checksum::of(&[boot.as_slice(), &mount.to_le_bytes(), name].concat());
    Ok(format!("{digest:016x}"))
}

#[cfg(test)]
mod tests {
    use super::super::trust::Trust;
    use super::*;

    #[test]
    fn a_local_directory_is_the_machines_and_a_url_may_say_otherwise() {
        let directory = tempfile::tempdir().unwrap();
        let root = &Folder::root(directory.path(), &Trust::default(), false).unwrap();
        assert_eq!(Reach::of(root, None).unwrap(), Reach::Machine);
        assert_eq!(Reach::of(root, Some(Hosts::One)).unwrap(), Reach::Machine);
        let Reach::Host(name) = Reach::of(root, Some(Hosts::Several)).unwrap() else {
            panic!("not a host's");
        };
        assert!(Reach::is_host(&name));
        assert_eq!(
            Reach::of(root, Some(Hosts::Several)).unwrap(),
            Reach::Host(name)
        );
    }
}
