//! TLS against real servers that ask for it.

use std::io::{IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, GetOutcome, Store};
use penstock_store::{OpenOptions, open};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use crate::behaviour::batches::{fetch, fill};
use crate::behaviour::{bytes, fresh_namespace, get, key, put, soon, within};
use crate::resp_server::{FREE_PORT, Server, on_each_server, patient};

/// Certificates of one authority, in files.
struct Papers {
    folder: TempDir,
}

impl Papers {
    /// An authority, the server's certificate for `localhost` and 127.0.0.1, and a client's.
    fn new() -> Self {
        let papers = Self {
            folder: tempfile::tempdir().expect("a temporary directory"),
        };
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "authority");
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key"))
            .expect("an authority");
        papers.write("ca.pem", &authority.pem());
        for (name, subjects) in [
            (
                "server",
                vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
            ),
            ("client", vec!["client".to_owned()]),
        ] {
            let secret = KeyPair::generate().expect("a key");
            let certificate = CertificateParams::new(subjects)
                .and_then(|mut params| {
                    params.distinguished_name.push(DnType::CommonName, name);
                    params.signed_by(&secret, &authority)
                })
                .expect("a certificate");
            papers.write(&format!("{name}.pem"), &certificate.pem());
            papers.write(&format!("{name}.key"), &secret.serialize_pem());
        }
        papers
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("a file");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A server that also listens for TLS, and the port.
    fn server(&self, name: &'static str, ask_clients: bool) -> (Server, u16) {
        let path = |file: &str| self.path(file).display().to_string();
        let arguments = [
            "--tls-port",
            FREE_PORT,
            "--tls-cert-file",
            &path("server.pem"),
            "--tls-key-file",
            &path("server.key"),
            "--tls-ca-cert-file",
            &path("ca.pem"),
            "--tls-auth-clients",
            if ask_clients { "yes" } else { "no" },
        ];
        let server = Server::start_with(name, &arguments);
        let port = server.option("--tls-port").parse().expect("a port");
        (server, port)
    }

    fn url(&self, port: u16) -> String {
        format!(
            "rediss://127.0.0.1:{port}?ca={}",
            shown(&self.path("ca.pem"))
        )
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn store(url: &str) -> Arc<dyn Store> {
    open(url, &patient()).expect("the URL is right")
}

fn refused(url: &str) -> penstock_contract::Error {
    refused_by(&*store(url))
}

fn refused_by(store: &dyn Store) -> penstock_contract::Error {
    store
        .contains(&[key(fresh_namespace(), 0)], soon())
        .expect_err("must be refused")
}

#[test]
fn behaves_as_a_store_over_tls() {
    let papers = Papers::new();
    on_each_server(|name| {
        let (_server, port) = papers.server(name, false);
        crate::behaviour::run_all(|| store(&papers.url(port)));
    });
}

#[test]
fn big_values_move_over_several_connections() {
    let papers = Papers::new();
    on_each_server(|name| {
        let (_server, port) = papers.server(name, false);
        let store = store(&papers.url(port));
        let namespace = fresh_namespace();
        let keys = fill(&*store, namespace, 8, 3 << 20);
        for outcome in fetch(&*store, &keys, 3 << 20, soon()) {
            assert_eq!(outcome.unwrap(), GetOutcome::Hit(3 << 20));
        }
        assert!(store.stats().connects >= 2);
    });
}

#[test]
fn idle_connections_are_used_again() {
    let papers = Papers::new();
    on_each_server(|name| {
        let (server, port) = papers.server(name, false);
        let store = store(&papers.url(port));
        let namespace = fresh_namespace();
        for n in 0..20 {
            put(&*store, &key(namespace, n), &bytes(n, 1000)).unwrap();
        }
        assert_eq!(store.stats().connects, 1);
        // One that was closed while it lay idle is replaced without anybody noticing.
        server.command("CLIENT KILL TYPE normal SKIPME yes");
        put(&*store, &key(namespace, 20), b"value").unwrap();
        assert_eq!(store.stats().connects, 2);
    });
}

#[test]
fn a_client_proves_who_it_is() {
    let papers = Papers::new();
    on_each_server(|name| {
        let (_server, port) = papers.server(name, true);
        let url = papers.url(port);
        let error = refused(&url);
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.to_string().contains("client certificate"), "{error}");
        let (cert, key_file) = (papers.path("client.pem"), papers.path("client.key"));
        let store = store(&format!(
            "{url}&cert={}&key={}",
            shown(&cert),
            shown(&key_file)
        ));
        let key = key(fresh_namespace(), 0);
        put(&*store, &key, b"value").unwrap();
        assert_eq!(get(&*store, &key), Some(b"value".to_vec()));
    });
}

#[test]
fn a_server_that_proves_nothing_is_refused() {
    let papers = Papers::new();
    let others = Papers::new();
    on_each_server(|name| {
        let (_server, port) = papers.server(name, false);
        let error = refused(&others.url(port));
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(
            error.to_string().contains("certificate is not accepted"),
            "{error}"
        );
        // Another name than the certificate's.
        let error = refused(&format!("{}&name=pool.example", papers.url(port)));
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        // The certificate's name, at an address that it does not hold.
        let store = store(&format!("{}&name=localhost", papers.url(port)));
        store
            .contains(&[key(fresh_namespace(), 0)], soon())
            .unwrap();
    });
}

#[test]
fn a_server_without_tls_is_told_apart() {
    let papers = Papers::new();
    on_each_server(|name| {
        let server = Server::start(name);
        // Our greeting is noise to it: it waits for more, or complains, as the noise falls. While it
        // waits, only the time for a connection ends it.
        let url = papers.url(server.port());
        let error = refused_by(&*open(&url, &OpenOptions::default()).unwrap());
        assert!(
            matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Protocol),
            "{error}"
        );
        assert!(
            error.to_string().contains("speak TLS on this port"),
            "{error}"
        );
    });
}

#[test]
fn files_are_read_when_the_store_is_opened() {
    let papers = Papers::new();
    papers.write("empty.pem", "");
    let path = |name: &str| shown(&papers.path(name));
    for (query, says) in [
        (format!("ca={}", path("none.pem")), "none.pem"),
        (format!("ca={}", path("empty.pem")), "holds no certificate"),
        (format!("ca={}", path("client.key")), "holds no certificate"),
        (
            format!(
                "ca={}&cert={}&key={}",
                path("ca.pem"),
                path("client.pem"),
                path("ca.pem")
            ),
            "no private key in PEM form",
        ),
        (
            format!(
                "ca={}&cert={}&key={}",
                path("ca.pem"),
                path("client.pem"),
                path("server.key")
            ),
            "do not belong together",
        ),
    ] {
        let Err(error) = open(&format!("rediss://h?{query}"), &OpenOptions::default()) else {
            panic!("{query} must be refused");
        };
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn a_silent_peer_costs_no_more_than_the_deadline() {
    let papers = Papers::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let store = store(&papers.url(port));
    let error = store
        .contains(
            &[key(fresh_namespace(), 0)],
            within(Duration::from_millis(200)),
        )
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
}

/// Passes bytes on, and cuts the connection after so many of the server's.
fn cut_after(to: u16, bytes: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", to)) else {
                return;
            };
            let (mut up_from, mut up_to) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut up_from, &mut up_to));
            let mut down = server.take(bytes as u64);
            let mut client = client;
            let _ = std::io::copy(&mut down, &mut client);
            let _ = client.flush();
            let _ = client.shutdown(std::net::Shutdown::Both);
        }
    });
    port
}

#[test]
fn a_connection_cut_in_the_middle_of_a_value_is_no_hit() {
    let papers = Papers::new();
    on_each_server(|name| {
        let (_server, port) = papers.server(name, false);
        let key = key(fresh_namespace(), 0);
        put(&*store(&papers.url(port)), &key, &bytes(0, 1 << 20)).unwrap();
        for after in [10, 3000, 20_000, 500_000, 1_000_000] {
            let store = store(&papers.url(cut_after(port, after)));
            let mut into = vec![0; 1 << 20];
            let error = store
                .get(&key, &mut [IoSliceMut::new(&mut into)], soon())
                .expect_err("cut off");
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{after}: {error}");
        }
    });
}
