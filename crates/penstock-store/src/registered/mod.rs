//! Stores that others bring, each in a program beside this process.

#[cfg(test)]
pub(crate) mod fuzz;
mod link;
mod process;
mod program;
mod protocol;
mod replies;
mod secrets;

use std::sync::Arc;

use penstock_contract::{Error, ErrorKind, Result, Store};

use self::program::ProgramStore;
use self::secrets::Secrets;
use crate::options::{OpenOptions, Place};

/// Opens the registered store of a URL's scheme. None if there is none.
pub(crate) fn open(
    scheme: &str,
    url: &str,
    options: &OpenOptions,
) -> Option<Result<Arc<dyn Store>>> {
    let registered = options
        .registered
        .iter()
        .find(|each| each.scheme == scheme)?;
    let open = || -> Result<Arc<dyn Store>> {
        Secrets::check(url)?;
        let secrets = Secrets::of(url);
        match &registered.place {
            Place::Program(command) => {
                ProgramStore::open(command, url, secrets).map(|store| Arc::new(store) as _)
            }
            Place::Nowhere(why) => Err(Error::new(ErrorKind::Config, why)),
        }
    };
    Some(open().map_err(|error| {
        error
            .with("scheme", scheme)
            .with("brought by", &registered.origin)
    }))
}
