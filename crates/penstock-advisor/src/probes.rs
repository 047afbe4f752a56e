//! When to measure a pool from which nothing is loaded, and how much to fetch for it.

/// Seconds for which a pool from which nothing is loaded is left alone before its speed is measured
/// again.
const PAUSE: f64 = 5.0;

/// Share of the time in which the pool is busy with such measurements, unless it would be left
/// alone for longer than [`LONGEST_PAUSE`].
const SHARE: f64 = 0.1;

/// The longest time in seconds for which a pool is left alone.
const LONGEST_PAUSE: f64 = 30.0;

/// Bytes of every other measurement. The measurements between them fetch only as much as keeps all
/// lanes at work. The two sizes tell the time of each load from the time of each byte.
const BYTES: u64 = 4 << 20;

/// After so many declined loads in a row, a measurement is as large as the load would have been:
/// its time may not follow from the times of small loads. Each such measurement doubles the number,
/// up to [`LAST_WHOLE`].
const FIRST_WHOLE: u32 = 4;

/// See [`FIRST_WHOLE`].
const LAST_WHOLE: u32 = 256;

/// The pool's speed counts as known after so many loads: the time of one alone could be latency or
/// bandwidth.
const KNOWN: u32 = 2;

#[derive(Clone, Debug)]
pub(crate) struct Probes {
    /// How many objects of a load are fetched at a time.
    lanes: u64,
    /// When values were last asked of the pool.
    seen: f64,
    pause: f64,
    little_ones: u64,
    /// Whether the last probe was as large as a load. Such probes are rare enough; they do not
    /// change the pause.
    is_whole: bool,
    /// Whether the last probe brought nothing.
    is_silent: bool,
    /// Loads declined since a probe was last as large as a load, or since a load was last worth it.
    declined: u32,
    whole_after: u32,
}

/// A load that was declined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Declined {
    pub(crate) pool_bytes: u64,
    /// The bytes of one block.
    pub(crate) block_bytes: u64,
    pub(crate) block_objects: u64,
    /// Whether the load would have taken so long that it is not measured whole.
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

    /// Notes that values are asked of the pool, for whatever purpose.
    pub(crate) fn on_pool_used(&mut self, now: f64) {
        self.seen = now;
    }

    /// Notes that a load was worth it up to its furthest end.
    pub(crate) fn on_whole_load(&mut self) {
        (self.declined, self.whole_after) = (0, FIRST_WHOLE);
    }

    /// Notes that a probe is over.
    pub(crate) fn on_end(&mut self, seconds: f64, is_silent: bool) {
        if !self.is_whole {
            self.pause = PAUSE.max(seconds / SHARE).min(LONGEST_PAUSE);
        }
        self.is_silent = is_silent;
    }

    /// Notes that a load was declined. Returns how many blocks to fetch as a probe; 0 in most
    /// cases. `observed` is the number of loads from the pool that are known.
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
