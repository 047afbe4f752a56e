//! Fences: points in a device's work that jobs wait for.
//!
//! A thread of the engine waits for each fence in turn, asleep, and tells the lanes. No lane and no
//! stream of ours waits on the device. So work that shares a hardware queue with our streams goes
//! on, and a job that is given up before its fence is passed is over at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::copy::cuda::{CudaError, CudaExecutor, Point};
use crate::signal::{Signal, Signals};
use crate::sync::Mutex;
use crate::{Device, EngineError};

/// A point in a device's work. It is passed once the device has computed everything that it had
/// been given when the fence was raised ([`Engine::raise_fence`](crate::Engine::raise_fence)).
#[derive(Clone)]
pub struct Fence(Option<Arc<Mark>>);

impl Fence {
    /// Nothing to wait for, as in host memory.
    pub const NONE: Self = Self(None);

    /// The state of the fence for a job that was submitted at `submitted`.
    pub(crate) fn passage(&self, submitted: Instant) -> Passage {
        match &self.0 {
            None => Passage::Passed(submitted),
            Some(mark) => match *mark.passage.lock() {
                Passage::Passed(at) => Passage::Passed(at.max(submitted)),
                other => other,
            },
        }
    }
}

/// The state of a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    Ahead,
    /// A job that waits for it may go on since then, and its clocks run.
    Passed(Instant),
    /// The fence's device failed: nobody knows what was computed.
    Lost,
}

/// The state that all holders of a fence see. Its lock is a leaf.
pub(crate) struct Mark {
    passage: Mutex<Passage>,
}

impl Mark {
    /// A mark that is ahead, and a fence that shows it.
    pub(crate) fn new() -> (Arc<Self>, Fence) {
        let mark = Arc::new(Self {
            passage: Mutex::new(Passage::Ahead),
        });
        (Arc::clone(&mark), Fence(Some(mark)))
    }

    pub(crate) fn set(&self, passage: Passage) {
        *self.passage.lock() = passage;
    }
}

/// A mark whose fence is lost if nobody has set it by the end.
struct OrLost(Arc<Mark>);

impl Drop for OrLost {
    fn drop(&mut self) {
        let mut passage = self.0.passage.lock();
        if *passage == Passage::Ahead {
            *passage = Passage::Lost;
        }
    }
}

/// The fences of an engine that are ahead, in the order in which they were raised.
#[derive(Default)]
pub(crate) struct Watch {
    state: Mutex<State>,
    raised: Signal,
}

#[derive(Default)]
struct State {
    ahead: VecDeque<(Arc<Mark>, Point)>,
    /// Points that can be recorded again.
    idle: Vec<Point>,
    closed: bool,
}

impl Watch {
    /// Raises a fence behind all work that a stream of a device has been given. Host memory needs
    /// no fence.
    ///
    /// # Safety
    ///
    /// The stream is one of the device's, by its driver's handle, and alive; zero is its default
    /// stream.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn raise(&self, device: Device, stream: u64) -> Result<Fence, EngineError> {
        let Device::Cuda(ordinal) = device else {
            return Ok(Fence::NONE);
        };
        let idle = {
            let mut state = self.state.lock();
            if state.closed {
                return Err(EngineError::Closed);
            }
            let own = state.idle.iter().position(|point| point.is_of(ordinal));
            own.map(|index| state.idle.swap_remove(index))
        };
        let point = match idle {
            Some(point) => point,
            None => CudaExecutor::of(ordinal)?.point()?,
        };
        // SAFETY: the caller's promise.
        unsafe { point.record(stream) }?;
        let (mark, fence) = Mark::new();
        self.state.lock().ahead.push_back((mark, point));
        self.raised.notify_one();
        Ok(fence)
    }

    /// Waits for fences until it is told to end. If that panics, the fences that were ahead are lost,
    /// and it begins again.
    pub(crate) fn serve(&self, place: &'static str, signals: &Signals) {
        let again = |_| {
            let lost = std::mem::take(&mut self.state.lock().ahead);
            for (mark, _) in lost {
                mark.set(Passage::Lost);
            }
            signals.copy.notify_all();
            signals.get.notify_all();
            !self.state.lock().closed
        };
        penstock_threads::serve(place, again, || self.run(signals));
    }

    /// Waits for one fence after another, and wakes the lanes whose jobs may go on.
    fn run(&self, signals: &Signals) {
        loop {
            let seen = self.raised.generation();
            match self.next() {
                Next::Fence(mark, point) => {
                    let mark = OrLost(mark);
                    let waited: Result<(), CudaError> = point.wait();
                    let passage = match waited {
                        Ok(()) => Passage::Passed(Instant::now()),
                        Err(_) => Passage::Lost,
                    };
                    // Whoever has seen that the fence is passed finds its point for the next one.
                    self.give_back(point);
                    mark.0.set(passage);
                    signals.copy.notify_all();
                    signals.get.notify_all();
                }
                Next::Wait => self.raised.wait(seen, None),
                Next::Close => return,
            }
        }
    }

    fn next(&self) -> Next {
        let mut state = self.state.lock();
        if state.closed {
            return Next::Close;
        }
        match state.ahead.pop_front() {
            Some((mark, point)) => Next::Fence(mark, point),
            None => Next::Wait,
        }
    }

    fn give_back(&self, point: Point) {
        self.state.lock().idle.push(point);
    }

    /// Tells the thread that watches to end. Idempotent.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.raised.notify_all();
    }
}

enum Next {
    Fence(Arc<Mark>, Point),
    Wait,
    Close,
}
