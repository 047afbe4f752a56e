//! What one process knows of the packs of one namespace: where each key's value lies.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::pack::{Entry, Id, Local, Name, Place};

/// Where a value lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) pack: Name,
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

/// A value's place, kept once for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Spot {
    pack: Id,
    number: u32,
    offset: u32,
    bytes: u32,
}

struct Pack {
    name: Name,
    /// Values that were not removed.
    live: u32,
}

/// When the bucket was listed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Listings {
    /// When the last listing of what is new began.
    pub(super) fresh: Option<Instant>,
    /// When the last listing of all ended. However long it takes, the next one is no sooner.
    pub(super) whole: Option<Instant>,
    /// When a listing of all was last begun beside the others.
    pub(super) tried: Option<Instant>,
}

/// What to change in the bucket so that some keys are gone.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Removal {
    /// How many of the keys were there.
    pub(super) keys: u64,
    /// Packs that have no other values.
    pub(super) packs: Vec<Name>,
    /// Values to be removed from packs that have others.
    pub(super) noted: Vec<Place>,
}

/// The packs of a namespace, as far as they are known.
#[derive(Default)]
pub(super) struct Index {
    packs: HashMap<Id, Pack>,
    /// For each key, the newest value.
    newest: HashMap<Local, Spot>,
    /// Further values of keys that were put several times.
    older: HashMap<Local, Vec<Spot>>,
    /// Values that notes say are removed, in packs that are known or will be.
    removed: HashSet<Place>,
    notes: HashMap<Id, Vec<Place>>,
    /// Objects whose head was read and is damaged.
    unreadable: HashSet<Id>,
    /// Objects whose head could not be had. The next listing of all tries again.
    refused: HashSet<Id>,
    /// Values of packs and places of notes that are held: what the memory grows with.
    held: usize,
    pub(super) listings: Listings,
}

impl Index {
    /// Whether the object has been read already.
    pub(super) fn knows(&self, id: Id) -> bool {
        self.packs.contains_key(&id)
            || self.notes.contains_key(&id)
            || self.unreadable.contains(&id)
            || self.refused.contains(&id)
    }

    /// The newest object that is known.
    pub(super) fn newest_id(&self) -> Option<Id> {
        self.packs.keys().chain(self.notes.keys()).max().copied()
    }

    pub(super) fn add_pack(&mut self, name: Name, entries: &[Entry]) {
        if self.packs.contains_key(&name.id) {
            return;
        }
        let mut live = 0;
        for (number, entry) in (0..).zip(entries) {
            let Ok(offset) = u32::try_from(entry.offset) else {
                continue;
            };
            if self.removed.contains(&(name.id, number)) {
                continue;
            }
            live += 1;
            let spot = Spot {
                pack: name.id,
                number,
                offset,
                bytes: entry.bytes,
            };
            self.add_spot(entry.key, spot);
        }
        self.packs.insert(name.id, Pack { name, live });
        self.held += name.count as usize;
    }

    /// Values of packs and places of notes that are held.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    fn add_spot(&mut self, key: Local, spot: Spot) {
        let newest = self.newest.entry(key).or_insert(spot);
        if *newest == spot {
            return;
        }
        let older = if *newest < spot {
            std::mem::replace(newest, spot)
        } else {
            spot
        };
        self.older.entry(key).or_default().push(older);
    }

    pub(super) fn add_note(&mut self, id: Id, places: Vec<Place>) {
        self.remove_places(&places);
        self.held += places.len();
        if let Some(before) = self.notes.insert(id, places) {
            self.held -= before.len();
        }
    }

    pub(super) fn add_unreadable(&mut self, id: Id) {
        self.unreadable.insert(id);
    }

    pub(super) fn add_refused(&mut self, id: Id) {
        self.refused.insert(id);
    }

    pub(super) fn forget_refused(&mut self) {
        self.refused.clear();
    }

    /// Where the newest value of a key lies.
    pub(super) fn find(&self, key: &Local) -> Option<Found> {
        let spot = self.newest.get(key)?;
        let pack = self.packs.get(&spot.pack)?;
        Some(Found {
            pack: pack.name,
            offset: u64::from(spot.offset),
            bytes: spot.bytes,
        })
    }

    /// What removes these keys from the bucket, as far as it is known.
    pub(super) fn plan_removal(&self, keys: &HashSet<Local>) -> Removal {
        let mut removal = Removal::default();
        let mut of_packs: HashMap<Id, Vec<Place>> = HashMap::new();
        for key in keys {
            let Some(newest) = self.newest.get(key) else {
                continue;
            };
            removal.keys += 1;
            let older = self.older.get(key).map_or(&[][..], Vec::as_slice);
            for spot in older.iter().chain([newest]) {
                let place = (spot.pack, spot.number);
                of_packs.entry(spot.pack).or_default().push(place);
            }
        }
        for (id, places) in of_packs {
            match self.packs.get(&id) {
                Some(pack) if pack.live as usize == places.len() => removal.packs.push(pack.name),
                _ => removal.noted.extend(places),
            }
        }
        removal
    }

    /// Forgets values that are removed.
    fn remove_places(&mut self, places: &[Place]) {
        let mut gone: HashSet<Place> = HashSet::new();
        for place in places {
            if self.removed.insert(*place)
                && let Some(pack) = self.packs.get_mut(&place.0)
            {
                pack.live = pack.live.saturating_sub(1);
                gone.insert(*place);
            }
        }
        if !gone.is_empty() {
            self.forget(|spot| gone.contains(&(spot.pack, spot.number)));
        }
    }

    /// Forgets packs that are no longer in the bucket.
    pub(super) fn drop_packs(&mut self, ids: &HashSet<Id>) {
        for id in ids {
            if let Some(pack) = self.packs.remove(id) {
                self.held -= pack.name.count as usize;
            }
        }
        self.forget(|spot| ids.contains(&spot.pack));
    }

    /// Forgets spots. Where the newest of a key goes, the one before it comes back.
    fn forget(&mut self, is_gone: impl Fn(&Spot) -> bool) {
        self.older.retain(|_, spots| {
            spots.retain(|spot| !is_gone(spot));
            !spots.is_empty()
        });
        let older = &mut self.older;
        self.newest.retain(|key, spot| {
            if !is_gone(spot) {
                return true;
            }
            let Some(spots) = older.get_mut(key) else {
                return false;
            };
            spots.sort_unstable();
            if let Some(before) = spots.pop() {
                *spot = before;
            }
            if spots.is_empty() {
                older.remove(key);
            }
            true
        });
    }

    /// Takes over what a listing of all saw: whatever was known before it began and was not seen is
    /// gone.
    pub(super) fn whole_listing(&mut self, known_before: &HashSet<Id>, seen: &HashSet<Id>) {
        let gone: HashSet<Id> = known_before.difference(seen).copied().collect();
        if gone.is_empty() {
            return;
        }
        self.drop_packs(&gone);
        self.unreadable.retain(|id| !gone.contains(id));
        for id in &gone {
            if let Some(places) = self.notes.remove(id) {
                self.held -= places.len();
            }
        }
        self.removed = self.notes.values().flatten().copied().collect();
    }

    /// Every object that has been read.
    pub(super) fn known(&self) -> HashSet<Id> {
        let ids = self.packs.keys().chain(self.notes.keys());
        ids.chain(&self.unreadable).copied().collect()
    }

    /// Every key, with the length of its newest value, in the order in which the values lie: whoever
    /// reads or removes all of them goes from pack to pack.
    pub(super) fn keys(&self) -> Vec<(Local, u32)> {
        let mut spots: Vec<_> = self.newest.iter().collect();
        spots.sort_unstable_by_key(|(_, spot)| **spot);
        let keys = spots.into_iter();
        keys.map(|(key, spot)| (*key, spot.bytes)).collect()
    }

    /// Packs, keys, and objects whose head is damaged or could not be had.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let unread = self.unreadable.len() + self.refused.len();
        (self.packs.len(), self.newest.len(), unread)
    }
}

#[cfg(test)]
mod tests {
    use penstock_contract::{Key, Namespace};
    use penstock_layout::Span;

    use super::super::pack::{Kind, pack_head};
    use super::*;

    const NAMESPACE: Namespace = Namespace(*b"0123456789abcdef");

    fn local(n: u8) -> Local {
        Local::of(&Key::new(NAMESPACE, &[n], Span::new(0..4, 0..2).unwrap()).unwrap())
    }

    fn pack(index: &mut Index, millis: u64, values: &[(u8, u32)]) -> Name {
        let values: Vec<_> = values.iter().map(|&(n, len)| (local(n), len)).collect();
        let name = Name {
            id: Id { millis, random: 1 },
            kind: Kind::Pack,
            count: values.len() as u32,
        };
        index.add_pack(name, &pack_head(NAMESPACE, &values).1);
        name
    }

    fn found(index: &Index, n: u8) -> Option<(Id, u32)> {
        index
            .find(&local(n))
            .map(|found| (found.pack.id, found.bytes))
    }

    #[test]
    fn the_newest_value_is_found_in_whatever_order_packs_are_read() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut index = Index::default();
            let mut names = [None; 3];
            for n in order {
                names[n] = Some(pack(&mut index, n as u64, &[(7, n as u32), (n as u8, 9)]));
            }
            let [first, second, third] = names.map(|name| name.unwrap().id);
            assert_eq!(found(&index, 7), Some((third, 2)));
            index.drop_packs(&HashSet::from([third]));
            assert_eq!(found(&index, 7), Some((second, 1)));
            assert_eq!(found(&index, 2), None);
            index.drop_packs(&HashSet::from([first, second]));
            assert_eq!(found(&index, 7), None);
            assert_eq!(index.counts(), (0, 0, 0));
        }
    }

    #[test]
    fn a_key_is_removed_from_all_packs_and_empty_packs_are_deleted() {
        let mut index = Index::default();
        let old = pack(&mut index, 1, &[(7, 1)]);
        let new = pack(&mut index, 2, &[(8, 1), (7, 2)]);
        let removal = index.plan_removal(&HashSet::from([local(7), local(99)]));
        assert_eq!(removal.keys, 1);
        assert_eq!(removal.packs, [old]);
        assert_eq!(removal.noted, [(new.id, 1)]);
        index.drop_packs(&HashSet::from([old.id]));
        index.add_note(
            Id {
                millis: 3,
                random: 1,
            },
            removal.noted,
        );
        assert_eq!(
            (found(&index, 7), found(&index, 8)),
            (None, Some((new.id, 1)))
        );
        let rest = index.plan_removal(&HashSet::from([local(7), local(8)]));
        assert_eq!((rest.keys, rest.packs), (1, vec![new]));
    }

    #[test]
    fn notes_count_before_and_after_their_packs_are_read() {
        for note_first in [true, false] {
            let mut index = Index::default();
            let id = Id {
                millis: 5,
                random: 1,
            };
            let places = vec![(
                Id {
                    millis: 1,
                    random: 1,
                },
                0,
            )];
            if note_first {
                index.add_note(id, places.clone());
            }
            let name = pack(&mut index, 1, &[(1, 10), (2, 20)]);
            if !note_first {
                index.add_note(id, places);
            }
            assert_eq!(
                (found(&index, 1), found(&index, 2)),
                (None, Some((name.id, 20)))
            );
            let removal = index.plan_removal(&HashSet::from([local(2)]));
            assert_eq!(removal.packs, [name], "its other value was removed before");
        }
    }

    #[test]
    fn what_a_listing_of_all_does_not_show_is_gone() {
        let mut index = Index::default();
        let kept = pack(&mut index, 1, &[(1, 1)]);
        let expired = pack(&mut index, 2, &[(2, 1)]);
        index.add_note(
            Id {
                millis: 3,
                random: 1,
            },
            vec![(expired.id, 0)],
        );
        let before = index.known();
        let put_meanwhile = pack(&mut index, 4, &[(4, 1)]);
        index.whole_listing(&before, &HashSet::from([kept.id]));
        assert_eq!(found(&index, 1), Some((kept.id, 1)));
        assert_eq!(found(&index, 2), None);
        assert_eq!(found(&index, 4), Some((put_meanwhile.id, 1)));
        assert!(index.removed.is_empty() && index.notes.is_empty());
    }
}
