//! Stores that misbehave on purpose: what is above them must lose hits and nothing else.

use std::time::{Duration, Instant};

use penstock_contract::{
    BatchBytes, Capabilities, Error, ErrorKind, GetRequest, Key, Listed, Namespace, PutRequest,
    Result, Store, StoreStats,
};

/// What a store does instead of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its work, after a sleep. It does not look at deadlines meanwhile.
    Slow(Duration),
    /// It fails.
    Erring(ErrorKind),
    /// It panics.
    Panicking,
    /// It leaves requests without an outcome, and answers for fewer keys than it was asked for.
    Silent,
}

impl Trouble {
    /// The trouble of this name: `slow`, `erring`, `panicking` or `silent`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "slow" => Some(Self::Slow(Duration::from_millis(300))),
            "erring" => Some(Self::Erring(ErrorKind::Unavailable)),
            "panicking" => Some(Self::Panicking),
            "silent" => Some(Self::Silent),
            _ => None,
        }
    }
}

/// A store in trouble: every operation on values is, what it says of itself is not.
pub struct Troubled<S> {
    inner: S,
    trouble: Trouble,
}

impl<S: Store> Troubled<S> {
    /// Brings a store into trouble.
    pub fn new(inner: S, trouble: Trouble) -> Self {
        Self { inner, trouble }
    }

    /// What takes the place of the work; None if the work is to be done.
    fn instead<T>(&self, silent: T) -> Option<Result<T>> {
        match self.trouble {
            Trouble::Slow(time) => {
                std::thread::sleep(time);
                None
            }
            Trouble::Erring(kind) => Some(Err(Error::new(kind, "trouble on purpose"))),
            Trouble::Panicking => panic!("trouble on purpose"),
            Trouble::Silent => Some(Ok(silent)),
        }
    }
}

impl<S: Store> Store for Troubled<S> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn contains(&self, keys: &[Key], deadline: Instant) -> Result<Vec<bool>> {
        self.instead(Vec::new())
            .unwrap_or_else(|| self.inner.contains(keys, deadline))
    }

    fn put_many(&self, batch: &mut [PutRequest<'_>], deadline: Instant) {
        match self.instead(()) {
            Some(Err(error)) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
                }
            }
            Some(Ok(())) => {}
            None => self.inner.put_many(batch, deadline),
        }
    }

    fn get_many(&self, batch: &mut [GetRequest<'_, '_>], deadline: Instant) {
        match self.instead(()) {
            Some(Err(error)) => {
                for request in batch {
                    request.outcome = Some(Err(Error::new(error.kind(), error.to_string())));
                }
            }
            Some(Ok(())) => {}
            None => self.inner.get_many(batch, deadline),
        }
    }

    fn touch(&self, values: &[(Key, u64)], deadline: Instant) -> Result<Vec<bool>> {
        self.instead(Vec::new())
            .unwrap_or_else(|| self.inner.touch(values, deadline))
    }

    fn remove(&self, keys: &[Key], deadline: Instant) -> Result<u64> {
        self.instead(0)
            .unwrap_or_else(|| self.inner.remove(keys, deadline))
    }

    fn list(
        &self,
        namespace: Option<Namespace>,
        visit: &mut dyn FnMut(Listed),
        deadline: Instant,
    ) -> Result<()> {
        self.instead(())
            .unwrap_or_else(|| self.inner.list(namespace, visit, deadline))
    }

    fn describe(&self, deadline: Instant) -> Result<Vec<(String, String)>> {
        self.instead(Vec::new())
            .unwrap_or_else(|| self.inner.describe(deadline))
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }

    fn charge(&self, value_bytes: u64) -> u64 {
        self.inner.charge(value_bytes)
    }

    fn batch_bytes(&self) -> BatchBytes {
        self.inner.batch_bytes()
    }
}
