//! Traces of text (lmcache-agent-trace). Each line is a request with its real prompt.
//!
//! No tokenizer is run. A block has as many bytes of text as its tokens have on average
//! ([`ReadOptions::bytes_per_token`]). Its name is the hash of that text and of the block before
//! it. As with tokens, text that does not fill a block is in no block.

use std::io::BufRead;

use serde::Deserialize;
use twox_hash::XxHash3_64;

use super::{Lines, ReadOptions};
use crate::error::Result;
use crate::trace::{Builder, Trace};

/// Tokens of a block: vLLM's default.
const BLOCK_TOKENS: u32 = 16;

#[derive(Deserialize)]
struct Entry {
    /// Microseconds.
    timestamp: f64,
    input: String,
    #[serde(default)]
    output: String,
    #[serde(default)]
    session_id: Option<String>,
}

pub(super) fn parse(lines: &mut Lines<'_, impl BufRead>, options: &ReadOptions) -> Result<Trace> {
    let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and saturating is right"
    )]
    let block_bytes = ((f64::from(block_tokens) * options.bytes_per_token) as usize).max(1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an estimate"
    )]
    let tokens = |text: &str| (text.len() as f64 / options.bytes_per_token) as u32;
    let mut builder = Builder::new(block_tokens);
    lines.each(&mut builder, |builder, line, entry: Entry| {
        let at = line.micros(entry.timestamp, 1.0)?;
        let session = entry
            .session_id
            .map(|id| XxHash3_64::oneshot(id.as_bytes()));
        let mut before = 0;
        let names = entry
            .input
            .as_bytes()
            .chunks_exact(block_bytes)
            .map(|text| {
                before = XxHash3_64::oneshot_with_seed(before, text);
                before
            });
        let names: Vec<_> = names.collect();
        line.bounded(builder, names.len() as u64)?;
        let lengths = (tokens(&entry.input), tokens(&entry.output));
        builder.push(at, session, names, lengths);
        Ok(())
    })?;
    Ok(builder.build())
}
