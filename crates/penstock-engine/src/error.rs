//! The errors and faults of an engine.

use penstock_contract::Key;
use penstock_layout::LayoutError;
use penstock_value::Accused;
use penstock_value::compare::Distance;
use penstock_value::header::Writer;

use crate::CudaError;

/// Why an engine refused a call. Errors never tell what happens to an accepted job: its outcomes
/// do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An argument or a setting is out of bounds.
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
    /// The call does not fit what the engine was told before: an object has no layer of its group, or
    /// more bytes than a slot. The text names the group, the job or the size.
    #[error("{0}")]
    Refused(String),
    /// The regions are not those of the layout. The text has both numbers.
    #[error("{0}")]
    Regions(String),
    /// An object names layers, heads or a block that the registered memory does not have.
    #[error("not in the registered memory: {0}")]
    NotInLayout(LayoutError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] CudaError),
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

impl EngineError {
    /// A group has no memory registered.
    pub(crate) fn not_registered(group: u16) -> Self {
        let message = format!("no KV memory is registered with this engine for group {group}");
        Self::Refused(message)
    }

    /// A job's id is in use until the job's last completion has been polled.
    pub(crate) fn outstanding(job: u64) -> Self {
        Self::Refused(format!("job {job} is still outstanding"))
    }
}

/// What failed in the background of an engine. Its jobs go on, but slower.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
    /// The store had other KV than this engine computed.
    #[error(
        "wrong KV: writer {writer} has stored other KV than this engine ({witness}) computes for the \
         same tokens ({key}; distance {:.3}, of the first layer {:.3}; 0 where single bits differ). The \
         value was removed. {}",
        distance.layer, distance.first, what_follows(*accused, writer == witness)
    )]
    Disagreement {
        /// Where the value lay.
        key: Key,
        /// Who stored it.
        writer: Writer,
        /// Who this engine is.
        witness: Writer,
        /// How far apart both are.
        distance: Distance,
        /// What follows for the writer; None if nothing can.
        accused: Option<Accused>,
    },
    /// Others have found this engine's KV to be wrong.
    #[error(
        "other engines compute other KV than this one (writer {writer}): nobody loads what it has \
         stored, and it stores nothing more. Compare its weights, adapters, settings and hardware with \
         those of the others (`penstock doctor URL` lists who disagrees), then restart it"
    )]
    Distrusted {
        /// Who this engine is.
        writer: Writer,
    },
}

fn what_follows(accused: Option<Accused>, is_own: bool) -> &'static str {
    match accused {
        None if is_own => {
            "It was this engine's own value: its memory or its device may be faulty. If this goes on, \
             take it out of service"
        }
        None => {
            "Who stored it is not known, so its other values stay: if this goes on, remove the \
                 namespace (`penstock pool purge --namespace`)"
        }
        Some(Accused::Writer | Accused::Again) => {
            "No engine loads what that writer has stored any more. Compare weights, adapters, settings \
             and hardware of both (`penstock doctor URL` lists who disagrees), and restart the \
             one that is wrong"
        }
        Some(Accused::Itself) => {
            "This engine disagrees with three others, so it is likely to be wrong itself: nobody loads \
             what it has stored, and it stores nothing more. Check its weights, adapters, settings and \
             hardware, then restart it"
        }
    }
}

impl Fault {
    /// The bytes of host memory that are not pinned because of this fault.
    pub fn unpinned_bytes(&self) -> u64 {
        match self {
            Self::Unpinned { bytes, .. } => *bytes,
            _ => 0,
        }
    }
}
