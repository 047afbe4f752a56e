//! Whom a pool believes, besides its own user and root, who may do everything anyway.
//!
//! Who may write into a pool can choose what engines load, since anybody can compute a checksum. So
//! what another user made, or could have changed, is not believed: neither folders nor values.

use rustix::fs::Mode;

use super::seen::Seen;

const ROOT: u32 = 0;
const GROUP: &str = "group";
const ALL: &str = "all";

/// Whom a pool's URL trusts besides this process's own user and root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    users: Vec<u32>,
    group: bool,
    all: bool,
}

impl Trust {
    /// Reads the value of a URL's parameter: user ids, `group` or `all`, with commas between them.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut trust = Self::default();
        for name in text.split(',') {
            match name {
                GROUP => trust.group = true,
                ALL => trust.all = true,
                // No sign: `+5` would be another way to write 5, and in a URL it is a space.
                id if id.bytes().all(|byte| byte.is_ascii_digit()) => {
                    trust.users.push(id.parse().ok()?);
                }
                _ => return None,
            }
        }
        Some(trust)
    }

    /// The value that [`parse`](Self::parse) reads. `None` if nobody else is trusted.
    pub(super) fn name(&self) -> Option<String> {
        let words = [(self.group, GROUP), (self.all, ALL)];
        let words = words.into_iter().filter(|(is, _)| *is);
        let names: Vec<String> = words
            .map(|(_, word)| word.to_owned())
            .chain(self.users.iter().map(u32::to_string))
            .collect();
        (!names.is_empty()).then(|| names.join(","))
    }
}

/// What is believed in a pool whose folder belongs to this group.
#[derive(Clone, Debug)]
pub(super) struct Beliefs {
    trust: Trust,
    own: u32,
    group: u32,
}

/// Why something is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// The file or folder belongs to this user.
    Owner(u32),
    /// Every user may write to the file or folder.
    Everybody,
    /// This group may write to the file or folder.
    Group(u32),
}

impl Beliefs {
    pub(super) fn new(trust: &Trust, folder: &Seen) -> Self {
        Self {
            trust: trust.clone(),
            own: rustix::process::geteuid().as_raw(),
            group: folder.group,
        }
    }

    /// Why nobody should rely on it, if so.
    pub(super) fn doubt(&self, seen: &Seen) -> Option<Doubt> {
        if self.trust.all {
            return None;
        }
        // Only who belongs to a group, and root, can give it a file.
        let is_the_groups = self.trust.group && seen.group == self.group;
        if !is_the_groups && !self.is_trusted(seen.owner) {
            Some(Doubt::Owner(seen.owner))
        } else if seen.mode & 0o002 != 0 {
            Some(Doubt::Everybody)
        } else if seen.mode & 0o020 != 0 && !is_the_groups {
            Some(Doubt::Group(seen.group))
        } else {
            None
        }
    }

    fn is_trusted(&self, user: u32) -> bool {
        user == self.own || user == ROOT || self.trust.users.contains(&user)
    }

    /// Whether a symbolic link of this user may say where the pool lies.
    pub(super) fn may_lead(&self, user: u32) -> bool {
        self.trust.all || self.is_trusted(user)
    }

    /// Whether members of the pool's group write into it, too.
    pub(super) fn is_for_the_group(&self) -> bool {
        self.trust.group
    }

    /// The rights of new folders and of new files. Those for the owner alone hold whatever the
    /// process's umask is.
    pub(super) fn rights(&self) -> (Mode, Mode) {
        rights_for(&self.trust)
    }
}

pub(super) fn rights_for(trust: &Trust) -> (Mode, Mode) {
    let (folder, file) = match trust {
        // As the process's umask leaves them.
        Trust { all: true, .. } => (0o777, 0o666),
        // Everything in the folder gets its group.
        Trust { group: true, .. } => (0o2770, 0o660),
        _ => (0o700, 0o600),
    };
    (Mode::from_raw_mode(folder), Mode::from_raw_mode(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_whom_they_trust() {
        for text in ["1000", "0,65534", "group", "group,1000", "all"] {
            let trust = Trust::parse(text).unwrap();
            let name = trust.name().unwrap();
            assert_eq!(Trust::parse(&name), Some(trust));
            assert_eq!(name, text);
        }
        assert_eq!(Trust::default().name(), None);
        for text in [
            "",
            "1000,",
            "-1",
            "+1",
            "4294967296",
            "alice",
            "Group",
            "group all",
        ] {
            assert_eq!(Trust::parse(text), None, "{text}");
        }
    }

    #[test]
    fn what_others_made_or_may_change_is_doubted() {
        let own = rustix::process::geteuid().as_raw();
        let seen = |owner, group, mode| Seen {
            owner,
            group,
            mode,
            ..Seen::default()
        };
        let folder = seen(own, 50, 0o2770);
        let doubt = |text: &str, (owner, group, mode)| {
            let trust = Trust::parse(text).unwrap_or_default();
            Beliefs::new(&trust, &folder).doubt(&seen(owner, group, mode))
        };
        let other = own + 7;
        for (text, what, why) in [
            ("", (own, 50, 0o755), None),
            ("", (ROOT, 50, 0o644), None),
            ("", (other, 50, 0o600), Some(Doubt::Owner(other))),
            ("", (own, 50, 0o777), Some(Doubt::Everybody)),
            ("", (own, 50, 0o660), Some(Doubt::Group(50))),
            ("group", (other, 50, 0o660), None),
            ("group", (other, 51, 0o660), Some(Doubt::Owner(other))),
            ("group", (own, 51, 0o660), Some(Doubt::Group(51))),
            ("group", (own, 50, 0o666), Some(Doubt::Everybody)),
            ("all", (other, 51, 0o777), None),
        ] {
            assert_eq!(doubt(text, what), why, "{text} {what:?}");
        }
        let trusted = other.to_string();
        assert_eq!(doubt(&trusted, (other, 50, 0o600)), None);
        assert!(doubt(&trusted, (other + 1, 50, 0o600)).is_some());
    }
}
