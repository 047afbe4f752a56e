//! What fuzz tests need: a program that says whatever they want.

use std::io::IoSliceMut;
use std::time::Instant;

use penstock_contract::{GetOutcome, GetRequest, Key};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use super::link::{Failure, Link};
use super::protocol::Greeting;
use super::{Secrets, replies};

/// Hides the password of a URL in a text that repeats it, each of its characters spelled in one of
/// several ways.
pub(crate) fn repeated_password(password: &str, ways: &[u8], before: &str, after: &str) {
    let encoded = |text: &str| -> String {
        let bytes = text.bytes();
        bytes.map(|byte| format!("%{byte:02X}")).collect()
    };
    let url = format!("x://me:{}@host", encoded(password));
    let mut ways = ways.iter().cycle();
    let spelled: String = password
        .chars()
        .map(|c| match ways.next().map_or(0, |way| way % 4) {
            0 => encoded(&c.to_string()),
            1 => encoded(&c.to_string()).to_lowercase(),
            2 if matches!(c, '\'' | '"' | '\\') => format!("\\{c}"),
            _ => c.to_string(),
        })
        .collect();
    let hidden = Secrets::of(&url).hide(&format!("{before}{spelled}{after}"));
    // What stands for it, and for what cannot be shown, may be in it.
    let is_plain = |c: char| !c.is_control() && !matches!(c, ' ' | '*' | '…' | '\u{fffd}');
    if !password.is_empty() && password.chars().all(is_plain) {
        assert!(
            !hidden.contains(&spelled) && !hidden.contains(password),
            "{password:?}: {hidden:?}"
        );
    }
}

/// Reads all replies out of what a program says before it goes: gets of two values, whose memory is
/// as long as the lengths say, then answers, puts, a listing and a text.
pub(crate) fn replies(said: &[u8], key: Key, lengths: [usize; 2]) {
    let _ = Greeting::parse(said);
    let secrets = Secrets::of("x://me:secret@host");
    let deadline = penstock_contract::testing::soon();
    for which in 0..5 {
        let mut link = link(said);
        let _ = (|| -> Result<(), Failure> {
            let reply = link.head(deadline)?;
            match which {
                0 => {
                    let mut memory = lengths.map(|length| vec![0xee; length + 1]);
                    let [one, other] = &mut memory;
                    let mut one = [IoSliceMut::new(&mut one[..lengths[0]])];
                    let mut other = [IoSliceMut::new(&mut other[..lengths[1]])];
                    let mut batch = [
                        GetRequest::new(key, &mut one),
                        GetRequest::new(key, &mut other),
                    ];
                    let read = replies::gets(&mut link, reply, &mut batch, &secrets, deadline);
                    for (request, length) in batch.into_iter().zip(lengths) {
                        if let Some(Ok(GetOutcome::Hit(bytes))) = request.outcome {
                            assert!(bytes <= length as u64);
                        }
                    }
                    assert!(memory.iter().all(|memory| memory.last() == Some(&0xee)));
                    read?;
                }
                1 => drop(replies::answers(&mut link, reply, 2, deadline)?),
                2 => drop(replies::puts(&mut link, reply, 2, &secrets, deadline)?),
                3 => replies::objects(&mut link, reply, deadline, |_| {})?,
                _ => drop(replies::text(&mut link, reply.bytes, deadline)?),
            }
            link.done()
        })();
        // Whatever was left, it can be thrown away, or the program has gone.
        let _ = link.settle(deadline);
    }
}

/// A link that owes a reply, to a program that says this and goes.
fn link(said: &[u8]) -> Link {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let mut link = Link::new(ours);
    link.send(&[], Instant::now()).unwrap();
    let mut rest = said;
    while let Ok(sent) = rustix::net::send(&theirs, rest, SendFlags::NOSIGNAL) {
        rest = &rest[sent..];
        if rest.is_empty() {
            break;
        }
    }
    link
}
