//! What traces say, and what is said of lines that are none.

use std::io::Write;
use std::path::Path;

use penstock_sim::{ReadOptions, Reading, Trace, parse, read};
use proptest::collection::vec;
use proptest::prelude::*;

fn reading(text: &str) -> Result<Reading, String> {
    let options = ReadOptions::default();
    parse(text.as_bytes(), Path::new("t.jsonl"), &options).map_err(|error| error.to_string())
}

fn prompts(trace: &Trace) -> Vec<(u64, Vec<u32>)> {
    let requests = trace.requests().iter();
    requests
        .map(|r| (r.at / 1000, trace.blocks(r).collect()))
        .collect()
}

const MOONCAKE: &str = r#"{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}
{"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]}"#;

const SESSIONS: &str = r#"{"id": "a", "block_size": 64, "requests": [
{"t": 0.0, "in": 128, "out": 3, "hash_runs": [[1, 2]]},
{"t": 2.0, "type": "subagent", "requests": [{"t": 1.0, "in": 64, "out": 1, "hash_runs": [[9, 1]]}]},
{"t": 5.0, "in": 256, "out": 3, "hash_runs": [[1, 1], [5, 3]]}]}
{"id": "b", "block_size": 64, "requests": [{"t": 0.5, "in": 128, "out": 3, "hash_runs": [[1, 2]]}]}"#;

fn sessions() -> String {
    let (first, second) = SESSIONS.rsplit_once('\n').unwrap();
    first.replace('\n', "") + "\n" + second
}

#[test]
fn mooncake_is_sorted_and_numbered() {
    let found = reading(MOONCAKE).unwrap();
    assert_eq!(
        (found.format, found.trace.block_tokens),
        ("Mooncake (hash_ids)", 512)
    );
    assert_eq!(prompts(&found.trace), [(0, vec![0, 2]), (2000, vec![0, 1])]);
    assert_eq!(found.trace.unique_blocks(), 3);
}

#[test]
fn sessions_have_ids_and_clocks_of_their_own() {
    let found = reading(&sessions()).unwrap();
    assert_eq!(found.trace.block_tokens, 64);
    let expected = [
        (0, vec![0, 1]),
        (3000, vec![2]),
        (5000, vec![0, 3, 4, 5]),
        (60500, vec![6, 7]),
    ];
    assert_eq!(prompts(&found.trace), expected);
    let sessions: Vec<_> = found.trace.requests().iter().map(|r| r.session).collect();
    assert_eq!(sessions, [0, 0, 0, 1]);
}

#[test]
fn text_is_cut_into_chained_blocks() {
    let (same, other) = ("x".repeat(64), "y".repeat(64));
    let line = |time: u32, input: &str| {
        format!(r#"{{"timestamp": {time}, "input": "{input}", "session_id": "s"}}"#)
    };
    let text = [
        line(0, &format!("{same}{same}tail")),
        line(1000, &format!("{same}{other}")),
        line(2000, &format!("{other}{same}")),
    ];
    let found = reading(&text.join("\n")).unwrap();
    let expected = [(0, vec![0, 1]), (1, vec![0, 2]), (2, vec![3, 4])];
    assert_eq!(prompts(&found.trace), expected);
    assert_eq!(found.trace.requests()[0].input_tokens, 33);
}

const STORED: &str = r#"[1.5, [{"type": "BlockStored", "block_hashes": [11, "ab"], "parent_block_hash": null, "block_size": 16}], 0]
{"ts": 2.5, "events": [{"type": "BlockStored", "block_hashes": [13], "parent_block_hash": "ab", "block_size": 16}, {"type": "BlockRemoved", "block_hashes": [11]}]}"#;

#[test]
fn events_are_replayed_with_what_comes_before() {
    let found = reading(STORED).unwrap();
    assert_eq!(
        (found.format, found.trace.block_tokens),
        ("vLLM KV events", 16)
    );
    assert_eq!(
        prompts(&found.trace),
        [(0, vec![0, 1]), (1000, vec![0, 1, 2])]
    );
}

#[test]
fn a_file_may_be_packed() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(MOONCAKE.as_bytes()).unwrap();
    file.write_all(&packer.finish().unwrap()).unwrap();
    let found = read(file.path(), &ReadOptions::default()).unwrap();
    assert_eq!(found.trace.requests().len(), 2);
}

#[test]
fn errors_say_where_and_what() {
    let cases = [
        ("", "trace t.jsonl: it has no requests"),
        ("{\"a\": 1}", "line 1: no known format"),
        (
            "{\"hash_ids\": [1], \"timestamp\": 1}",
            "line 1: column 33: missing field `input_length`",
        ),
        ("[1, [{\"type\": \"Moved\"}]]", "unknown type \"Moved\""),
        (
            "{\"block_size\": 0, \"requests\": []}",
            "line 1: a block_size of 0",
        ),
    ];
    for (text, expected) in cases {
        let error = reading(text).err().unwrap();
        assert!(error.contains(expected), "{error}");
    }
    let second = format!("{}\n{{\"hash_ids\": 3}}", MOONCAKE.lines().next().unwrap());
    assert!(
        reading(&second)
            .err()
            .unwrap()
            .contains("t.jsonl, line 2: column ")
    );
    let run = r#"{"block_size": 64, "requests": [{"t": 0, "hash_runs": [[1, 99999999999]]}]}"#;
    assert!(reading(run).err().unwrap().contains("beyond 2^32 ids"));
    let many = r#"{"block_size": 64, "requests": [{"t": 0, "hash_runs": [[1, 4294967295]]}]}"#;
    assert!(
        reading(many)
            .err()
            .unwrap()
            .contains("more than 2147483648 blocks")
    );
    let time = r#"{"timestamp": -5, "input_length": 1, "hash_ids": [1]}"#;
    assert!(reading(time).err().unwrap().contains("a time of -5"));
    let itself =
        r#"{"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 1, "block_size": 16}"#;
    let twice = format!("{itself}\n{itself}");
    assert!(reading(&twice).err().unwrap().contains("without an end"));
}

proptest! {
    #[test]
    fn bytes_that_are_no_trace_do_not_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes[..], Path::new("t"), &ReadOptions::default());
    }

    #[test]
    fn changed_traces_do_not_panic(
        which in 0usize..3,
        edits in vec((any::<u16>(), any::<u8>()), 1..6),
        end in any::<u16>(),
    ) {
        let mut bytes = [MOONCAKE.to_owned(), sessions(), STORED.to_owned()][which].clone().into_bytes();
        for (at, byte) in edits {
            let at = usize::from(at) % bytes.len();
            bytes[at] = byte;
        }
        bytes.truncate(usize::from(end) % (2 * bytes.len()));
        let _ = parse(&bytes[..], Path::new("t"), &ReadOptions::default());
    }
}
