//! Gets: values that lie near each other in one pack come in one request.

use std::collections::{HashMap, HashSet};
use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
use penstock_contract::{Error, GetOutcome, GetRequest, Namespace, slices};

use super::bucket::Bucket;
use super::failure::Failure;
use super::index::Found;
use super::listing::Known;
use super::pack::{Local, Name};

/// Bytes between two values that one request reads for nothing rather than making two requests. In
/// the time of a round trip, several times as many arrive.
const GAP: u64 = 256 << 10;

/// A get and where its value lies.
pub(super) struct Wanted<'r, 'a, 'b> {
    pub(super) request: &'r mut GetRequest<'a, 'b>,
    pub(super) found: Found,
}

/// Some of one pack's values, to be read by one request, in the order in which they lie.
struct Read<'r, 'a, 'b> {
    namespace: Namespace,
    pack: Name,
    range: Range<u64>,
    wanted: Vec<Wanted<'r, 'a, 'b>>,
}

/// Finds the requests' values, which are to be read. A request whose value does not fit or is empty
/// gets its outcome. Those whose value is not known are left open.
pub(super) fn locate<'r, 'a, 'b>(
    namespaces: &HashMap<Namespace, Arc<Known>>,
    requests: impl Iterator<Item = &'r mut GetRequest<'a, 'b>>,
) -> Vec<Wanted<'r, 'a, 'b>> {
    let mut wanted = Vec::new();
    for request in requests {
        let known = namespaces.get(&request.key.namespace);
        let found = known.and_then(|known| known.index.lock().find(&Local::of(&request.key)));
        let Some(found) = found else {
            request.outcome = None;
            continue;
        };
        let bytes = u64::from(found.bytes);
        if slices::room_of(request.into) < bytes {
            request.outcome = Some(Ok(GetOutcome::TooLarge(bytes)));
        } else if bytes == 0 {
            request.outcome = Some(Ok(GetOutcome::Hit(0)));
        } else {
            request.outcome = None;
            wanted.push(Wanted { request, found });
        }
    }
    wanted
}

/// Reads values, several ranges at once, and fills in the outcomes of those that came. Returns the
/// packs that are gone; the outcomes of their values are left open.
pub(super) async fn read_all(
    bucket: &Bucket,
    wanted: Vec<Wanted<'_, '_, '_>>,
    range_bytes: u64,
    ranges_at_once: usize,
    describe: &impl Fn(&Failure) -> Error,
) -> HashMap<Namespace, HashSet<super::pack::Id>> {
    let reads = merged(wanted, range_bytes).into_iter();
    let mut reads = stream::iter(reads)
        .map(|read| read.run(bucket, describe))
        .buffer_unordered(ranges_at_once);
    let mut gone: HashMap<_, HashSet<_>> = HashMap::new();
    while let Some(pack) = reads.next().await {
        if let Some((namespace, name)) = pack {
            gone.entry(namespace).or_default().insert(name.id);
        }
    }
    gone
}

/// Values that lie near each other, together.
fn merged<'r, 'a, 'b>(
    mut wanted: Vec<Wanted<'r, 'a, 'b>>,
    range_bytes: u64,
) -> Vec<Read<'r, 'a, 'b>> {
    wanted.sort_by_key(|wanted| (wanted.found.pack.id, wanted.found.offset));
    let mut reads: Vec<Read<'_, '_, '_>> = Vec::new();
    for wanted in wanted {
        let (namespace, pack) = (wanted.request.key.namespace, wanted.found.pack);
        let start = wanted.found.offset;
        let end = start + u64::from(wanted.found.bytes);
        match reads.last_mut() {
            Some(last)
                if (last.namespace, last.pack) == (namespace, pack)
                    && start <= last.range.end + GAP
                    && end <= last.range.start + range_bytes =>
            {
                last.range.end = last.range.end.max(end);
                last.wanted.push(wanted);
            }
            _ => reads.push(Read {
                namespace,
                pack,
                range: start..end,
                wanted: vec![wanted],
            }),
        }
    }
    reads
}

impl Read<'_, '_, '_> {
    /// Fills in outcomes. Returns the pack if it is gone.
    async fn run(
        mut self,
        bucket: &Bucket,
        describe: &impl Fn(&Failure) -> Error,
    ) -> Option<(Namespace, Name)> {
        let mut at = self.range.start;
        let wanted = &mut self.wanted;
        let mut first = 0;
        let take = |piece: &[u8]| {
            let range = at..at + piece.len() as u64;
            for value in &mut wanted[first..] {
                value.take(piece, &range);
            }
            at = range.end;
            first += wanted[first..]
                .iter()
                .take_while(|value| value.end() <= at)
                .count();
        };
        let outcome = bucket
            .read(self.namespace, &self.pack, self.range.clone(), take)
            .await;
        match outcome {
            Ok(true) => None,
            Ok(false) => Some((self.namespace, self.pack)),
            Err(failure) => {
                for value in &mut self.wanted {
                    value
                        .request
                        .outcome
                        .get_or_insert_with(|| Err(describe(&failure)));
                }
                None
            }
        }
    }
}

impl Wanted<'_, '_, '_> {
    fn end(&self) -> u64 {
        self.found.offset + u64::from(self.found.bytes)
    }

    /// Takes the value's part of a piece of the pack. With its last byte, the value is a hit.
    fn take(&mut self, piece: &[u8], range: &Range<u64>) {
        let (start, end) = (self.found.offset, self.end());
        let (from, to) = (start.max(range.start), end.min(range.end));
        if from >= to {
            return;
        }
        let part = &piece[(from - range.start) as usize..(to - range.start) as usize];
        fill(self.request.into, (from - start) as usize, part);
        if to == end {
            self.request.outcome = Some(Ok(GetOutcome::Hit(u64::from(self.found.bytes))));
        }
    }
}

/// Copies bytes to a place in the slices.
fn fill(into: &mut [IoSliceMut<'_>], mut at: usize, mut bytes: &[u8]) {
    for slice in into {
        if at >= slice.len() {
            at -= slice.len();
            continue;
        }
        let (now, later) = bytes.split_at(bytes.len().min(slice.len() - at));
        slice[at..at + now.len()].copy_from_slice(now);
        if later.is_empty() {
            return;
        }
        (at, bytes) = (0, later);
    }
}
