//! A segment's memory: the only way to it.
//!
//! Other processes change this memory at any time. So the only references to it are to atomic
//! words. Values are copied in and out by functions that may race (see [`racing`]).
#![allow(
    unsafe_code,
    reason = "memory that others write has no safe type; this is all there is of it"
)]

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use penstock_contract::memory::Run;
use penstock_value::copies::{SummedCopy, racing};

use super::geometry::Geometry;
use super::state::Word;

/// Bytes mapped at a time. A process that touched the memory page by page would pay a fault for
/// each 4 KiB, which takes several times as long as copying them.
const CHUNK_BYTES: u64 = 2 << 20;

/// A segment in this process's address space.
pub(super) struct Mapping {
    memory: MmapRaw,
    /// Words from the start that are only accessed atomically.
    words: u64,
    /// Where the pages are, which are only copied from and to.
    pages: std::ops::Range<u64>,
    /// Which chunks of the memory this process has mapped.
    warm: Vec<AtomicBool>,
}

impl Mapping {
    pub(super) fn new(file: &File, geometry: &Geometry) -> io::Result<Self> {
        let bytes = usize::try_from(geometry.file_bytes()).map_err(io::Error::other)?;
        let memory = MmapOptions::new().len(bytes).map_raw(file)?;
        let chunks = geometry.file_bytes().div_ceil(CHUNK_BYTES);
        let mapping = Self {
            memory,
            words: geometry.words(),
            pages: geometry.page_at(0)..geometry.page_at(geometry.pages),
            warm: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
        };
        mapping.warm(0, mapping.pages.start);
        Ok(mapping)
    }

    /// Maps the memory that is going to be touched, in large pieces, unless that was done before.
    fn warm(&self, at: u64, len: u64) {
        let chunks = at / CHUNK_BYTES..(at + len).div_ceil(CHUNK_BYTES);
        for chunk in chunks {
            let warm = &self.warm[chunk as usize];
            if warm.load(Ordering::Relaxed) || warm.swap(true, Ordering::Relaxed) {
                continue;
            }
            let start = (chunk * CHUNK_BYTES) as usize;
            let len = (CHUNK_BYTES as usize).min(self.memory.len() - start);
            // If the system cannot do this, each page is mapped when it is touched.
            #[cfg(target_os = "linux")]
            let _ = self
                .memory
                .advise_range(memmap2::Advice::PopulateRead, start, len);
        }
    }

    /// Maps all of the memory, until `stop` says so. Loads and stores then find it mapped.
    pub(super) fn warm_up(&self, stop: &dyn Fn() -> bool) {
        for chunk in 0..self.warm.len() as u64 {
            if stop() {
                return;
            }
            self.warm(chunk * CHUNK_BYTES, 1);
        }
    }

    /// A word, by its number.
    pub(super) fn word(&self, index: u64) -> &AtomicU64 {
        assert!(index < self.words, "word {index} of {}", self.words);
        let word = self.memory.as_mut_ptr().cast::<u64>();
        // SAFETY: the word lies in the mapping, which starts at a page of the machine and lives as
        // long as the reference. Words and pages do not overlap, so all of this process's accesses
        // to the word are atomic. So are those of the other processes, which run this code too.
        unsafe { AtomicU64::from_ptr(word.add(index as usize)) }
    }

    /// Copies bytes into pages, from `at` on.
    pub(super) fn copy_in(&self, at: u64, from: &[u8]) {
        self.check(at, from.len());
        self.warm(at, from.len() as u64);
        // SAFETY: checked: the destination lies in the mapping. The source is this process's own.
        unsafe {
            let to = self.memory.as_mut_ptr().add(at as usize);
            racing::copy_in(from.as_ptr(), to, from.len());
        }
    }

    /// Copies bytes into pages, from `at` on, as the next bytes of a payload that is summed.
    pub(super) fn copy_in_summed(&self, at: u64, from: &[u8], copy: &mut SummedCopy) {
        self.check(at, from.len());
        self.warm(at, from.len() as u64);
        // SAFETY: checked: the destination lies in the mapping. The source is this process's own.
        unsafe { copy.copy_in(from, self.memory.as_mut_ptr().add(at as usize)) };
    }

    /// Copies bytes out of pages, from `at` on. If others write to these pages meanwhile, any
    /// mixture of bytes may arrive.
    pub(super) fn copy_out(&self, at: u64, into: &mut [u8]) {
        self.check(at, into.len());
        self.warm(at, into.len() as u64);
        // SAFETY: checked: the source lies in the mapping. The destination is this process's own.
        unsafe {
            let from = self.memory.as_mut_ptr().add(at as usize);
            racing::copy_out(from, into.as_mut_ptr(), into.len());
        }
    }

    /// Copies bytes out of pages, from `at` on, as the next bytes of a payload that is summed.
    pub(super) fn copy_out_summed(&self, at: u64, into: &mut [u8], copy: &mut SummedCopy) {
        self.check(at, into.len());
        self.warm(at, into.len() as u64);
        // SAFETY: checked: the source lies in the mapping. The destination is this process's own.
        unsafe { copy.copy_out(self.memory.as_mut_ptr().add(at as usize), into) };
    }

    /// Takes in bytes of pages, from `at` on, as the next ones of a payload that is summed.
    pub(super) fn sum(&self, at: u64, len: usize, copy: &mut SummedCopy) {
        self.check(at, len);
        self.warm(at, len as u64);
        // SAFETY: checked: the source lies in the mapping.
        unsafe { copy.sum(self.memory.as_mut_ptr().add(at as usize), len) };
    }

    /// The address of bytes of pages, for whoever copies them by means of its own.
    pub(super) fn run(&self, at: u64, len: usize) -> Run {
        self.check(at, len);
        let start = self.memory.as_mut_ptr().wrapping_add(at as usize);
        Run::new(start, len)
    }

    /// All of the memory.
    pub(super) fn all(&self) -> Run {
        Run::new(self.memory.as_mut_ptr(), self.memory.len())
    }

    fn check(&self, at: u64, len: usize) {
        let end = at.checked_add(len as u64);
        assert!(
            at >= self.pages.start && end.is_some_and(|end| end <= self.pages.end),
            "{len} bytes at {at} are not in the pages"
        );
    }
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn swap_if(&self, current: u64, new: u64) -> bool {
        self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn fence(order: Ordering) {
        fence(order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping() -> (tempfile::NamedTempFile, Geometry, Mapping) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let geometry = Geometry::of(1 << 20).unwrap();
        file.as_file().set_len(geometry.file_bytes()).unwrap();
        let mapping = Mapping::new(file.as_file(), &geometry).unwrap();
        (file, geometry, mapping)
    }

    #[test]
    fn nothing_outside_is_reached() {
        let (_file, geometry, mapping) = mapping();
        let (start, end) = (geometry.page_at(0), geometry.page_at(geometry.pages));
        let caught =
            |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
        mapping.copy_in(end - 2, &[1; 2]);
        for at in [0, start - 1, end - 1, end, u64::MAX] {
            assert!(caught(&|| mapping.copy_in(at, &[1; 2])), "{at}");
            assert!(caught(&|| mapping.copy_out(at, &mut [1; 2])), "{at}");
        }
        mapping.word(geometry.words() - 1);
        assert!(caught(&|| {
            mapping.word(geometry.words());
        }));
    }

    /// Bytes of the file that this process has mapped.
    #[cfg(target_os = "linux")]
    fn mapped(mapping: &Mapping) -> u64 {
        let first = format!("{:x}-", mapping.memory.as_ptr().addr());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split(&first).nth(1).expect("mapped");
        let rss = own.lines().find_map(|line| line.strip_prefix("Rss:"));
        let kib: u64 = rss.unwrap().trim().trim_end_matches(" kB").parse().unwrap();
        kib << 10
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn all_of_it_is_mapped_in_the_background() {
        let page = memmap2::MmapMut::map_anon(4096).unwrap();
        if page.advise(memmap2::Advice::PopulateRead).is_err() {
            eprintln!("skipped: mapping in advance, which this kernel does not do");
            return;
        }
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let geometry = Geometry::of(64 << 20).unwrap();
        file.as_file().set_len(geometry.file_bytes()).unwrap();
        let open = || Mapping::new(file.as_file(), &geometry).unwrap();
        // The pages come into being here.
        open().copy_in(geometry.page_at(0), &vec![1; 32 << 20]);

        let mapping = open();
        assert!(mapped(&mapping) < 8 << 20);
        mapping.warm_up(&|| true);
        assert!(mapped(&mapping) < 8 << 20);
        mapping.warm_up(&|| false);
        assert!(mapped(&mapping) >= 32 << 20);
    }
}
