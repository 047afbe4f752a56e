//! The values' bytes: chains of pages, and how room for them is found.
//!
//! A *hand* goes round the pages, for all processes together, and whoever needs room takes the
//! pages that it passes: those that belong to nothing, and those of values that were not used
//! since it last came by, which are evicted ([`Sweep`]). So a value's pages mostly lie side by side,
//! and are copied in one piece.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;

use penstock_evict::{Progress, Round, Sweep};

use super::geometry::{HAND_WORD, USED_WORD};
use super::index::{Claim, Found};
use super::segment::Segment;
use super::state::{Belonging, Kind, State};
use crate::{Error, ErrorKind, Result, deadline};

/// Bytes copied between two looks at the clock.
const PIECE_BYTES: u64 = 4 << 20;
/// Pages passed between two looks at the clock.
const PAGES_A_LOOK: u64 = 1024;

impl Segment {
    /// Takes pages for a claim, chained, and returns the first. Values are evicted as need be; how
    /// many is added to `evicted`. Fails with [`ErrorKind::Full`] if other processes are filling
    /// the room just now.
    pub(super) fn take_pages(
        &self,
        claim: &mut Claim<'_>,
        count: u64,
        evicted: &mut u64,
        give_up: Instant,
    ) -> Result<u64> {
        let pages = self.geometry.pages;
        let mine = Belonging {
            entry: claim.entry as u32,
            generation: claim.state.generation(),
        };
        // Below zero where a count was lost with a process.
        let used = self.header(USED_WORD).load(Relaxed).cast_signed().max(0) as u64;
        let free = pages.saturating_sub(used);
        let mut sweep = Sweep::new(pages, free, count);
        let (mut first, mut last) = (None, 0);
        let mut since_look = 0;
        while claim.pages < count {
            let stretch = count - claim.pages;
            let start = self.header(HAND_WORD).fetch_add(stretch, Relaxed);
            let before = claim.pages;
            for page in (0..stretch).map(|n| start.wrapping_add(n) % pages) {
                if self.take_page(page, mine, sweep.round(), evicted) {
                    match first {
                        None => first = Some(page),
                        Some(_) => self.link(last).store(page, Relaxed),
                    }
                    last = page;
                    claim.pages += 1;
                }
            }
            self.header(USED_WORD)
                .fetch_add(claim.pages - before, Relaxed);
            since_look += stretch;
            if since_look >= PAGES_A_LOOK {
                since_look = 0;
                deadline::check(give_up)?;
            }
            match sweep.pass(stretch) {
                Progress::Searching => {}
                // The next one need not go all round to find out.
                Progress::Miscounted => self.header(USED_WORD).store(pages, Relaxed),
                Progress::InVain => {
                    return Err(Error::new(
                        ErrorKind::Full,
                        "the pool is full of values that are being put just now",
                    ));
                }
            }
        }
        Ok(first.unwrap_or(0))
    }

    fn take_page(&self, page: u64, mine: Belonging, round: Round, evicted: &mut u64) -> bool {
        let word = self.belonging(page);
        let belonging = Belonging::of(word);
        let entry = u64::from(belonging.entry);
        // An entry that there is not is damage, and holds nothing.
        let holder = (entry < self.geometry.entries()).then(|| State::of(self.state(entry)));
        if let Some(state) = holder
            && state.holds(belonging)
        {
            let freed = match state.kind() {
                Kind::Claimed(owner) => self.release_if_dead(owner),
                Kind::Live => self.read(entry, state).is_none_or(|found| {
                    let forget_use = || self.forget_use(&found);
                    let goes = round.gives_up(page == found.first, forget_use);
                    let gone = goes && self.release(&found);
                    *evicted += u64::from(gone);
                    gone
                }),
                Kind::Free => true,
            };
            if !freed || State::of(self.state(entry)).holds(belonging) {
                return false;
            }
        }
        belonging.give_to(word, mine)
    }

    /// Counts the pages in use anew, for those that died before they could.
    pub(super) fn count_used(&self) {
        let used = (0..self.geometry.pages).filter(|&page| {
            let belonging = Belonging::of(self.belonging(page));
            let entry = u64::from(belonging.entry);
            entry < self.geometry.entries() && State::of(self.state(entry)).holds(belonging)
        });
        let used = used.count() as u64;
        self.header(USED_WORD).store(used, SeqCst);
    }

    /// Fills a claim's pages.
    pub(super) fn write(&self, first: u64, value: &[IoSlice<'_>], deadline: Instant) -> Result<()> {
        let bytes = crate::slices::len_of(value);
        let mut slices = value.iter().map(|slice| &**slice);
        let mut slice: &[u8] = &[];
        self.each_run(first, bytes, deadline, |mut at, run| {
            let end = at + run;
            while at < end {
                if slice.is_empty() {
                    slice = slices.next().unwrap_or_default();
                    continue;
                }
                let (now, later) = slice.split_at(slice.len().min((end - at) as usize));
                self.mapping().copy_in(at, now);
                (at, slice) = (at + now.len() as u64, later);
            }
        })
        .map(drop)
    }

    /// Copies a value out; false if it is not there any more, and what arrived is worth nothing.
    pub(super) fn read_value(
        &self,
        found: &Found,
        into: &mut [IoSliceMut<'_>],
        deadline: Instant,
    ) -> Result<bool> {
        let mut slices = into.iter_mut().map(|slice| &mut **slice);
        let mut slice: &mut [u8] = &mut [];
        let whole = self.each_run(found.first, found.bytes, deadline, |mut at, run| {
            let end = at + run;
            while at < end {
                if slice.is_empty() {
                    slice = slices.next().unwrap_or_default();
                    continue;
                }
                let len = slice.len().min((end - at) as usize);
                let (now, later) = std::mem::take(&mut slice).split_at_mut(len);
                self.mapping().copy_out(at, now);
                (at, slice) = (at + len as u64, later);
            }
        })?;
        let is_still = found.state.is_still(self.state(found.entry));
        if is_still && !whole {
            // No protocol writes such a chain: damage, which must not be met again.
            self.release(found);
        }
        Ok(whole && is_still)
    }

    /// Goes along a chain, in runs of pages that lie side by side, where they are and how long.
    /// False if the chain leads outside: it is being changed.
    fn each_run(
        &self,
        first: u64,
        bytes: u64,
        deadline: Instant,
        mut visit: impl FnMut(u64, u64),
    ) -> Result<bool> {
        let page_bytes = self.geometry.page_bytes;
        let (mut page, mut left) = (first, bytes);
        while left > 0 {
            let start = page;
            let mut run = 0;
            loop {
                if page >= self.geometry.pages {
                    return Ok(false);
                }
                run += page_bytes;
                if run >= left {
                    break;
                }
                let next = self.link(page).load(Relaxed);
                let is_beside = next == page + 1;
                page = next;
                if !is_beside || run >= PIECE_BYTES {
                    break;
                }
            }
            let run = run.min(left);
            visit(self.geometry.page_at(start), run);
            left -= run;
            if left > 0 {
                deadline::check(deadline)?;
            }
        }
        Ok(true)
    }
}
