//! A scaled trace against its definition, written out request by request.

use std::path::Path;

use penstock_sim::{PolicyKind, ReadOptions, Scale, Trace, bounds, hits, parse};
use proptest::collection::vec;
use proptest::prelude::*;

/// A trace of vLLM's events would tell no sessions; text does. A request is a time in seconds, a
/// session, and the letters that its blocks have.
fn trace(requests: &[(u64, u32, String)]) -> Trace {
    let line = |(second, session, letters): &(u64, u32, String)| {
        let at = second * 1_000_000;
        format!(r#"{{"timestamp": {at}, "session_id": "{session}", "input": "{letters}"}}"#)
    };
    let options = ReadOptions {
        block_tokens: Some(1),
        bytes_per_token: 1.0,
        ..ReadOptions::default()
    };
    let text: Vec<String> = requests.iter().map(line).collect();
    let read = parse(text.join("\n").as_bytes(), Path::new("made"), &options);
    read.unwrap().trace
}

fn scale(populations: u32) -> Scale {
    Scale {
        populations,
        common_share: 0.5,
        stagger: 30.0,
        seed: 7,
    }
}

/// Ten sessions that begin with the same two letters; each asks twice, the second time for more.
fn sessions() -> Vec<(u64, u32, String)> {
    let of = |turn: u64| {
        move |session: u32| {
            let own = char::from(b'a' + session as u8).to_string();
            let letters = format!("SY{}", own.repeat(2 + turn as usize));
            (turn * 100 + u64::from(session), session, letters)
        }
    };
    (0..10).map(of(0)).chain((0..10).map(of(1))).collect()
}

#[test]
fn populations_have_texts_of_their_own_but_for_what_many_sessions_share() {
    let one = trace(&sessions());
    assert_eq!((one.unique_blocks(), one.common_blocks()), (2 + 30, 0));
    let many = one.scaled(&scale(50)).unwrap();
    assert_eq!(many.common_blocks(), 2);
    assert_eq!(many.unique_blocks(), 2 + 50 * 30);
    assert_eq!(many.request_count(), 50 * one.request_count());
    assert_eq!(many.block_count(), 50 * one.block_count());
    assert_eq!(many.input_tokens(), 50 * one.input_tokens());
    assert_eq!(many.session_count(), 500);
    // Each prompt but the first finds the common blocks; second turns find what the first had.
    assert_eq!(bounds::infinite(&many), (50 * 20 - 1) * 2 + 50 * 10 * 2);
    let late = many.duration() - one.duration();
    assert!((15_000_000..=30_000_000).contains(&late), "{late}");
}

#[test]
fn the_seed_alone_decides_when_populations_begin() {
    let one = trace(&sessions());
    let found = |seed| {
        let scale = Scale { seed, ..scale(40) };
        let trace = one.scaled(&scale).unwrap();
        (trace.duration(), hits(&trace, PolicyKind::Lru, 60))
    };
    assert_eq!(found(1), found(1));
    assert_ne!(found(1).0, found(2).0);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let one = trace(&sessions());
    let many = one.scaled(&scale(2)).unwrap();
    let odd = [
        one.scaled(&scale(0)),
        one.scaled(&Scale {
            common_share: 1.5,
            ..scale(2)
        }),
        one.scaled(&Scale {
            stagger: f64::NAN,
            ..scale(2)
        }),
        one.scaled(&scale(u32::MAX)),
        many.scaled(&scale(2)),
    ];
    let errors = odd.map(|found| found.unwrap_err().to_string());
    assert!(errors[3].contains("more than 2^32"), "{}", errors[3]);
    assert!(errors[4].contains("scaled already"), "{}", errors[4]);
    assert!(bounds::belady(&many, 5).is_err());
}

proptest! {
    /// Populations whose beginnings lie nowhere apart ask for the same at the same time. With texts
    /// of their own, they find what one of them finds, so many times.
    #[test]
    fn populations_with_nothing_in_common_find_what_one_finds(
        paths in vec("[ab]{1,5}", 1..20), populations in 1u32..5,
    ) {
        let requests = paths.into_iter().zip(0..).map(|(path, at)| (at, 0, path));
        let one = trace(&requests.collect::<Vec<_>>());
        let many = one.scaled(&Scale { stagger: 0.0, ..scale(populations) }).unwrap();
        let (all, times) = (u64::from(many.unique_blocks()), u64::from(populations));
        prop_assert_eq!(bounds::infinite(&many), times * bounds::infinite(&one));
        for policy in PolicyKind::ALL {
            prop_assert_eq!(hits(&many, policy, all), times * bounds::infinite(&one));
        }
    }

    /// By run or by block, an LRU cache holds the same.
    #[test]
    fn lru_by_run_is_lru_by_block(paths in vec("[ab]{1,6}", 1..40), capacity in 1usize..20) {
        let mut held: Vec<String> = Vec::new();
        let mut found = 0;
        for path in &paths {
            let blocks: Vec<&str> = (1..=path.len()).map(|end| &path[..end]).collect();
            let has = |block: &&&str| held.iter().any(|other| other == **block);
            found += blocks.iter().take_while(has).count() as u64;
            for block in blocks.iter().rev() {
                held.retain(|other| other != block);
                held.push((*block).to_owned());
            }
            let excess = held.len().saturating_sub(capacity);
            held.drain(..excess);
        }
        let requests = paths.into_iter().zip(0..).map(|(path, at)| (at, 0, path));
        let trace = trace(&requests.collect::<Vec<_>>());
        prop_assert_eq!(hits(&trace, PolicyKind::Lru, capacity as u64), found);
    }
}
