//! Times both ways to copy on the device: pieces of several sizes, in both directions.

use std::time::{Duration, Instant};

use penstock_layout::Segment;

use super::crossover::{Timing, copy_engine_from};
use super::resources::{DeviceMemory, Event, PinnedMemory};
use super::symbols::CudaError;
use super::{By, COPY_ENGINE_FROM, CudaExecutor, Object, Track, Way};
use crate::Region;

const PIECE_BYTES: [usize; 7] = [
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
];
/// Bytes of one timed copy, whatever the size of the pieces.
const COPY_BYTES: usize = 2 << 20;
/// Rounds of measurement. For each copy, the shortest time counts: the one that the model disturbed
/// least.
const ROUNDS: usize = 5;
/// No round begins after this time.
const LIMIT: Duration = Duration::from_millis(40);

/// The times of copies in one direction, and the limit that follows from them.
#[derive(Clone, Debug, PartialEq)]
pub struct Direction {
    /// Mean bytes of a piece from which the copy engines are used.
    pub copy_engine_from: usize,
    /// The times, by rising size of a piece.
    pub timings: Vec<Timing>,
}

/// The times of a device's copies.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Bytes of each copy that was timed.
    pub copy_bytes: usize,
    /// Copies from the device.
    pub gather: Direction,
    /// Copies to the device.
    pub scatter: Direction,
}

impl Calibration {
    pub(super) fn of(&self, way: Way) -> &Direction {
        match way {
            Way::Gather => &self.gather,
            Way::Scatter => &self.scatter,
        }
    }
}

/// Times copies between memory that it allocates, 6 MiB in all, and gives back.
pub(super) fn measure(executor: &CudaExecutor) -> Result<Calibration, CudaError> {
    let context = &executor.context;
    let _entered = context.enter()?;
    let device = DeviceMemory::new(context, 2 * COPY_BYTES)?;
    let host = PinnedMemory::new(context, COPY_BYTES)?;
    let mut clock = Clock {
        executor,
        track: Track::new(context)?,
        start: Event::timed(context)?,
        end: Event::timed(context)?,
    };
    let mut best = [[[f64::INFINITY; 2]; PIECE_BYTES.len()]; 2];
    let began = Instant::now();
    for round in 0..ROUNDS {
        if round > 0 && began.elapsed() > LIMIT {
            break;
        }
        for (size, &piece_bytes) in PIECE_BYTES.iter().enumerate() {
            for (direction, way) in [Way::Gather, Way::Scatter].into_iter().enumerate() {
                for (kind, by) in [By::CopyEngine, By::Kernel].into_iter().enumerate() {
                    let took = clock.time(way, by, &device, &host, piece_bytes)?;
                    let best = &mut best[direction][size][kind];
                    *best = best.min(took);
                }
            }
        }
    }
    let [gather, scatter] = best.map(|sizes| {
        let timings: Vec<Timing> = PIECE_BYTES
            .iter()
            .zip(sizes)
            .map(|(&piece_bytes, [copy_engine, kernel])| Timing {
                piece_bytes,
                copy_engine,
                kernel,
            })
            .collect();
        Direction {
            copy_engine_from: copy_engine_from(&timings).unwrap_or(COPY_ENGINE_FROM),
            timings,
        }
    });
    Ok(Calibration {
        copy_bytes: COPY_BYTES,
        gather,
        scatter,
    })
}

/// A track whose copies are timed by the device.
struct Clock<'e> {
    executor: &'e CudaExecutor,
    track: Track,
    start: Event,
    end: Event,
}

impl Clock<'_> {
    /// Seconds of one copy, including the time to start it.
    #[allow(unsafe_code)]
    fn time(
        &mut self,
        way: Way,
        by: By,
        device: &DeviceMemory,
        host: &PinnedMemory,
        piece_bytes: usize,
    ) -> Result<f64, CudaError> {
        // SAFETY: the memory is the device's, and is touched by nobody else until the stream has
        // finished, below.
        let region = unsafe { Region::new(device.address() as usize, 2 * COPY_BYTES as u64) };
        // A piece, then a gap. As in a KV cache, no piece continues another.
        let pieces: Vec<Segment> = (0..COPY_BYTES / piece_bytes)
            .map(|piece| Segment {
                region: 0,
                offset: (2 * piece * piece_bytes) as u64,
                len: piece_bytes as u64,
            })
            .collect();
        let object = Object {
            segments: &pieces,
            host: host.host(),
            device: Some(host.device()),
        };
        let started = self.start.record(&self.track.stream).and_then(|()| {
            // SAFETY: as above; the pinned memory is as long as all pieces.
            unsafe {
                self.executor
                    .start(way, by, &[region], &[object], &mut self.track)
            }
        });
        let ended = started.and_then(|()| self.end.record(&self.track.stream));
        let finished = self.track.stream.finish(&self.track.event);
        ended.and(finished)?;
        self.end.seconds_since(&self.start)
    }
}
