//! Schemes of the URLs of servers.

/// The schemes of servers.
pub(crate) const SCHEMES: [&str; 15] = [
    "redis",
    "valkey",
    "rediss",
    "valkeys",
    "redis+sentinel",
    "valkey+sentinel",
    "rediss+sentinel",
    "valkeys+sentinel",
    "redis+cluster",
    "valkey+cluster",
    "rediss+cluster",
    "valkeys+cluster",
    "unix",
    "redis+unix",
    "valkey+unix",
];

/// How their URLs look, in short.
pub(crate) const USAGE: &str = "valkey://[user[:password]@]host[:port][/db] (or redis://; \
     valkeys:// and rediss:// with TLS; valkey+sentinel://host[,host]/master, \
     valkey+cluster://host[,host]), unix:///path.sock[?db=N]";

/// A scheme without what it says of the topology.
pub(super) fn base(scheme: &str) -> &str {
    scheme.split('+').next().unwrap_or(scheme)
}
