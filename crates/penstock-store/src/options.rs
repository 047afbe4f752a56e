//! Options for opening a store, besides its URL.

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
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            client_name: "penstock".to_owned(),
            connect_timeout: Duration::from_secs(1),
            pool_connections: 8,
        }
    }
}
