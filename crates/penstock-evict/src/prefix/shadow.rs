//! How least recently used would have done: the same uses, within the same weight.

use std::collections::VecDeque;

/// Estimates after which a policy that fell behind is tried again; four times as many every time.
const FIRST_PAUSE: u32 = 8;

/// The chains that least recently used would hold, and which of the two found more.
///
/// Holds whole chains, so it needs neither names nor a queue: an entry is held by it if the chain
/// that used it last is.
pub(super) struct Shadow {
    /// The weight of each chain that no later one has used.
    chains: VecDeque<u64>,
    /// The number of the oldest chain held.
    oldest: u64,
    weight: u64,
    found: u64,
    found_by_policy: u64,
    pause: u32,
    paused_for: u32,
}

impl Shadow {
    pub(super) fn new() -> Self {
        Self {
            chains: VecDeque::new(),
            oldest: 0,
            weight: 0,
            found: 0,
            found_by_policy: 0,
            pause: FIRST_PAUSE,
            paused_for: 0,
        }
    }

    /// Starts the next chain; returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        self.chains.push_back(0);
        self.oldest + self.chains.len() as u64 - 1
    }

    /// Whether an entry last used by that chain would be held.
    pub(super) fn holds(&self, chain: u64) -> bool {
        chain >= self.oldest
    }

    /// An entry moves from the chain that used it last, if any, to the newest.
    pub(super) fn moved(&mut self, from: Option<(u64, u64)>, weight: u64) {
        if let Some((chain, before)) = from
            && let Some(place) = chain.checked_sub(self.oldest)
            && let Some(chain) = self.chains.get_mut(place as usize)
        {
            *chain -= before;
            self.weight -= before;
        }
        if let Some(newest) = self.chains.back_mut() {
            *newest += weight;
            self.weight += weight;
        }
    }

    /// Notes how many blocks of a chain both found in a row from its start.
    pub(super) fn found(&mut self, by_policy: u64, by_shadow: u64) {
        self.found_by_policy += by_policy;
        self.found += by_shadow;
    }

    /// Keeps within the weight that the policy itself holds.
    pub(super) fn trim(&mut self, bound: u64) {
        while self.weight > bound && self.chains.len() > 1 {
            if let Some(chain) = self.chains.pop_front() {
                self.weight -= chain;
                self.oldest += 1;
            }
        }
    }

    /// Whether to do as least recently used does until the next time this is asked.
    pub(super) fn is_better(&mut self) -> bool {
        if self.paused_for > 0 {
            self.paused_for -= 1;
            if self.paused_for == 0 {
                (self.found, self.found_by_policy) = (0, 0);
            }
        } else if self.found > self.found_by_policy {
            self.paused_for = self.pause;
            self.pause = self.pause.saturating_mul(4);
        }
        self.paused_for > 0
    }
}
