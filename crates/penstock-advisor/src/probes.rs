//! When to measure a pool from which nothing is loaded, and with how much.

/// Seconds for which a pool from which nothing is loaded is left alone before its speed is measured
/// again.
const PAUSE: f64 = 5.0;

/// Share of the time in which the pool is busy with such measurements, unless it would be left
/// alone for longer than [`LONGEST_PAUSE`].
const SHARE: f64 = 0.1;

/// Seconds.
const LONGEST_PAUSE: f64 = 30.0;

/// As large as every other measurement is. In turn with it comes one of as little as keeps all
/// lanes at work, so that what each load takes is told from what each byte does.
const BYTES: u64 = 4 << 20;

/// Loads in a row that are declined before a measurement is as large as a load would have been:
/// what one takes may not follow from what little ones do. Each time doubles it up to
/// [`LAST_WHOLE`].
const FIRST_WHOLE: u32 = 4;

/// See [`FIRST_WHOLE`].
const LAST_WHOLE: u32 = 256;

/// Loads of which the speed is known at least: it could be latency, or bandwidth.
const KNOWN: u32 = 2;

#[derive(Clone, Debug)]
pub(crate) struct Probes {
    /// Objects of a load that are fetched at a time.
    lanes: u64,
    /// When the pool was last asked for values.
    seen: f64,
    pause: f64,
    little_ones: u64,
    /// Whether the last probe was as large as a load. These are rare enough.
    is_whole: bool,
    /// Whether the last probe brought nothing.
    is_silent: bool,
    /// Loads since a probe was last as large as one, or one was worth it.
    declined: u32,
    whole_after: u32,
}

/// A load that was declined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Declined {
    pub(crate) pool_bytes: u64,
    /// Of a block.
    pub(crate) block_bytes: u64,
    pub(crate) block_objects: u64,
    /// Whether it would have taken so long that it is not measured whole.
    pub(crate) is_hopeless: bool,
}

impl Probes {
    pub(crate) fn new(lanes: u64) -> Self {
        Self {
            lanes: lanes.max(1),
            seen: f64::NEG_INFINITY,
            pause: PAUSE,
            little_ones: 0,
            is_whole: false,
            is_silent: false,
            declined: 0,
            whole_after: FIRST_WHOLE,
        }
    }

    /// Values are asked for, by whomever.
    pub(crate) fn on_pool_used(&mut self, now: f64) {
        self.seen = now;
    }

    /// A load was worth it as far as it could reach.
    pub(crate) fn on_whole_load(&mut self) {
        (self.declined, self.whole_after) = (0, FIRST_WHOLE);
    }

    /// A probe is over.
    pub(crate) fn on_end(&mut self, seconds: f64, is_silent: bool) {
        if !self.is_whole {
            self.pause = PAUSE.max(seconds / SHARE).min(LONGEST_PAUSE);
        }
        self.is_silent = is_silent;
    }

    /// A load was declined. Blocks to fetch instead, for nobody; 0 as a rule. `observed` loads of
    /// the pool are known.
    pub(crate) fn on_declined(
        &mut self,
        now: f64,
        load: Declined,
        observed: u32,
        is_one_under_way: bool,
    ) -> u64 {
        self.declined += 1;
        let is_known = observed >= KNOWN || self.is_silent;
        let pause = if is_known { self.pause } else { 0.0 };
        if now - self.seen < pause || is_one_under_way {
            return 0;
        }
        let (bytes, objects) = (load.block_bytes.max(1), load.block_objects.max(1));
        self.is_whole = self.declined >= self.whole_after && !load.is_hopeless;
        if self.is_whole {
            self.declined = 0;
            self.whole_after = LAST_WHOLE.min(2 * self.whole_after);
            return load.pool_bytes.div_ceil(bytes);
        }
        self.little_ones += 1;
        let least = self.lanes.div_ceil(objects);
        if self.little_ones % 2 == 1 {
            least
        } else {
            (2 * least).max(BYTES / bytes)
        }
    }
}
