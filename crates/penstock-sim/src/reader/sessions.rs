//! Coding sessions (kv-cache-tester). Each line is a session. The blocks of its requests are runs
//! of ids that mean something within the session only. A subagent is an entry with requests of its
//! own; their times count from the subagent's start.

use std::io::BufRead;

use serde::Deserialize;

use super::{Line, Lines, ReadOptions};
use crate::error::Result;
use crate::trace::{Builder, Trace};

/// Ids of one session. A block's name is its id plus this times the session's number.
const IDS: u64 = 1 << 32;
/// Most subagents nested in each other.
const MAX_DEPTH: usize = 16;

#[derive(Deserialize)]
struct Session {
    block_size: u32,
    requests: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    /// Seconds since the start of the session or subagent.
    t: f64,
    #[serde(rename = "in", default)]
    input: u32,
    #[serde(rename = "out", default)]
    output: u32,
    hash_runs: Option<Vec<(u64, u64)>>,
    requests: Option<Vec<Entry>>,
}

pub(super) fn parse(lines: &mut Lines<'_, impl BufRead>, options: &ReadOptions) -> Result<Trace> {
    let block_tokens = lines.line().json::<Session>()?.block_size;
    if block_tokens == 0 {
        return Err(lines.line().wrong("a block_size of 0"));
    }
    let mut builder = Builder::new(block_tokens);
    let mut number = 0;
    lines.each(&mut builder, |builder, line, session: Session| {
        if session.block_size != block_tokens {
            return Err(line.wrong(format!(
                "blocks of {} tokens, and of {block_tokens} before",
                session.block_size
            )));
        }
        #[expect(clippy::cast_precision_loss, reason = "numbers of sessions are small")]
        let start = number as f64 * options.session_interval;
        let place = Place {
            line,
            session: number,
            start,
            depth: 0,
        };
        number += 1;
        place.add(builder, &session.requests)
    })?;
    Ok(builder.build())
}

/// Where a list of requests belongs.
struct Place<'a> {
    line: &'a Line<'a>,
    session: u64,
    start: f64,
    depth: usize,
}

impl Place<'_> {
    fn add(&self, builder: &mut Builder, entries: &[Entry]) -> Result<()> {
        if self.depth > MAX_DEPTH {
            return Err(self.line.wrong("subagents nested too deeply"));
        }
        for entry in entries {
            if let Some(runs) = &entry.hash_runs {
                let mut count = 0u64;
                for &(start, length) in runs {
                    let fits = start.checked_add(length).is_some_and(|end| end <= IDS);
                    if !fits {
                        let what = format!("a run [{start}, {length}] beyond 2^32 ids");
                        return Err(self.line.wrong(what));
                    }
                    count = count.saturating_add(length);
                }
                self.line.bounded(builder, count)?;
                let names = runs
                    .iter()
                    .flat_map(|&(start, length)| start..start + length)
                    .map(|id| self.session * IDS + id);
                let at = self.line.micros(self.start + entry.t, 1e6)?;
                builder.push(at, Some(self.session), names, (entry.input, entry.output));
            }
            if let Some(requests) = &entry.requests {
                let inner = Place {
                    start: self.start + entry.t,
                    depth: self.depth + 1,
                    ..*self
                };
                inner.add(builder, requests)?;
            }
        }
        Ok(())
    }
}
