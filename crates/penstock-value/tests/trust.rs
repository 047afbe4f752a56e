//! The roll: who is trusted after which marks, and that engines tell each other through the pool.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_contract::testing::soon;
use penstock_contract::{Namespace, Store};
use penstock_value::header::Writer;
use penstock_value::{Accused, Keyring, MemoryStore, ROLL, Trust};
use proptest::prelude::*;

const NAMESPACE: Namespace = Namespace([3; 16]);

fn pool() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(1 << 20))
}

fn accuse(trust: &Trust, writer: u64, witness: u64) -> Accused {
    let (accused, told) = trust.accuse(Writer(writer), Writer(witness), NAMESPACE, soon());
    told.expect("the pool was told");
    accused
}

/// What a new engine finds out.
fn distrusted(pool: &Arc<dyn Store>, among: std::ops::Range<u64>) -> Vec<u64> {
    let trust = Trust::new(pool, None);
    trust.read(soon()).expect("the pool answers");
    among.filter(|&n| trust.is_distrusted(Writer(n))).collect()
}

#[test]
fn whom_one_engine_marks_no_engine_trusts() {
    let pool = pool();
    let (witness, other) = (Trust::new(&pool, None), Trust::new(&pool, None));
    let now = Instant::now();
    other.refresh(now, soon());
    assert_eq!(accuse(&witness, 1, 7), Accused::Writer);
    assert_eq!(accuse(&witness, 1, 7), Accused::Again);
    assert!(witness.is_distrusted(Writer(1)));
    assert!(!witness.is_distrusted(Writer(7)));
    // What is known is as old as it may be.
    other.refresh(now + Duration::from_secs(9), soon());
    assert!(!other.is_distrusted(Writer(1)));
    other.refresh(now + Duration::from_secs(10), soon());
    assert!(other.is_distrusted(Writer(1)));
    let (mark, counts) = other.marks()[0];
    assert_eq!((mark.writer, mark.witness), (Writer(1), Writer(7)));
    assert_eq!((mark.namespace, counts), (NAMESPACE, true));
}

#[test]
fn an_engine_that_disagrees_with_three_is_itself_not_trusted() {
    let pool = pool();
    let wrong = Trust::new(&pool, None);
    assert_eq!(accuse(&wrong, 1, 9), Accused::Writer);
    assert_eq!(accuse(&wrong, 2, 9), Accused::Writer);
    assert_eq!(distrusted(&pool, 0..10), [1, 2]);
    assert_eq!(accuse(&wrong, 3, 9), Accused::Itself);
    assert_eq!(distrusted(&pool, 0..10), [9]);
    assert!(wrong.is_distrusted(Writer(9)));
}

#[test]
fn the_ranks_of_an_engine_are_one_witness() {
    let pool = pool();
    let ranks = [(); 3].map(|()| Trust::new(&pool, None));
    assert_eq!(accuse(&ranks[0], 1, 9), Accused::Writer);
    assert_eq!(accuse(&ranks[1], 2, 9), Accused::Writer);
    assert_eq!(accuse(&ranks[1], 1, 9), Accused::Writer);
    assert_eq!(accuse(&ranks[2], 3, 9), Accused::Itself);
    assert_eq!(distrusted(&pool, 0..10), [9]);
}

#[test]
fn an_engine_that_one_other_has_marked_is_heard() {
    let pool = pool();
    let trust = Trust::new(&pool, None);
    accuse(&trust, 1, 9);
    assert!(trust.is_distrusted(Writer(1)) && trust.is_heard(Writer(1)));
    accuse(&Trust::new(&pool, None), 1, 8);
    trust.read(soon()).unwrap();
    assert!(!trust.is_heard(Writer(1)));
}

#[test]
fn a_witness_that_two_others_have_marked_does_not_count() {
    let pool = pool();
    accuse(&Trust::new(&pool, None), 1, 9);
    accuse(&Trust::new(&pool, None), 9, 1);
    // One word against the other: neither is trusted.
    assert_eq!(distrusted(&pool, 0..10), [1, 9]);
    accuse(&Trust::new(&pool, None), 9, 2);
    assert_eq!(distrusted(&pool, 0..10), [9]);
}

#[test]
fn a_mark_that_the_pool_has_lost_is_written_anew() {
    let pool = pool();
    let witness = Trust::new(&pool, None);
    accuse(&witness, 1, 7);
    let mut keys = Vec::new();
    pool.list(Some(ROLL), &mut |listed| keys.push(listed.key), soon())
        .unwrap();
    assert_eq!(pool.remove(&keys, soon()).unwrap(), 1);
    assert_eq!(distrusted(&pool, 0..10), []);
    witness.refresh(Instant::now() + Duration::from_secs(60), soon());
    assert_eq!(distrusted(&pool, 0..10), [1]);
}

#[test]
fn engines_with_other_keys_have_another_roll_and_engines_with_some_read_both() {
    let pool = pool();
    let old = "old:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let new = "new:/wECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let ring = |lines: &str| Arc::new(Keyring::parse(lines).unwrap());
    let (before, after) = (ring(old), ring(&format!("{new}\n{old}")));
    accuse(&Trust::new(&pool, Some(&before)), 1, 7);
    accuse(&Trust::new(&pool, None), 2, 7);
    let rotated = Trust::new(&pool, Some(&after));
    rotated.read(soon()).unwrap();
    assert!(rotated.is_distrusted(Writer(1)));
    assert!(!rotated.is_distrusted(Writer(2)));
    assert_eq!(distrusted(&pool, 0..10), [2]);
}

proptest! {
    /// Engines write the roll over each other: in the end it has all marks all the same.
    #[test]
    fn no_mark_is_lost(marks in prop::collection::vec((0..4_usize, 0..40_u64), 1..12)) {
        let pool = pool();
        let engines: Vec<Trust> = (0..4).map(|_| Trust::new(&pool, None)).collect();
        let mut made = HashSet::new();
        for (engine, writer) in marks {
            let witness = 100 + engine as u64;
            accuse(&engines[engine], writer, witness);
            made.insert((Writer(writer), Writer(witness)));
        }
        let reader = Trust::new(&pool, None);
        reader.read(soon()).unwrap();
        let found: HashSet<_> = reader.marks().iter().map(|(mark, _)| (mark.writer, mark.witness)).collect();
        prop_assert!(made.is_subset(&found));
        // Besides, only those that have marked too many have marked themselves.
        prop_assert!(found.difference(&made).all(|(writer, witness)| writer == witness));
        for engine in &engines {
            engine.read(soon()).unwrap();
            prop_assert_eq!(engine.marks(), reader.marks());
        }
    }
}
