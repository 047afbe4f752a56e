//! The arena: a bounded piece of host memory, in slots of one size.
//!
//! A slot holds one object's value: its header, then the payload. The type of a slot says what may
//! be done with it. An [`Empty`] slot is filled in one of two ways: by a gather and then sealed, or
//! by a store and then verified. Only a [`Sealed`] slot is put. Only a [`Verified`] slot is
//! scattered, or kept for later. The layer for sealed values seals and verifies; with keys, it
//! encrypts and decrypts in place. Dropping a slot gives it back, whatever its state.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memmap2::{MmapMut, MmapRaw};
use penstock_contract::ErrorKind;
use penstock_value::header::{Checksum, Writer};
use penstock_value::sealed::{
    self, LARGEST_HEADER_BYTES, SealedBeside, SealedInPlace, SealedStore, SealedValue,
};

use crate::config::EngineConfig;
use crate::copy::cuda::{CudaError, Pins};
use crate::job::Transfer;
use crate::signal::Signals;
use crate::sync::Mutex;
use crate::{Counters, EngineError};

const PAGE: usize = 4096;

/// Host memory that a slot takes if its payload has up to `slot_bytes`.
pub fn slot_stride(slot_bytes: usize) -> usize {
    let pages = slot_bytes
        .saturating_add(LARGEST_HEADER_BYTES)
        .div_ceil(PAGE);
    pages.saturating_mul(PAGE)
}

/// The purpose of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Load,
    /// The value will be kept, pinned.
    Prefetch,
    Store,
    /// The value is kept, and nobody works on the slot.
    Keep,
}

/// Bytes that are pinned at a time: start-up and shutdown wait for no more. Tests have many pieces in
/// little memory.
pub(crate) const PIN_BYTES: usize = if cfg!(test) { 1 << 20 } else { 256 << 20 };

/// Bytes that are populated at a time: a huge page. Another thread that maps memory meanwhile waits
/// for no more.
#[cfg(target_os = "linux")]
const POPULATE_BYTES: usize = 2 << 20;

/// The memory and its free slots.
pub(crate) struct Arena {
    /// Declared before the memory, so that it is unpinned before it is unmapped.
    pins: Mutex<Option<Pins>>,
    memory: MmapRaw,
    stride: usize,
    slot_bytes: usize,
    header_bytes: usize,
    store_slots: usize,
    free: Mutex<Free>,
    signals: Arc<Signals>,
    counters: Arc<Counters>,
}

struct Free {
    /// Last in, first out: the pages of the slot that was used last exist, and may be in the cache.
    slots: Vec<usize>,
    held_by_stores: usize,
    held_by_prefetches: usize,
}

impl Free {
    /// How many slots are held for this purpose, if it has a bound.
    fn held_for(&mut self, purpose: Purpose) -> Option<&mut usize> {
        match purpose {
            Purpose::Store => Some(&mut self.held_by_stores),
            Purpose::Prefetch => Some(&mut self.held_by_prefetches),
            Purpose::Load | Purpose::Keep => None,
        }
    }
}

impl Arena {
    /// Reserves address space. Pages come into being when a slot is first used, or by
    /// [`populate`](Self::populate) or [`pin`](Self::pin).
    pub(crate) fn new(
        config: &EngineConfig,
        signals: Arc<Signals>,
        counters: Arc<Counters>,
    ) -> Result<Self, EngineError> {
        let stride = slot_stride(config.slot_bytes);
        let bytes = stride
            .checked_mul(config.slots)
            .ok_or(EngineError::Config("slots times slot_bytes overflows"))?;
        let memory =
            MmapMut::map_anon(bytes).map_err(|source| EngineError::Memory { bytes, source })?;
        // Gives fewer page faults and TLB misses where the system has huge pages. Where it refuses,
        // nothing is lost.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        // A child process has no use for the arena. And pinned pages must stay this process's: a
        // copy must not take their place.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::DontFork);
        Ok(Self {
            pins: Mutex::default(),
            memory: memory.into(),
            stride,
            slot_bytes: config.slot_bytes,
            header_bytes: sealed::header_bytes(config.keys.as_deref()),
            store_slots: config.store_slots,
            free: Mutex::new(Free {
                slots: (0..config.slots).rev().collect(),
                held_by_stores: 0,
                held_by_prefetches: 0,
            }),
            signals,
            counters,
        })
    }

    /// Unpins all slots. No copy of a device touches them any more.
    pub(crate) fn unpin(&self) {
        *self.pins.lock() = None;
    }

    /// Pins the slots for a device, some at a time, until all are pinned or `stop` says so. Slots
    /// can be used meanwhile, but copies are slower.
    pub(crate) fn pin(&self, device: i32, stop: impl Fn() -> bool) -> Result<(), CudaError> {
        let mut pins = self.pins.lock();
        if pins.is_some() {
            return Ok(());
        }
        self.pin_pieces(&mut pins, device, stop)
            .map_err(|(left, error)| {
                let unpinned = &self.counters.unpinned_bytes;
                unpinned.store(left as u64, Ordering::Relaxed);
                error
            })
    }

    /// An error says how many bytes are left.
    #[allow(unsafe_code)]
    fn pin_pieces(
        &self,
        pins: &mut Option<Pins>,
        device: i32,
        stop: impl Fn() -> bool,
    ) -> Result<(), (usize, CudaError)> {
        let bytes = self.memory.len();
        let pins = pins.insert(Pins::new(device).map_err(|error| (bytes, error))?);
        // Pieces of whole slots: a copy must not cross from one pinned piece into the next.
        let piece = (PIN_BYTES / self.stride).max(1) * self.stride;
        for start in (0..bytes).step_by(piece) {
            if stop() {
                break;
            }
            let address = self.memory.as_mut_ptr().wrapping_add(start);
            let len = piece.min(bytes - start);
            // Else the driver brings the pages into being, all of the piece in one go, and other
            // threads can map no memory meanwhile.
            self.populate_part(start, len, &stop);
            // SAFETY: the piece lies in the mapping, which is dropped after the pins; no slot is in
            // use then.
            unsafe { pins.add(address, len) }.map_err(|error| (bytes - start, error))?;
            let pinned = &self.counters.pinned_bytes;
            pinned.fetch_add(len as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Brings all pages into being, in the order in which slots are first used, until `stop` says
    /// so. Later loads then do not wait for pages. In a guest, they also do not wait for a host
    /// that must find the memory first.
    pub(crate) fn populate(&self, stop: impl Fn() -> bool) {
        self.populate_part(0, self.memory.len(), &stop);
    }

    fn populate_part(&self, start: usize, len: usize, stop: &impl Fn() -> bool) {
        let end = start + len;
        #[cfg(target_os = "linux")]
        for start in (start..end).step_by(POPULATE_BYTES) {
            let len = POPULATE_BYTES.min(end - start);
            let populate = memmap2::Advice::PopulateWrite;
            // Kernels before 5.14 refuse this: there, a page comes with its first use.
            if stop() || self.memory.advise_range(populate, start, len).is_err() {
                return;
            }
        }
    }

    /// A free slot, unless there is none, or stores already hold their share.
    pub(crate) fn lease(self: &Arc<Self>, purpose: Purpose) -> Lent {
        let mut free = self.free.lock();
        let is_store = purpose == Purpose::Store;
        if is_store && free.held_by_stores == self.store_slots {
            return Lent::NoShare;
        }
        let Some(index) = free.slots.pop() else {
            return Lent::NoneFree;
        };
        if let Some(held) = free.held_for(purpose) {
            *held += 1;
        }
        Lent::Slot(self.slot(index, purpose))
    }

    /// Slots that prefetches are filling.
    pub(crate) fn prefetching(&self) -> usize {
        self.free.lock().held_by_prefetches
    }

    fn slot(self: &Arc<Self>, index: usize, purpose: Purpose) -> Slot<Empty> {
        let in_use = self.counters.slots_in_use.fetch_add(1, Ordering::Relaxed) + 1;
        self.counters
            .slots_peak
            .fetch_max(in_use, Ordering::Relaxed);
        Slot {
            lease: Lease {
                arena: Arc::clone(self),
                index,
                purpose,
            },
            state: Empty,
        }
    }
}

/// What came of the request for a slot.
pub(crate) enum Lent {
    Slot(Slot<Empty>),
    /// Stores already hold as many slots as they may.
    NoShare,
    NoneFree,
}

/// The right to use one slot.
struct Lease {
    arena: Arc<Arena>,
    index: usize,
    purpose: Purpose,
}

impl Lease {
    fn address(&self) -> *mut u8 {
        self.arena
            .memory
            .as_mut_ptr()
            .wrapping_add(self.index * self.arena.stride)
    }

    fn capacity(&self) -> usize {
        LARGEST_HEADER_BYTES + self.arena.slot_bytes
    }

    #[allow(unsafe_code)]
    fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.capacity());
        // SAFETY: the slot's `stride >= capacity` bytes lie in the mapping, which lives as long
        // as the arena that the lease holds; anonymous mappings are zeroed, hence initialised.
        // The index was popped from the free list and returns to it only when the lease is
        // dropped, so nobody else touches these bytes; `&self` keeps `bytes_mut` away.
        unsafe { std::slice::from_raw_parts(self.address().add(range.start), range.len()) }
    }

    #[allow(unsafe_code)]
    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.capacity());
        // SAFETY: as in `bytes`; `&mut self` makes the slice unique.
        unsafe { std::slice::from_raw_parts_mut(self.address().add(range.start), range.len()) }
    }
}

impl Lease {
    /// Notes that nobody works on the slot any more.
    fn at_rest(&self, free: &mut Free) {
        if let Some(held) = free.held_for(self.purpose) {
            *held -= 1;
        }
        if self.purpose != Purpose::Keep {
            let in_use = &self.arena.counters.slots_in_use;
            in_use.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        {
            let mut free = self.arena.free.lock();
            free.slots.push(self.index);
            self.at_rest(&mut free);
        }
        if self.purpose == Purpose::Keep {
            let kept = &self.arena.counters.slots_kept;
            kept.fetch_sub(1, Ordering::Relaxed);
        }
        self.arena.signals.copy.notify_one();
        self.arena.signals.get.notify_one();
    }
}

/// A slot whose content has no meaning yet.
pub(crate) struct Empty;

/// A slot that holds a payload as it was gathered.
pub(crate) struct Gathered {
    payload_bytes: usize,
    /// The checksum of the payload; of nothing if the payload will be encrypted.
    checksum: u64,
    writer: Writer,
}

/// A slot that holds a whole value, ready to be put.
pub(crate) struct Sealed {
    value: SealedInPlace,
    /// The payload's state, unless it was encrypted.
    plain: Option<Verified>,
}

/// A slot that holds a payload as it was gathered, or the payload of a value which arrived whole,
/// under its own key, and matched its checksum or its authentication.
pub(crate) struct Verified {
    payload_bytes: usize,
    context: Arc<[u8]>,
    writer: Writer,
}

impl Verified {
    fn of(transfer: &Transfer, writer: Writer) -> Self {
        Self {
            payload_bytes: transfer.bytes,
            context: Arc::clone(&transfer.context),
            writer,
        }
    }
}

/// A slot of the arena, in one of its states.
pub(crate) struct Slot<State> {
    lease: Lease,
    state: State,
}

impl Slot<Empty> {
    /// Room for a payload of `bytes`.
    pub(crate) fn payload_mut(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.lease.arena.header_bytes;
        self.lease.bytes_mut(start..start + bytes)
    }

    /// Room for a value with a payload of `payload_bytes`, encrypted or not.
    pub(crate) fn value_mut(&mut self, payload_bytes: usize) -> &mut [u8] {
        self.lease
            .bytes_mut(0..LARGEST_HEADER_BYTES + payload_bytes)
    }

    /// Notes that the transfer's payload has been filled.
    pub(crate) fn gathered(self, transfer: &Transfer, checksum: u64) -> Slot<Gathered> {
        Slot {
            lease: self.lease,
            state: Gathered {
                payload_bytes: transfer.bytes,
                checksum,
                writer: transfer.writer,
            },
        }
    }

    /// Notes that the slot holds the transfer's payload, as the layer for sealed values has
    /// verified.
    pub(crate) fn verified(self, transfer: &Transfer, word: sealed::Verified) -> Slot<Verified> {
        assert_eq!(
            word.bytes(),
            transfer.bytes as u64,
            "of the length asked for"
        );
        Slot {
            lease: self.lease,
            state: Verified::of(transfer, word.writer()),
        }
    }
}

impl Slot<Gathered> {
    pub(crate) fn payload(&self) -> &[u8] {
        let start = self.lease.arena.header_bytes;
        self.lease.bytes(start..start + self.state.payload_bytes)
    }

    /// Makes a coded value of the payload, which is the payload of `transfer`, at the beginning of
    /// `room`, and takes that from it. The payload stays as it is. `None` if values like this are
    /// not coded, or if this one would be no shorter.
    pub(crate) fn code<'r>(
        &self,
        store: &SealedStore,
        transfer: &Transfer,
        room: &mut &'r mut [u8],
    ) -> Result<Option<SealedBeside<'r>>, ErrorKind> {
        let Some(element) = transfer.element else {
            return Ok(None);
        };
        let label = transfer.label(self.state.writer);
        store
            .seal_coded(label, element, self.payload(), self.state.checksum, room)
            .map_err(|error| error.kind())
    }

    /// Makes a value of the payload, which is the payload of `transfer`.
    pub(crate) fn seal(
        mut self,
        store: &SealedStore,
        transfer: &Transfer,
    ) -> Result<Slot<Sealed>, ErrorKind> {
        let Gathered {
            payload_bytes,
            checksum,
            writer,
        } = self.state;
        let value_bytes = self.lease.arena.header_bytes + payload_bytes;
        let value = self.lease.bytes_mut(0..value_bytes);
        let value = store
            .seal_in_place(transfer.label(writer), value, checksum)
            .map_err(|error| error.kind())?;
        let plain = (!value.is_encrypted()).then(|| Verified::of(transfer, writer));
        Ok(Slot {
            lease: self.lease,
            state: Sealed { value, plain },
        })
    }

    /// The payload, which is the payload of `transfer`. It is as good as a verified one.
    pub(crate) fn into_verified(self, transfer: &Transfer) -> Slot<Verified> {
        Slot {
            state: Verified::of(transfer, self.state.writer),
            lease: self.lease,
        }
    }
}

impl Slot<Sealed> {
    /// The value. `position` is the number of tokens before its payload.
    pub(crate) fn value(&self, position: u64) -> SealedValue<'_> {
        let value = &self.state.value;
        value.value(self.lease.bytes(0..value.bytes()), position)
    }

    /// The payload, unless it was encrypted in place.
    pub(crate) fn into_verified(self) -> Option<Slot<Verified>> {
        let lease = self.lease;
        self.state.plain.map(|state| Slot { lease, state })
    }
}

impl Slot<Verified> {
    /// The payload as if it had been gathered, to be put anew. With `sum` its checksum is taken.
    pub(crate) fn into_gathered(self, sum: bool) -> Slot<Gathered> {
        let summed = if sum { self.payload() } else { &[] };
        let checksum = Checksum::of(summed);
        Slot {
            lease: self.lease,
            state: Gathered {
                payload_bytes: self.state.payload_bytes,
                checksum,
                writer: self.state.writer,
            },
        }
    }

    /// Puts the slot at rest: it no longer counts as in use.
    pub(crate) fn keep(mut self) -> Self {
        let arena = Arc::clone(&self.lease.arena);
        self.lease.at_rest(&mut arena.free.lock());
        self.lease.purpose = Purpose::Keep;
        arena.counters.slots_kept.fetch_add(1, Ordering::Relaxed);
        // Stores may have waited for their share, and all lanes for a value to be given up.
        arena.signals.copy.notify_one();
        arena.signals.get.notify_one();
        self
    }

    /// Who computed the payload.
    pub(crate) fn writer(&self) -> Writer {
        self.state.writer
    }

    /// Whether this is what the transfer would load, if the key is the same.
    pub(crate) fn is_of(&self, transfer: &Transfer) -> bool {
        self.state.payload_bytes == transfer.bytes && self.state.context == transfer.context
    }

    pub(crate) fn payload(&self) -> &[u8] {
        let start = self.lease.arena.header_bytes;
        self.lease.bytes(start..start + self.state.payload_bytes)
    }
}

#[cfg(all(test, not(loom), target_os = "linux"))]
mod tests {
    use super::*;

    /// How many page faults without a disk this thread has had so far.
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit(')').next().unwrap();
        after_name
            .split_whitespace()
            .nth(7)
            .unwrap()
            .parse()
            .unwrap()
    }

    /// The faults of the first writes to all slots, 64 MiB together.
    fn faults_of_first_use(populate: bool) -> u64 {
        let config = EngineConfig::new(1 << 20, 64);
        let arena = Arena::new(&config, Arc::default(), Arc::default());
        let arena = Arc::new(arena.unwrap());
        if populate {
            arena.populate(|| false);
        }
        let mut slots: Vec<_> = (0..64)
            .map(|_| match arena.lease(Purpose::Load) {
                Lent::Slot(slot) => slot,
                Lent::NoShare | Lent::NoneFree => unreachable!("no other is lent"),
            })
            .collect();
        let before = faults();
        for slot in &mut slots {
            slot.payload_mut(1 << 20).fill(1);
        }
        faults() - before
    }

    #[test]
    fn a_child_process_does_not_get_the_arena() {
        let config = EngineConfig::new(1 << 20, 64);
        let arena = Arena::new(&config, Arc::default(), Arc::default()).unwrap();
        let first = arena.memory.as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // The kernel may count the arena and memory beside it as one mapping.
        let holds_arena = |line: &&str| {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let ends = range.map(|(start, end)| [start, end].map(|n| usize::from_str_radix(n, 16)));
            matches!(ends, Some([Ok(start), Ok(end)]) if (start..end).contains(&first))
        };
        let mut own = maps.lines().skip_while(|line| !holds_arena(line));
        let flags = own.find(|line| line.starts_with("VmFlags:"));
        assert!(
            flags.unwrap().split(' ').any(|flag| flag == "dc"),
            "{flags:?}"
        );
    }

    #[test]
    fn a_populated_arena_has_its_pages_before_they_are_used() {
        let page = MmapMut::map_anon(PAGE).unwrap();
        if page.advise(memmap2::Advice::PopulateWrite).is_err() {
            eprintln!("skipped: an arena's pages, which this kernel does not populate");
            return;
        }
        // Huge pages, at best.
        assert!(faults_of_first_use(false) >= 32);
        assert!(faults_of_first_use(true) < 8);
    }
}
