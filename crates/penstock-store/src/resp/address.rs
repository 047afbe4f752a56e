//! Addresses: what a pool's URL says.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use penstock_contract::{Error, ErrorKind, Result};
use percent_encoding::percent_decode_str;
use url::{Host, Url};

use super::schemes::{SCHEMES, base};

const DEFAULT_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The environment variable with the password. It is used if the URL names none.
pub(super) const PASSWORD_VARIABLE: &str = "PENSTOCK_POOL_PASSWORD";

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
    /// The master of this name, which one of these sentinels knows.
    Sentinel {
        sentinels: Vec<Place>,
        master: String,
    },
    /// A cluster. These nodes of it are known.
    Cluster(Vec<Place>),
}

/// A host and a port.
pub(super) type Place = (String, u16);

/// A password. It shows itself only through [`Self::reveal`].
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret(String);

impl Secret {
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Files in PEM form, and the name that the server has to prove, as a URL with TLS gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TlsFiles {
    /// Certificates of authorities to trust instead of the system's.
    pub(super) authorities: Option<PathBuf>,
    /// Our own certificate, and the certificates between it and its authority.
    pub(super) certificate: Option<PathBuf>,
    /// The private key of our certificate.
    pub(super) key: Option<PathBuf>,
    /// The name in the server's certificate, if it is not the host's.
    pub(super) name: Option<String>,
}

/// A server, who we are to it, and which of its databases is the pool.
///
/// The text form is the URL without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    scheme: &'static str,
    pub(super) endpoint: Endpoint,
    pub(super) tls: Option<TlsFiles>,
    pub(super) database: u32,
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
    /// The user for sentinels, which have users of their own.
    sentinel_user: Option<String>,
    sentinel_password: Option<Secret>,
    /// Whether to speak version 3 of the protocol instead of version 2.
    pub(super) is_resp3: bool,
    /// Whether a cluster's replicas are to be read from.
    pub(super) reads_replicas: bool,
    /// Whether the connections are for reading from a cluster's replica.
    pub(super) is_replica: bool,
}

impl Address {
    /// Reads a server's URL, which has one of these forms:
    ///
    /// - `redis://[user[:password]@]host[:port][/db]`, or `valkey://` likewise.
    /// - `rediss://` or `valkeys://` for TLS (`?ca=…&cert=…&key=…&name=…`).
    /// - Each of them with `+sentinel`, for the master that sentinels name:
    ///   `redis+sentinel://[user[:password]@]host[:port][,…]/master[/db]`, then
    ///   `[?sentinel_user=…&sentinel_password=…]`.
    /// - Each of them with `+cluster`, for a cluster with these nodes among others:
    ///   `redis+cluster://[user[:password]@]host[:port][,…][?read=replicas]`.
    /// - `unix:///path[?db=N&user=…&password=…]`, also as `redis+unix://` or `valkey+unix://`.
    ///
    /// `spare_password` is used if the URL has none. Errors never contain the URL, because it may
    /// hold a password.
    pub(super) fn parse(text: &str, spare_password: Option<String>) -> Result<Self> {
        // To the parser, a URL has one host. So the other hosts are taken out first.
        let (text, others) = split_hosts(text)?;
        let url = Url::parse(&text).map_err(|e| config(format!("not a pool URL: {e}")))?;
        if url.fragment().is_some() {
            return Err(config(
                "a pool URL has no fragment: write '#' in a password as %23",
            ));
        }
        let known = SCHEMES.into_iter().find(|known| *known == url.scheme());
        let scheme = known.ok_or_else(|| {
            config(format!(
                "not a Valkey or Redis URL: scheme {:?}",
                url.scheme()
            ))
        })?;
        let mut address = match scheme.split_once('+') {
            Some((_, "sentinel")) => Self::parse_sentinel(scheme, &url, others)?,
            Some((_, "cluster")) => Self::parse_cluster(scheme, &url, others)?,
            Some((_, "unix")) => Self::parse_unix(&url)?,
            _ if scheme == "unix" => Self::parse_unix(&url)?,
            _ => Self::parse_tcp(scheme, &url)?,
        };
        if address.password.is_none() {
            address.password = spare_password.filter(|p| !p.is_empty()).map(Secret);
        }
        Ok(address)
    }

    fn parse_tcp(scheme: &'static str, url: &Url) -> Result<Self> {
        let query = Query::parse(scheme, url)?;
        let database = match url.path().trim_start_matches('/') {
            "" => 0,
            path => parse_database(path)?,
        };
        let (host, port) = host_of(url, DEFAULT_PORT)?;
        Self::over_tcp(scheme, url, Endpoint::Tcp { host, port }, database, query)
    }

    fn parse_cluster(scheme: &'static str, url: &Url, others: Vec<Place>) -> Result<Self> {
        let query = Query::parse(scheme, url)?;
        if !url.path().trim_start_matches('/').is_empty() {
            return Err(config("a cluster has one database: its URL has no path"));
        }
        let seeds = [vec![host_of(url, DEFAULT_PORT)?], others].concat();
        Self::over_tcp(scheme, url, Endpoint::Cluster(seeds), 0, query)
    }

    fn parse_sentinel(scheme: &'static str, url: &Url, others: Vec<Place>) -> Result<Self> {
        let query = Query::parse(scheme, url)?;
        let path = url.path().trim_start_matches('/');
        let (master, database) = match path.split_once('/') {
            Some((master, database)) => (master, parse_database(database)?),
            None => (path, 0),
        };
        let master = decode(master)?;
        // Otherwise a password with a bare '/' in it would pass for the master's name, and be
        // shown.
        if master.is_empty() || master.contains(['@', ':', '/']) {
            return Err(config(
                "a pool URL with sentinels names their master: redis+sentinel://host/master",
            ));
        }
        let endpoint = Endpoint::Sentinel {
            sentinels: [vec![host_of(url, SENTINEL_PORT)?], others].concat(),
            master,
        };
        Self::over_tcp(scheme, url, endpoint, database, query)
    }

    fn over_tcp(
        scheme: &'static str,
        url: &Url,
        endpoint: Endpoint,
        database: u32,
        query: Query,
    ) -> Result<Self> {
        let some = |text: &str| (!text.is_empty()).then(|| decode(text)).transpose();
        Ok(Self {
            scheme,
            endpoint,
            tls: query.tls,
            database,
            user: some(url.username())?,
            password: some(url.password().unwrap_or_default())?.map(Secret),
            sentinel_user: query.sentinel_user,
            sentinel_password: query.sentinel_password,
            is_resp3: query.is_resp3,
            reads_replicas: query.reads_replicas,
            is_replica: false,
        })
    }

    /// The sentinel of this address at this place, as a server to talk to.
    pub(super) fn sentinel(&self, host: String, port: u16) -> Self {
        Self {
            database: 0,
            user: self.sentinel_user.clone(),
            password: self.sentinel_password.clone(),
            ..self.server(host, port)
        }
    }

    /// The server at this place, with this address's user and database.
    pub(super) fn server(&self, host: String, port: u16) -> Self {
        Self {
            scheme: base(self.scheme),
            endpoint: Endpoint::Tcp { host, port },
            ..self.clone()
        }
    }

    /// The replica at this place, to read from, with this address's user.
    pub(super) fn replica(&self, host: String, port: u16) -> Self {
        Self {
            is_replica: true,
            ..self.server(host, port)
        }
    }

    fn parse_unix(url: &Url) -> Result<Self> {
        if url.has_host() && url.host_str() != Some("") {
            return Err(config(
                "a unix socket's URL has three slashes: unix:///path",
            ));
        }
        let path: Vec<u8> = percent_decode_str(url.path()).collect();
        if path.len() < 2 || path[0] != b'/' || path.contains(&0) {
            return Err(config(
                "a unix socket's URL holds an absolute path: unix:///path",
            ));
        }
        let (mut database, mut user, mut password) = (0, None, None);
        let mut is_resp3 = false;
        for (name, value) in url.query_pairs() {
            match &*name {
                "db" => database = parse_database(&value)?,
                "protocol" => is_resp3 = parse_protocol(&value)?,
                "user" => user = Some(value.into_owned()),
                "password" => password = Some(Secret(value.into_owned())),
                // The error does not repeat the name: it may be the rest of a password with a bare
                // '&'.
                _ => {
                    return Err(config(
                        "a unix socket's URL takes db, user, password and protocol only",
                    ));
                }
            }
        }
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        Ok(Self {
            scheme: "unix",
            endpoint: Endpoint::Unix(PathBuf::from(OsString::from_vec(path))),
            tls: None,
            database,
            user: filled(user),
            password: password.filter(|password: &Secret| !password.0.is_empty()),
            sentinel_user: None,
            sentinel_password: None,
            is_resp3,
            reads_replicas: false,
            is_replica: false,
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        let database = match self.database {
            0 => String::new(),
            database => format!("/{database}"),
        };
        match &self.endpoint {
            Endpoint::Tcp { host, port } => {
                f.write_str(&place(host, *port))?;
                f.write_str(&database)
            }
            Endpoint::Sentinel { sentinels, master } => {
                let places: Vec<_> = sentinels.iter().map(|(h, p)| place(h, *p)).collect();
                // A master's name has no slash.
                write!(
                    f,
                    "{}/{}{database}",
                    places.join(","),
                    encode(master.as_bytes())
                )
            }
            Endpoint::Cluster(seeds) => {
                let places: Vec<_> = seeds.iter().map(|(h, p)| place(h, *p)).collect();
                f.write_str(&places.join(","))
            }
            Endpoint::Unix(path) => {
                f.write_str(&encode(path.as_os_str().as_bytes()))?;
                if self.database != 0 {
                    write!(f, "?db={}", self.database)
                } else {
                    Ok(())
                }
            }
        }
    }
}

fn place(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// What the query of a URL over TCP says.
#[derive(Default)]
struct Query {
    tls: Option<TlsFiles>,
    sentinel_user: Option<String>,
    sentinel_password: Option<Secret>,
    is_resp3: bool,
    reads_replicas: bool,
}

impl Query {
    fn parse(scheme: &str, url: &Url) -> Result<Self> {
        let with_sentinels = scheme.ends_with("+sentinel");
        let mut query = Self {
            tls: matches!(base(scheme), "rediss" | "valkeys").then(TlsFiles::default),
            ..Self::default()
        };
        for (name, value) in url.query_pairs() {
            if value.is_empty() {
                return Err(config("a name in the pool URL's query has no value"));
            }
            let path = Some(PathBuf::from(&*value));
            match (&*name, &mut query.tls) {
                ("ca", Some(files)) => files.authorities = path,
                ("cert", Some(files)) => files.certificate = path,
                ("key", Some(files)) => files.key = path,
                ("name", Some(files)) => files.name = Some(value.into_owned()),
                ("sentinel_user", _) if with_sentinels => {
                    query.sentinel_user = Some(value.into_owned());
                }
                ("sentinel_password", _) if with_sentinels => {
                    query.sentinel_password = Some(Secret(value.into_owned()));
                }
                ("protocol", _) => query.is_resp3 = parse_protocol(&value)?,
                ("read", _) if scheme.ends_with("+cluster") => match &*value {
                    "replicas" => query.reads_replicas = true,
                    "primaries" => query.reads_replicas = false,
                    _ => return Err(config("read is either primaries or replicas")),
                },
                // The error does not repeat the name: it may be the rest of a password with a bare
                // '?'.
                _ => {
                    return Err(config(
                        "a pool URL's query holds ca, cert, key and name with TLS, sentinel_user \
                         and sentinel_password with sentinels, read with a cluster, protocol, and \
                         nothing else; the database is in the path",
                    ));
                }
            }
        }
        match &query.tls {
            Some(files) if files.certificate.is_some() != files.key.is_some() => {
                Err(config("a client certificate needs both cert and key"))
            }
            _ => Ok(query),
        }
    }
}

fn host_of(url: &Url, default_port: u16) -> Result<(String, u16)> {
    let host = match url.host() {
        Some(Host::Domain(name)) if name.contains(',') => {
            return Err(config(
                "only a pool URL with +sentinel or +cluster has several hosts",
            ));
        }
        Some(Host::Domain(name)) if !name.is_empty() => host_name(decode(name)?)?,
        Some(Host::Ipv4(ip)) => ip.to_string(),
        Some(Host::Ipv6(ip)) => ip.to_string(),
        _ => return Err(config("the pool URL names no host")),
    };
    Ok((host, url.port().unwrap_or(default_port)))
}

/// A name that can be resolved. The error does not repeat it: if the URL has a mistake before it,
/// it may be a part of a password.
fn host_name(name: String) -> Result<String> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if name.bytes().all(is_name) {
        return Ok(name);
    }
    Err(config(
        "a host's name has letters, digits, '-', '.' and '_' only",
    ))
}

/// Splits a URL with several hosts: returns the URL with the first host only, and the other hosts.
/// Any other URL stays as it is.
fn split_hosts(text: &str) -> Result<(String, Vec<Place>)> {
    let Some((scheme, rest)) = text.split_once("://") else {
        return Ok((text.to_owned(), Vec::new()));
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    let start = authority.rfind('@').map_or(0, |at| at + 1);
    let (user, hosts) = authority.split_at(start);
    let default_port = match scheme.split_once('+') {
        Some((_, "sentinel")) => SENTINEL_PORT,
        Some((_, "cluster")) => DEFAULT_PORT,
        _ => return Ok((text.to_owned(), Vec::new())),
    };
    let mut hosts = hosts.split(',');
    let first = hosts.next().unwrap_or_default();
    let others = hosts
        .map(|host| {
            let url = Url::parse(&format!("redis://{host}"))
                .map_err(|_| config("one of the hosts or ports is not one"))?;
            if url.username().is_empty() && url.password().is_none() {
                host_of(&url, default_port)
            } else {
                Err(config("one of the hosts or ports is not one"))
            }
        })
        .collect::<Result<_>>()?;
    Ok((format!("{scheme}://{user}{first}{tail}"), others))
}

/// Encodes a part of a URL's path. Slashes stay as they are.
fn encode(bytes: &[u8]) -> String {
    const KEPT: &percent_encoding::AsciiSet = &percent_encoding::NON_ALPHANUMERIC
        .remove(b'/')
        .remove(b'.')
        .remove(b'-')
        .remove(b'_')
        .remove(b'~');
    percent_encoding::percent_encode(bytes, KEPT).to_string()
}

fn decode(text: &str) -> Result<String> {
    percent_decode_str(text)
        .decode_utf8()
        .map(|text| text.into_owned())
        .map_err(|_| config("a part of the pool URL is not UTF-8 after percent-decoding"))
}

/// Reads the protocol's version: whether it is 3.
fn parse_protocol(text: &str) -> Result<bool> {
    match text {
        "2" => Ok(false),
        "3" => Ok(true),
        _ => Err(config("the pool URL's protocol is 2 or 3")),
    }
}

fn parse_database(text: &str) -> Result<u32> {
    text.parse()
        .map_err(|_| config("the pool URL's database is not a number"))
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Address {
        Address::parse(text, None).unwrap()
    }

    fn tcp(host: &str, port: u16) -> Endpoint {
        Endpoint::Tcp {
            host: host.into(),
            port,
        }
    }

    fn password(address: &Address) -> Option<&str> {
        address.password.as_ref().map(Secret::reveal)
    }

    #[test]
    fn cluster_urls() {
        let address = parse("valkey+cluster://u:p@a,b:7,[::1]:8?read=replicas");
        let seeds = vec![("a".into(), 6379), ("b".into(), 7), ("::1".into(), 8)];
        assert_eq!(address.endpoint, Endpoint::Cluster(seeds));
        assert!(address.reads_replicas && !address.is_replica);
        assert_eq!(address.to_string(), "valkey+cluster://a:6379,b:7,[::1]:8");
        let replica = address.replica("b".into(), 9);
        assert_eq!(
            (replica.to_string(), replica.is_replica),
            ("valkey://b:9".into(), true)
        );
        assert_eq!(password(&replica), Some("p"));
        let tls = parse("rediss+cluster://a?ca=/f");
        assert!(tls.tls.is_some() && !tls.reads_replicas);
        for text in [
            "redis+cluster://a/1",
            "redis+cluster://a?read=all",
            "redis+cluster://a?ca=/f",
            "redis+cluster://a,:b",
            "redis+cluster://",
            "redis://a?read=replicas",
        ] {
            let error = Address::parse(text, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{text}");
        }
    }

    #[test]
    fn tcp_urls() {
        let address = parse("redis://pool.example");
        assert_eq!(address.endpoint, tcp("pool.example", 6379));
        assert_eq!(
            (address.database, &address.user, password(&address)),
            (0, &None, None)
        );

        let address = parse("valkey://me:s%40%3Acret%2F@10.0.0.7:7000/12");
        assert_eq!(address.endpoint, tcp("10.0.0.7", 7000));
        assert_eq!(
            (address.database, address.user.as_deref()),
            (12, Some("me"))
        );
        assert_eq!(password(&address), Some("s@:cret/"));
        assert_eq!(address.to_string(), "valkey://10.0.0.7:7000/12");

        let address = parse("redis://:only@[fd00::1]:1");
        assert_eq!(address.endpoint, tcp("fd00::1", 1));
        assert_eq!(
            (address.user.as_deref(), password(&address)),
            (None, Some("only"))
        );
        assert_eq!(address.to_string(), "redis://[fd00::1]:1");
    }

    #[test]
    fn unix_urls() {
        for scheme in ["unix", "redis+unix", "valkey+unix"] {
            let address = parse(&format!(
                "{scheme}:///run/a%20b.sock?db=3&user=me&password=p%26w%2B"
            ));
            assert_eq!(address.endpoint, Endpoint::Unix("/run/a b.sock".into()));
            assert_eq!((address.database, address.user.as_deref()), (3, Some("me")));
            assert_eq!(password(&address), Some("p&w+"));
            assert_eq!(address.to_string(), "unix:///run/a%20b.sock?db=3");
            assert_eq!(parse(&address.to_string()).endpoint, address.endpoint);
        }
    }

    #[test]
    fn urls_with_tls() {
        let address = parse("rediss://me:pw@pool.example/2?ca=/a%20b.pem&name=other.example");
        assert_eq!(address.endpoint, tcp("pool.example", 6379));
        let tls = address.tls.as_ref().unwrap();
        assert_eq!(tls.authorities.as_deref(), Some("/a b.pem".as_ref()));
        assert_eq!(tls.name.as_deref(), Some("other.example"));
        assert_eq!(address.to_string(), "rediss://pool.example:6379/2");
        let address = parse("valkeys://h?cert=/c.pem&key=/k.pem");
        let tls = address.tls.as_ref().unwrap();
        assert_eq!(tls.certificate.as_deref(), Some("/c.pem".as_ref()));
        assert_eq!(tls.key.as_deref(), Some("/k.pem".as_ref()));
        assert_eq!(parse("valkey://h").tls, None);
    }

    #[test]
    fn urls_with_sentinels() {
        let address = parse(
            "valkey+sentinel://me:pw@a.example,[::1]:5000,10.0.0.1/main/3\
             ?sentinel_user=watch&sentinel_password=dog",
        );
        let sentinels = vec![
            ("a.example".to_owned(), 26379),
            ("::1".to_owned(), 5000),
            ("10.0.0.1".to_owned(), 26379),
        ];
        let master = "main".to_owned();
        assert_eq!(address.endpoint, Endpoint::Sentinel { sentinels, master });
        assert_eq!(
            address.to_string(),
            "valkey+sentinel://a.example:26379,[::1]:5000,10.0.0.1:26379/main/3"
        );
        let odd = parse("redis+sentinel://a/my%20main%3F%20").to_string();
        assert_eq!(odd, "redis+sentinel://a:26379/my%20main%3F%20");
        assert_eq!(parse(&odd).to_string(), odd);
        for odd in [
            "redis://a%20b",
            "redis+sentinel://a,b%20c/main",
            "redis+cluster://a,%2F",
        ] {
            let error = Address::parse(odd, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{odd}");
        }
        let watcher = address.sentinel("a.example".into(), 26379);
        assert_eq!(
            (
                watcher.database,
                watcher.user.as_deref(),
                password(&watcher)
            ),
            (0, Some("watch"), Some("dog"))
        );
        let server = address.server("b".into(), 1);
        assert_eq!(
            (server.database, server.user.as_deref(), password(&server)),
            (3, Some("me"), Some("pw"))
        );
        assert_eq!(server.to_string(), "valkey://b:1/3");
        let address = parse("rediss+sentinel://h/m?ca=/c.pem");
        assert!(address.tls.is_some());
        assert_eq!(address.to_string(), "rediss+sentinel://h:26379/m");
    }

    #[test]
    fn the_spare_password_fills_in() {
        let spare = || Some("spare".to_owned());
        let given = Address::parse("redis://me:own@h", spare()).unwrap();
        assert_eq!(password(&given), Some("own"));
        for url in ["redis://h", "redis://me@h", "unix:///s?user=me"] {
            assert_eq!(
                password(&Address::parse(url, spare()).unwrap()),
                Some("spare"),
                "{url}"
            );
        }
        assert_eq!(
            password(&Address::parse("redis://h", Some(String::new())).unwrap()),
            None
        );
    }

    #[test]
    fn wrong_urls_are_refused_and_never_repeated() {
        for url in [
            "redis://u:hunter2@",
            "redis://u:hunter2@/0",
            "redis://u:hunter2@host:99999",
            "redis://u:hunter2@host/zero",
            "redis://u:hunter2@host/1/2",
            "redis://u:hunter2@host/-1",
            "redis://u:hunter2@host?db=hunter2",
            "redis://u:hunter2@host?ca=/hunter2.pem",
            "redis://u:hunter2@h1,h2",
            "redis+sentinel://u:hunter2@h1",
            "redis+sentinel://u:12/hunter2@h1/m",
            "redis+sentinel://u:12/hunter2@h1",
            "redis+sentinel://u:hunter2@h1/m/hunter2",
            "redis+sentinel://u:hunter2@h1,h2:hunter2/m",
            "redis+sentinel://h1,/m?sentinel_password=hunter2",
            "redis+sentinel://h1/m?password=hunter2",
            "redis://u:hunter2#x@host",
            "redis://u:hunter2%ff@host",
            "rediss://u:hunter2@host?hunter2",
            "rediss://u:hunter2@host?ca=",
            "rediss://u:hunter2@host?cert=/hunter2.pem",
            "http://u:hunter2@host",
            "unix://host/path?password=hunter2",
            "unix://u:hunter2@/path",
            "unix:///?password=hunter2",
            "unix:///path?password=x&hunter2",
            "unix:///path?db=hunter2",
            "unix:///pa%00th?password=hunter2",
            "hunter2",
        ] {
            let error = Address::parse(url, None).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(
                !format!("{error} {error:?}").contains("hunter2"),
                "{url}: {error}"
            );
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        for url in ["redis://me:hunter2@h/1", "unix:///s?password=hunter2"] {
            let address = parse(url);
            assert!(!format!("{address} {address:?}").contains("hunter2"));
        }
    }
}
