//! Many objects in one copy: each has its own bytes, whoever its neighbours are.

use std::sync::Arc;

use penstock_contract::memory::Run;
use penstock_contract::testing::{LONG, eventually, soon};
use penstock_cuda_standin::Machine;
use penstock_layout::{KvLayout, Span};
use penstock_value::header::Checksum;
use proptest::prelude::*;

use super::super::CudaExecutor;
use super::jobs::{completions, engine, is_ready, numbered, outcomes, register};
use super::{Cache, Payload, Sizes, pattern};
use crate::copy::{Executor, HostExecutor, Way};
use crate::registration::{Object, Registration};
use crate::{Fence, Outcome, Owner, Region};

/// A batch: the pages of each object, none of which is in two.
#[derive(Clone, Debug)]
struct Batch {
    layout: KvLayout,
    sizes: Sizes,
    objects: Vec<(Vec<u64>, Span)>,
    pinned: bool,
}

fn batches() -> impl Strategy<Value = Batch> {
    let contents = prop::sample::select(vec![1_u64, 16, 48, 4096]);
    let sizes = (1..4_u16, 1..3_u16, 1..5_u64, contents);
    let layout = prop::sample::select(KvLayout::ALL.to_vec());
    // As a free pool lends them: mostly in order, in any order, each object with its neighbours.
    let pages = prop::collection::vec(1..4_usize, 1..=64);
    (sizes, layout, pages, any::<[bool; 3]>()).prop_flat_map(
        |((layers, heads, tokens, content), layout, pages, [shuffled, reversed, pinned])| {
            let blocks: u64 = pages.iter().sum::<usize>() as u64 + 2;
            let sizes = Sizes {
                layers,
                blocks,
                heads,
                tokens,
                content,
            };
            let in_order = Just((0..blocks).collect::<Vec<_>>());
            let order = match shuffled {
                true => in_order.prop_shuffle().boxed(),
                false => in_order.boxed(),
            };
            let range =
                |end: u16| (0..end).prop_flat_map(move |first| (Just(first), first + 1..=end));
            let whole = prop::bool::weighted(0.7);
            let spans = prop::collection::vec((whole, range(layers), range(heads)), pages.len());
            (order, spans).prop_map(move |(mut order, spans)| {
                if reversed {
                    order.reverse();
                }
                let mut order = order.into_iter();
                let objects = pages.iter().zip(spans).map(|(&count, (whole, l, h))| {
                    let (l, h) = if whole {
                        ((0, layers), (0, heads))
                    } else {
                        (l, h)
                    };
                    let span = Span::new(l.0..l.1, h.0..h.1).unwrap();
                    (order.by_ref().take(count).collect(), span)
                });
                Batch {
                    layout,
                    sizes,
                    objects: objects.collect(),
                    pinned,
                }
            })
        },
    )
}

/// The payloads of a batch, one after the other in one piece of memory, as slots are.
fn cut<'a>(mut memory: &'a mut [u8], lens: &[usize]) -> Vec<&'a mut [u8]> {
    let mut payloads = Vec::new();
    for &len in lens {
        let (payload, rest) = memory.split_at_mut(len);
        payloads.push(payload);
        memory = rest;
    }
    payloads
}

fn check(batch: &Batch, on_host: bool) {
    let machine = Machine::new();
    let cache = Cache::new(&machine, batch.layout, batch.sizes, 1);
    let (executor, region): (Arc<dyn Executor>, Region) = if on_host {
        let (start, len) = (cache.memory.start.expose_provenance(), cache.memory.len());
        // SAFETY: mapped as long as the cache, and nobody else touches it.
        #[allow(unsafe_code)]
        let region = unsafe { Region::new(start, len as u64) };
        (Arc::new(HostExecutor), region)
    } else {
        (CudaExecutor::of(machine.ordinal).unwrap(), cache.region)
    };
    let registered = Registration::new(cache.descriptor.clone(), vec![region], executor).unwrap();
    let places: Vec<Vec<usize>> = (batch.objects.iter())
        .map(|(pages, span)| cache.places(pages, span))
        .collect();
    let lens: Vec<usize> = places.iter().map(Vec::len).collect();
    let mut payloads = Payload::new(&machine, lens.iter().sum(), 0, batch.pinned && !on_host);

    let before = cache.memory.read();
    let objects = (batch.objects.iter()).zip(cut(payloads.bytes(), &lens));
    let objects = objects.map(|((pages, span), payload)| Object {
        pages: pages.iter().copied(),
        span,
        payload,
    });
    let sums = registered.gather(objects, true).unwrap();
    let seen = |places: &[usize]| places.iter().map(|&at| before[at]).collect::<Vec<u8>>();
    for ((payload, places), sum) in cut(payloads.bytes(), &lens).iter().zip(&places).zip(sums) {
        assert!(**payload == *seen(places), "gathered");
        assert_eq!(sum, Checksum::of(payload));
    }

    let mut after = before.clone();
    let write = |after: &mut Vec<u8>, seed| {
        let new = pattern(lens.iter().sum(), seed);
        for (&at, &byte) in places.iter().flatten().zip(&new) {
            after[at] = byte;
        }
        new
    };
    payloads.bytes().copy_from_slice(&write(&mut after, 2));
    let objects = (batch.objects.iter()).zip(cut(payloads.bytes(), &lens));
    let objects = objects.map(|((pages, span), payload)| Object {
        pages: pages.iter().copied(),
        span,
        payload: &*payload,
    });
    registered.scatter(objects).unwrap();
    assert!(cache.memory.read() == after, "scattered, and nothing else");

    if !on_host && batch.pinned {
        let shared = |memory: &mut [u8]| -> Vec<_> {
            let payloads = (batch.objects.iter()).zip(cut(memory, &lens));
            let objects = payloads.map(|((pages, span), payload)| {
                // In runs of memory that lie side by side, or in one.
                let run = Run::new(payload.as_mut_ptr(), payload.len());
                let runs = run.cut(run.start().addr(), 1 << 10).collect();
                (pages.clone(), *span, runs)
            });
            objects.collect()
        };
        let objects = shared(payloads.bytes());
        registered.copy_shared(Way::Gather, objects).unwrap();
        let expected: Vec<u8> = places.iter().flatten().map(|&at| after[at]).collect();
        assert!(
            *payloads.bytes() == *expected,
            "gathered into shared memory"
        );
        payloads.bytes().copy_from_slice(&write(&mut after, 3));
        let objects = shared(payloads.bytes());
        registered.copy_shared(Way::Scatter, objects).unwrap();
        assert!(cache.memory.read() == after, "scattered from shared memory");
    }
    drop((payloads, registered, cache));
    machine.assert_clean();
    Machine::assert_thread_as_before();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn each_object_of_a_batch_has_its_own_bytes(batch in batches(), on_host in any::<bool>()) {
        check(&batch, on_host);
    }
}

/// What a block's neighbours are, whatever the property test has drawn.
#[test]
fn neighbours_in_every_layout() {
    for layout in KvLayout::ALL {
        for layers in [1, 2] {
            for pages in [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 4, 5], [5, 0, 1, 4]] {
                let sizes = Sizes {
                    layers,
                    blocks: 6,
                    heads: 1,
                    tokens: 8,
                    content: 64,
                };
                let span = Span::new(0..layers, 0..1).unwrap();
                let batch = Batch {
                    layout,
                    sizes,
                    objects: pages.map(|page| (vec![page], span)).to_vec(),
                    pinned: true,
                };
                check(&batch, false);
                check(&batch, true);
            }
        }
    }
}

const SIX: Sizes = Sizes {
    layers: 2,
    blocks: 6,
    heads: 1,
    tokens: 8,
    content: 64,
};

/// Jobs whose blocks go in one copy, by the kernel and by the copy engine.
#[test]
fn jobs_of_neighbouring_blocks_are_stored_and_loaded() {
    for (layout, layers) in [
        (KvLayout::BLHNC, 2),
        (KvLayout::LBHNC, 2),
        (KvLayout::LBHNC, 1),
    ] {
        for (pages, content) in [
            (&[0, 1, 2, 3][..], 64),
            (&[0, 2, 4], 64),
            (&[3, 2, 1, 0], 64),
            (&[5, 0], 64),
            (&[0, 1, 2, 3], 16 << 10),
        ] {
            let machine = Machine::new();
            let sizes = Sizes {
                layers,
                content,
                ..SIX
            };
            let cache = Cache::new(&machine, layout, sizes, 1);
            let engine = engine(&cache);
            register(&engine, &cache).unwrap();
            eventually("pinned, and measured", || is_ready(&engine));
            let before = cache.memory.read();
            let (blocks, owner) = (numbered(pages), Owner::default());
            let submitted = engine.submit_store(1, &blocks, &owner, Fence::NONE);
            submitted.unwrap();
            let stored = outcomes(&engine, 1);
            let is_stored = |outcome: &Outcome| matches!(outcome, Outcome::Stored(_));
            assert!(
                stored.iter().all(is_stored),
                "{layout} {pages:?} {stored:?}"
            );
            let mut after = pattern(before.len(), 77);
            cache.memory.write(0, &after);
            let deadline = soon();
            let submitted = engine.submit_load(2, &blocks, &owner, deadline, true, Fence::NONE);
            submitted.unwrap();
            let loaded = outcomes(&engine, 2);
            let is_loaded = |outcome: &Outcome| matches!(outcome, Outcome::Loaded(_));
            assert!(
                loaded.iter().all(is_loaded),
                "{layout} {pages:?} {loaded:?}"
            );
            for at in cache.places(pages, &cache.whole()) {
                after[at] = before[at];
            }
            assert!(cache.memory.read() == after, "{layout} {pages:?}");
            assert!(engine.shutdown(LONG));
            drop((engine, cache));
            machine.assert_clean();
        }
    }
}

/// Requests that know nothing of each other, whose blocks happen to be neighbours.
#[test]
fn neighbours_of_two_requests_are_stored() {
    let machine = Machine::new();
    let cache = Cache::new(&machine, KvLayout::BLHNC, SIX, 1);
    let engine = engine(&cache);
    register(&engine, &cache).unwrap();
    eventually("pinned, and measured", || is_ready(&engine));
    for round in 0..50_u8 {
        let jobs = [1, 2].map(|page| (2 * u64::from(round) + page - 1, page));
        for (job, page) in jobs {
            let mut block = numbered(&[page]);
            block[0].chunk[1] = round;
            let submitted = engine.submit_store(job, &block, &Owner::default(), Fence::NONE);
            submitted.unwrap();
        }
        for done in completions(&engine, jobs.map(|(job, _)| job)) {
            let blocks = done.event.blocks();
            assert!(matches!(blocks, [Outcome::Stored(_)]), "{blocks:?}");
        }
    }
    assert!(engine.shutdown(LONG));
    drop((engine, cache));
    machine.assert_clean();
}
