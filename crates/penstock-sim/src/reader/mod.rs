//! Reading traces. A file's first line tells its format. `.gz` files are unpacked on the way.
//!
//! Others wrote what is read here. A line that makes no sense is an error that names the file and
//! the line, never a panic.

mod events;
mod mooncake;
mod sessions;
mod text;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::trace::{Builder, Trace};

/// A longer line is refused, because a line is held in memory whole.
const MAX_LINE_BYTES: u64 = 1 << 30;
/// Most blocks that a trace may ask for in all. The same blocks count again each time.
const MAX_BLOCKS: usize = 1 << 31;

/// What a trace does not say.
#[derive(Clone, Copy, Debug)]
pub struct ReadOptions {
    /// Tokens of a block, if the format leaves this open: for traces of text (default 16), and for
    /// Mooncake's traces, which have 512 in the published release.
    pub block_tokens: Option<u32>,
    /// Bytes of text that make a token. A trace of text is cut into blocks. A block has this many
    /// bytes for each of its tokens.
    pub bytes_per_token: f64,
    /// Seconds from one session's start to the next one's, for formats in which every session's
    /// clock starts at zero.
    pub session_interval: f64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            block_tokens: None,
            bytes_per_token: 4.0,
            session_interval: 60.0,
        }
    }
}

impl ReadOptions {
    fn check(&self) -> Result<()> {
        if self.block_tokens == Some(0) {
            return Err(Error::Config("a block of 0 tokens is none".into()));
        }
        if !(self.bytes_per_token.is_finite() && self.bytes_per_token > 0.0) {
            return Err(Error::Config(format!(
                "a token cannot have {} bytes of text",
                self.bytes_per_token
            )));
        }
        if !(0.0..=1e9).contains(&self.session_interval) {
            return Err(Error::Config(format!(
                "sessions cannot start every {} seconds",
                self.session_interval
            )));
        }
        Ok(())
    }
}

/// The formats, by what names them in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Mooncake,
    Sessions,
    Text,
    Events,
}

/// A trace, and the format of its file.
pub struct Reading {
    /// The requests.
    pub trace: Trace,
    /// The format, in words.
    pub format: &'static str,
}

/// Reads a trace.
///
/// # Errors
/// The file cannot be read, is in no known format, or a line of it makes no sense.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Reading> {
    options.check()?;
    let io = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let mut file = BufReader::new(File::open(path).map_err(io)?);
    let packed = file.fill_buf().map_err(io)?.starts_with(&[0x1f, 0x8b]);
    if packed {
        let unpacked = BufReader::new(flate2::bufread::MultiGzDecoder::new(file));
        parse(unpacked, path, options)
    } else {
        parse(file, path, options)
    }
}

/// Reads a trace from anything that gives its lines. Errors call it `path`.
///
/// # Errors
/// As [`read`].
pub fn parse(source: impl BufRead, path: &Path, options: &ReadOptions) -> Result<Reading> {
    options.check()?;
    let mut lines = Lines {
        source,
        path,
        number: 0,
        text: Vec::new(),
    };
    let Some(first) = lines.next()? else {
        return Err(lines.no_trace("it has no requests"));
    };
    let format = first.format()?;
    let trace = match format {
        Format::Mooncake => mooncake::parse(&mut lines, options),
        Format::Sessions => sessions::parse(&mut lines, options),
        Format::Text => text::parse(&mut lines, options),
        Format::Events => events::parse(&mut lines),
    }?;
    if trace.requests().is_empty() {
        return Err(lines.no_trace("it has no requests"));
    }
    let format = match format {
        Format::Mooncake => "Mooncake (hash_ids)",
        Format::Sessions => "coding sessions (hash_runs)",
        Format::Text => "text (input)",
        Format::Events => "vLLM KV events",
    };
    Ok(Reading { trace, format })
}

/// The lines of a file, except blank ones.
struct Lines<'a, R> {
    source: R,
    path: &'a Path,
    number: usize,
    text: Vec<u8>,
}

/// One line of a file.
struct Line<'a> {
    path: &'a Path,
    number: usize,
    text: &'a [u8],
}

impl<'a, R: BufRead> Lines<'a, R> {
    /// The next line.
    fn next(&mut self) -> Result<Option<Line<'_>>> {
        loop {
            self.text.clear();
            let read = (&mut self.source)
                .take(MAX_LINE_BYTES)
                .read_until(b'\n', &mut self.text)
                .map_err(|source| Error::Io {
                    path: self.path.to_owned(),
                    source,
                })?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if !self.text.trim_ascii().is_empty() {
                return Ok(Some(self.line()));
            }
        }
    }

    /// The line that [`Lines::next`] gave last.
    fn line(&self) -> Line<'_> {
        Line {
            path: self.path,
            number: self.number,
            text: &self.text,
        }
    }

    fn no_trace(&self, what: &str) -> Error {
        Error::Trace {
            path: self.path.to_owned(),
            what: what.to_owned(),
        }
    }

    /// Gives every line to the builder, from the line that was read already.
    fn each<T: DeserializeOwned>(
        &mut self,
        builder: &mut Builder,
        mut add: impl FnMut(&mut Builder, &Line<'_>, T) -> Result<()>,
    ) -> Result<()> {
        let mut line = self.line();
        loop {
            add(builder, &line, line.json()?)?;
            match self.next()? {
                Some(next) => line = next,
                None => return Ok(()),
            }
        }
    }
}

impl Line<'_> {
    fn wrong(&self, what: impl Into<String>) -> Error {
        Error::Line {
            path: self.path.to_owned(),
            line: self.number,
            what: what.into(),
        }
    }

    fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(self.text).map_err(|error| {
            // serde_json counts lines from its own start. Our line number is the one that helps.
            let what = error.to_string();
            let what = what.split(" at line ").next().unwrap_or_default();
            self.wrong(format!("column {}: {what}", error.column()))
        })
    }

    fn format(&self) -> Result<Format> {
        let value: Value = self.json()?;
        if value.is_array() {
            return Ok(Format::Events);
        }
        for (field, format) in [
            ("hash_ids", Format::Mooncake),
            ("requests", Format::Sessions),
            ("input", Format::Text),
            ("events", Format::Events),
            ("type", Format::Events),
        ] {
            if value.get(field).is_some() {
                return Ok(format);
            }
        }
        Err(self.wrong(
            "no known format: a request has hash_ids (Mooncake), requests (coding sessions) or \
             input (text); vLLM's KV events have a type",
        ))
    }

    /// A time in the trace.
    fn micros(&self, number: f64, unit: f64) -> Result<u64> {
        let micros = number * unit;
        if !(0.0..9e18).contains(&micros) {
            return Err(self.wrong(format!("a time of {number} is none")));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked"
        )]
        Ok(micros as u64)
    }

    /// Checks that a trace stays within what memory holds.
    fn bounded(&self, builder: &Builder, more: u64) -> Result<()> {
        if builder.block_count() as u64 + more > MAX_BLOCKS as u64 {
            return Err(self.wrong(format!("the trace asks for more than {MAX_BLOCKS} blocks")));
        }
        Ok(())
    }
}
