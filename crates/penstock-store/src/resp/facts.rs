//! Facts: what servers say about themselves.

use std::collections::BTreeMap;
use std::time::Instant;

use super::command::Commands;
use super::connection::Connection;
use super::failure::Failure;
use super::parser::Reply;
use super::{refuse, unexpected};

/// The settings that decide how the server serves a pool.
const SETTINGS: [&str; 6] = [
    "maxmemory",
    "maxmemory-policy",
    "save",
    "appendonly",
    "io-threads",
    "proto-max-bulk-len",
];

/// Facts whose values are added up if there are several servers.
const SUMS: [&str; 5] = [
    "config:maxmemory",
    "evicted_keys",
    "maxmemory",
    "used_memory",
    "used_memory_dataset",
];

/// Facts by name.
pub(super) type Facts = BTreeMap<String, String>;

/// What INFO says, by its names, and the settings, as `config:NAME`.
pub(super) fn of(connection: &mut Connection, deadline: Instant) -> Result<Facts, Failure> {
    let mut commands = Commands::default();
    commands.push(&["INFO"]);
    SETTINGS
        .iter()
        .for_each(|setting| commands.push(&["CONFIG", "GET", setting]));
    let mut facts = Facts::new();
    connection.call(&commands, deadline, |i, reply| {
        match (i, reply) {
            (0, reply) => {
                let Reply::String(text) = refuse(reply)? else {
                    return Err(unexpected());
                };
                for line in String::from_utf8_lossy(&text).lines() {
                    if let Some((name, value)) = line.split_once(':') {
                        facts.insert(name.to_owned(), value.to_owned());
                    }
                }
            }
            (_, Reply::Array(pairs)) => {
                for pair in pairs.chunks_exact(2) {
                    if let [Reply::String(name), Reply::String(value)] = pair {
                        let name = format!("config:{}", String::from_utf8_lossy(name));
                        facts.insert(name, String::from_utf8_lossy(value).into_owned());
                    }
                }
            }
            // CONFIG is often forbidden, or renamed away.
            (_, _) => {}
        }
        Ok(())
    })?;
    Ok(facts)
}

/// What is true of several servers together: a sum if that says something, else the value that they
/// agree on, else all their values.
pub(super) fn together(servers: &[Facts]) -> Facts {
    let names = servers.iter().flat_map(Facts::keys);
    let mut facts: Facts = names
        .map(|name| {
            let values: Vec<&str> = servers
                .iter()
                .filter_map(|facts| facts.get(name).map(String::as_str))
                .collect();
            let numbers = || values.iter().map(|value| value.parse().ok());
            let sum = numbers().sum::<Option<u64>>();
            // A server without a bound makes the whole unbounded.
            let is_bounded = numbers().all(|number| number != Some(0));
            let together = match sum {
                Some(sum) if SUMS.contains(&name.as_str()) => {
                    if name.ends_with("maxmemory") && !is_bounded {
                        "0".to_owned()
                    } else {
                        sum.to_string()
                    }
                }
                _ => {
                    let mut distinct = values.clone();
                    distinct.sort_unstable();
                    distinct.dedup();
                    distinct.join(" | ")
                }
            };
            (name.clone(), together)
        })
        .collect();
    facts.insert("cluster:primaries".to_owned(), servers.len().to_string());
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_several() {
        let one = |pairs: &[(&str, &str)]| -> Facts {
            pairs
                .iter()
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect()
        };
        let facts = together(&[
            one(&[
                ("used_memory", "5"),
                ("redis_version", "7"),
                ("maxmemory", "9"),
                ("x", "a"),
            ]),
            one(&[
                ("used_memory", "6"),
                ("redis_version", "7"),
                ("maxmemory", "0"),
                ("x", "b"),
            ]),
        ]);
        assert_eq!(facts["used_memory"], "11");
        assert_eq!(facts["redis_version"], "7");
        assert_eq!(facts["maxmemory"], "0");
        assert_eq!(facts["x"], "a | b");
        assert_eq!(facts["cluster:primaries"], "2");
    }
}
