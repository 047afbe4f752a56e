//! The values' bytes: chains of pages, and how room for them is found.
//!
//! A *hand* goes round the pages, for all processes together. Whoever needs room takes pages that
//! the hand passes: pages that belong to nothing, and pages of the least recently used values,
//! which are evicted ([`Sweep`]). So a value's pages mostly lie side by side, and are copied in one
//! piece.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;

use penstock_contract::{Error, ErrorKind, Result, deadline};
use penstock_evict::{DEMOTED, Progress, Round, Sweep, horizon};
use penstock_value::copies::SummedCopy;
use penstock_value::header::HEADER_BYTES;

use super::geometry::{DRAWN_WORD, HAND_WORD, HORIZON_WORD, USED_WORD};
use super::index::{Claim, Found};
use super::segment::Segment;
use super::state::{Belonging, Kind, State};

/// Bytes copied between two looks at the clock.
const PIECE_BYTES: u64 = 4 << 20;
/// Pages passed between two looks at the clock.
const PAGES_A_LOOK: u64 = 1024;
/// Most values to sample. They are evenly chosen, and their times of use tell the horizon.
const SAMPLE: usize = 1 << 11;

/// The pages taken for a claim so far.
#[derive(Default)]
struct Chain {
    first: Option<u64>,
    /// Has a meaning only if there is a first page.
    last: u64,
}

/// What becomes of a page that the hand meets.
enum Met {
    Taken,
    /// The page belongs to a value that stays and begins with page `first`.
    Staying {
        first: u64,
    },
    /// Somebody else was faster, or is filling it.
    Lost,
}

impl Segment {
    /// Takes pages for a claim, chains them, and returns the first. Evicts values as needed, and
    /// adds their number to `evicted`. Fails with [`ErrorKind::Full`] if other processes are
    /// filling the room just now.
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
        // Below zero if a count was lost with a process.
        let used = self.header(USED_WORD).load(Relaxed).cast_signed().max(0) as u64;
        let free = pages.saturating_sub(used);
        let mut sweep = Sweep::new(pages, free, count);
        let mut chain = Chain::default();
        let mut since_look = 0;
        while claim.pages < count {
            let stretch = count - claim.pages;
            let start = self.header(HAND_WORD).fetch_add(stretch, Relaxed);
            let met = (0..stretch).map(|n| start.wrapping_add(n) % pages);
            let taken = self.pass_over(met, mine, sweep.round(), &mut chain, evicted);
            claim.pages += taken;
            self.header(USED_WORD).fetch_add(taken, Relaxed);
            if claim.pages < count {
                self.redraw_horizon(start.wrapping_add(stretch), &sweep);
            }
            since_look += stretch;
            if since_look >= PAGES_A_LOOK {
                since_look = 0;
                deadline::check(give_up)?;
            }
            match sweep.pass(stretch) {
                Progress::Searching => {}
                // Correct the count, so that the next search need not go all round to find out.
                Progress::Miscounted => self.header(USED_WORD).store(pages, Relaxed),
                Progress::InVain => {
                    return Err(Error::new(
                        ErrorKind::Full,
                        "the pool is full of values that are being put just now",
                    ));
                }
            }
        }
        Ok(chain.first.unwrap_or(0))
    }

    /// Takes those pages that the hand met and that can be taken, and chains them. Returns how
    /// many.
    fn pass_over(
        &self,
        met: impl Iterator<Item = u64>,
        mine: Belonging,
        round: Round,
        chain: &mut Chain,
        evicted: &mut u64,
    ) -> u64 {
        let horizon = self.header(HORIZON_WORD).load(Relaxed);
        let mut taken = 0;
        // The value whose page was met last, and its first page, if it stays. Then its other pages
        // stay too.
        let mut staying = None;
        for page in met {
            let holder = Belonging::of(self.belonging(page));
            if staying.is_some_and(|(of, first)| of == holder && page != first) {
                continue;
            }
            match self.take_page(page, holder, mine, round, horizon, evicted) {
                Met::Taken => {
                    match chain.first {
                        None => chain.first = Some(page),
                        Some(_) => self.link(chain.last).store(page, Relaxed),
                    }
                    chain.last = page;
                    taken += 1;
                }
                Met::Staying { first } => staying = Some((holder, first)),
                Met::Lost => {}
            }
        }
        taken
    }

    /// Draws the horizon anew if the hand, which is now at `hand`, has passed enough pages since
    /// the last time.
    fn redraw_horizon(&self, hand: u64, sweep: &Sweep) {
        // Below zero if another process was further on when it drew the horizon.
        let passed = hand.wrapping_sub(self.header(DRAWN_WORD).load(Relaxed));
        let passed = passed.cast_signed().max(0) as u64;
        if let Some(room) = sweep.wants_horizon(passed) {
            // Others may find the same at the same time and draw it too. The result is about the
            // same.
            self.draw_horizon(room);
            self.header(DRAWN_WORD).store(hand, Relaxed);
        }
    }

    /// Draws the horizon anew. The values used up to it, which go, have `room` pages together, or
    /// nearly.
    fn draw_horizon(&self, room: u64) {
        let (mut sample, mut step) = (Vec::with_capacity(SAMPLE), 1);
        for (n, live) in self.each_live().enumerate() {
            if n % step == 0 {
                sample.push(live);
            }
            if sample.len() == SAMPLE {
                let mut keeps = false;
                sample.retain(|_| {
                    keeps = !keeps;
                    keeps
                });
                step *= 2;
            }
        }
        let found = sample
            .into_iter()
            .filter_map(|(entry, state)| self.read(entry, state));
        let mut uses: Vec<_> = found
            .map(|found| (self.used_at(&found), self.geometry.pages_of(found.bytes)))
            .collect();
        self.header(HORIZON_WORD)
            .store(horizon(&mut uses, room.div_ceil(step as u64)), Relaxed);
    }

    /// Has the hand go round once for what was retired alone.
    pub(super) fn look_for_the_retired(&self) {
        self.header(HORIZON_WORD).store(DEMOTED, Relaxed);
        let hand = self.header(HAND_WORD).load(Relaxed);
        self.header(DRAWN_WORD).store(hand, Relaxed);
    }

    fn take_page(
        &self,
        page: u64,
        belonging: Belonging,
        mine: Belonging,
        round: Round,
        horizon: u64,
        evicted: &mut u64,
    ) -> Met {
        let entry = u64::from(belonging.entry);
        // If there is no such entry, this is damage, and the page belongs to nothing.
        let holder = (entry < self.geometry.entries()).then(|| State::of(self.state(entry)));
        if let Some(state) = holder
            && state.holds(belonging)
        {
            let freed = match state.kind() {
                Kind::Claimed(owner) => self.release_if_dead(owner),
                Kind::Live => match self.read(entry, state) {
                    Some(found) => {
                        let first = found.first;
                        let used_at = || self.used_at(&found);
                        if !round.gives_up(page == first, horizon, used_at) {
                            return Met::Staying { first };
                        }
                        let gone = self.release(&found);
                        *evicted += u64::from(gone);
                        gone
                    }
                    None => true,
                },
                Kind::Free => true,
            };
            if !freed || State::of(self.state(entry)).holds(belonging) {
                return Met::Lost;
            }
        }
        if belonging.give_to(self.belonging(page), mine) {
            Met::Taken
        } else {
            Met::Lost
        }
    }

    /// Counts the pages in use anew, in place of processes that died before they could.
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
        let bytes = penstock_contract::slices::len_of(value);
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

    /// Copies a value out. False if the value is not there any more; what arrived is then worth
    /// nothing. `payload` is the copy of what follows the header, if that is to be summed.
    pub(super) fn read_value(
        &self,
        found: &Found,
        into: &mut [IoSliceMut<'_>],
        mut payload: Option<&mut SummedCopy>,
        deadline: Instant,
    ) -> Result<bool> {
        let mut header_left = HEADER_BYTES;
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
                if let Some(payload) = &mut payload {
                    let (header, now) = now.split_at_mut(header_left.min(len));
                    header_left -= header.len();
                    self.mapping().copy_out(at, header);
                    let at = at + header.len() as u64;
                    self.mapping().copy_out_summed(at, now, payload);
                } else {
                    self.mapping().copy_out(at, now);
                }
                (at, slice) = (at + len as u64, later);
            }
        })?;
        let is_still = found.state.is_still(self.state(found.entry));
        if is_still && !whole {
            // The protocol never writes such a chain. It is damage, which must not be met again.
            self.release(found);
        }
        Ok(whole && is_still)
    }

    /// Goes along a chain, in runs of pages that lie side by side, and visits each run's place and
    /// length. False if the chain leads outside the pages: it is being changed.
    pub(super) fn each_run(
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
