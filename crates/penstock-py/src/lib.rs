//! `penstock._native`: the bindings. They register, convert and release the GIL; they decide
//! nothing.

mod advisor;
mod blocks;
mod buffer;
mod catalogue;
mod completion;
mod compress;
mod cuda;
mod digest;
mod dlpack;
mod engine;
mod errors;
mod groups;
mod keeper;
mod keys;
mod layout;
mod lookup;
mod panics;
mod registered;
mod sealed;
mod sim;
mod store;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::advisor::{Advisor, Choice, Reach, attended};
    #[pymodule_export]
    use crate::blocks::{Blocks, host_changes};
    #[pymodule_export]
    use crate::buffer::Buffer;
    #[pymodule_export]
    use crate::catalogue::{Answers, Catalogue, Moved, Step};
    #[pymodule_export]
    use crate::completion::{Completion, Event, Outcome};
    #[pymodule_export]
    use crate::compress::Coder;
    #[pymodule_export]
    use crate::cuda::{CopyTimes, DirectionTimes, PieceTimes, cuda_calibration};
    #[pymodule_export]
    use crate::digest::{FileDigests, digest};
    #[pymodule_export]
    use crate::engine::{Engine, Fence, Lookup, slot_stride};
    #[pymodule_export]
    use crate::groups::{GroupSpec, PoolGroup};
    #[pymodule_export]
    use crate::keeper::Keeper;
    #[pymodule_export]
    use crate::keys::EncryptionKeys;
    #[pymodule_export]
    use crate::layout::{Descriptor, TensorView, check_ranks, objects};
    #[pymodule_export]
    use crate::lookup::{
        EngineCache, ModelVariant, PoolFinder, PrefixHasher, PromptPrefix, TokenIds, read_question,
    };
    #[pymodule_export]
    use crate::panics::panics;
    #[pymodule_export]
    use crate::registered::{built_in_schemes, check_store, find_stores_with, store_checks};
    #[pymodule_export]
    use crate::sim::{Trace, policies, routings};
    #[pymodule_export]
    use crate::store::{Store, parse_size, tenant_namespace};

    /// The version is that of Cargo's workspace.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
