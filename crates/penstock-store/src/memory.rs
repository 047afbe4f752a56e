//! Opens a store in this process's memory, which is [`penstock_value`]'s.

use std::sync::Arc;

use penstock_contract::{Result, Store};
use penstock_value::MemoryStore;

use crate::OpenOptions;
use crate::parameters::{self, refused};

/// How its URL looks.
pub(crate) const USAGE: &str = "memory://?size=1GiB";

/// Opens the memory store of a URL.
pub(crate) fn open(url: &str, _options: &OpenOptions) -> Result<Arc<dyn Store>> {
    let url = parameters::parse(url, USAGE)?;
    if url.has_host() || !matches!(url.path(), "" | "/") {
        return Err(refused("a memory pool has neither host nor path", USAGE));
    }
    let size = parameters::size(&url, USAGE)?;
    let size = size.ok_or_else(|| refused("a memory pool needs a size", USAGE))?;
    Ok(Arc::new(MemoryStore::new(size)))
}
