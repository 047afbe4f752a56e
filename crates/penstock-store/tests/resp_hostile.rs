//! The RESP store against peers that say what no server says.

use std::io::{IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, GetOutcome, GetRequest, Key, PutOutcome, Result, Store};
use penstock_store::{OpenOptions, open};
use proptest::prelude::*;

use crate::behaviour::{bytes, eventually, fresh_namespace, key, put, soon, within};
use crate::resp_server::{Impostor, Script};

/// Reads a first piece of what comes, then says these bytes and nothing more.
fn says(reply: &[u8]) -> Script {
    let reply = reply.to_vec();
    Box::new(move |stream| {
        let _ = stream.read(&mut [0; 65_536]);
        let _ = stream.write_all(&reply);
        let _ = stream.shutdown(Shutdown::Write);
        // Not closed before the other side does: that could throw the reply away.
        let _ = std::io::copy(stream, &mut std::io::sink());
    })
}

fn facing(scripts: Vec<Script>) -> (Impostor, Arc<dyn Store>) {
    let impostor = Impostor::start(scripts);
    let store = open(&impostor.url(), &OpenOptions::default()).unwrap();
    (impostor, store)
}

fn get_into(store: &dyn Store, into: &mut [u8]) -> Result<GetOutcome> {
    store.get(
        &key(fresh_namespace(), 0),
        &mut [IoSliceMut::new(into)],
        soon(),
    )
}

#[test]
fn nonsense_is_an_error_and_ends_the_connection() {
    let long_line = [b"+".as_slice(), &[b'x'; 100_000]].concat();
    for (reply, kind) in [
        (b"".as_slice(), ErrorKind::Unreachable),
        (b"HTTP/1.1 400 Bad Request\r\n", ErrorKind::Protocol),
        (b"\0\0\0\0", ErrorKind::Protocol),
        (b"+OK\r\n", ErrorKind::Protocol),
        (b":1\r\n", ErrorKind::Protocol),
        (b"*1\r\n$1\r\nx\r\n", ErrorKind::Protocol),
        (b"*-1\r\n+OK\r\n", ErrorKind::Protocol),
        (b"$", ErrorKind::Unreachable),
        (b"$8", ErrorKind::Unreachable),
        (b"$8\r\n", ErrorKind::Unreachable),
        (b"$8\r\n1234567", ErrorKind::Unreachable),
        (b"$8\r\n12345678", ErrorKind::Unreachable),
        (b"$8\r\n12345678\r", ErrorKind::Unreachable),
        (b"$8\r\n12345678xx", ErrorKind::Protocol),
        (b"$8\r\n12345678\r\n+OK\r\n", ErrorKind::Protocol),
        (b"$-2\r\n", ErrorKind::Protocol),
        (b"$+8\r\n12345678\r\n", ErrorKind::Protocol),
        (b"$8 \r\n12345678\r\n", ErrorKind::Protocol),
        (b"$99999999999999999999\r\n", ErrorKind::Protocol),
        (b"$600000000\r\n", ErrorKind::Protocol),
        (b"$100\r\nshort", ErrorKind::Unreachable),
        (&long_line, ErrorKind::Protocol),
    ] {
        let (_impostor, store) = facing(vec![says(reply), says(b"$8\r\nabcdefgh\r\n")]);
        let mut into = [0; 8];
        let outcome = get_into(&*store, &mut into);
        let text = reply[..reply.len().min(40)].escape_ascii();
        if reply == b"*-1\r\n+OK\r\n" || reply == b"$8\r\n12345678\r\n+OK\r\n" {
            // The answer itself is right; what follows it makes the connection unfit.
            assert!(
                outcome.is_ok() || outcome.is_err_and(|e| e.kind() == kind),
                "{text}"
            );
        } else {
            let error = outcome.expect_err(&text.to_string());
            assert_eq!(error.kind(), kind, "{text}: {error}");
        }
        assert_eq!(
            get_into(&*store, &mut into).unwrap(),
            GetOutcome::Hit(8),
            "after {text}"
        );
        assert_eq!(&into, b"abcdefgh");
        assert_eq!(store.stats().connects, 2, "{text}");
    }
}

#[test]
fn nonsense_to_other_operations_is_an_error() {
    let keys: Vec<Key> = (0..3).map(|n| key(fresh_namespace(), n)).collect();
    for reply in [
        b"+OK\r\n".as_slice(),
        b":-1\r\n",
        b"$-1\r\n",
        b":1x\r\n",
        b"*2\r\n$1\r\n0\r\n:1\r\n",
        b"*2\r\n$2\r\n0x\r\n*0\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
        b":3\r\n:3\r\n",
    ] {
        let again = || says(reply);
        let (_impostor, store) = facing(vec![again(), again(), again(), again()]);
        let text = reply.escape_ascii();
        for kind in [
            store.contains(&keys, soon()).map(drop),
            store.remove(&keys, soon()).map(drop),
            store.list(None, &mut |_| {}, soon()),
            store.describe(soon()).map(drop),
        ]
        .map(|outcome| outcome.err().map(|error| error.kind()))
        {
            if reply == b":3\r\n:3\r\n" && kind.is_none() {
                continue;
            }
            assert!(
                matches!(kind, Some(ErrorKind::Protocol | ErrorKind::Unreachable)),
                "{text}: {kind:?}"
            );
        }
    }
}

#[test]
fn a_put_needs_an_ok_after_its_last_byte() {
    for reply in [
        b"$-1\r\n".as_slice(),
        b"+FINE\r\n",
        b":1\r\n",
        b"$2\r\nOK\r\n",
        b"",
    ] {
        let (_impostor, store) = facing(vec![says(reply)]);
        let outcome = put(&*store, &key(fresh_namespace(), 0), &bytes(0, 1000));
        let error = outcome.expect_err(&reply.escape_ascii().to_string());
        assert!(
            matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unreachable),
            "{error}"
        );
    }
    // "OK" while most of the value is still on this side.
    let (has_heard, waits) = std::sync::mpsc::channel::<()>();
    let early: Script = Box::new(move |stream| {
        let _ = stream.read(&mut [0; 100]);
        let _ = stream.write_all(b"+OK\r\n");
        let _ = waits.recv();
    });
    let (_impostor, store) = facing(vec![early]);
    let error = put(&*store, &key(fresh_namespace(), 0), &bytes(0, 64 << 20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    drop(has_heard);
}

#[test]
fn a_refusal_in_the_middle_of_a_put_is_told() {
    let (has_heard, waits) = std::sync::mpsc::channel::<()>();
    let refuses: Script = Box::new(move |stream| {
        let _ = stream.read(&mut [0; 100]);
        let _ = stream.write_all(b"-OOM no room at all\r\n");
        let _ = stream.shutdown(Shutdown::Write);
        // Neither closed nor read from before the other side has heard.
        let _ = waits.recv();
    });
    let (_impostor, store) = facing(vec![refuses]);
    let error = put(&*store, &key(fresh_namespace(), 0), &bytes(0, 64 << 20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    drop(has_heard);
}

#[test]
fn why_a_connection_was_reset_is_told() {
    // Closing with bytes unread resets the connection, so that sending fails on this side.
    let resets: Script = Box::new(|stream| {
        let _ = stream.read(&mut [0; 100]);
        let _ = stream.write_all(b"-OOM no room at all\r\n");
    });
    let (_impostor, store) = facing(vec![resets]);
    let error = put(&*store, &key(fresh_namespace(), 0), &bytes(0, 64 << 20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
}

#[test]
fn a_request_on_a_connection_that_was_closing_is_sent_again() {
    // The connection is open when it is taken up again, and closed before it answers.
    let closes = || -> Script {
        Box::new(|stream| {
            let _ = stream.read(&mut [0; 65_536]);
            let _ = stream.write_all(b"$4\r\nmine\r\n");
            let _ = stream.read(&mut [0; 65_536]);
        })
    };
    let (_impostor, store) = facing(vec![
        closes(),
        closes(),
        says(b":1\r\n"),
        says(b"$4\r\nlast\r\n"),
    ]);
    let mut into = [0; 4];
    for connects in [1, 2] {
        assert_eq!(get_into(&*store, &mut into).unwrap(), GetOutcome::Hit(4));
        assert_eq!(store.stats().connects, connects);
    }
    let one = [key(fresh_namespace(), 0)];
    assert_eq!(store.contains(&one, soon()).unwrap(), [true]);
    assert_eq!((store.stats().connects, store.stats().errors), (3, 0));

    // On a connection just opened it is an error: nothing suggests that another would do better.
    let mute: Script = Box::new(|stream| drop(stream.read(&mut [0; 65_536])));
    let (_impostor, store) = facing(vec![mute, says(b"$4\r\nlast\r\n")]);
    let error = get_into(&*store, &mut into).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[test]
fn a_peer_that_trickles_meets_the_deadline() {
    for reply in [b"$1000000\r\n".as_slice(), b"*1000000\r\n", b"+"] {
        let trickle = || -> Script {
            Box::new(move |stream| {
                let _ = stream.read(&mut [0; 65_536]);
                let _ = stream.write_all(reply);
                while stream.write_all(b"x").is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            })
        };
        let (_impostor, store) = facing(vec![trickle(), trickle()]);
        let late = || within(Duration::from_millis(150));
        let mut into = vec![0; 1_000_000];
        let one = key(fresh_namespace(), 0);
        let outcomes = [
            store
                .get(&one, &mut [IoSliceMut::new(&mut into)], late())
                .map(drop),
            store.describe(late()).map(drop),
        ];
        for outcome in outcomes {
            let kind = outcome.unwrap_err().kind();
            assert!(
                matches!(kind, ErrorKind::TimedOut | ErrorKind::Protocol),
                "{kind:?}"
            );
        }
    }
}

/// Whether something has come from this port that nobody has read yet.
fn has_unread(port: u16) -> bool {
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let from = format!(":{port:04X}");
    sockets.lines().skip(1).any(|socket| {
        // A number, both ends, the state, and the bytes that are still to be sent and to be read.
        let fields: Vec<&str> = socket.split_whitespace().collect();
        fields[2].ends_with(&from) && !fields[4].ends_with(":00000000")
    })
}

#[test]
fn a_connection_that_said_too_much_is_not_used_again() {
    // The second reply arrives unasked while the connection lies idle, and is another key's.
    let (goes_on, waits) = std::sync::mpsc::channel::<()>();
    let talkative: Script = Box::new(move |stream| {
        let _ = stream.read(&mut [0; 65_536]);
        let _ = stream.write_all(b"$4\r\nmine\r\n");
        let _ = waits.recv();
        let _ = stream.write_all(b"$4\r\nlies\r\n");
        // Until the other side closes it.
        let _ = std::io::copy(stream, &mut std::io::sink());
    });
    let (impostor, store) = facing(vec![talkative, says(b"$4\r\ntrue\r\n")]);
    let mut into = [0; 4];
    assert_eq!(get_into(&*store, &mut into).unwrap(), GetOutcome::Hit(4));
    assert_eq!(&into, b"mine");
    goes_on.send(()).unwrap();
    eventually("it lies there unread", || has_unread(impostor.port()));
    // The impostor serves one connection after the other.
    assert_eq!(get_into(&*store, &mut into).unwrap(), GetOutcome::Hit(4));
    assert_eq!(&into, b"true");
}

#[test]
fn what_was_answered_is_not_asked_again() {
    // The connection breaks after the first of two replies: not a stale one, so no retry.
    let serves_once: Script = Box::new(|stream| {
        let _ = stream.read(&mut [0; 65_536]);
        let _ = stream.write_all(b"$4\r\nmine\r\n");
        let _ = stream.read(&mut [0; 65_536]);
        let _ = stream.write_all(b"$4\r\nhalf\r\n$4\r\nha");
    });
    let (_impostor, store) = facing(vec![serves_once, says(b"$4\r\nmore\r\n$4\r\nmore\r\n")]);
    let mut into = [0; 4];
    assert_eq!(get_into(&*store, &mut into).unwrap(), GetOutcome::Hit(4));
    let mut buffers = [[0; 4]; 2];
    let mut slices: Vec<_> = buffers.iter_mut().map(|b| [IoSliceMut::new(b)]).collect();
    let mut batch: Vec<_> = slices
        .iter_mut()
        .map(|into| GetRequest::new(key(fresh_namespace(), 0), into))
        .collect();
    store.get_many(&mut batch, soon());
    let outcomes: Vec<_> = batch.into_iter().map(|r| r.outcome.unwrap()).collect();
    assert_eq!(outcomes[0].as_ref().unwrap(), &GetOutcome::Hit(4));
    assert_eq!(
        outcomes[1].as_ref().unwrap_err().kind(),
        ErrorKind::Unreachable
    );
    assert_eq!(&buffers[0], b"half");
}

#[derive(Clone, Debug)]
enum Stored {
    Value(Vec<u8>),
    Nothing,
    Refused,
}

fn stored() -> impl Strategy<Value = Stored> {
    prop_oneof![
        6 => proptest::collection::vec(any::<u8>(), 0..40_000).prop_map(Stored::Value),
        2 => proptest::collection::vec(any::<u8>(), 0..3).prop_map(Stored::Value),
        1 => Just(Stored::Nothing),
        1 => Just(Stored::Refused),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever pieces the replies come in and wherever the destinations are cut, every value
    /// lands where it belongs; if the connection ends early, what came whole is a hit and
    /// nothing else is.
    #[test]
    fn replies_in_any_pieces(
        values in proptest::collection::vec(stored(), 1..12),
        pieces in proptest::collection::vec(1usize..20_000, 1..12),
        room in 0usize..41_000,
        cuts in proptest::collection::vec(0usize..5_000, 1..6),
        end in proptest::option::of(0.0f64..1.0),
    ) {
        let mut reply = Vec::new();
        let mut ends = Vec::new();
        for value in &values {
            match value {
                Stored::Value(value) => {
                    reply.extend_from_slice(format!("${}\r\n", value.len()).as_bytes());
                    reply.extend_from_slice(value);
                    reply.extend_from_slice(b"\r\n");
                }
                Stored::Nothing => reply.extend_from_slice(b"$-1\r\n"),
                Stored::Refused => reply.extend_from_slice(b"-OOM no\r\n"),
            }
            ends.push(reply.len());
        }
        let sent = end.map_or(reply.len(), |end| (reply.len() as f64 * end) as usize);
        reply.truncate(sent);
        let script: Script = Box::new(move |stream| {
            // The whole pipeline may come in pieces; the window may hold some of it back.
            let mut peer = stream.try_clone().unwrap();
            let _ = peer.read(&mut [0; 65_536]);
            std::thread::spawn(move || std::io::copy(&mut peer, &mut std::io::sink()));
            let mut rest = &reply[..];
            for piece in pieces.into_iter().cycle() {
                let (now, later) = rest.split_at(piece.min(rest.len()));
                if now.is_empty() || stream.write_all(now).is_err() {
                    break;
                }
                rest = later;
            }
            let _ = stream.shutdown(Shutdown::Write);
        });
        let (_impostor, store) = facing(vec![script]);
        let mut buffers = vec![vec![0; room]; values.len()];
        let mut slices: Vec<Vec<IoSliceMut<'_>>> = buffers
            .iter_mut()
            .map(|buffer| {
                let mut rest = buffer.as_mut_slice();
                let mut slices = Vec::new();
                for &cut in &cuts {
                    let (now, later) = rest.split_at_mut(cut.min(rest.len()));
                    slices.push(IoSliceMut::new(now));
                    rest = later;
                }
                slices.push(IoSliceMut::new(rest));
                slices
            })
            .collect();
        let mut batch: Vec<_> = slices
            .iter_mut()
            .map(|into| GetRequest::new(key(fresh_namespace(), 0), into))
            .collect();
        store.get_many(&mut batch, soon());
        let outcomes: Vec<_> = batch.into_iter().map(|r| r.outcome.unwrap()).collect();
        for (n, outcome) in outcomes.into_iter().enumerate() {
            if ends[n] > sent {
                let kind = outcome.expect_err("its reply did not come whole").kind();
                // One that had begun may fail by its own refusal, cut short or not.
                prop_assert_eq!(kind, ErrorKind::Unreachable);
                continue;
            }
            match &values[n] {
                Stored::Value(value) if value.len() <= room => {
                    prop_assert_eq!(outcome.unwrap(), GetOutcome::Hit(value.len() as u64));
                    prop_assert!(buffers[n].starts_with(value), "value {} has changed", n);
                }
                Stored::Value(value) => {
                    prop_assert_eq!(outcome.unwrap(), GetOutcome::TooLarge(value.len() as u64));
                }
                Stored::Nothing => prop_assert_eq!(outcome.unwrap(), GetOutcome::Miss),
                Stored::Refused => prop_assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Full),
            }
        }
    }

    /// Any bytes at all: no panic, no hang, and a hit only if they are a value of this length.
    #[test]
    fn any_bytes(
        reply in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..60),
            "\\$[0-9]{1,2}\r?\n?[a-z]{0,40}\r?\n?".prop_map(String::into_bytes),
            "\\$(3\r\n[a-z]{3}|0\r\n|-1)\r\n".prop_map(String::into_bytes),
        ],
    ) {
        let (_impostor, store) = facing(vec![says(&reply)]);
        let mut into = [0; 30];
        if let Ok(GetOutcome::Hit(length)) = get_into(&*store, &mut into) {
            let head = format!("${length}\r\n");
            prop_assert!(reply.starts_with(head.as_bytes()));
            prop_assert_eq!(&reply[head.len()..][..length as usize], &into[..length as usize]);
        }
    }
}

#[test]
fn a_put_of_scattered_pieces_arrives_whole() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let takes: Script = Box::new(move |stream| {
        let mut all = Vec::new();
        let mut piece = vec![0; 10_000];
        // Slowly at first, so that sends stop half-way.
        while !all.ends_with(b"the end\r\n") {
            std::thread::sleep(Duration::from_millis(if all.len() < 500_000 {
                1
            } else {
                0
            }));
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => break,
                Ok(n) => all.extend_from_slice(&piece[..n]),
            }
        }
        let _ = stream.write_all(b"+OK\r\n");
        sender.send(all).unwrap();
    });
    let (_impostor, store) = facing(vec![takes]);
    let mut value = bytes(5, 6 << 20);
    value.extend_from_slice(b"the end");
    let pieces: Vec<_> = value.chunks(4099).map(std::io::IoSlice::new).collect();
    let key = key(fresh_namespace(), 0);
    assert_eq!(
        store.put(&key, &pieces, soon()).unwrap(),
        PutOutcome::Stored
    );
    let text = key.to_string();
    let head = format!(
        "*3\r\n$3\r\nSET\r\n${}\r\n{text}\r\n${}\r\n",
        text.len(),
        value.len()
    );
    let expected = [head.as_bytes(), &value, b"\r\n"].concat();
    assert!(receiver.recv().unwrap() == expected);
}
