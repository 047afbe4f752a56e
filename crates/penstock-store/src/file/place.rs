//! What a handle holds open in the pool's directory.

use std::fs::File;
use std::path::Path;
use std::time::{Instant, SystemTime};

use penstock_contract::Result;

use super::failure;
use super::folder::{Folder, Judged};
use super::names::{TEMPORARIES, ValuePath};
use super::reach::{Hosts, Reach};
use super::seen::charge;
use super::temp::Writer;
use super::trust::Trust;
use super::usage::Usage;

/// The pool's directory, and this handle's place in it. If the directory is removed, a new place is
/// opened in a new one.
pub(super) struct Place {
    pub(super) root: Folder,
    pub(super) reach: Reach,
    pub(super) usage: Usage,
    pub(super) writer: Writer,
    /// The lock on this file is the turn to evict.
    pub(super) turn: File,
}

impl Place {
    /// Opens the directory. If `make` says so, it is made where it is missing.
    pub(super) fn open(
        path: &Path,
        hosts: Option<Hosts>,
        trust: &Trust,
        make: bool,
    ) -> Result<Self> {
        let root = Folder::root(path, trust, make)?;
        let temporaries = root.make(TEMPORARIES)?;
        let reach = Reach::of(&root, hosts)?;
        Ok(Self {
            usage: Usage::open(&root, &reach.usage())?,
            turn: root.shared(&reach.turn(), "open the pool's eviction lock")?,
            writer: Writer::register(temporaries, &reach)?,
            reach,
            root,
        })
    }

    /// Whether all of it still has its name in the directory at this path.
    pub(super) fn is_whole_at(&self, path: &Path) -> bool {
        let temporaries = || {
            let there = self.root.look(TEMPORARIES).ok().flatten();
            there.is_some_and(|there| there.identity == self.writer.folder().identity())
        };
        self.root.is_at(path)
            && temporaries()
            && self.writer.is_registered()
            && self.usage.is_at(&self.root, &self.reach.usage())
            && self.root.has(&self.reach.turn(), &self.turn)
    }

    /// The folder in which a value lies. `None` if there is none.
    pub(super) fn shard(&self, path: &ValuePath) -> Result<Option<Folder>> {
        match self.root.open(path.namespace())? {
            Some(namespace) => namespace.open(path.shard()),
            None => Ok(None),
        }
    }

    /// The folder in which a value lies, made if there is none.
    pub(super) fn make_shard(&self, path: &ValuePath) -> Result<Folder> {
        self.root.make(path.namespace())?.make(path.shard())
    }

    /// Removes values, and whatever else has their names. Gives the values' room back. Returns how
    /// many there were, and the room they had. The count's lock is held throughout, so nobody else
    /// on this machine can remove or replace a value between reading its length and removing it.
    pub(super) fn remove(
        &self,
        paths: &[ValuePath],
        deadline: Instant,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(u64, u64)> {
        let mut locked = self.usage.lock_while(deadline, go_on)?;
        let (mut removed, mut freed) = (0, 0);
        let outcome = paths.iter().try_for_each(|path| {
            let Some(shard) = self.shard(path)? else {
                return Ok(());
            };
            let failed =
                |error| failure::of(error, "remove a value", &shard.path().join(path.file()));
            let judged = shard.judge(path.file()).map_err(failed)?;
            // Another host may remove it at the same time.
            let is_gone = shard.remove(path.file()).map_err(failed)?;
            match judged {
                Judged::Value(seen) if is_gone => {
                    removed += 1;
                    freed += charge(seen.bytes);
                }
                // What was taken for it is not known. The count stays too high until the next scan.
                Judged::TooLong if is_gone => removed += 1,
                _ => {}
            }
            Ok(())
        });
        if freed > 0 {
            locked.give_back(freed);
            locked.save()?;
        }
        outcome.map(|()| (removed, freed))
    }

    /// Other hosts cannot see this one's locks. They see when its files were changed.
    pub(super) fn show_life(&self) {
        if self.reach.hosts() == Hosts::Several {
            let _ = self.turn.set_modified(SystemTime::now());
            self.usage.show_life();
            self.writer.show_life();
        }
    }
}
