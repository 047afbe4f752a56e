//! vLLM's KV events, one per line, or a batch per line: `{"ts": …, "events": […]}`, or the array
//! that is published, `[ts, [event, …], rank]`.
//!
//! An event tells which blocks an engine stored, not what the engine was asked: a hit in the
//! engine's own cache is silent. So what is replayed is what the engine computed: each stored chain
//! is a request, with the blocks before it. Removals say how large that engine's cache was; they
//! are left out.

use std::io::BufRead;

use rustc_hash::FxHashMap;
use serde::Deserialize;
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::{Line, Lines};
use crate::error::Result;
use crate::trace::{Builder, Trace};

/// Most blocks of a prompt. Without this bound, a chain in which a parent is its own child would
/// never end.
const MAX_CHAIN: usize = 1 << 22;

#[derive(Deserialize)]
struct Stored {
    block_hashes: Vec<Value>,
    #[serde(default)]
    parent_block_hash: Value,
    block_size: u32,
}

/// Which block comes before which, as far as events told.
#[derive(Default)]
struct Chains {
    parents: FxHashMap<u64, Option<u64>>,
    now: u64,
}

pub(super) fn parse(lines: &mut Lines<'_, impl BufRead>) -> Result<Trace> {
    let mut chains = Chains::default();
    let mut block_tokens = None;
    let mut builder = Builder::new(1);
    lines.each(&mut builder, |builder, line, value: Value| {
        chains.batch(builder, line, &value, &mut block_tokens)
    })?;
    if let Some(tokens) = block_tokens {
        builder.set_block_tokens(tokens);
    }
    Ok(builder.build())
}

impl Chains {
    fn batch(
        &mut self,
        builder: &mut Builder,
        line: &Line<'_>,
        value: &Value,
        block_tokens: &mut Option<u32>,
    ) -> Result<()> {
        let (time, events) = match value {
            Value::Array(parts) => (parts.first(), parts.get(1).and_then(Value::as_array)),
            _ => (
                value.get("ts").or_else(|| value.get("timestamp")),
                value.get("events").and_then(Value::as_array),
            ),
        };
        // If events have no time, one follows the other after a microsecond.
        self.now = match time.and_then(Value::as_f64) {
            Some(seconds) => line.micros(seconds, 1e6)?,
            None => self.now + 1,
        };
        let single = std::slice::from_ref(value);
        for event in events.map_or(single, Vec::as_slice) {
            let Some(kind) = event.get("type").and_then(Value::as_str) else {
                return Err(line.wrong("an event without a type"));
            };
            match kind {
                "BlockStored" => {
                    let stored = Stored::deserialize(event)
                        .map_err(|error| line.wrong(format!("BlockStored: {error}")))?;
                    self.stored(builder, line, &stored, block_tokens)?;
                }
                "BlockRemoved" | "AllBlocksCleared" => {}
                other => return Err(line.wrong(format!("an event of the unknown type {other:?}"))),
            }
        }
        Ok(())
    }

    fn stored(
        &mut self,
        builder: &mut Builder,
        line: &Line<'_>,
        stored: &Stored,
        block_tokens: &mut Option<u32>,
    ) -> Result<()> {
        let known = *block_tokens.get_or_insert(stored.block_size);
        if known != stored.block_size || known == 0 {
            let size = stored.block_size;
            return Err(line.wrong(format!("blocks of {size} tokens, and of {known} before")));
        }
        let mut parent = match &stored.parent_block_hash {
            Value::Null => None,
            hash => Some(name(line, hash)?),
        };
        let mut chain = Vec::new();
        let mut above = parent;
        while let Some(block) = above {
            chain.push(block);
            if chain.len() > MAX_CHAIN {
                return Err(line.wrong("a chain of parents without an end"));
            }
            above = self.parents.get(&block).copied().flatten();
        }
        chain.reverse();
        for hash in &stored.block_hashes {
            let block = name(line, hash)?;
            self.parents.insert(block, parent);
            chain.push(block);
            parent = Some(block);
        }
        line.bounded(builder, chain.len() as u64)?;
        let tokens = u32::try_from(chain.len() as u64 * u64::from(known))
            .map_err(|_| line.wrong("a prompt of more than 2^32 tokens"))?;
        builder.push(self.now, Builder::INFERRED, chain, (tokens, 0));
        Ok(())
    }
}

/// A block's hash, which is a number or text.
fn name(line: &Line<'_>, hash: &Value) -> Result<u64> {
    if let Some(number) = hash.as_u64() {
        return Ok(number);
    }
    if let Some(number) = hash.as_i64() {
        return Ok(number.cast_unsigned());
    }
    hash.as_str()
        .map(|text| XxHash3_64::oneshot(text.as_bytes()))
        .ok_or_else(|| line.wrong(format!("a block hash of {hash}, neither a number nor text")))
}
