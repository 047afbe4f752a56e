//! Writers whose KV was found to be wrong. Engines that share a pool tell each other of them by one
//! value in it, the roll.
//!
//! An engine that computes a block which the pool already has compares both. If they are not of the
//! same KV, it marks the writer of the pool's value. From then on, no engine loads what that writer
//! has stored, and whoever comes across such a value removes it.
//!
//! Of two that disagree, either may be wrong. So marks count as votes do:
//!
//! | who | is |
//! |---|---|
//! | a writer that another engine has marked | not trusted |
//! | an engine that two others have marked | no witness: it compares nothing more, and its marks do not count |
//! | an engine that has marked three others | likely to be wrong itself: it marks itself. Its marks do not count, and it is not trusted |
//!
//! A writer that one engine has marked goes on to compare, and what it has stored is compared by others
//! before it is removed. Else the first of two to compare would always be right.
//!
//! The roll only grows, so engines that write it at the same time lose nothing for long: each looks
//! for the marks that it knows whenever it reads the roll, and writes it anew if some are not there.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, RwLock};
use penstock_contract::{
    Key, NAMESPACE_BYTES, Namespace, PutOutcome, Result, Span, Store, unanswered,
};
use twox_hash::XxHash3_64;

use super::{Destination, Got, HeaderRoom, SealedStore, Wanted};
use crate::Keyring;
use crate::header::Writer;

/// The namespace that rolls lie in: SHA-256 of `penstock distrusted writers`, cut to its length.
pub const ROLL: Namespace = Namespace([
    0x6a, 0x76, 0xb1, 0x80, 0x09, 0x29, 0x29, 0x61, 0x8c, 0x03, 0xdf, 0xc6, 0x9e, 0xa4, 0x22, 0x9c,
]);

/// How old what is known of the roll may be.
const EVERY: Duration = Duration::from_secs(10);
/// When the roll is read again that could not be read.
const AGAIN: Duration = Duration::from_secs(1);
/// The longest that loads and stores wait for the roll. A near tier may have all they need.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most marks that a roll holds. The oldest go first.
const MOST_MARKS: usize = 1024;
/// An engine that disagrees with so many writers is taken to be wrong itself.
const TOO_MANY: usize = 3;
/// A writer that so many engines disagree with is no witness.
const ENOUGH: usize = 2;

/// Bytes of a mark in the roll.
const MARK_BYTES: usize = 3 * 8 + NAMESPACE_BYTES;

/// One engine's word that another's KV is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark {
    /// Whose KV it was.
    pub writer: Writer,
    /// Who computed other KV.
    pub witness: Writer,
    /// When, in seconds since 1970.
    pub at: u64,
    /// Where the value lay.
    pub namespace: Namespace,
}

/// What follows from an engine's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accused {
    /// The engine had marked this writer before.
    Again,
    /// The writer is not trusted any more.
    Writer,
    /// The engine has marked so many that it is likely to be wrong itself.
    Itself,
}

/// What one engine knows of the roll of a pool, and its own marks.
pub struct Trust {
    /// The pool, without tiers in front of it: these would show an old roll.
    rolls: SealedStore,
    /// Where the roll lies, for each of the encryption keys. The first is written.
    keys: Vec<Key>,
    own: Mutex<Vec<Mark>>,
    known: RwLock<Known>,
    /// When the roll is read again.
    next: Mutex<Option<Instant>>,
    was_asked: AtomicBool,
}

#[derive(Default)]
struct Known {
    marks: BTreeSet<Mark>,
    distrusted: HashSet<Writer>,
}

impl Known {
    /// The mark of a witness on itself, if that is due. `last` is a mark of the same witness.
    fn on_itself(&self, last: &Mark) -> Option<Mark> {
        let witness = last.witness;
        let by_witness = self.marks.iter().filter(|mark| mark.witness == witness);
        let marked: BTreeSet<Writer> = by_witness.map(|mark| mark.writer).collect();
        let is_due = marked.len() >= TOO_MANY && !marked.contains(&witness);
        is_due.then_some(Mark {
            writer: witness,
            ..*last
        })
    }
}

impl Trust {
    /// What the pool's roll says, once it is read. Engines with other encryption keys have another
    /// roll: they cannot load these values either.
    pub fn new(store: &Arc<dyn Store>, keys: Option<&Arc<Keyring>>) -> Self {
        let far = store.tiers().last().unwrap_or(store);
        Self {
            rolls: SealedStore::new(Arc::clone(far), keys.cloned()),
            keys: match keys {
                Some(keys) => keys.each_fingerprint().map(roll_key).collect(),
                None => vec![roll_key(&[])],
            },
            own: Mutex::default(),
            known: RwLock::default(),
            next: Mutex::default(),
            was_asked: AtomicBool::new(false),
        }
    }

    /// Whether no value of this writer is to be loaded.
    pub fn is_distrusted(&self, writer: Writer) -> bool {
        self.known.read().distrusted.contains(&writer)
    }

    /// Whether this engine's marks count.
    pub fn is_heard(&self, witness: Writer) -> bool {
        Votes::of(&self.known.read().marks).hears(witness)
    }

    /// All marks that are known, each with whether it counts.
    pub fn marks(&self) -> Vec<(Mark, bool)> {
        let known = self.known.read();
        let votes = Votes::of(&known.marks);
        let marks = known.marks.iter();
        marks.map(|&mark| (mark, votes.counts(&mark))).collect()
    }

    /// Reads the roll if what is known of it is too old at the time `now`. The first call waits for
    /// another thread that reads it; later ones go by what is known.
    pub fn refresh(&self, now: Instant, deadline: Instant) {
        let next = if self.was_asked.load(Ordering::Acquire) {
            self.next.try_lock()
        } else {
            Some(self.next.lock())
        };
        let Some(mut next) = next else { return };
        if next.is_none_or(|next| next <= now) {
            let asked = Instant::now();
            let after = match self.read(deadline.min(asked + PATIENCE)) {
                Ok(()) => EVERY,
                // A pool that does not answer takes all the time that it is given.
                Err(_) => asked.elapsed() + AGAIN,
            };
            *next = Some(now + after);
            self.was_asked.store(true, Ordering::Release);
        }
    }

    /// Marks a writer whose value in a namespace is not of the KV that `witness` has computed. What
    /// the mark means holds here from now on, whether or not the pool can be told.
    ///
    /// Fails if the pool could not be told; it is told when the roll is read again.
    pub fn accuse(
        &self,
        writer: Writer,
        witness: Writer,
        namespace: Namespace,
        deadline: Instant,
    ) -> (Accused, Result<()>) {
        {
            let mut own = self.own.lock();
            if own.iter().any(|mark| mark.is_by(witness, writer)) {
                return (Accused::Again, Ok(()));
            }
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            own.push(Mark {
                writer,
                witness,
                at: at.map_or(0, |since| since.as_secs()),
                namespace,
            });
        }
        self.learn([]);
        let told = self.read(deadline);
        let is_itself = self
            .own
            .lock()
            .iter()
            .any(|mark| mark.is_by(witness, witness));
        let accused = if is_itself {
            Accused::Itself
        } else {
            Accused::Writer
        };
        (accused, told)
    }

    /// Reads the roll, and writes it anew if it lacks marks that are known: a pool may forget it, and
    /// of two engines that write it at once one loses.
    ///
    /// Fails if the pool did.
    pub fn read(&self, deadline: Instant) -> Result<()> {
        let mut found = BTreeSet::new();
        let mut first = BTreeSet::new();
        for (place, key) in self.keys.iter().enumerate() {
            let marks = self.read_one(key, deadline)?;
            if place == 0 {
                first.clone_from(&marks);
            }
            found.extend(marks);
        }
        self.learn(found.iter().copied());
        let known = newest(&self.known.read().marks);
        if known.is_subset(&first) {
            return Ok(());
        }
        self.write(&known, deadline)
    }

    fn read_one(&self, key: &Key, deadline: Instant) -> Result<BTreeSet<Mark>> {
        let mut payload = vec![0; MOST_MARKS * MARK_BYTES];
        let destination = Room {
            key,
            header: &mut HeaderRoom::new(),
            payload: &mut payload,
        };
        let mut arrivals = self.rolls.fetch(vec![destination], deadline);
        let arrival = arrivals.pop().ok_or_else(unanswered)?;
        let bytes = match self.rolls.verify(arrival) {
            Ok((_, Got::Payload(verified))) => verified.bytes(),
            Ok((_, Got::Failed(error))) => return Err(error),
            // A damaged roll is written anew by those whose marks it had.
            _ => 0,
        };
        let marks = payload[..usize::try_from(bytes).unwrap_or(0)].chunks_exact(MARK_BYTES);
        Ok(marks.map(Mark::decode).collect())
    }

    fn write(&self, marks: &BTreeSet<Mark>, deadline: Instant) -> Result<()> {
        let payload: Vec<u8> = marks.iter().flat_map(Mark::encode).collect();
        let key = &self.keys[0];
        let payload = std::iter::once(&payload[..]);
        let seal = self.rolls.seal(key, &[], payload.clone())?;
        let put = || {
            let answers = self
                .rolls
                .put_many(&[seal.value(payload.clone(), 0)], deadline);
            answers
                .into_iter()
                .next()
                .unwrap_or_else(|| Err(unanswered()))
        };
        if put()? == PutOutcome::AlreadyPresent {
            // The store keeps a value of the same length. That one has other marks.
            self.rolls.remove(&[*key], deadline)?;
            put()?;
        }
        Ok(())
    }

    /// Takes in marks of the roll, beside the own ones. If they are too many by this engine, it marks
    /// itself.
    fn learn(&self, marks: impl IntoIterator<Item = Mark>) {
        let mut own = self.own.lock();
        let mut known = self.known.write();
        // A mark that was seen once holds until this engine ends: a pool may forget it.
        known.marks.extend(marks);
        known.marks.extend(own.iter().copied());
        // The ranks of an engine are one witness. Each may have met other writers.
        let itself = own.last().and_then(|last| known.on_itself(last));
        known.marks.extend(itself);
        own.extend(itself);
        known.distrusted = Votes::of(&known.marks).distrusted();
    }
}

/// The newest marks, as many as a roll holds.
fn newest(marks: &BTreeSet<Mark>) -> BTreeSet<Mark> {
    let mut newest: Vec<Mark> = marks.iter().copied().collect();
    newest.sort_by_key(|mark| std::cmp::Reverse(mark.at));
    newest.truncate(MOST_MARKS);
    newest.into_iter().collect()
}

/// Who has marked whom.
struct Votes {
    /// Writer → those that have marked it.
    witnesses: BTreeMap<Writer, BTreeSet<Writer>>,
}

impl Votes {
    fn of(marks: &BTreeSet<Mark>) -> Self {
        let mut witnesses: BTreeMap<Writer, BTreeSet<Writer>> = BTreeMap::new();
        for mark in marks {
            witnesses
                .entry(mark.writer)
                .or_default()
                .insert(mark.witness);
        }
        Self { witnesses }
    }

    /// Whether a mark counts: its witness is heard, or has marked itself.
    fn counts(&self, mark: &Mark) -> bool {
        mark.writer == mark.witness || self.hears(mark.witness)
    }

    /// Whether a witness has not marked itself, and not enough others have marked it.
    fn hears(&self, witness: Writer) -> bool {
        let against = self.witnesses.get(&witness);
        against.is_none_or(|against| !against.contains(&witness) && against.len() < ENOUGH)
    }

    fn distrusted(&self) -> HashSet<Writer> {
        let is_distrusted = |(&writer, witnesses): (&Writer, &BTreeSet<Writer>)| {
            let counts = |&witness: &Writer| {
                self.counts(&Mark {
                    writer,
                    witness,
                    at: 0,
                    namespace: ROLL,
                })
            };
            witnesses.iter().any(counts).then_some(writer)
        };
        self.witnesses.iter().filter_map(is_distrusted).collect()
    }
}

impl Mark {
    fn is_by(&self, witness: Writer, writer: Writer) -> bool {
        (self.witness, self.writer) == (witness, writer)
    }

    fn encode(&self) -> [u8; MARK_BYTES] {
        let mut bytes = [0; MARK_BYTES];
        bytes[..8].copy_from_slice(&self.writer.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.witness.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.at.to_le_bytes());
        bytes[24..].copy_from_slice(&self.namespace.0);
        bytes
    }

    /// The mark in these bytes, of which there must be [`MARK_BYTES`].
    fn decode(bytes: &[u8]) -> Self {
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let mut namespace = [0; NAMESPACE_BYTES];
        namespace.copy_from_slice(&bytes[24..MARK_BYTES]);
        Self {
            writer: Writer(number(0)),
            witness: Writer(number(8)),
            at: number(16),
            namespace: Namespace(namespace),
        }
    }
}

/// Where a roll arrives.
struct Room<'a> {
    key: &'a Key,
    header: &'a mut HeaderRoom,
    payload: &'a mut [u8],
}

impl Destination for Room<'_> {
    fn wanted(&mut self, header_bytes: usize) -> Wanted<'_> {
        let payload = std::iter::once(IoSliceMut::new(self.payload));
        Wanted {
            key: self.key,
            context: &[],
            position: 0,
            payload_bytes: None,
            memory: self.header.before(header_bytes, payload),
        }
    }
}

/// Where the roll of engines with an encryption key lies, by the key's fingerprint; that of engines
/// without keys, for an empty one.
fn roll_key(fingerprint: &[u8]) -> Key {
    let span = Span::new(0..1, 0..1).expect("a span of one layer and one head");
    let chunk = XxHash3_64::oneshot(fingerprint).to_le_bytes();
    Key::new(ROLL, &chunk, span).expect("a short hash")
}
