//! A library with a store in memory, for the tests of the border. `troubled://NAME?trouble=panicking`
//! names what the store does instead of its work. What is put under one name is seen under it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

use penstock_store::MemoryStore;
use penstock_store_plugin::Open;
use penstock_store_plugin::contract::{
    BatchBytes, Capabilities, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest,
    Result, Store, StoreStats,
};
use penstock_store_testing::{Trouble, Troubled};

/// A memory store that others of this name share.
struct Named {
    name: String,
    memory: Arc<MemoryStore>,
    best: BatchBytes,
}

enum TroubledStore {
    Sound(Named),
    Troubled(Troubled<Named>),
}

impl TroubledStore {
    fn store(&self) -> &dyn Store {
        match self {
            Self::Sound(store) => store,
            Self::Troubled(store) => store,
        }
    }
}

impl Open for TroubledStore {
    fn open(url: &str) -> Result<Self> {
        static MEMORIES: LazyLock<Mutex<HashMap<String, Arc<MemoryStore>>>> =
            LazyLock::new(Mutex::default);
        let wrong = || Error::new(ErrorKind::Config, "troubled://NAME?trouble=WHICH");
        let rest = url.strip_prefix("troubled://").ok_or_else(wrong)?;
        let (name, trouble) = rest.split_once("?trouble=").unwrap_or((rest, ""));
        if trouble == "opening" {
            panic!("trouble on purpose, at {url}");
        }
        let mut memories = MEMORIES.lock().map_err(|_| wrong())?;
        let memory = memories
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(MemoryStore::new(64 << 20)));
        let named = Named {
            name: name.to_owned(),
            memory: Arc::clone(memory),
            best: BatchBytes {
                put: 64 << 20,
                get: 4 << 20,
            },
        };
        Ok(match trouble {
            "" => Self::Sound(named),
            which => {
                let trouble = Trouble::named(which).ok_or_else(wrong)?;
                Self::Troubled(Troubled::new(named, trouble))
            }
        })
    }
}

#[allow(unsafe_code, reason = "the one symbol that a library exports")]
mod exported {
    use super::TroubledStore;

    penstock_store_plugin::export!(TroubledStore);
}

/// Forwards to another store, except for what is said here.
macro_rules! forward {
    ($of:ty, $self:ident, $inner:expr, $url:expr, $batches:expr) => {
        impl Store for $of {
            fn capabilities(&self) -> Capabilities {
                let $self = self;
                $inner.capabilities()
            }
            fn url(&self) -> String {
                let $self = self;
                $url
            }
            fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
                let $self = self;
                $inner.contains(keys, deadline)
            }
            fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
                let $self = self;
                $inner.put_many(batch, deadline);
            }
            fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
                let $self = self;
                $inner.get_many(batch, deadline);
            }
            fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
                let $self = self;
                $inner.touch(values, deadline)
            }
            fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
                let $self = self;
                $inner.remove(keys, deadline)
            }
            fn list(
                &self,
                namespace: Option<Namespace>,
                visit: &mut dyn FnMut(Listed),
                deadline: Instant,
            ) -> Result<()> {
                let $self = self;
                $inner.list(namespace, visit, deadline)
            }
            fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
                let $self = self;
                $inner.describe(deadline)
            }
            fn stats(&self) -> StoreStats {
                let $self = self;
                $inner.stats()
            }
            fn charge(&self, value_bytes: u64) -> u64 {
                let $self = self;
                $inner.charge(value_bytes)
            }
            fn batch_bytes(&self) -> BatchBytes {
                let $self = self;
                $batches
            }
        }
    };
}

forward!(
    Named,
    this,
    this.memory,
    format!("troubled://{}", this.name),
    this.best
);
forward!(
    TroubledStore,
    this,
    this.store(),
    this.store().url(),
    this.store().batch_bytes()
);
