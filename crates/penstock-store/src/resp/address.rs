//! Addresses: what a pool's URL says.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use url::{Host, Url};

use crate::{Error, ErrorKind, Result};

const DEFAULT_PORT: u16 = 6379;

/// The variable that holds the password of a URL that names none.
pub(super) const PASSWORD_VARIABLE: &str = "PENSTOCK_POOL_PASSWORD";

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// A password. It shows itself only where it is asked to.
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

/// A server, who we are to it, and which of its databases is the pool.
///
/// The text form is the URL without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    scheme: &'static str,
    pub(super) endpoint: Endpoint,
    pub(super) database: u32,
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
}

impl Address {
    /// Reads `redis://[user[:password]@]host[:port][/db]`, `valkey://` likewise, or
    /// `unix:///path[?db=N&user=…&password=…]` (also as `redis+unix://`, `valkey+unix://`).
    ///
    /// `spare_password` is used if the URL has none. Errors never hold the URL, since it may hold
    /// a password.
    pub(super) fn parse(text: &str, spare_password: Option<String>) -> Result<Self> {
        let url = Url::parse(text).map_err(|e| config(format!("not a pool URL: {e}")))?;
        if url.fragment().is_some() {
            return Err(config(
                "a pool URL has no fragment: write '#' in a password as %23",
            ));
        }
        let mut address = match url.scheme() {
            "redis" => Self::parse_tcp("redis", &url)?,
            "valkey" => Self::parse_tcp("valkey", &url)?,
            "unix" | "redis+unix" | "valkey+unix" => Self::parse_unix(&url)?,
            "rediss" | "valkeys" => return Err(config("TLS comes in a later version")),
            other => {
                return Err(config(format!(
                    "not a Valkey or Redis URL: scheme {other:?}"
                )));
            }
        };
        if address.password.is_none() {
            address.password = spare_password.filter(|p| !p.is_empty()).map(Secret);
        }
        Ok(address)
    }

    fn parse_tcp(scheme: &'static str, url: &Url) -> Result<Self> {
        if url.query().is_some() {
            return Err(config(
                "a TCP pool URL takes no query: the database is its path",
            ));
        }
        let host = match url.host() {
            Some(Host::Domain(name)) if !name.is_empty() => decode(name)?,
            Some(Host::Ipv4(ip)) => ip.to_string(),
            Some(Host::Ipv6(ip)) => ip.to_string(),
            _ => return Err(config("the pool URL names no host")),
        };
        let database = match url.path().trim_start_matches('/') {
            "" => 0,
            path => parse_database(path)?,
        };
        let some = |text: &str| (!text.is_empty()).then(|| decode(text)).transpose();
        Ok(Self {
            scheme,
            endpoint: Endpoint::Tcp {
                host,
                port: url.port().unwrap_or(DEFAULT_PORT),
            },
            database,
            user: some(url.username())?,
            password: some(url.password().unwrap_or_default())?.map(Secret),
        })
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
        for (name, value) in url.query_pairs() {
            match &*name {
                "db" => database = parse_database(&value)?,
                "user" => user = Some(value.into_owned()),
                "password" => password = Some(Secret(value.into_owned())),
                // The name is not repeated: it may be the rest of a password with a bare '&'.
                _ => {
                    return Err(config(
                        "a unix socket's URL takes db, user and password only",
                    ));
                }
            }
        }
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        Ok(Self {
            scheme: "unix",
            endpoint: Endpoint::Unix(PathBuf::from(OsString::from_vec(path))),
            database,
            user: filled(user),
            password: password.filter(|password: &Secret| !password.0.is_empty()),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        match &self.endpoint {
            Endpoint::Tcp { host, port } => {
                if host.contains(':') {
                    write!(f, "[{host}]:{port}")?;
                } else {
                    write!(f, "{host}:{port}")?;
                }
                if self.database != 0 {
                    write!(f, "/{}", self.database)
                } else {
                    Ok(())
                }
            }
            Endpoint::Unix(path) => {
                f.write_str(&encode_path(path))?;
                if self.database != 0 {
                    write!(f, "?db={}", self.database)
                } else {
                    Ok(())
                }
            }
        }
    }
}

fn encode_path(path: &std::path::Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    const KEPT: &percent_encoding::AsciiSet = &percent_encoding::NON_ALPHANUMERIC
        .remove(b'/')
        .remove(b'.')
        .remove(b'-')
        .remove(b'_')
        .remove(b'~');
    percent_encoding::percent_encode(path.as_os_str().as_bytes(), KEPT).to_string()
}

fn decode(text: &str) -> Result<String> {
    percent_decode_str(text)
        .decode_utf8()
        .map(|text| text.into_owned())
        .map_err(|_| config("a part of the pool URL is not UTF-8 after percent-decoding"))
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
            "redis://u:hunter2#x@host",
            "redis://u:hunter2%ff@host",
            "rediss://u:hunter2@host",
            "http://u:hunter2@host",
            "unix://host/path?password=hunter2",
            "unix://u:hunter2@/path",
            "unix:///?password=hunter2",
            "unix:///path?password=x&hunter2",
            "unix:///path?db=hunter2",
            "unix:///pa%00th?password=hunter2",
            "hunter2",
        ] {
            let error = Address::parse(url, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(
                !format!("{error} {error:?}").contains("hunter2"),
                "{url}: {error}"
            );
        }
        let tls = Address::parse("rediss://h", None).unwrap_err();
        assert!(tls.to_string().contains("TLS comes in a later version"));
    }

    #[test]
    fn passwords_are_not_shown() {
        for url in ["redis://me:hunter2@h/1", "unix:///s?password=hunter2"] {
            let address = parse(url);
            assert!(!format!("{address} {address:?}").contains("hunter2"));
        }
    }
}
