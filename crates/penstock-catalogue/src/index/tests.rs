use proptest::prelude::*;

use super::*;

fn name(n: u64) -> Name {
    let mut chunk = [0; 32];
    // All names fall into a few buckets, so that names which only look alike must be told
    // apart.
    chunk[8..16].copy_from_slice(&n.to_le_bytes());
    Name {
        group: 0,
        tenant: None,
        chunk,
    }
}

/// Names one block that follows another.
fn refer(index: &mut Index, before: Option<Number>, name: Name) -> Number {
    let mut numbers = Vec::from_iter(before);
    index.refer(
        name.group,
        name.tenant,
        [name.chunk].into_iter(),
        &mut numbers,
    );
    *numbers.last().unwrap()
}

#[test]
fn what_nothing_names_and_nobody_has_is_forgotten() {
    let mut index = Index::new(8);
    let number = refer(&mut index, None, name(1));
    assert_eq!(refer(&mut index, None, name(1)), number);
    assert_ne!(refer(&mut index, None, name(2)), number);
    index.release(number);
    assert_eq!(index.len(), 2);
    index.release(number);
    assert_eq!(index.len(), 1);
    // Its number is used again, without any state of the old block.
    assert_eq!(refer(&mut index, None, name(3)), number);
    assert!(!index.state(number).is_in_pool());
}

#[test]
fn what_the_pool_has_is_remembered_within_a_bound() {
    let mut index = Index::new(2);
    for n in 0..3 {
        let number = refer(&mut index, None, name(n));
        index.set_stored(number);
        index.release(number);
    }
    assert_eq!(index.len(), 2);
    let known = |index: &mut Index, n| {
        let number = refer(index, None, name(n));
        let is_known = index.state(number).is_in_pool();
        index.release(number);
        is_known
    };
    assert!(!known(&mut index, 0));
    assert!(known(&mut index, 1));
    assert!(known(&mut index, 2));
    index.forget_pool();
    assert_eq!(index.len(), 0);
}

#[test]
fn what_host_memory_has_stays_whatever_names_it() {
    let mut index = Index::new(1);
    index.change_ranks(name(1), 1);
    index.change_ranks(name(1), 1);
    let number = refer(&mut index, None, name(1));
    assert!(index.state(number).is_held_by(2));
    index.release(number);
    index.forget_pool();
    index.change_ranks(name(1), -1);
    assert_eq!(index.len(), 1);
    index.change_ranks(name(1), -1);
    assert_eq!(index.len(), 0);
    // The report of a removal that overtook the report of the arrival.
    index.change_ranks(name(1), -1);
    index.change_ranks(name(1), 1);
    assert_eq!(index.len(), 0);
}

#[test]
fn what_host_memory_had_is_forgotten_with_the_blocks_that_nothing_else_knows() {
    let mut index = Index::new(4);
    index.change_ranks(name(1), 1);
    index.change_ranks(name(2), 1);
    index.change_ranks(name(3), 1);
    let wanted = refer(&mut index, None, name(1));
    let pooled = refer(&mut index, None, name(2));
    index.set_in_node(pooled, true);
    index.set_stored(pooled);
    index.release(pooled);
    index.forget_host();
    assert_eq!(index.len(), 2);
    assert!(!index.state(wanted).is_held_by(1));
    assert!(!index.state(pooled).is_held_by(1));
    assert!(index.state(pooled).is_in_pool());
    index.release(wanted);
    assert_eq!(index.len(), 1);
}

#[test]
fn a_block_is_found_through_the_one_before_it_and_alone_once_that_is_gone() {
    let mut index = Index::new(4);
    let first = refer(&mut index, None, name(1));
    let second = refer(&mut index, Some(first), name(2));
    let other = refer(&mut index, Some(first), name(3));
    assert_eq!(refer(&mut index, Some(first), name(2)), second);
    assert_eq!(refer(&mut index, Some(first), name(3)), other);
    assert_eq!(index.find(&name(2)), None);
    assert_eq!(index.find(&name(3)), Some(other));
    index.release(first);
    assert_eq!(index.find(&name(2)), Some(second));
    // The number belongs to another block now: the old block is no longer before its followers.
    assert_eq!(refer(&mut index, None, name(4)), first);
    let fifth = refer(&mut index, Some(first), name(5));
    assert_ne!(fifth, second);
    assert_eq!(refer(&mut index, Some(first), name(5)), fifth);
    // The first block comes again, and the second is found behind it.
    let first = refer(&mut index, None, name(1));
    assert_eq!(refer(&mut index, Some(first), name(2)), second);
    assert_eq!(index.next(first), Some(second));
}

/// Two numbers of one block: that of a job whose prompt's beginning was forgotten, and that of
/// a request that came later.
fn two_numbers(index: &mut Index) -> (Number, Number) {
    let first = refer(index, None, name(1));
    let of_job = refer(index, Some(first), name(2));
    index.release(first);
    let mut numbers = Vec::new();
    let chunks = [name(1).chunk, name(2).chunk];
    index.refer(0, None, chunks.into_iter(), &mut numbers);
    assert_ne!(numbers[1], of_job);
    (of_job, numbers[1])
}

fn answered(index: &mut Index, number: Number, is_there: bool) {
    let question = index.ask();
    index.answer(question, number, is_there);
}

#[test]
fn of_two_numbers_of_a_block_the_one_that_knows_newer_things_counts() {
    type Step = fn(&mut Index, Number, Number);
    let cases: [(&str, Step, u16); 6] = [
        (
            "lost since the pool was asked",
            |index, job, request| {
                answered(index, request, true);
                index.set_lost(job);
            },
            0,
        ),
        (
            "in the pool again since it was lost",
            |index, job, request| {
                index.set_lost(job);
                answered(index, request, true);
            },
            IN_POOL,
        ),
        (
            "gone since it was stored",
            |index, job, request| {
                index.set_stored(job);
                answered(index, request, false);
            },
            0,
        ),
        (
            "stored since the pool was asked",
            |index, job, request| {
                answered(index, request, false);
                index.set_stored(job);
            },
            IN_POOL | OURS,
        ),
        (
            "still there since it was stored",
            |index, job, request| {
                index.set_stored(job);
                answered(index, request, true);
            },
            IN_POOL | OURS,
        ),
        (
            "there with another's key since the pool was asked",
            |index, job, request| {
                answered(index, request, true);
                index.set_foreign(job);
            },
            IN_POOL | FOREIGN,
        ),
    ];
    for (what, step, wanted) in cases {
        let mut index = Index::new(8);
        let (job, request) = two_numbers(&mut index);
        step(&mut index, job, request);
        assert_eq!(index.join(request), job, "{what}");
        assert_eq!(index.state(job).flags & OF_POOL, wanted, "{what}");
    }
}

#[test]
fn what_is_remembered_of_a_block_does_not_count_against_a_newer_answer() {
    let mut index = Index::new(8);
    let (job, request) = two_numbers(&mut index);
    index.set_stored(job);
    index.release(job);
    answered(&mut index, request, false);
    assert_eq!(index.join(request), request);
    assert!(!index.state(request).is_in_pool());
}

#[test]
fn a_late_report_of_a_forgotten_block_makes_no_second_one_that_lasts() {
    let mut index = Index::new(4);
    let first = refer(&mut index, None, name(1));
    let second = refer(&mut index, Some(first), name(2));
    index.change_ranks(name(2), 1);
    assert_eq!(index.len(), 3);
    index.list(second);
    assert_eq!(index.len(), 2);
    assert!(index.state(second).is_held_by(1));
    index.change_ranks(name(2), -1);
    assert!(index.state(second).is_held_by(0));
}

proptest! {
    /// Prompts of a few different blocks come and go. A block keeps one number while it is
    /// known, and no two blocks have the same number.
    #[test]
    fn numbers_stand_for_names(steps in prop::collection::vec((prop::collection::vec(0_u64..3, 1..6), 0..4, any::<bool>()), 1..40)) {
        let mut index = Index::new(3);
        let mut live: Vec<(Vec<u64>, Vec<Number>)> = Vec::new();
        for (path, leaves, in_pool) in steps {
            if leaves == 0 && !live.is_empty() {
                for number in live.remove(0).1.into_iter().rev() {
                    index.release(number);
                }
                continue;
            }
            // A job that still names a prompt's end keeps nothing of its beginning.
            if leaves == 1 && !live.is_empty() {
                let (names, numbers) = &mut live[0];
                names.remove(0);
                index.release(numbers.remove(0));
                if numbers.is_empty() {
                    live.remove(0);
                }
                continue;
            }
            // A block's name holds all before it, as chained hashes do.
            let mut code = 1;
            let (mut names, mut numbers) = (Vec::new(), Vec::new());
            for step in path {
                code = code * 4 + step;
                names.push(code);
            }
            let chunks: Vec<Chunk> = names.iter().map(|&code| name(code).chunk).collect();
            index.refer(0, None, chunks.into_iter(), &mut numbers);
            for number in &mut numbers {
                *number = index.join(*number);
                let question = index.ask();
                index.answer(question, *number, in_pool);
            }
            live.push((names, numbers));
            let mut known = std::collections::HashMap::new();
            for (names, numbers) in &live {
                for (name, number) in names.iter().zip(numbers) {
                    prop_assert_eq!(*known.entry(*name).or_insert(*number), *number);
                }
            }
            let distinct: std::collections::HashSet<_> = known.values().collect();
            prop_assert_eq!(distinct.len(), known.len());
            let listed: std::collections::HashSet<_> =
                index.table.iter().map(|&number| index.name(number).chunk).collect();
            prop_assert_eq!(listed.len(), index.table.len());
        }
        for number in live.into_iter().flat_map(|(_, numbers)| numbers) {
            index.release(number);
        }
        index.forget_pool();
        prop_assert_eq!(index.len(), 0);
    }
}
