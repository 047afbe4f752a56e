//! Where everything lies in a segment: a function of its size alone.
//!
//! ```text
//! header │ states: 8 words a bucket │ bodies: 16 words an entry │ belongings │ links │ pages
//! ```
//!
//! All but the pages is made of words of 8 bytes, which are only ever accessed atomically.

use penstock_contract::{Error, ErrorKind, Result};

/// Bytes in front of everything. The header's words lie here. Words that change have cache lines of
/// their own.
pub(super) const HEADER_BYTES: u64 = 4096;
/// Entries of a bucket: their states fill one cache line.
pub(super) const WAYS: u64 = 8;
/// Words of an entry's body.
pub(super) const BODY_WORDS: u64 = 16;
/// Words of the header that change: where the search for room goes on …
pub(super) const HAND_WORD: u64 = 64;
/// … how many values were ever published …
pub(super) const STAMP_WORD: u64 = 80;
/// … how many pages are in use, or nearly …
pub(super) const USED_WORD: u64 = 96;
/// … and the time of use up to which values go, and where the hand was when that time was drawn.
pub(super) const HORIZON_WORD: u64 = 112;
pub(super) const DRAWN_WORD: u64 = 113;

const WORD: u64 = 8;
const SMALLEST: u64 = 1 << 20;
const LARGEST: u64 = 1 << 45;
const SMALLEST_PAGE: u64 = 4 << 10;
const LARGEST_PAGE: u64 = 16 << 10;
/// What a page has room for beyond a power of two. Most values are a power of two plus their
/// header, and the header would otherwise cost a page of its own.
const PAGE_EXTRA: u64 = penstock_value::header::HEADER_BYTES as u64;
/// The pages begin at a page of the machine, and the segment ends at one.
const ALIGNMENT: u64 = 4096;

/// A segment's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes of the whole segment, as asked for.
    pub(super) size: u64,
    /// Bytes of a page.
    pub(super) page_bytes: u64,
    /// How many pages there are.
    pub(super) pages: u64,
    /// How many buckets of entries there are.
    pub(super) buckets: u64,
}

impl Geometry {
    /// The shape of a segment of this size.
    pub(super) fn of(size: u64) -> Result<Self> {
        if !(SMALLEST..=LARGEST).contains(&size) {
            return Err(Error::new(
                ErrorKind::Config,
                format!("a shared-memory pool has 1 MiB to 32 TiB, not {size} bytes"),
            ));
        }
        // Small pools get small pages, so that they too hold some thousands of pages.
        let page = (size / 8192)
            .next_power_of_two()
            .clamp(SMALLEST_PAGE, LARGEST_PAGE);
        let page_bytes = page + PAGE_EXTRA;
        // As many entries as pages: a value has at least one.
        let cost = page_bytes + (1 + BODY_WORDS + 2) * WORD;
        let last_bucket = WAYS * (1 + BODY_WORDS) * WORD;
        let pages = (size - HEADER_BYTES - last_bucket - 2 * ALIGNMENT) / cost;
        Ok(Self {
            size,
            page_bytes,
            pages,
            buckets: pages.div_ceil(WAYS),
        })
    }

    pub(super) fn entries(&self) -> u64 {
        self.buckets * WAYS
    }

    /// The longest value accepted: two of them fit beside each other.
    pub(super) fn max_value_bytes(&self) -> u64 {
        self.pages / 2 * self.page_bytes
    }

    /// The word with an entry's state.
    pub(super) fn state_word(&self, entry: u64) -> u64 {
        HEADER_BYTES / WORD + entry
    }

    /// The first word of an entry's body.
    pub(super) fn body_word(&self, entry: u64) -> u64 {
        self.state_word(self.entries()) + entry * BODY_WORDS
    }

    /// The word that says what a page belongs to.
    pub(super) fn belonging_word(&self, page: u64) -> u64 {
        self.body_word(self.entries()) + page
    }

    /// The word that says which page follows a page in its value.
    pub(super) fn link_word(&self, page: u64) -> u64 {
        self.belonging_word(self.pages) + page
    }

    /// Words in all.
    pub(super) fn words(&self) -> u64 {
        self.link_word(self.pages)
    }

    /// Where a page's bytes begin.
    pub(super) fn page_at(&self, page: u64) -> u64 {
        (self.words() * WORD).next_multiple_of(ALIGNMENT) + page * self.page_bytes
    }

    /// Bytes of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.page_at(self.pages).next_multiple_of(ALIGNMENT)
    }

    /// How many pages a value takes.
    pub(super) fn pages_of(&self, value_bytes: u64) -> u64 {
        value_bytes.div_ceil(self.page_bytes).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_is_used_up_and_not_exceeded() {
        for size in (20..45).flat_map(|bits| [1_u64 << bits, (1 << bits) + 12_345, 3 << (bits - 1)])
        {
            let geometry = Geometry::of(size).unwrap();
            assert!(geometry.file_bytes() <= size, "{geometry:?}");
            let values = geometry.pages * geometry.page_bytes;
            assert!(values > size / 100 * 94, "{geometry:?}");
            assert!(geometry.max_value_bytes() > size / 4, "{geometry:?}");
            assert!(geometry.entries() >= geometry.pages);
            assert!(geometry.entries() < 1 << 32 && geometry.pages < 1 << 32);
            assert_eq!(
                geometry.state_word(0) % 8,
                0,
                "a bucket's states share a line"
            );
            assert_eq!(geometry.body_word(0) % 8, 0);
            assert!(geometry.words() * WORD <= geometry.page_at(0));
        }
        for size in [0, 4096, SMALLEST - 1, LARGEST + 1, u64::MAX] {
            let error = Geometry::of(size).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{size}");
        }
    }

    #[test]
    fn a_power_of_two_and_its_header_waste_no_page() {
        let geometry = Geometry::of(1 << 30).unwrap();
        for bytes in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
            let value = bytes + PAGE_EXTRA;
            assert_eq!(geometry.pages_of(value), bytes / LARGEST_PAGE);
        }
        assert_eq!(geometry.pages_of(0), 1);
        assert_eq!(geometry.pages_of(geometry.page_bytes + 1), 2);
    }
}
