//! The errors and faults of an engine.

use penstock_layout::{LayoutError, Span};

use crate::CudaError;

/// Why an engine refused a call. Errors never tell what happens to an accepted job: its outcomes
/// do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A setting is out of bounds.
    #[error("{0}")]
    Config(&'static str),
    /// The arena's memory could not be reserved.
    #[error("cannot reserve {bytes} bytes of host memory: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A lane's thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// A group has no memory registered.
    #[error("no KV memory is registered with this engine for group {group}")]
    NotRegistered {
        /// The group.
        group: u16,
    },
    /// A group's memory is registered already.
    #[error("KV memory of group {group} is registered with this engine already")]
    AlreadyRegistered {
        /// The group.
        group: u16,
    },
    /// A group has no namespace, so its objects have no keys.
    #[error("group {group} has no namespace: name it before its first job")]
    Unnamed {
        /// The group.
        group: u16,
    },
    /// Another group has the namespace, so their objects could not be told apart.
    #[error("the namespace of group {group} is that of group {other} already")]
    NamespaceTaken {
        /// The group.
        group: u16,
        /// The group that has it.
        other: u16,
    },
    /// A region is smaller than the layout says.
    #[error("region {region} has {given} bytes, but the layout takes it to have {expected}")]
    RegionTooSmall {
        /// The region's index.
        region: usize,
        /// The bytes that the layout expects.
        expected: u64,
        /// Bytes given.
        given: u64,
    },
    /// The number of regions is not the descriptor's.
    #[error("the layout has {expected} regions, but {given} were given")]
    RegionCount {
        /// Regions of the descriptor.
        expected: usize,
        /// Regions given.
        given: usize,
    },
    /// An object holds more than a slot can.
    #[error("an object of {bytes} bytes does not fit a slot of {slot_bytes}")]
    ObjectTooLarge {
        /// Payload bytes of the object.
        bytes: u64,
        /// Payload bytes of a slot.
        slot_bytes: usize,
    },
    /// An object names layers, heads or a block that the registered memory does not have.
    #[error("not in the registered memory: {0}")]
    NotInLayout(#[from] LayoutError),
    /// An object's span has no layer of its group.
    #[error("no layer of the object's group lies in span {span}")]
    NoLayers {
        /// The span.
        span: Span,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// A copy of no blocks.
    #[error("a copy needs at least one block")]
    NoBlocks,
    /// The job id is in use until the job's last completion has been polled.
    #[error("job {0} is still outstanding")]
    DuplicateJob(u64),
    /// There are too many look-ups whose answers nobody has polled.
    #[error("{outstanding} look-ups are outstanding, {bound} are allowed: poll answers first")]
    Busy {
        /// Look-ups outstanding, the refused one included.
        outstanding: usize,
        /// The bound.
        bound: usize,
    },
    /// The engine was shut down.
    #[error("the engine was shut down")]
    Closed,
}

/// What failed in the background of an engine. Its jobs go on, but slower.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Host memory could not be pinned. The driver then copies from and to it by itself, piece
    /// after piece.
    #[error(
        "{bytes} bytes of host memory could not be pinned for CUDA device {ordinal} ({error}): \
         copies from and to them are slower. Ask for less host memory (penstock.host_bytes), or give \
         the container or virtual machine more; some bound how much may be pinned, as WSL does"
    )]
    Unpinned {
        /// The device's ordinal.
        ordinal: i32,
        /// The bytes that are not pinned.
        bytes: u64,
        /// Why the bytes are not pinned.
        error: CudaError,
    },
    /// The driver did not take copies in batches.
    #[error(
        "the CUDA driver does not take copies in batches ({error}): each piece is copied by a call \
         of its own, which is slower. A newer driver may take them"
    )]
    Unbatched {
        /// The driver's answer.
        error: CudaError,
    },
    /// A device's copies could not be measured.
    #[error(
        "the copies of CUDA device {ordinal} could not be measured ({error}): how each is made \
         follows figures of other devices"
    )]
    Unmeasured {
        /// The device's ordinal.
        ordinal: i32,
        /// Why the copies could not be measured.
        error: CudaError,
    },
}

impl Fault {
    /// The bytes of host memory that are not pinned because of this fault.
    pub fn unpinned_bytes(&self) -> u64 {
        match self {
            Self::Unpinned { bytes, .. } => *bytes,
            Self::Unbatched { .. } | Self::Unmeasured { .. } => 0,
        }
    }
}
