//! The parts of the protocol that read foreign bytes, for [`crate::fuzz`].

use super::cluster;
use super::failure::Failure;
use super::parser::{Reply, ReplyReader, Violation};

/// All replies in `bytes`, fed in pieces of this size, up to the first violation.
pub(crate) fn replies(bytes: &[u8], piece: usize) -> (Vec<Reply>, Option<Violation>) {
    let (mut reader, mut held, mut replies) = (ReplyReader::default(), Vec::new(), Vec::new());
    for piece in bytes.chunks(piece) {
        held.extend_from_slice(piece);
        loop {
            match reader.feed(&held) {
                Ok((taken, reply)) => {
                    held.drain(..taken);
                    match reply {
                        Some(reply) => replies.push(reply),
                        None => break,
                    }
                }
                Err(violation) => return (replies, Some(violation)),
            }
        }
    }
    (replies, None)
}

/// Reads a map of a cluster from a node's reply.
pub(crate) fn cluster_map(bytes: &[u8]) {
    if let Ok((_, Some(reply))) = ReplyReader::default().feed(bytes) {
        cluster::check_map(reply);
    }
}

/// The part of a refusal that is passed on.
pub(crate) fn refusal(line: &[u8]) -> String {
    Failure::refused(line)
        .error("redis://h:1", "get")
        .to_string()
}
