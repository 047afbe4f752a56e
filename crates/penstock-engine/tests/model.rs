//! Random jobs against an oracle: whatever is asked in whatever order, over a store that forgets,
//! damages and refuses, memory holds exactly what the outcomes say.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use penstock_contract::{Chunk, ErrorKind, HostChange};
use penstock_engine::{Event, Fence, Outcome, Outcomes};
use penstock_layout::KvLayout;
use proptest::prelude::*;

use crate::support::*;

#[derive(Clone, Debug)]
enum Step {
    /// Store blocks under keys that say what the blocks hold.
    Store {
        blocks: Vec<u64>,
    },
    /// Load keys of blocks that were submitted, though the store may not have them.
    Load {
        picks: Vec<u64>,
        prefix: bool,
        deadline_ms: u64,
    },
    /// Prefetch keys: a load without targets.
    Prefetch {
        picks: Vec<u64>,
        deadline_ms: u64,
    },
    /// Release any job, prefetch or not, over or not.
    Release {
        pick: usize,
    },
    Cancel {
        pick: usize,
    },
    WaitReleased {
        pick: usize,
    },
    Damage {
        pick: u64,
        byte: usize,
    },
    Remove {
        pick: u64,
    },
    Fail {
        kind: Option<ErrorKind>,
    },
    HoldGets(bool),
    HoldPuts(bool),
    Poll,
    Drain,
    /// The store does its work again, and all that was asked for ends. So what is loaded next may
    /// well be there.
    Land,
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        2 => Just(None),
        1 => Just(Some(ErrorKind::Unreachable)),
        1 => Just(Some(ErrorKind::TimedOut)),
    ];
    prop_oneof![
        8 => prop::collection::vec(0..BLOCKS, 1..8).prop_map(|blocks| Step::Store { blocks }),
        12 => (prop::collection::vec(any::<u64>(), 1..8), any::<bool>(), prop_oneof![1 => 0..3_u64, 4 => Just(30_000)])
            .prop_map(|(picks, prefix, deadline_ms)| Step::Load { picks, prefix, deadline_ms }),
        4 => (prop::collection::vec(any::<u64>(), 1..8), prop_oneof![1 => 0..3_u64, 4 => Just(30_000)])
            .prop_map(|(picks, deadline_ms)| Step::Prefetch { picks, deadline_ms }),
        3 => any::<usize>().prop_map(|pick| Step::Release { pick }),
        2 => any::<usize>().prop_map(|pick| Step::Cancel { pick }),
        2 => any::<usize>().prop_map(|pick| Step::WaitReleased { pick }),
        2 => (0..20_u64, any::<usize>()).prop_map(|(pick, byte)| Step::Damage { pick, byte }),
        1 => (0..20_u64).prop_map(|pick| Step::Remove { pick }),
        1 => kind.prop_map(|kind| Step::Fail { kind }),
        1 => any::<bool>().prop_map(Step::HoldGets),
        1 => any::<bool>().prop_map(Step::HoldPuts),
        6 => Just(Step::Poll),
        1 => Just(Step::Drain),
        1 => Just(Step::Land),
    ]
}

#[derive(Debug)]
enum Pending {
    Store {
        blocks: Vec<u64>,
        released: bool,
    },
    /// What each target block is loaded from.
    Load {
        from: Vec<(u64, u64)>,
        prefix: bool,
    },
    Prefetch {
        objects: usize,
    },
}

/// Blocks below are sources of stores, those above targets of loads.
struct Oracle {
    /// What each block holds: `pattern` of this, or zeros.
    holds: HashMap<u64, u64>,
    pending: HashMap<u64, Pending>,
    next_content: u64,
    next_job: u64,
    loaded: u64,
    kept: u64,
    stored: u64,
}

impl Oracle {
    fn busy(&self, block: u64) -> bool {
        self.pending.values().any(|job| match job {
            Pending::Store { blocks, released } => !released && blocks.contains(&block),
            Pending::Load { from, .. } => from.iter().any(|&(_, target)| target == block),
            Pending::Prefetch { .. } => false,
        })
    }

    fn settle(&mut self, kv: &Kv, job: u64, event: &Event) {
        match event {
            Event::Released => match self.pending.get_mut(&job) {
                Some(Pending::Store { released, .. }) => {
                    assert!(!*released, "released once");
                    *released = true;
                }
                other => panic!("released: {other:?}"),
            },
            Event::Stored(Outcomes {
                blocks: objects, ..
            }) => {
                let Some(Pending::Store { blocks, released }) = self.pending.remove(&job) else {
                    panic!("not a store: {job}")
                };
                assert!(released, "released before it is over");
                assert_eq!(objects.len(), blocks.len());
                for outcome in objects {
                    match outcome {
                        Outcome::Stored(bytes) => {
                            assert_eq!(*bytes, BLOCK_BYTES as u64);
                            self.stored += 1;
                        }
                        Outcome::AlreadyPresent
                        | Outcome::Dropped
                        | Outcome::Cancelled
                        | Outcome::Failed(_) => {}
                        other => panic!("of a store: {other:?}"),
                    }
                }
            }
            Event::Loaded(Outcomes {
                blocks: objects, ..
            }) => {
                let Some(Pending::Load { from, prefix }) = self.pending.remove(&job) else {
                    panic!("not a load: {job}")
                };
                assert_eq!(objects.len(), from.len());
                for (outcome, (content, target)) in objects.iter().zip(from) {
                    match outcome {
                        Outcome::Loaded(bytes) => {
                            assert_eq!(*bytes, BLOCK_BYTES as u64);
                            self.holds.insert(target, content);
                            self.loaded += 1;
                        }
                        Outcome::Kept(bytes) => {
                            assert_eq!(*bytes, BLOCK_BYTES as u64);
                            self.holds.insert(target, content);
                            self.kept += 1;
                        }
                        Outcome::Skipped => assert!(prefix),
                        Outcome::Miss
                        | Outcome::Rejected(_)
                        | Outcome::TimedOut
                        | Outcome::Cancelled
                        | Outcome::Failed(_) => {}
                        other => panic!("of a load: {other:?}"),
                    }
                    self.check(kv, target);
                }
            }
            Event::Prefetched(Outcomes {
                blocks: objects, ..
            }) => {
                let Some(Pending::Prefetch { objects: expected }) = self.pending.remove(&job)
                else {
                    panic!("not a prefetch: {job}")
                };
                assert_eq!(objects.len(), expected);
                for outcome in objects {
                    match outcome {
                        Outcome::Loaded(_) => self.loaded += 1,
                        Outcome::Kept(_) => self.kept += 1,
                        Outcome::Stored(_) | Outcome::AlreadyPresent => {
                            panic!("of a prefetch: {outcome:?}")
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    fn check(&self, kv: &Kv, block: u64) {
        let expected = match self.holds.get(&block) {
            Some(&content) => pattern(content),
            None => vec![0; BLOCK_BYTES],
        };
        assert!(
            kv.read(block, share()) == expected,
            "block {block} holds something else"
        );
    }
}

/// Lets the store do its work, and waits until every job is over.
fn land(store: &Probe, engine: &Rig, kv: &Kv, oracle: &mut Oracle) {
    store.fail(None);
    store.hold_gets(false);
    store.hold_puts(false);
    end_all(engine, kv, oracle);
}

/// Waits until every job is over, whatever the store does.
fn end_all(engine: &Rig, kv: &Kv, oracle: &mut Oracle) {
    let mut seen = Vec::new();
    eventually("every job is over", || {
        engine.poll(&mut seen);
        for completion in seen.drain(..) {
            oracle.settle(kv, completion.job, &completion.event);
        }
        oracle.pending.is_empty()
    });
}

fn run(layout: KvLayout, keep: bool, steps: &[Step]) {
    let (store, kv) = (Probe::new(), Kv::new(layout));
    let mut config = config(5);
    config.keep = keep;
    config.get_lanes = 3;
    config.copy_lanes = 2;
    config.batch = 3;
    config.store_wait = Duration::from_millis(2);
    config.store_backoff = Duration::from_millis(1);
    config.put_timeout = Duration::from_millis(20);
    config.get_timeout = Duration::from_millis(20);
    config.max_pending_objects = 16;
    let engine = unregistered(&store, config);
    engine.register_kv(&kv);
    let mut oracle = Oracle {
        holds: HashMap::new(),
        pending: HashMap::new(),
        next_content: 1,
        next_job: 0,
        loaded: 0,
        kept: 0,
        stored: 0,
    };
    let mut seen = Vec::new();
    let mut kept: HashSet<Chunk> = HashSet::new();
    let mut follow = || {
        for HostChange { chunk, came, .. } in engine.take_host_changes() {
            let is_news = if came {
                kept.insert(chunk)
            } else {
                kept.remove(&chunk)
            };
            assert!(is_news, "{chunk:?} came, or went, twice");
        }
        kept.len() as u64
    };
    for step in steps {
        match step {
            Step::Store { blocks } => {
                let mut free: Vec<u64> = blocks
                    .iter()
                    .copied()
                    .filter(|&b| !oracle.busy(b))
                    .collect();
                free.sort_unstable();
                free.dedup();
                let mut objects = Vec::new();
                for &block in &free {
                    let content = oracle.next_content;
                    oracle.next_content += 1;
                    kv.fill(block, content);
                    oracle.holds.insert(block, content);
                    objects.push(block_of(content, block));
                }
                oracle.next_job += 1;
                engine
                    .submit_store(oracle.next_job, objects, Fence::NONE)
                    .unwrap();
                let job = Pending::Store {
                    blocks: free,
                    released: false,
                };
                oracle.pending.insert(oracle.next_job, job);
            }
            Step::Load {
                picks,
                prefix,
                deadline_ms,
            } => {
                let mut targets = (0..BLOCKS).filter(|&b| !oracle.busy(b));
                let submitted = oracle.next_content;
                let from: Vec<(u64, u64)> = picks
                    .iter()
                    .map(|pick| pick % submitted)
                    .zip(&mut targets)
                    .collect();
                drop(targets);
                let objects = from.iter().map(|&(n, b)| block_of(n, b)).collect();
                let deadline = within(Duration::from_millis(*deadline_ms));
                oracle.next_job += 1;
                engine
                    .submit_load(oracle.next_job, objects, deadline, *prefix, Fence::NONE)
                    .unwrap();
                oracle.pending.insert(
                    oracle.next_job,
                    Pending::Load {
                        from,
                        prefix: *prefix,
                    },
                );
            }
            Step::Prefetch { picks, deadline_ms } => {
                let submitted = oracle.next_content;
                let objects: Vec<_> = picks.iter().map(|n| block_of(n % submitted, 0)).collect();
                let deadline = within(Duration::from_millis(*deadline_ms));
                oracle.next_job += 1;
                let pending = Pending::Prefetch {
                    objects: objects.len(),
                };
                oracle.pending.insert(oracle.next_job, pending);
                engine
                    .submit_prefetch(oracle.next_job, objects, deadline)
                    .unwrap();
            }
            Step::Release { pick } => {
                if oracle.next_job > 0 {
                    engine.release(*pick as u64 % oracle.next_job + 1);
                }
            }
            Step::Cancel { pick } => {
                if oracle.next_job > 0 {
                    engine.cancel(*pick as u64 % oracle.next_job + 1);
                }
            }
            Step::WaitReleased { pick } => {
                if oracle.next_job > 0 {
                    let job = *pick as u64 % oracle.next_job + 1;
                    assert!(engine.wait_released(&[job], LONG));
                    engine.poll(&mut seen);
                    for completion in seen.drain(..) {
                        oracle.settle(&kv, completion.job, &completion.event);
                    }
                    if let Some(Pending::Store { released, .. }) = oracle.pending.get(&job) {
                        assert!(released);
                    }
                }
            }
            Step::Damage { pick, byte } => {
                if store.has(&key(*pick)) {
                    let mut value = store.value(&key(*pick));
                    if !value.is_empty() {
                        let at = byte % value.len();
                        value[at] ^= 1 << (byte % 8);
                        store.plant(&key(*pick), &value);
                    }
                }
            }
            Step::Remove { pick } => {
                penstock_contract::Store::remove(&store.inner, &[key(*pick)], soon()).unwrap();
            }
            Step::Fail { kind } => store.fail(*kind),
            Step::HoldGets(hold) => store.hold_gets(*hold),
            Step::HoldPuts(hold) => store.hold_puts(*hold),
            Step::Poll => {
                follow();
                engine.poll(&mut seen);
                for completion in seen.drain(..) {
                    oracle.settle(&kv, completion.job, &completion.event);
                }
            }
            Step::Drain => {
                engine.drain(Duration::from_millis(1));
            }
            Step::Land => land(&store, &engine, &kv, &mut oracle),
        }
    }
    end_all(&engine, &kv, &mut oracle);
    // Whatever happened before, what is stored now can be loaded.
    let mut content = 0;
    eventually("a block is stored", || {
        content = oracle.next_content;
        kv.fill(0, content);
        oracle.holds.insert(0, content);
        oracle.next_content += 1;
        oracle.next_job += 1;
        let job = Pending::Store {
            blocks: vec![0],
            released: false,
        };
        oracle.pending.insert(oracle.next_job, job);
        let before = oracle.stored;
        engine
            .submit_store(oracle.next_job, vec![block_of(content, 0)], Fence::NONE)
            .unwrap();
        land(&store, &engine, &kv, &mut oracle);
        oracle.stored > before
    });
    eventually("it is loaded", || {
        oracle.next_job += 1;
        let job = Pending::Load {
            from: vec![(content, BLOCKS - 1)],
            prefix: true,
        };
        oracle.pending.insert(oracle.next_job, job);
        let before = oracle.loaded + oracle.kept;
        let objects = vec![block_of(content, BLOCKS - 1)];
        engine
            .submit_load(oracle.next_job, objects, soon(), true, Fence::NONE)
            .unwrap();
        land(&store, &engine, &kv, &mut oracle);
        oracle.loaded + oracle.kept > before
    });
    // A lane may still hold a value of a job that was given up.
    eventually("what is kept is counted", || {
        follow() == engine.stats().slots_kept
    });
    assert!(engine.shutdown(LONG));
    for block in 0..BLOCKS {
        oracle.check(&kv, block);
    }
    let stats = engine.stats();
    assert_eq!((stats.slots_in_use, stats.slots_kept), (0, 0));
    assert_eq!(stats.panics, 0);
    let counted = [
        stats.loaded_objects,
        stats.kept_objects,
        stats.stored_objects,
    ];
    assert_eq!(counted, [oracle.loaded, oracle.kept, oracle.stored]);
    assert!(keep || oracle.kept == 0);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 192,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn memory_holds_what_the_outcomes_say(
        layout in prop::sample::select(KvLayout::ALL.to_vec()),
        keep in any::<bool>(),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        run(layout, keep, &steps);
    }
}
