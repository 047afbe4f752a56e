//! Regions: the KV memory that an engine reads and writes.

/// Memory of the serving engine in which its KV lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    address: usize,
    len: u64,
}

impl Region {
    /// The `len` bytes at `address`.
    ///
    /// # Safety
    ///
    /// From its registration until [`crate::Engine::unregister`] has returned true, or
    /// [`crate::Engine::shutdown`] has returned and [`crate::Engine::is_copying`] is false, or the
    /// engine has been dropped:
    /// - the bytes are mapped, readable and writable, by the device that they are registered for;
    /// - no Rust reference to them exists while a job touches them;
    /// - the blocks of a store job are not written until the job is released, and those of a
    ///   load job are neither read nor written until the job is over.
    #[allow(unsafe_code)]
    pub unsafe fn new(address: usize, len: u64) -> Self {
        Self { address, len }
    }

    /// The number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.address
    }
}
