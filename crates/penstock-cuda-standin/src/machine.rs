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
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::ptx::{Memory, Program, Shape};
use crate::stream::{Event, Stream};

/// The variable that says how many devices a program finds.
pub const DEVICES: &str = "PENSTOCK_STANDIN_DEVICES";

/// The variable that says from how many bytes of a piece on the copy engines are faster than the kernel.
/// Without it nothing takes time.
pub const CROSSOVER: &str = "PENSTOCK_STANDIN_COPY_ENGINES_FROM";

pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_SUPPORTED: i32 = 801;
/// CUDA's number for an access to memory that is not there.
pub const ILLEGAL_ADDRESS: i32 = 700;
/// The number that a call answers which was told to fail.
pub const TOLD_TO_FAIL: i32 = 999;

/// The difference between an address on the host and the address of the same memory for the device.
const DEVICE_MEMORY: u64 = 0x5000_0000_0000_0000;
const PINNED_MEMORY: u64 = 0x3000_0000_0000_0000;

/// Seconds that copies take by the machine's clock.
#[derive(Clone, Copy)]
pub struct Costs {
    /// A copy engine's, for a piece.
    pub engine_piece: f64,
    /// A copy engine's, for a byte.
    pub engine_byte: f64,
    /// A kernel's, for its launch.
    pub kernel_start: f64,
    /// A kernel's, for a byte.
    pub kernel_byte: f64,
}

impl Costs {
    /// The copy engines win from pieces of `at` bytes on, and by less than the kernel's handicap
    /// before.
    pub fn turning(at: f64) -> Self {
        let (engine_piece, engine_byte) = (1e-6, 20e-12);
        Self {
            engine_piece,
            engine_byte,
            kernel_start: 0.0,
            kernel_byte: (engine_piece / at + engine_byte) / 1.05,
        }
    }
}

/// Memory that the machine knows.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Address on the host, where the bytes really are.
    pub host: u64,
    /// Bytes of the range.
    pub len: u64,
    /// Whose memory the range is.
    pub kind: Kind,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
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
    pub fn device(&self) -> u64 {
        match self.kind {
            Kind::Adopted | Kind::Device => self.host + DEVICE_MEMORY,
            Kind::Pinned | Kind::Registered => self.host + PINNED_MEMORY,
        }
    }

    /// Whether it is the host's.
    pub fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered)
    }

    fn contains(&self, base: u64, address: u64, len: u64) -> bool {
        address >= base && address - base <= self.len && len <= self.len - (address - base)
    }
}

/// Who copies. The meaning of addresses depends on it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// A kernel, or copies in a batch. `cuda.h` allows the host's addresses in a batch where they
    /// are the device's too; here they never are.
    Device,
    /// Device memory, and host memory by the host's addresses.
    CopyEngine,
}

/// What the driver keeps, and what a test wants of it.
#[derive(Default)]
pub struct State {
    /// Every call, by its name, in order.
    pub calls: Vec<&'static str>,
    /// The call that fails, by its name, after so many of the same.
    pub fail: Option<(&'static str, usize)>,
    /// Whether the call that was to fail has failed.
    pub failed: bool,
    /// The memory that the machine knows.
    pub ranges: Vec<Range>,
    /// What was done that the driver forbids or punishes.
    pub offences: Vec<String>,
    /// The error that all calls answer, after an illegal access.
    pub lost: Option<i32>,
    /// Times that the primary context is held.
    pub held: usize,
    /// Whether the driver has no copies in batches.
    pub without_batches: bool,
    /// The number of multiprocessors; without one, an H100's.
    pub multiprocessors: Option<i32>,
    /// For each launch, its grid and the threads for a piece.
    pub launches: Vec<(u32, u32)>,
    /// For each batch, the number of pieces.
    pub batches: Vec<usize>,
    /// The times of gathers and of scatters; without them nothing takes time.
    pub costs: Option<(Costs, Costs)>,
}

/// One device.
pub struct Machine {
    /// The device's number.
    pub ordinal: i32,
    /// What the device keeps.
    pub state: Mutex<State>,
    /// Streams, events, modules that have not been destroyed.
    pub alive: AtomicUsize,
    /// Is done once, while the next copy or kernel runs.
    pub meanwhile: Mutex<Option<Meanwhile>>,
    default_stream: OnceLock<Arc<Stream>>,
    /// All streams, while they live.
    streams: Mutex<Vec<Weak<Stream>>>,
    /// Whether the process ends at what a driver forbids.
    is_strict: bool,
}

/// What is done while a copy runs.
pub type Meanwhile = Box<dyn FnOnce() + Send>;

/// What a handle stands for.
#[derive(Clone)]
pub enum Thing {
    /// A device's primary context.
    Context(Arc<Machine>),
    /// A stream.
    Stream(Arc<Stream>),
    /// An event.
    Event(Arc<Event>),
    /// A module's text.
    Module(Arc<String>),
    /// A kernel.
    Function(Arc<Program>),
}

static MACHINES: Mutex<Vec<Arc<Machine>>> = Mutex::new(Vec::new());
static THINGS: Mutex<Option<HashMap<usize, Thing>>> = Mutex::new(None);
static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0x1000);

thread_local! {
    /// Handles of contexts, the current one last, and the mode of graph captures.
    pub(crate) static THREAD: RefCell<(Vec<usize>, i32)> = const { RefCell::new((Vec::new(), 0)) };
}

pub(crate) fn things<T>(visit: impl FnOnce(&mut HashMap<usize, Thing>) -> T) -> T {
    visit(THINGS.lock().get_or_insert_default())
}

/// A handle for a thing.
pub fn handle_of(thing: Thing) -> usize {
    let handle = NEXT_HANDLE.fetch_add(16, Ordering::Relaxed);
    things(|all| all.insert(handle, thing));
    handle
}

impl Machine {
    /// A new device, with an ordinal that no other test has.
    pub fn new() -> Arc<Self> {
        Self::add(false)
    }

    fn add(is_strict: bool) -> Arc<Self> {
        static NEXT: AtomicI32 = AtomicI32::new(0);
        let machine = Arc::new(Self {
            ordinal: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            alive: AtomicUsize::new(0),
            meanwhile: Mutex::default(),
            default_stream: OnceLock::new(),
            streams: Mutex::default(),
            is_strict,
        });
        MACHINES.lock().push(Arc::clone(&machine));
        machine
    }

    /// Makes the devices that the program is to find, once.
    pub(crate) fn make_all() {
        static MADE: OnceLock<()> = OnceLock::new();
        MADE.get_or_init(|| {
            let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
            let costs = number(CROSSOVER).map(|bytes| Costs::turning(bytes.into()));
            for _ in 0..number(DEVICES).unwrap_or(0) {
                let machine = Self::add(true);
                machine.state.lock().costs = costs.map(|costs| (costs, costs));
            }
        });
    }

    /// The stream that the model computes on, unless it has one of its own.
    pub(crate) fn default_stream(&self) -> Arc<Stream> {
        let start = || {
            let stream = Stream::of_a_model();
            self.watch(&stream);
            stream
        };
        Arc::clone(self.default_stream.get_or_init(start))
    }

    /// A stream is the device's: what waits for the device waits for it too.
    pub fn watch(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock();
        streams.retain(|known| known.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// Waits until the device has done what it was given until now. Freeing memory and unloading
    /// modules do.
    pub(crate) fn synchronize(&self) {
        let streams: Vec<_> = self
            .streams
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for stream in streams {
            stream.synchronize();
        }
    }

    /// The device with an ordinal.
    pub fn find(ordinal: i32) -> Option<Arc<Self>> {
        let machines = MACHINES.lock();
        machines.iter().find(|m| m.ordinal == ordinal).cloned()
    }

    /// Makes the `nth` next call of this name fail, counted from zero.
    pub fn fail(&self, call: &'static str, nth: usize) {
        let mut state = self.state.lock();
        state.failed = false;
        state.fail = Some((call, nth));
    }

    /// Whether the call that was told to fail has failed. Afterwards, no call fails.
    pub fn stop_failing(&self) -> bool {
        let mut state = self.state.lock();
        state.fail = None;
        state.failed
    }

    /// How often a call was made.
    pub fn calls(&self, name: &str) -> usize {
        let state = self.state.lock();
        state.calls.iter().filter(|&&call| call == name).count()
    }

    /// Turns memory of the test into device memory; returns its address for the device.
    pub fn adopt(&self, host: *mut u8, len: usize) -> u64 {
        let range = Range {
            host: host.expose_provenance() as u64,
            len: len as u64,
            kind: Kind::Adopted,
        };
        self.state.lock().ranges.push(range);
        range.device()
    }

    /// Memory of the test is no more the device's.
    pub fn forget(&self, host: *mut u8) {
        let host = host.expose_provenance() as u64;
        self.state.lock().ranges.retain(|range| range.host != host);
    }

    /// Asserts that everything that was made is gone, and that nothing forbidden was done.
    pub fn assert_clean(&self) {
        let state = self.state.lock();
        assert_eq!(state.offences, Vec::<String>::new());
        assert_eq!(state.held, 0, "holds of the context");
        let ours = |range: &&Range| range.kind != Kind::Adopted;
        assert_eq!(state.ranges.iter().filter(ours).count(), 0, "memory");
        assert_eq!(self.alive.load(Ordering::Relaxed), 0, "handles");
    }

    /// Asserts that the calling thread has the state that it had before any copy.
    pub fn assert_thread_as_before() {
        THREAD.with_borrow(|thread| assert_eq!(*thread, (Vec::new(), 0)));
    }

    /// Gives the calling thread the state that it had before any copy.
    pub fn leave_thread() {
        THREAD.take();
    }

    /// Notes what a driver forbids. Where programs use the stand-in, their process ends.
    pub(crate) fn offence(&self, what: String) {
        if self.is_strict {
            eprintln!("penstock-cuda-standin: forbidden: {what}");
            std::process::abort();
        }
        self.state.lock().offences.push(what);
    }

    /// Where the bytes of an address are. None unless all of them may be reached.
    pub(crate) fn resolve(&self, reach: Reach, address: u64, len: u64) -> Option<*mut u8> {
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
    pub(crate) fn lose(&self, code: i32, what: String) {
        self.state.lock().lost.get_or_insert(code);
        self.offence(what);
    }

    /// Copies bytes; both ends are given by address. One end may be `pageable` memory, which nobody
    /// pinned.
    pub(crate) fn copy(&self, to: u64, from: u64, len: u64, pageable: Option<u64>) {
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
    pub(crate) fn copy_in_batch(&self, to: u64, from: u64, len: u64) {
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
    pub(crate) fn run(
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
        let range = self.ranges[found];
        // Kernels go to and fro between few ranges.
        self.ranges.swap(found, found / 2);
        let host = range.host + (address - range.device());
        Ok(std::ptr::with_exposed_provenance_mut(host as usize))
    }
}

/// Reads so many bytes. A copy of a known length is one instruction, not a call.
///
/// # Safety
/// They can be read.
#[allow(unsafe_code)]
unsafe fn read<const BYTES: usize>(at: *const u8) -> u128 {
    let mut value = [0; 16];
    // SAFETY: the caller says so, and BYTES is 16 at most.
    unsafe { std::ptr::copy_nonoverlapping(at, value.as_mut_ptr(), BYTES) };
    u128::from_le_bytes(value)
}

/// Writes so many bytes.
///
/// # Safety
/// They can be written.
#[allow(unsafe_code)]
unsafe fn write<const BYTES: usize>(at: *mut u8, value: u128) {
    // SAFETY: the caller says so, and BYTES is 16 at most.
    unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), at, BYTES) };
}

#[allow(unsafe_code)]
impl Memory for Bus {
    fn load(&mut self, address: u64, bytes: usize) -> Result<u128, i32> {
        let at = self.at(address, bytes)?;
        // SAFETY: the bytes lie in a range that the machine's tests keep alive.
        Ok(unsafe {
            match bytes {
                1 => read::<1>(at),
                2 => read::<2>(at),
                4 => read::<4>(at),
                8 => read::<8>(at),
                16 => read::<16>(at),
                _ => unreachable!("no access of a kernel has {bytes} bytes"),
            }
        })
    }

    fn store(&mut self, address: u64, bytes: usize, value: u128) -> Result<(), i32> {
        let at = self.at(address, bytes)?;
        self.stored += bytes as u64;
        // SAFETY: as above.
        unsafe {
            match bytes {
                1 => write::<1>(at, value),
                2 => write::<2>(at, value),
                4 => write::<4>(at, value),
                8 => write::<8>(at, value),
                16 => write::<16>(at, value),
                _ => unreachable!("no access of a kernel has {bytes} bytes"),
            }
        }
        Ok(())
    }
}
