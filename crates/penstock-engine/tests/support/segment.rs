//! A pool in shared memory for one test.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use penstock_store::ShmStore;

/// A pool of this test's own, which is removed when the test ends.
pub struct Pool(String);

impl Pool {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(format!("test-engine-{}-{n}", std::process::id()))
    }

    pub fn name(&self) -> &str {
        &self.0
    }

    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm/penstock-{}", self.0))
    }

    pub fn open(&self, size: u64) -> Arc<ShmStore> {
        Arc::new(ShmStore::open(&self.0, Some(size)).unwrap())
    }

    /// Changes one byte in every copy of these bytes. Returns how many there were.
    pub fn damage(&self, bytes: &[u8]) -> usize {
        let memory = fs::read(self.path()).unwrap();
        let file = fs::OpenOptions::new().write(true).open(self.path());
        let file = file.unwrap();
        let places = memory.windows(bytes.len()).enumerate();
        let places = places.filter(|(_, window)| *window == bytes);
        places
            .map(|(at, _)| file.write_all_at(&[!memory[at]], at as u64).unwrap())
            .count()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}
