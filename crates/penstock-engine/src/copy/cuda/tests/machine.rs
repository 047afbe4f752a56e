//! A stand-in for a CUDA device, in host memory: what the driver keeps, and what streams do.
//!
//! It is no model of the hardware:
//! - Streams are threads that take their time. So work that is not waited for, or not ordered,
//!   shows.
//! - Addresses of the device and of the host differ, as `cuda.h` allows for registered memory. So
//!   the use of one for the other is an illegal access.
//! - Kernels run as PTX, instruction by instruction.
//! - Time is what a table of costs says.
//!
//! Each test has its own machine, by its ordinal.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::ptx::{Memory, Program, Shape};

pub(super) const INVALID_VALUE: i32 = 1;
pub(super) const INVALID_CONTEXT: i32 = 201;
pub(super) const INVALID_HANDLE: i32 = 400;
pub(super) const NOT_SUPPORTED: i32 = 801;
pub(super) const ILLEGAL_ADDRESS: i32 = 700;
pub(super) const TOLD_TO_FAIL: i32 = 999;

/// The difference between an address on the host and the address of the same memory for the device.
const DEVICE_MEMORY: u64 = 0x5000_0000_0000_0000;
const PINNED_MEMORY: u64 = 0x3000_0000_0000_0000;

/// Seconds that copies take by the machine's clock.
#[derive(Clone, Copy)]
pub(super) struct Costs {
    pub(super) engine_piece: f64,
    pub(super) engine_byte: f64,
    pub(super) kernel_start: f64,
    pub(super) kernel_byte: f64,
}

/// Memory that the machine knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    /// Address on the host, where the bytes really are.
    pub(super) host: u64,
    pub(super) len: u64,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Memory of the test, taken for device memory.
    Adopted,
    /// Allocated by the driver, on the device.
    Device,
    /// Allocated by the driver, pinned.
    Pinned,
    /// Memory of another owner, pinned.
    Registered,
}

impl Range {
    /// The address at which kernels reach it.
    pub(super) fn device(&self) -> u64 {
        match self.kind {
            Kind::Adopted | Kind::Device => self.host + DEVICE_MEMORY,
            Kind::Pinned | Kind::Registered => self.host + PINNED_MEMORY,
        }
    }

    pub(super) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered)
    }

    fn contains(&self, base: u64, address: u64, len: u64) -> bool {
        address >= base && address - base <= self.len && len <= self.len - (address - base)
    }
}

/// Who copies. The meaning of addresses depends on it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// A kernel, or copies in a batch. `cuda.h` allows the host's addresses in a batch where they
    /// are the device's too; here they never are.
    Device,
    /// Device memory, and host memory by the host's addresses.
    CopyEngine,
}

#[derive(Default)]
pub(super) struct State {
    /// Every call, by its name, in order.
    pub(super) calls: Vec<&'static str>,
    /// The call that fails, by its name, after so many of the same.
    pub(super) fail: Option<(&'static str, usize)>,
    /// Whether the call that was to fail has failed.
    pub(super) failed: bool,
    pub(super) ranges: Vec<Range>,
    /// What was done that the driver forbids or punishes.
    pub(super) offences: Vec<String>,
    /// The error that all calls answer, after an illegal access.
    pub(super) lost: Option<i32>,
    /// Times that the primary context is held.
    pub(super) held: usize,
    pub(super) without_batches: bool,
    /// The number of multiprocessors; without one, an H100's.
    pub(super) multiprocessors: Option<i32>,
    /// For each launch, its grid and the threads for a piece.
    pub(super) launches: Vec<(u32, u32)>,
    /// For each batch, the number of pieces.
    pub(super) batches: Vec<usize>,
    pub(super) costs: Option<(Costs, Costs)>,
}

/// One device.
pub(super) struct Machine {
    pub(super) ordinal: i32,
    pub(super) state: Mutex<State>,
    /// Streams, events, modules that have not been destroyed.
    pub(super) alive: AtomicUsize,
    /// Is done once, while the next copy or kernel runs.
    pub(super) meanwhile: Mutex<Option<Meanwhile>>,
}

pub(super) type Meanwhile = Box<dyn FnOnce() + Send>;

/// What a handle stands for.
#[derive(Clone)]
pub(super) enum Thing {
    Context(Arc<Machine>),
    Stream(Arc<Stream>),
    Event(Arc<Event>),
    Module(Arc<String>),
    Function(Arc<Program>),
}

static MACHINES: Mutex<Vec<Arc<Machine>>> = Mutex::new(Vec::new());
static THINGS: Mutex<Option<HashMap<usize, Thing>>> = Mutex::new(None);
static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0x1000);

thread_local! {
    /// Handles of contexts, the current one last, and the mode of graph captures.
    pub(super) static THREAD: RefCell<(Vec<usize>, i32)> = const { RefCell::new((Vec::new(), 0)) };
}

pub(super) fn things<T>(visit: impl FnOnce(&mut HashMap<usize, Thing>) -> T) -> T {
    visit(THINGS.lock().get_or_insert_default())
}

/// A handle for a thing.
pub(super) fn handle_of(thing: Thing) -> usize {
    let handle = NEXT_HANDLE.fetch_add(16, Ordering::Relaxed);
    things(|all| all.insert(handle, thing));
    handle
}

impl Machine {
    /// A new device, with an ordinal that no other test has.
    pub(super) fn new() -> Arc<Self> {
        static NEXT: AtomicI32 = AtomicI32::new(0);
        let machine = Arc::new(Self {
            ordinal: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            alive: AtomicUsize::new(0),
            meanwhile: Mutex::default(),
        });
        MACHINES.lock().push(Arc::clone(&machine));
        machine
    }

    pub(super) fn find(ordinal: i32) -> Option<Arc<Self>> {
        let machines = MACHINES.lock();
        machines.iter().find(|m| m.ordinal == ordinal).cloned()
    }

    /// Makes the `nth` next call of this name fail, counted from zero.
    pub(super) fn fail(&self, call: &'static str, nth: usize) {
        let mut state = self.state.lock();
        state.failed = false;
        state.fail = Some((call, nth));
    }

    /// Whether the call that was told to fail has failed. Afterwards, no call fails.
    pub(super) fn stop_failing(&self) -> bool {
        let mut state = self.state.lock();
        state.fail = None;
        state.failed
    }

    pub(super) fn calls(&self, name: &str) -> usize {
        let state = self.state.lock();
        state.calls.iter().filter(|&&call| call == name).count()
    }

    /// Turns memory of the test into device memory; returns its address for the device.
    pub(super) fn adopt(&self, host: *mut u8, len: usize) -> u64 {
        let range = Range {
            host: host.expose_provenance() as u64,
            len: len as u64,
            kind: Kind::Adopted,
        };
        self.state.lock().ranges.push(range);
        range.device()
    }

    pub(super) fn forget(&self, host: *mut u8) {
        let host = host.expose_provenance() as u64;
        self.state.lock().ranges.retain(|range| range.host != host);
    }

    /// Asserts that everything that was made is gone, and that nothing forbidden was done.
    pub(super) fn assert_clean(&self) {
        let state = self.state.lock();
        assert_eq!(state.offences, Vec::<String>::new());
        assert_eq!(state.held, 0, "holds of the context");
        let ours = |range: &&Range| range.kind != Kind::Adopted;
        assert_eq!(state.ranges.iter().filter(ours).count(), 0, "memory");
        assert_eq!(self.alive.load(Ordering::Relaxed), 0, "handles");
    }

    pub(super) fn offence(&self, what: String) {
        self.state.lock().offences.push(what);
    }

    /// Where the bytes of an address are. None unless all of them may be reached.
    pub(super) fn resolve(&self, reach: Reach, address: u64, len: u64) -> Option<*mut u8> {
        let state = self.state.lock();
        let host = state.ranges.iter().find_map(|range| {
            let base = match reach {
                Reach::CopyEngine if range.is_host() => range.host,
                _ => range.device(),
            };
            let inside = range.contains(base, address, len);
            inside.then(|| range.host + (address - base))
        })?;
        Some(std::ptr::with_exposed_provenance_mut(host as usize))
    }

    /// Notes an access that no device allows: the context is lost.
    pub(super) fn lose(&self, code: i32, what: String) {
        let mut state = self.state.lock();
        state.lost.get_or_insert(code);
        state.offences.push(what);
    }

    /// Copies bytes; both ends are given by address. One end may be `pageable` memory, which nobody
    /// pinned.
    pub(super) fn copy(&self, to: u64, from: u64, len: u64, pageable: Option<u64>) {
        self.pass_the_time();
        let end = |address| {
            if pageable == Some(address) {
                Some(std::ptr::with_exposed_provenance_mut(address as usize))
            } else {
                self.resolve(Reach::CopyEngine, address, len)
            }
        };
        self.copy_between((end(to), end(from)), to, from, len);
    }

    /// Copies bytes; both ends are given by the addresses at which the device reaches them.
    pub(super) fn copy_in_batch(&self, to: u64, from: u64, len: u64) {
        self.pass_the_time();
        let end = |address| self.resolve(Reach::Device, address, len);
        self.copy_between((end(to), end(from)), to, from, len);
    }

    #[allow(unsafe_code)]
    fn copy_between(&self, ends: (Option<*mut u8>, Option<*mut u8>), to: u64, from: u64, len: u64) {
        let (Some(to), Some(from)) = ends else {
            self.lose(
                ILLEGAL_ADDRESS,
                format!("copy of {len} from {from:#x} to {to:#x}"),
            );
            return;
        };
        // SAFETY: both ranges are known to the machine, whose tests keep them alive, and do not
        // overlap: one is the host's, one the device's.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len as usize) };
    }

    fn pass_the_time(&self) {
        let meanwhile = self.meanwhile.lock().take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    }

    /// Runs a kernel.
    pub(super) fn run(
        &self,
        program: &Program,
        shape: Shape,
        parameters: &[u64],
        seed: u64,
    ) -> Result<u64, i32> {
        self.pass_the_time();
        let mut bus = Bus {
            ranges: self.state.lock().ranges.clone(),
            stored: 0,
        };
        program
            .run(shape, parameters, &mut bus, seed)
            .map(|()| bus.stored)
    }
}

/// What kernels reach.
struct Bus {
    ranges: Vec<Range>,
    stored: u64,
}

impl Bus {
    fn at(&mut self, address: u64, bytes: usize) -> Result<*mut u8, i32> {
        let found = self
            .ranges
            .iter()
            .position(|range| range.contains(range.device(), address, bytes as u64))
            .ok_or(ILLEGAL_ADDRESS)?;
        // The next access is most likely there too.
        self.ranges.swap(0, found.min(1));
        let range = self.ranges[if found > 1 { found } else { 0 }];
        let host = range.host + (address - range.device());
        Ok(std::ptr::with_exposed_provenance_mut(host as usize))
    }
}

#[allow(unsafe_code)]
impl Memory for Bus {
    fn load(&mut self, address: u64, bytes: usize) -> Result<u64, i32> {
        let at = self.at(address, bytes)?;
        let mut value = [0; 8];
        // SAFETY: the bytes lie in a range that the machine's tests keep alive.
        unsafe { std::ptr::copy_nonoverlapping(at, value.as_mut_ptr(), bytes) };
        Ok(u64::from_le_bytes(value))
    }

    fn store(&mut self, address: u64, bytes: usize, value: u64) -> Result<(), i32> {
        let at = self.at(address, bytes)?;
        self.stored += bytes as u64;
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), at, bytes) };
        Ok(())
    }
}

/// An event: how often it was recorded, and how many of these records have happened.
#[derive(Default)]
pub(super) struct Event {
    pub(super) timed: bool,
    /// How often it was recorded, how often it happened, and when, by the machine's clock.
    pub(super) state: Mutex<(u64, u64, f64)>,
    pub(super) changed: Condvar,
}

impl Event {
    pub(super) fn wait(&self, for_record: u64) {
        let mut state = self.state.lock();
        while state.1 < for_record {
            self.changed.wait(&mut state);
        }
    }
}

type Work = Box<dyn FnOnce(&mut f64) + Send>;

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    running: bool,
    closed: bool,
}

/// A stream: a thread that does its work in order, when it gets round to it.
pub(super) struct Stream {
    queue: Mutex<Queue>,
    /// Copies and kernels that have not ended.
    copies: Arc<AtomicUsize>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Stream {
    pub(super) fn new() -> Arc<Self> {
        let stream = Arc::new(Self {
            queue: Mutex::default(),
            copies: Arc::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
        });
        let own = Arc::clone(&stream);
        *stream.thread.lock() = Some(std::thread::spawn(move || own.serve()));
        stream
    }

    fn serve(&self) {
        let mut clock = 0.0;
        let mut turn = 0_u64;
        loop {
            let mut queue = self.queue.lock();
            queue.running = false;
            self.changed.notify_all();
            while queue.work.is_empty() {
                if queue.closed {
                    return;
                }
                self.changed.wait(&mut queue);
            }
            let work = queue.work.pop_front().expect("not empty");
            queue.running = true;
            drop(queue);
            // Late by design, now and then.
            turn += 1;
            if turn % 3 == 1 {
                std::thread::sleep(Duration::from_micros(150));
            }
            work(&mut clock);
        }
    }

    pub(super) fn push(&self, work: impl FnOnce(&mut f64) + Send + 'static) {
        self.queue.lock().work.push_back(Box::new(work));
        self.changed.notify_all();
    }

    pub(super) fn synchronize(&self) {
        let mut queue = self.queue.lock();
        while queue.running || !queue.work.is_empty() {
            self.changed.wait(&mut queue);
        }
    }

    /// Closes the stream. A destroyed stream still does the work that it was given.
    pub(super) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    /// Work that touches memory.
    pub(super) fn push_copy(&self, work: impl FnOnce(&mut f64) + Send + 'static) {
        let copies = Arc::clone(&self.copies);
        copies.fetch_add(1, Ordering::Relaxed);
        self.push(move |clock| {
            work(clock);
            copies.fetch_sub(1, Ordering::Release);
        });
    }

    /// Whether the stream touches no memory any more.
    pub(super) fn is_idle(&self) -> bool {
        self.copies.load(Ordering::Acquire) == 0
    }
}
