//! Options for opening a store, besides its URL.

use std::ffi::OsString;
use std::time::Duration;

/// How to open a store, besides what its URL says.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The name under which a server's operator sees our connections.
    pub client_name: String,
    /// Longest time that making a connection may take.
    pub connect_timeout: Duration,
    /// Most connections held to one server.
    pub pool_connections: usize,
    /// Stores that others bring, for URLs whose scheme is none of this crate's.
    pub registered: Vec<Registered>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            client_name: "penstock".to_owned(),
            connect_timeout: Duration::from_secs(1),
            pool_connections: 8,
            registered: Vec::new(),
        }
    }
}

/// A store that somebody else brings.
#[derive(Clone, Debug)]
pub struct Registered {
    /// The scheme of its URLs.
    pub scheme: String,
    /// Where the store comes from, for people.
    pub origin: String,
    /// Where the store is.
    pub place: Place,
}

/// Where a registered store is.
#[derive(Clone, Debug)]
pub enum Place {
    /// In a program, which runs beside this process: the program and its arguments.
    Program(Vec<OsString>),
    /// Nowhere, for this reason.
    Nowhere(String),
}
