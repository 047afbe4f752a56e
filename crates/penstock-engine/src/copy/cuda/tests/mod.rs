//! Tests of the executor against a stand-in for the driver, in host memory.
//!
//! [`penstock_cuda_standin`] says what they show, and what they cannot.

mod calibrations;
mod copies;
mod faults;
mod jobs;
mod node;
mod objects;
mod order;

use std::sync::Arc;

use penstock_layout::{Axis, Descriptor, Interior, KvLayout, Segment, Span};

use super::symbols::Symbols;
use super::{CudaError, CudaExecutor, Pins};
use crate::Region;
use crate::copy::{Executor, Gathering, Scattering};
use penstock_cuda_standin::Machine;

/// Sizes of a cache's axes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    layers: u16,
    blocks: u64,
    heads: u16,
    tokens: u64,
    content: u64,
}

/// Memory of the test, touched through its address only.
struct Bytes {
    start: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: plain memory; tests touch it only while no copy does, or to find out that one did.
#[allow(unsafe_code)]
unsafe impl Send for Bytes {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Bytes {}

#[allow(unsafe_code)]
impl Bytes {
    fn new(len: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(len.max(1), 4096).unwrap();
        // SAFETY: the layout has a size.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        Self { start, layout }
    }

    fn len(&self) -> usize {
        self.layout.size()
    }

    fn read(&self) -> Vec<u8> {
        // SAFETY: initialised, and as long.
        unsafe { std::slice::from_raw_parts(self.start, self.len()) }.to_vec()
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        // SAFETY: inside, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }

    fn fill(&self, seed: u64) {
        self.write(0, &pattern(self.len(), seed));
    }
}

impl Drop for Bytes {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made by `new` with this layout.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
    }
}

/// Bytes that differ for each seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// A KV cache on a machine.
struct Cache {
    machine: Arc<Machine>,
    sizes: Sizes,
    layout: KvLayout,
    descriptor: Descriptor,
    memory: Bytes,
    region: Region,
}

impl Cache {
    #[allow(unsafe_code)]
    fn new(machine: &Arc<Machine>, layout: KvLayout, sizes: Sizes, seed: u64) -> Self {
        let share = Span::new(0..sizes.layers, 0..sizes.heads).unwrap();
        let (blocks, tokens, content) = (sizes.blocks, sizes.tokens, sizes.content);
        let descriptor = Descriptor::packed(layout, share, blocks, tokens, content).unwrap();
        let memory = Bytes::new(descriptor.region_lens()[0] as usize);
        memory.fill(seed);
        let address = machine.adopt(memory.start, memory.len());
        // SAFETY: mapped as long as the cache; tests keep off blocks of copies under way.
        let region = unsafe { Region::new(address as usize, memory.len() as u64) };
        Self {
            machine: Arc::clone(machine),
            sizes,
            layout,
            descriptor,
            memory,
            region,
        }
    }

    fn whole(&self) -> Span {
        self.descriptor.share()
    }

    fn segments(&self, blocks: &[u64], span: &Span) -> Vec<Segment> {
        let mut segments = Vec::new();
        (self.descriptor)
            .segments(blocks.iter().copied(), span, &mut segments)
            .unwrap();
        segments
    }

    /// Where each byte of the blocks lies in canonical order, from the layout's name alone.
    fn places(&self, blocks: &[u64], span: &Span) -> Vec<usize> {
        let Sizes {
            layers,
            blocks: count,
            heads,
            tokens,
            content,
        } = self.sizes;
        let mut places = Vec::new();
        for &block in blocks {
            for layer in span.layers() {
                let (outer, inner): (Vec<u64>, Vec<u64>) = match self.descriptor.interior() {
                    Interior::Hnc => (span.heads().map(u64::from).collect(), (0..tokens).collect()),
                    Interior::Nhc => ((0..tokens).collect(), span.heads().map(u64::from).collect()),
                };
                for &first in &outer {
                    for &second in &inner {
                        let (head, token) = match self.descriptor.interior() {
                            Interior::Hnc => (first, second),
                            Interior::Nhc => (second, first),
                        };
                        let mut at = 0;
                        for axis in self.layout.order() {
                            let (index, size) = match axis {
                                Axis::Layer => (u64::from(layer), u64::from(layers)),
                                Axis::Block => (block, count),
                                Axis::Head => (head, u64::from(heads)),
                                Axis::Token => (token, tokens),
                                Axis::Content => (0, content),
                            };
                            at = at * size + index;
                        }
                        places.extend((0..content).map(|byte| (at + byte) as usize));
                    }
                }
            }
        }
        places
    }

    /// Copies out of the device; returns the checksum.
    #[allow(unsafe_code)]
    fn gather(
        &self,
        executor: &CudaExecutor,
        blocks: &[u64],
        span: &Span,
        payload: &mut [u8],
    ) -> Result<u64, CudaError> {
        let segments = self.segments(blocks, span);
        let mut checksum = 0;
        let gathering = Gathering {
            segments: &segments,
            payload,
            checksum: Some(&mut checksum),
        };
        // SAFETY: the segments are the descriptor's, the payload is as long as they are.
        unsafe { executor.gather(&[self.region], &mut [gathering]) }?;
        Ok(checksum)
    }

    #[allow(unsafe_code)]
    fn scatter(
        &self,
        executor: &CudaExecutor,
        blocks: &[u64],
        span: &Span,
        payload: &[u8],
    ) -> Result<(), CudaError> {
        let segments = self.segments(blocks, span);
        let scattering = Scattering {
            segments: &segments,
            payload,
        };
        // SAFETY: as in `gather`.
        unsafe { executor.scatter(&[self.region], &[scattering]) }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.machine.forget(self.memory.start);
    }
}

/// Memory of a payload, pinned or not, at an offset from a page.
struct Payload {
    pins: Option<Pins>,
    memory: Bytes,
    offset: usize,
}

impl Payload {
    #[allow(unsafe_code)]
    fn new(machine: &Machine, len: usize, offset: usize, pinned: bool) -> Self {
        let memory = Bytes::new(offset + len);
        let pins = pinned.then(|| {
            let mut pins = Pins::new(machine.ordinal).unwrap();
            // SAFETY: unpinned before it is freed, in the order of the fields.
            unsafe { pins.add(memory.start, memory.len()) }.unwrap();
            pins
        });
        Self {
            pins,
            memory,
            offset,
        }
    }

    #[allow(unsafe_code)]
    fn bytes(&mut self) -> &mut [u8] {
        let len = self.memory.len() - self.offset;
        // SAFETY: inside the memory, and `&mut self` makes it the only one.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start.add(self.offset), len) }
    }

    fn is_pinned(&self) -> bool {
        self.pins.is_some()
    }
}

/// The stand-in's calls, in the driver's place.
#[allow(unsafe_code)]
pub(super) fn installed() -> Result<Symbols, CudaError> {
    // SAFETY: each has the signature of `cuda.h` for its name.
    unsafe { Symbols::load(&penstock_cuda_standin::find) }
}
