//! Mooncake's traces (FAST '25). Each line is a request, with the chained ids of its blocks.

use std::io::BufRead;

use serde::Deserialize;

use super::{Lines, ReadOptions};
use crate::error::Result;
use crate::trace::{Builder, Trace};

/// Tokens of a block in the published traces.
const BLOCK_TOKENS: u32 = 512;

#[derive(Deserialize)]
struct Entry {
    /// Milliseconds.
    timestamp: f64,
    input_length: u32,
    #[serde(default)]
    output_length: u32,
    hash_ids: Vec<u64>,
}

pub(super) fn parse(lines: &mut Lines<'_, impl BufRead>, options: &ReadOptions) -> Result<Trace> {
    let mut builder = Builder::new(options.block_tokens.unwrap_or(BLOCK_TOKENS));
    lines.each(&mut builder, |builder, line, entry: Entry| {
        line.bounded(builder, entry.hash_ids.len() as u64)?;
        let at = line.micros(entry.timestamp, 1e3)?;
        let lengths = (entry.input_length, entry.output_length);
        builder.push(at, Builder::INFERRED, entry.hash_ids, lengths);
        Ok(())
    })?;
    Ok(builder.build())
}
