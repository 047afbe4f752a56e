//! Listings: the objects that one server holds, page by page.

use std::time::Instant;

use penstock_contract::{KEY_PREFIX, Key, Listed, Namespace};

use super::command::Commands;
use super::connection::Connection;
use super::failure::Failure;
use super::parser::Reply;
use super::pool::ConnectionPool;
use super::{ask_each, count, refuse, unexpected};

/// Keys that the server looks at in one step of a listing.
const SCAN_COUNT: &str = "1000";

/// Visits every object, of one namespace if one is given.
pub(super) fn list(
    pool: &ConnectionPool,
    namespace: Option<Namespace>,
    visit: &mut dyn FnMut(Listed),
    deadline: Instant,
) -> Result<(), Failure> {
    let pattern = match namespace {
        Some(namespace) => format!("{KEY_PREFIX}{namespace}:*"),
        None => format!("{KEY_PREFIX}*"),
    };
    // Each step is a conversation of its own. So if a connection is found stale at the start of
    // one, nothing is visited twice.
    let mut cursor = "0".to_owned();
    loop {
        let (next, listed) = pool.converse(deadline, |connection| {
            scan(connection, &cursor, &pattern, deadline)
        })?;
        listed.into_iter().for_each(&mut *visit);
        if next == "0" {
            return Ok(());
        }
        cursor = next;
    }
}

/// One step of a listing: the next cursor and the objects seen.
fn scan(
    connection: &mut Connection,
    cursor: &str,
    pattern: &str,
    deadline: Instant,
) -> Result<(String, Vec<Listed>), Failure> {
    let mut commands = Commands::default();
    commands.push(&["SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT]);
    let mut page = None;
    connection.call(&commands, deadline, |_, reply| {
        page = Some(scan_page(reply)?);
        Ok(())
    })?;
    let Some((next, keys)) = page else {
        return Err(unexpected());
    };

    let mut listed = Vec::with_capacity(keys.len());
    let mut empty = Vec::new();
    ask_each(
        connection,
        "STRLEN",
        &keys,
        deadline,
        |key, reply| match reply {
            // The key does not hold a string, so no store put it there.
            Reply::Error(line) if line.starts_with(b"WRONGTYPE") => Ok(()),
            // An empty value, or none: the key may have been removed meanwhile.
            Reply::Integer(0) => {
                empty.push(key);
                Ok(())
            }
            reply => {
                listed.push(Listed {
                    key,
                    bytes: count(reply)?,
                    last_use: 0,
                });
                Ok(())
            }
        },
    )?;
    ask_each(connection, "EXISTS", &empty, deadline, |key, reply| {
        if count(reply)? > 0 {
            listed.push(Listed {
                key,
                bytes: 0,
                last_use: 0,
            });
        }
        Ok(())
    })?;
    Ok((next, listed))
}

fn scan_page(reply: Reply) -> Result<(String, Vec<Key>), Failure> {
    let Reply::Array(parts) = refuse(reply)? else {
        return Err(unexpected());
    };
    let Ok([Reply::String(cursor), Reply::Array(names)]) = <[Reply; 2]>::try_from(parts) else {
        return Err(unexpected());
    };
    let cursor = String::from_utf8(cursor).map_err(|_| unexpected())?;
    if !cursor.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(unexpected());
    }
    let keys = names.into_iter().filter_map(|name| match name {
        // A key that only begins like ours belongs to somebody else.
        Reply::String(name) => std::str::from_utf8(&name)
            .ok()
            .and_then(|n| Key::parse(n).ok()),
        _ => None,
    });
    Ok((cursor, keys.collect()))
}
