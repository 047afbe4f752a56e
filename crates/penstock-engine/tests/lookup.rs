//! Look-ups: answers, deadlines, bounds, and that those who wait go together.

use std::sync::Arc;
use std::time::Duration;

use penstock_contract::{ErrorKind, Namespace, Store};
use penstock_engine::{Answer, EngineError, Lookup, LookupConfig};
use penstock_layout::Span;

use crate::support::*;

const NAMESPACE: Namespace = Namespace([3; 16]);

fn lookup(store: &Arc<Probe>, config: LookupConfig) -> Lookup {
    Lookup::new(Arc::clone(store) as Arc<dyn Store>, config).unwrap()
}

fn one_thread() -> LookupConfig {
    LookupConfig {
        threads: 1,
        ..LookupConfig::default()
    }
}

fn chunks(numbers: &[u64]) -> Vec<[u8; 32]> {
    numbers.iter().map(|&n| key(n).chunk).collect()
}

fn answer(lookup: &Lookup, id: u64) -> Answer {
    let mut answer = None;
    eventually("the look-up is answered", || {
        answer = lookup.take(id);
        answer.is_some()
    });
    answer.unwrap()
}

fn untimed(answers: Vec<(u64, Answer, Duration)>) -> Vec<(u64, Answer)> {
    let answers = answers.into_iter();
    answers.map(|(id, answer, _)| (id, answer)).collect()
}

#[test]
fn a_chunk_is_there_if_all_its_spans_are() {
    let store = Probe::new();
    let halves = [(0..1, 0..HEADS), (1..LAYERS, 0..HEADS)].map(|(l, h)| Span::new(l, h).unwrap());
    for n in [1, 2, 3] {
        store.plant(&key_of(n, halves[0]), b"x");
    }
    store.plant(&key_of(1, halves[1]), b"x");
    store.plant(&key_of(3, halves[1]), b"x");
    let lookup = lookup(&store, LookupConfig::default());
    lookup
        .submit(5, NAMESPACE, chunks(&[1, 2, 3, 4]), &halves, LONG)
        .unwrap();
    assert!(lookup.wait(LONG));
    let polled = untimed(lookup.poll());
    assert_eq!(polled, [(5, Ok(vec![true, false, true, false]))]);
    assert_eq!(lookup.poll(), []);
    lookup
        .submit(5, NAMESPACE, chunks(&[2, 3]), &halves[..1], LONG)
        .unwrap();
    assert_eq!(answer(&lookup, 5), Ok(vec![true, true]));
    lookup
        .submit(5, Namespace([4; 16]), chunks(&[2]), &halves[..1], LONG)
        .unwrap();
    assert_eq!(answer(&lookup, 5), Ok(vec![false]));
    lookup.submit(5, NAMESPACE, vec![], &halves, LONG).unwrap();
    assert_eq!(answer(&lookup, 5), Ok(vec![]));
}

#[test]
fn lookups_that_wait_go_together_within_the_bound() {
    let store = Probe::new();
    store.plant(&key(1), b"x");
    let lookup = lookup(
        &store,
        LookupConfig {
            max_keys: 7,
            ..one_thread()
        },
    );
    store.hold_contains(true);
    lookup
        .submit(0, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    store.until(|call| *call == Call::Contains(1));
    for id in 1..5 {
        lookup
            .submit(id, NAMESPACE, chunks(&[id, 1, 50]), &[share()], LONG)
            .unwrap();
    }
    lookup
        .submit(5, NAMESPACE, chunks(&[1; 9]), &[share()], LONG)
        .unwrap();
    store.hold_contains(false);
    for id in 1..5 {
        assert_eq!(answer(&lookup, id), Ok(vec![id == 1, true, false]));
    }
    assert_eq!(answer(&lookup, 5), Ok(vec![true; 9]));
    let calls: Vec<Call> = [1, 6, 6, 9].map(Call::Contains).to_vec();
    assert_eq!(store.calls(), calls);
}

#[test]
fn a_deadline_is_kept_and_does_not_cost_those_with_more_time() {
    let store = Probe::new();
    store.plant(&key(1), b"x");
    let lookup = lookup(&store, one_thread());
    store.hold_contains(true);
    let submit = |id, numbers: &[u64], timeout| {
        lookup
            .submit(id, NAMESPACE, chunks(numbers), &[share()], timeout)
            .unwrap();
    };
    submit(0, &[1], LONG);
    store.until(|call| *call == Call::Contains(1));
    let begin = past();
    submit(1, &[1], Duration::from_millis(20));
    assert!(lookup.wait(LONG));
    let answers = lookup.poll();
    assert!(answers[0].2 >= Duration::from_millis(20) && answers[0].2 <= begin.elapsed());
    assert_eq!(untimed(answers), [(1, Err(ErrorKind::TimedOut))]);
    submit(2, &[1, 9], LONG / 2);
    submit(3, &[1, 8, 1], LONG);
    store.time_is_over();
    assert_eq!(answer(&lookup, 0), Err(ErrorKind::TimedOut));
    // 2 and 3 go together under the deadline of 2; 3 goes again.
    store.until(|call| *call == Call::Contains(5));
    store.time_is_over();
    assert_eq!(answer(&lookup, 2), Err(ErrorKind::TimedOut));
    store.until(|call| *call == Call::Contains(3));
    store.hold_contains(false);
    assert_eq!(answer(&lookup, 3), Ok(vec![true, false, true]));
}

#[test]
fn failures_are_answers() {
    let store = Probe::new();
    let lookup = lookup(&store, one_thread());
    store.fail(Some(ErrorKind::Unreachable));
    lookup
        .submit(1, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    assert_eq!(answer(&lookup, 1), Err(ErrorKind::Unreachable));
    store.fail(None);
    store.panic_on(key(2));
    lookup
        .submit(1, NAMESPACE, chunks(&[2]), &[share()], LONG)
        .unwrap();
    assert_eq!(answer(&lookup, 1), Err(ErrorKind::Internal));
    lookup
        .submit(1, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    assert_eq!(answer(&lookup, 1), Ok(vec![false]));
}

#[test]
fn the_queue_is_bounded_and_so_are_answers_that_nobody_takes() {
    let store = Probe::new();
    let config = LookupConfig {
        max_queued: 2,
        max_outstanding: 5,
        ..one_thread()
    };
    let lookup = lookup(&store, config);
    store.hold_contains(true);
    lookup
        .submit(0, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    store.until(|call| *call == Call::Contains(1));
    for id in 1..5 {
        lookup
            .submit(id, NAMESPACE, chunks(&[1]), &[share()], LONG)
            .unwrap();
    }
    assert!(matches!(
        lookup.submit(5, NAMESPACE, chunks(&[1]), &[share()], LONG),
        Err(EngineError::Busy {
            outstanding: 6,
            bound: 5
        })
    ));
    let mut answers = untimed(lookup.poll());
    answers.sort_by_key(|(id, _)| *id);
    let unavailable = Err(ErrorKind::Unavailable);
    assert_eq!(answers, [(3, unavailable.clone()), (4, unavailable)]);
    store.hold_contains(false);
    for id in 0..3 {
        assert_eq!(answer(&lookup, id), Ok(vec![false]));
    }
    assert!(matches!(
        lookup.submit(5, NAMESPACE, chunks(&[1]), &[], LONG),
        Err(EngineError::Config(_))
    ));
}

#[test]
fn a_cancelled_lookup_is_never_answered_not_even_under_a_new_one_of_its_id() {
    let store = Probe::new();
    store.plant(&key(1), b"x");
    let lookup = lookup(&store, one_thread());
    store.hold_contains(true);
    lookup
        .submit(0, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    lookup
        .submit(1, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    store.until(|call| matches!(call, Call::Contains(_)));
    assert_refused(
        lookup.submit(0, NAMESPACE, chunks(&[1]), &[share()], LONG),
        "job 0 is still outstanding",
    );
    lookup.cancel(0);
    lookup.cancel(1);
    lookup
        .submit(0, NAMESPACE, chunks(&[2, 1]), &[share()], LONG)
        .unwrap();
    store.hold_contains(false);
    assert_eq!(answer(&lookup, 0), Ok(vec![false, true]));
    assert_eq!(lookup.poll(), []);
}

#[test]
fn shutting_down_answers_what_is_open() {
    let store = Probe::new();
    let lookup = lookup(&store, one_thread());
    store.hold_contains(true);
    lookup
        .submit(0, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    store.until(|call| matches!(call, Call::Contains(_)));
    lookup
        .submit(1, NAMESPACE, chunks(&[1]), &[share()], LONG)
        .unwrap();
    assert!(!lookup.shutdown(Duration::ZERO));
    store.time_is_over();
    assert!(lookup.shutdown(LONG));
    for id in [0, 1] {
        assert_eq!(lookup.take(id), Some(Err(ErrorKind::Unavailable)));
    }
    let refused = lookup.submit(2, NAMESPACE, chunks(&[1]), &[share()], LONG);
    assert!(matches!(refused, Err(EngineError::Closed)));
}
