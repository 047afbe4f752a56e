//! Slots: the parts of its keys that a cluster divides among its primaries, and what a node says
//! about them.

use crc::{CRC_16_XMODEM, Crc};
use penstock_contract::{ErrorKind, Key};

use super::super::address::Place;
use super::super::failure::Failure;
use super::super::parser::Reply;

/// Slots in every cluster.
pub(super) const SLOTS: usize = 16384;

const CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The slot of a key: the CRC16 of its text form. That form has no braces, which would narrow down
/// what counts (Redis cluster specification, "Key distribution model").
pub(super) fn slot_of(key: &Key) -> usize {
    usize::from(CRC.checksum(key.to_string().as_bytes())) % SLOTS
}

/// Who serves a run of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) primary: Place,
    pub(super) replicas: Vec<Place>,
}

/// Reads the reply to `CLUSTER SLOTS`. A node that does not know its own address is at `asked`.
pub(super) fn parse(reply: Reply, asked: &str) -> Result<Vec<Shard>, Failure> {
    let shards = match reply {
        Reply::Error(line) if contains(&line, b"cluster support disabled") => {
            return Err(Failure::new(
                ErrorKind::Config,
                "the server is not part of a cluster: use its URL without +cluster",
            ));
        }
        Reply::Error(line) => return Err(Failure::refused(&line)),
        Reply::Array(shards) => shards,
        _ => return Err(nonsense()),
    };
    shards
        .into_iter()
        .map(|shard| parse_shard(shard, asked))
        .collect()
}

fn parse_shard(shard: Reply, asked: &str) -> Result<Shard, Failure> {
    let Reply::Array(parts) = shard else {
        return Err(nonsense());
    };
    let mut parts = parts.into_iter();
    let mut slot = || match parts.next() {
        Some(Reply::Integer(slot)) => usize::try_from(slot)
            .ok()
            .filter(|&slot| slot < SLOTS)
            .ok_or_else(nonsense),
        _ => Err(nonsense()),
    };
    let (first, last) = (slot()?, slot()?);
    let mut places = parts.map(|node| parse_place(node, asked));
    let primary = places.next().ok_or_else(nonsense)??;
    // A replica that has no address yet cannot be read from yet.
    let Some(primary) = primary.filter(|_| first <= last) else {
        return Err(nonsense());
    };
    Ok(Shard {
        first,
        last,
        primary,
        replicas: places
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?,
    })
}

/// A node's place, or `None` if it is not known.
fn parse_place(node: Reply, asked: &str) -> Result<Option<Place>, Failure> {
    let Reply::Array(parts) = node else {
        return Err(nonsense());
    };
    let mut parts = parts.into_iter();
    let host = match parts.next() {
        Some(Reply::String(host)) => String::from_utf8(host).map_err(|_| nonsense())?,
        Some(Reply::Nil) => String::new(),
        _ => return Err(nonsense()),
    };
    let port = match parts.next() {
        Some(Reply::Integer(port)) => u16::try_from(port).map_err(|_| nonsense())?,
        _ => return Err(nonsense()),
    };
    Ok(match host.as_str() {
        "?" => None,
        "" => Some((asked.to_owned(), port)),
        _ => Some((host, port)),
    }
    .filter(|&(_, port)| port != 0))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

fn nonsense() -> Failure {
    Failure::protocol("a node's map of the cluster makes no sense")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: Reply, port: i64) -> Reply {
        let id = Reply::String(b"07c37dfeb235213a872192d90877d0cd55635b91".to_vec());
        Reply::Array(vec![host, Reply::Integer(port), id, Reply::Array(vec![])])
    }

    fn text(text: &str) -> Reply {
        Reply::String(text.into())
    }

    fn shard(first: i64, last: i64, nodes: Vec<Reply>) -> Reply {
        Reply::Array([vec![Reply::Integer(first), Reply::Integer(last)], nodes].concat())
    }

    #[test]
    fn slots_are_the_servers_own() {
        // What CLUSTER KEYSLOT answers.
        let slot = |text: &str| usize::from(CRC.checksum(text.as_bytes())) % SLOTS;
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12182);
    }

    #[test]
    fn a_map_is_read() {
        let reply = Reply::Array(vec![
            shard(
                0,
                5460,
                vec![node(text("10.0.0.1"), 7000), node(text("10.0.0.4"), 7003)],
            ),
            shard(
                5461,
                5461,
                vec![node(Reply::Nil, 7001), node(text("?"), 7004)],
            ),
            shard(5462, 16383, vec![node(text(""), 7002), node(text("x"), 0)]),
        ]);
        let place = |host: &str, port| (host.to_owned(), port);
        let shards = parse(reply, "asked").unwrap();
        assert_eq!(shards.len(), 3);
        assert_eq!((shards[0].first, shards[0].last), (0, 5460));
        assert_eq!(shards[0].primary, place("10.0.0.1", 7000));
        assert_eq!(shards[0].replicas, [place("10.0.0.4", 7003)]);
        assert_eq!(shards[1].primary, place("asked", 7001));
        assert_eq!(shards[1].replicas, []);
        assert_eq!(shards[2].primary, place("asked", 7002));
        assert_eq!(shards[2].replicas, []);
    }

    #[test]
    fn nonsense_is_refused() {
        let one = || node(text("h"), 1);
        for reply in [
            Reply::Nil,
            Reply::Array(vec![Reply::Nil]),
            Reply::Array(vec![shard(0, 16384, vec![one()])]),
            Reply::Array(vec![shard(-1, 3, vec![one()])]),
            Reply::Array(vec![shard(5, 3, vec![one()])]),
            Reply::Array(vec![shard(0, 3, vec![])]),
            Reply::Array(vec![shard(0, 3, vec![node(text("?"), 1)])]),
            Reply::Array(vec![shard(0, 3, vec![node(text("h"), 70_000)])]),
            Reply::Array(vec![shard(0, 3, vec![Reply::Array(vec![])])]),
        ] {
            assert_eq!(parse(reply, "h").unwrap_err().kind, ErrorKind::Protocol);
        }
        let alone = Reply::Error(b"ERR This instance has cluster support disabled".to_vec());
        assert_eq!(parse(alone, "h").unwrap_err().kind, ErrorKind::Config);
    }
}
