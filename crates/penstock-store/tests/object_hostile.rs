//! The object store against servers that answer what no server answers: memory stays bounded, calls
//! end, and errors are those of every store.

use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use penstock_contract::{ErrorKind, Store};
use penstock_store::{OpenOptions, open};
use proptest::prelude::*;

use crate::behaviour::{fresh_namespace, key, soon, within};

/// More than what sockets hold on both sides, beside what is read.
const IN_SOCKETS: u64 = 64 << 20;

/// What a server does with one request: its first line is given.
type Answer = Arc<dyn Fn(&str, &mut Wire) + Send + Sync>;

/// A connection that counts what is written to it.
struct Wire {
    stream: TcpStream,
    written: Arc<AtomicU64>,
    /// The client has gone.
    is_over: bool,
}

impl Wire {
    fn say(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Ok(()) => drop(
                self.written
                    .fetch_add(bytes.len() as u64, Ordering::Relaxed),
            ),
            Err(_) => self.is_over = true,
        }
    }

    fn whole(&mut self, status: &str, body: &[u8]) {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.say(head.as_bytes());
        self.say(body);
    }

    /// Writes until the client has enough.
    fn endless(&mut self, status: &str, start: &[u8]) {
        self.say(format!("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n").as_bytes());
        self.say(format!("{:x}\r\n", start.len()).as_bytes());
        self.say(start);
        let piece = [b"\r\n10000\r\n".as_slice(), &[b'x'; 0x1_0000]].concat();
        while !self.is_over {
            self.say(&piece);
        }
    }
}

struct Impostor {
    port: u16,
    written: Arc<AtomicU64>,
    connections: Arc<AtomicUsize>,
    is_closed: Arc<AtomicBool>,
}

impl Impostor {
    fn start(answer: impl Fn(&str, &mut Wire) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let impostor = Self {
            port: listener.local_addr().expect("an address").port(),
            written: Arc::default(),
            connections: Arc::default(),
            is_closed: Arc::default(),
        };
        let (written, connections) = (impostor.written.clone(), impostor.connections.clone());
        let (is_closed, answer): (_, Answer) = (impostor.is_closed.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if is_closed.load(Ordering::Relaxed) {
                    return;
                }
                connections.fetch_add(1, Ordering::Relaxed);
                let (written, answer) = (written.clone(), answer.clone());
                std::thread::spawn(move || serve(stream, written, &answer));
            }
        });
        impostor
    }

    fn store(&self) -> Arc<dyn Store> {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let url = format!("s3://b/p?endpoint={endpoint}&region=us-east-1&unsigned=true&fresh=0ms");
        open(&url, &OpenOptions::default()).expect("the URL is right")
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn serve(stream: TcpStream, written: Arc<AtomicU64>, answer: &Answer) {
    let mut lines = BufReader::new(stream.try_clone().expect("a socket")).lines();
    let mut wire = Wire {
        stream,
        written,
        is_over: false,
    };
    while let Some(Ok(first)) = lines.next() {
        // Requests here have no body.
        while lines
            .next()
            .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
        {}
        answer(&first, &mut wire);
        if wire.is_over {
            return;
        }
    }
}

fn asked(store: &dyn Store) -> Result<Vec<bool>, ErrorKind> {
    let keys = [key(fresh_namespace(), 0)];
    store.contains(&keys, soon()).map_err(|error| error.kind())
}

fn page(contents: &str, token: Option<&str>) -> String {
    let more = match token {
        Some(token) => format!(
            "<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        ),
        None => "<IsTruncated>false</IsTruncated>".to_owned(),
    };
    format!("<ListBucketResult><Name>b</Name>{more}{contents}</ListBucketResult>")
}

#[test]
fn a_listing_without_end_is_an_error_and_is_not_kept() {
    let impostor = Impostor::start(|_, wire| {
        wire.endless("200 OK", b"<ListBucketResult><Contents>");
    });
    let store = impostor.store();
    for _ in 0..3 {
        assert_eq!(asked(&*store), Err(ErrorKind::Protocol));
    }
    assert!(impostor.written() < 3 * ((16 << 20) + IN_SOCKETS));
}

#[test]
fn of_an_errors_text_without_end_the_beginning_is_read() {
    for (status, kind) in [
        ("403 Forbidden", ErrorKind::Denied),
        ("400 Bad Request", ErrorKind::Protocol),
    ] {
        let impostor = Impostor::start(move |_, wire| {
            wire.endless(status, b"<Error><Code>Refused</Code>");
        });
        let store = impostor.store();
        let keys = [key(fresh_namespace(), 0)];
        let error = store.contains(&keys, soon()).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains("Refused"), "{error}");
        assert!(error.to_string().len() < 1000);
        assert!(impostor.written() < IN_SOCKETS);
    }
}

#[test]
fn pages_without_end_do_not_outlast_the_callers_time() {
    let impostor = Impostor::start(|_, wire| {
        wire.whole("200 OK", page("", Some("again")).as_bytes());
    });
    let store = impostor.store();
    let keys = [key(fresh_namespace(), 0)];
    let late = within(Duration::from_millis(200));
    let error = store.contains(&keys, late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    // And all the namespaces that there are.
    let late = within(Duration::from_millis(200));
    let error = store.list(None, &mut |_| (), late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[test]
fn nonsense_is_an_error_or_names_nothing() {
    let bomb = "<?xml version=\"1.0\"?><!DOCTYPE l [<!ENTITY a \"aaaaaaaaaa\"><!ENTITY b \
                \"&a;&a;&a;&a;&a;&a;&a;&a;\"><!ENTITY c \"&b;&b;&b;&b;&b;&b;&b;&b;\">]>\
                <ListBucketResult><Name>&c;</Name></ListBucketResult>";
    let deep = format!("<ListBucketResult>{}", "<a>".repeat(1 << 20));
    for body in [
        bomb,
        &deep,
        "",
        "nonsense",
        "<Contents/>",
        "\0\0\0",
        "<ListBucketResult>",
    ] {
        let body = body.as_bytes().to_vec();
        let impostor = Impostor::start(move |_, wire| wire.whole("200 OK", &body));
        let answer = asked(&*impostor.store());
        // A page whose elements are not those of a listing names no object.
        assert!(
            matches!(answer, Err(ErrorKind::Protocol)) || answer == Ok(vec![false]),
            "{answer:?}"
        );
    }
}

#[test]
fn an_answer_that_breaks_off_is_an_error() {
    let impostor = Impostor::start(|_, wire| {
        wire.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n<ListBucketResult>");
        let _ = wire.stream.shutdown(std::net::Shutdown::Both);
        wire.is_over = true;
    });
    assert_eq!(asked(&*impostor.store()), Err(ErrorKind::Unreachable));
}

#[test]
fn nobody_is_sent_elsewhere() {
    let elsewhere = Impostor::start(|_, wire| wire.whole("200 OK", page("", None).as_bytes()));
    for status in [
        "301 Moved",
        "302 Found",
        "303 See",
        "307 Temporary",
        "308 Permanent",
    ] {
        let to = format!("http://127.0.0.1:{}/b", elsewhere.port);
        let impostor = Impostor::start(move |_, wire| {
            let head = format!("HTTP/1.1 {status}\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n");
            wire.say(head.as_bytes());
        });
        assert_eq!(
            asked(&*impostor.store()),
            Err(ErrorKind::Config),
            "{status}"
        );
    }
    assert_eq!(elsewhere.connections.load(Ordering::Relaxed), 0);
}

/// A page with one pack, whose head is whatever `head` answers.
fn with_one_pack(bytes: u64, head: impl Fn(&mut Wire) + Send + Sync + 'static) -> Impostor {
    Impostor::start(move |line, wire| {
        if line.contains("list-type") {
            let after = line.split("prefix=").nth(1).unwrap_or_default();
            let prefix = after.split(['&', ' ']).next().unwrap_or_default();
            let prefix = prefix.replace("%2F", "/");
            let contents = format!(
                "<Contents><Key>{prefix}{:028x}-10000.pack</Key><Size>{bytes}</Size>\
                 <LastModified>2026-11-27T04:00:00.000Z</LastModified><ETag>\"x\"</ETag></Contents>",
                1
            );
            wire.whole("200 OK", page(&contents, None).as_bytes());
        } else {
            head(wire);
        }
    })
}

const RANGE: &str = "206 Partial\r\nContent-Range: bytes 0-3932195/4000000000\r\nETag: \"x\"\r\n\
                     Last-Modified: Fri, 27 Nov 2026 04:00:00 GMT";

#[test]
fn a_head_without_end_or_of_nonsense_is_passed_over() {
    let endless = with_one_pack(4_000_000_000, |wire| wire.endless(RANGE, b"PNSTKPK1"));
    let store = endless.store();
    for _ in 0..3 {
        assert_eq!(asked(&*store), Ok(vec![false]));
    }
    assert!(endless.written() < 3 * ((4 << 20) + IN_SOCKETS));
    let whole_object = with_one_pack(4_000_000_000, |wire| wire.endless("200 OK", b"PNSTKPK1"));
    assert_eq!(asked(&*whole_object.store()), Ok(vec![false]));
}

#[test]
fn a_get_finds_nothing_and_touches_nothing_but_its_slices() {
    let impostor = with_one_pack(4_000_000_000, |wire| wire.endless(RANGE, b"PNSTKPK1"));
    let store = impostor.store();
    let mut into = vec![7; 1000];
    let (before, rest) = into.split_at_mut(100);
    let (slice, after) = rest.split_at_mut(800);
    let outcome = store.get(
        &key(fresh_namespace(), 0),
        &mut [IoSliceMut::new(slice)],
        soon(),
    );
    assert_eq!(outcome.ok(), Some(penstock_contract::GetOutcome::Miss));
    assert!(before.iter().chain(after.iter()).all(|&byte| byte == 7));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a server answers, a call ends, with an error or with a miss.
    #[test]
    fn arbitrary_answers_are_errors_or_misses(
        status in prop::sample::select(vec![200, 204, 206, 400, 401, 404, 418]),
        body in prop::collection::vec(any::<u8>(), 0..200),
        has_length in any::<bool>(),
    ) {
        let impostor = Impostor::start(move |_, wire| {
            let length = if has_length { body.len() } else { body.len() + 1 };
            wire.say(format!("HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n\r\n").as_bytes());
            wire.say(&body);
            let _ = wire.stream.shutdown(std::net::Shutdown::Both);
            wire.is_over = true;
        });
        let keys = [key(fresh_namespace(), 0)];
        let late = within(Duration::from_secs(1));
        if let Ok(found) = impostor.store().contains(&keys, late) {
            prop_assert_eq!(found, vec![false]);
        }
    }
}
