//! Reads what a program answers, as it comes. A program may say anything.

use std::time::Instant;

use penstock_contract::{Error, GetOutcome, GetRequest, Listed, PutOutcome, Result};

use super::Secrets;
use super::link::{Failure, Link};
use super::protocol::{
    self, GOT_BYTES, LISTED_BYTES, LONGEST_TEXT, NO, PUT_BYTES, Reply, TOO_LARGE, WENT_WRONG, YES,
};

/// What reading a reply comes to.
type Done<T> = std::result::Result<T, Failure>;

/// A yes or no for each of so many items.
pub(super) fn answers(
    link: &mut Link,
    reply: Reply,
    items: usize,
    deadline: Instant,
) -> Done<Vec<bool>> {
    if (reply.items as usize, reply.bytes) != (items, items as u64) {
        return Err(Failure::Strange);
    }
    let mut found = vec![0; items];
    link.receive(&mut found, deadline)?;
    Ok(found.into_iter().map(|found| found != 0).collect())
}

/// Outcomes of so many puts.
pub(super) fn puts(
    link: &mut Link,
    reply: Reply,
    items: usize,
    secrets: &Secrets,
    deadline: Instant,
) -> Done<Vec<Result<PutOutcome>>> {
    if reply.items as usize != items {
        return Err(Failure::Strange);
    }
    let mut heads = vec![[0; PUT_BYTES]; items];
    link.receive(heads.as_flattened_mut(), deadline)?;
    let mut outcomes = Vec::with_capacity(items);
    for head in heads {
        let error = protocol::number(&head[4..]);
        outcomes.push(match protocol::number(&head[..4]) as u32 {
            YES => Ok(PutOutcome::Stored),
            NO => Ok(PutOutcome::AlreadyPresent),
            WENT_WRONG => Err(said(link, error, secrets, deadline)?),
            _ => return Err(Failure::Strange),
        });
    }
    Ok(outcomes)
}

/// Outcomes of gets. Values go where the requests say, and nowhere else.
pub(super) fn gets(
    link: &mut Link,
    reply: Reply,
    batch: &mut [GetRequest<'_, '_>],
    secrets: &Secrets,
    deadline: Instant,
) -> Done<()> {
    if reply.items as usize != batch.len() {
        return Err(Failure::Strange);
    }
    for request in batch {
        let mut head = [0; GOT_BYTES];
        link.receive(&mut head, deadline)?;
        let (outcome, error, bytes) = protocol::got(&head);
        request.outcome = Some(match outcome {
            YES => {
                link.receive_into(request.into, bytes, deadline)?;
                Ok(GetOutcome::Hit(bytes))
            }
            NO => Ok(GetOutcome::Miss),
            TOO_LARGE => Ok(GetOutcome::TooLarge(bytes)),
            WENT_WRONG => Err(said(link, error, secrets, deadline)?),
            _ => return Err(Failure::Strange),
        });
    }
    Ok(())
}

/// The objects of a listing. What is none is left out: others may keep their own things in there.
pub(super) fn objects(
    link: &mut Link,
    reply: Reply,
    deadline: Instant,
    mut visit: impl FnMut(Listed),
) -> Done<()> {
    for _ in 0..reply.items {
        let mut item = [0; LISTED_BYTES];
        link.receive(&mut item, deadline)?;
        if let Some(object) = protocol::listed(&item) {
            visit(object);
        }
    }
    Ok(())
}

/// A text of so many bytes, as the program says, if that is not too long.
pub(super) fn text(link: &mut Link, bytes: u64, deadline: Instant) -> Done<Vec<u8>> {
    if bytes > LONGEST_TEXT {
        return Err(Failure::Strange);
    }
    let mut text = vec![0; bytes as usize];
    link.receive(&mut text, deadline)?;
    Ok(text)
}

/// The error of one request.
fn said(link: &mut Link, bytes: u64, secrets: &Secrets, deadline: Instant) -> Done<Error> {
    let text = text(link, bytes, deadline)?;
    let (kind, message) = protocol::error(&text);
    Ok(secrets.error(&kind, &message))
}
