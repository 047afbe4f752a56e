//! Every byte, in every layout, by every way.

use std::ffi::CStr;

use penstock_cuda_standin::{Machine, Program};
use penstock_layout::{KvLayout, Span};
use penstock_value::header::Checksum;
use proptest::prelude::*;

use super::super::{
    COPY_ENGINE_FROM, CudaExecutor, KERNEL_BLOCKS, PIECES_NAME, PIECES_PTX, TABLE_PIECES,
};
use super::{Cache, Payload, Sizes, pattern};

/// How a copy is asked for.
#[derive(Clone, Debug)]
struct Case {
    layout: KvLayout,
    sizes: Sizes,
    span: Span,
    blocks: Vec<u64>,
    pinned: bool,
    /// The payload's offset from the start of a page.
    offset: usize,
    batches: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let contents = prop::sample::select(vec![1_u64, 3, 8, 16, 48, 256, 656, 4096]);
    let sizes = (1..5_u16, 1..8_u64, 1..4_u16, 1..9_u64, contents);
    let sizes = sizes.prop_map(|(layers, blocks, heads, tokens, content)| Sizes {
        layers,
        blocks,
        heads,
        tokens,
        content,
    });
    (sizes, prop::sample::select(KvLayout::ALL.to_vec())).prop_flat_map(|(sizes, layout)| {
        let range = |end: u16| (0..end).prop_flat_map(move |first| (Just(first), first + 1..=end));
        let blocks: Vec<u64> = (0..sizes.blocks).collect();
        let count = 1..=blocks.len();
        (
            range(sizes.layers),
            range(sizes.heads),
            prop::sample::subsequence(blocks, count).prop_shuffle(),
            any::<bool>(),
            prop::sample::select(vec![0_usize, 16, 64, 1, 7]),
            any::<bool>(),
        )
            .prop_map(
                move |(layers, heads, blocks, pinned, offset, batches)| Case {
                    layout,
                    sizes,
                    span: Span::new(layers.0..layers.1, heads.0..heads.1).unwrap(),
                    blocks,
                    pinned,
                    offset,
                    batches,
                },
            )
    })
}

fn check(case: &Case) {
    let machine = Machine::new();
    machine.state.lock().without_batches = !case.batches;
    let cache = Cache::new(&machine, case.layout, case.sizes, 1);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let places = cache.places(&case.blocks, &case.span);
    let segments = cache.segments(&case.blocks, &case.span).len();
    let mut payload = Payload::new(&machine, places.len(), case.offset, case.pinned);

    let before = cache.memory.read();
    let checksum = cache
        .gather(&executor, &case.blocks, &case.span, payload.bytes())
        .unwrap();
    let expected: Vec<u8> = places.iter().map(|&at| before[at]).collect();
    assert!(payload.bytes() == expected, "gathered");
    assert_eq!(checksum, Checksum::of(&expected));
    assert!(cache.memory.read() == before, "a gather only reads");

    let other = pattern(places.len(), 2);
    payload.bytes().copy_from_slice(&other);
    cache
        .scatter(&executor, &case.blocks, &case.span, payload.bytes())
        .unwrap();
    let mut after = before;
    for (&at, &byte) in places.iter().zip(&other) {
        after[at] = byte;
    }
    assert!(
        cache.memory.read() == after,
        "scattered, and nothing else touched"
    );

    // Which way the gather and the scatter went.
    let small = places.len() / segments < COPY_ENGINE_FROM;
    let kernel = small && payload.is_pinned();
    let batch = !kernel && payload.is_pinned() && segments > 1;
    let single = machine.calls("cuMemcpyDtoHAsync") + machine.calls("cuMemcpyHtoDAsync");
    let state = machine.state.lock();
    let launches = segments.div_ceil(TABLE_PIECES);
    assert_eq!(state.launches.len(), if kernel { 2 * launches } else { 0 });
    let batched = batch && case.batches;
    assert_eq!(
        state.batches,
        if batched { vec![segments; 2] } else { vec![] }
    );
    assert_eq!(single, if kernel || batched { 0 } else { 2 * segments });
    for &(blocks, threads) in &state.launches {
        assert!(blocks <= KERNEL_BLOCKS && (32..=512).contains(&threads));
    }
    drop(state);
    drop((payload, executor, cache));
    machine.assert_clean();
    Machine::assert_thread_as_before();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_byte_arrives_where_it_belongs(case in cases()) {
        check(&case);
    }
}

/// Every layout in every way, whatever the property test has drawn.
#[test]
fn large_and_small_pieces_in_every_layout() {
    for layout in KvLayout::ALL {
        for (tokens, content) in [(8, 48), (8, 8192), (1, 65_536)] {
            for pinned in [true, false] {
                for batches in [true, false] {
                    let sizes = Sizes {
                        layers: 3,
                        blocks: 4,
                        heads: 2,
                        tokens,
                        content,
                    };
                    check(&Case {
                        layout,
                        sizes,
                        span: Span::new(0..3, 0..2).unwrap(),
                        blocks: vec![3, 0, 2],
                        pinned,
                        offset: 64,
                        batches,
                    });
                }
            }
        }
    }
}

#[test]
fn more_pieces_than_a_table_holds() {
    let sizes = Sizes {
        layers: 90,
        blocks: 64,
        heads: 2,
        tokens: 1,
        content: 16,
    };
    check(&Case {
        layout: KvLayout::LHBNC,
        sizes,
        span: Span::new(0..90, 0..2).unwrap(),
        // Never neighbours.
        blocks: (0..64).step_by(2).collect(),
        pinned: true,
        offset: 64,
        batches: true,
    });
}

#[test]
fn a_driver_that_has_no_batches_is_asked_once() {
    let machine = Machine::new();
    machine.state.lock().without_batches = true;
    let cache = Cache::new(&machine, KvLayout::LBHNC, large(), 1);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let mut payload = Payload::new(&machine, 2 * 65_536, 0, true);
    for _ in 0..3 {
        cache
            .gather(&executor, &[1], &cache.whole(), payload.bytes())
            .unwrap();
    }
    assert_eq!(machine.calls("cuMemcpyBatchAsync"), 1);
    assert_eq!(machine.calls("cuMemcpyDtoHAsync"), 6);
}

/// The test runs itself in a process with the variable.
#[test]
fn an_operator_can_do_without_batches() {
    if std::env::var_os("PENSTOCK_CUDA_BATCHES").is_none() {
        let name = "copy::cuda::tests::copies::an_operator_can_do_without_batches";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("PENSTOCK_CUDA_BATCHES", "off")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let machine = Machine::new();
    let cache = Cache::new(&machine, KvLayout::LBHNC, large(), 1);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let mut payload = Payload::new(&machine, 2 * 65_536, 0, true);
    cache
        .gather(&executor, &[1], &cache.whole(), payload.bytes())
        .unwrap();
    assert_eq!(machine.calls("cuMemcpyBatchAsync"), 0);
    assert_eq!(machine.calls("cuMemcpyDtoHAsync"), 2);
}

/// Two layers, with pieces for the copy engines.
fn large() -> Sizes {
    Sizes {
        layers: 2,
        blocks: 2,
        heads: 1,
        tokens: 1,
        content: 65_536,
    }
}

#[test]
fn a_payload_that_is_pinned_in_part_is_not_for_the_kernel() {
    let machine = Machine::new();
    let sizes = Sizes {
        layers: 3,
        blocks: 2,
        heads: 1,
        tokens: 8,
        content: 256,
    };
    let cache = Cache::new(&machine, KvLayout::LBHNC, sizes, 1);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let mut payload = Payload::new(&machine, 3 * 2048, 0, false);
    let mut pins = super::Pins::new(machine.ordinal).unwrap();
    // SAFETY: unpinned below, before it is freed.
    #[allow(unsafe_code)]
    unsafe { pins.add(payload.memory.start, 4096) }.unwrap();
    cache
        .gather(&executor, &[1], &cache.whole(), payload.bytes())
        .unwrap();
    let before = cache.memory.read();
    let places = cache.places(&[1], &cache.whole());
    assert!(
        places
            .iter()
            .map(|&at| before[at])
            .eq(payload.bytes().iter().copied())
    );
    assert_eq!(machine.calls("cuLaunchKernel"), 0);
    drop((pins, payload, executor, cache));
    machine.assert_clean();
}

#[test]
fn copies_at_the_same_time_each_have_their_own_stream() {
    let machine = Machine::new();
    let sizes = Sizes {
        layers: 4,
        blocks: 32,
        heads: 2,
        tokens: 4,
        content: 64,
    };
    let cache = Cache::new(&machine, KvLayout::LBNHC, sizes, 1);
    let executor = CudaExecutor::of(machine.ordinal).unwrap();
    let before = cache.memory.read();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (cache, executor, machine, before) = (&cache, &executor, &machine, &before);
            scope.spawn(move || {
                for round in 0..6 {
                    let blocks = [thread * 8 + round, thread * 8 + 7];
                    let places = cache.places(&blocks, &cache.whole());
                    let mut payload = Payload::new(machine, places.len(), 0, round % 2 == 0);
                    cache
                        .gather(executor, &blocks, &cache.whole(), payload.bytes())
                        .unwrap();
                    let expected = places.iter().map(|&at| before[at]);
                    assert!(expected.eq(payload.bytes().iter().copied()));
                    cache
                        .scatter(executor, &blocks, &cache.whole(), payload.bytes())
                        .unwrap();
                }
                Machine::assert_thread_as_before();
            });
        }
    });
    assert!(cache.memory.read() == before);
    assert!((1..=4).contains(&machine.calls("cuStreamCreateWithPriority")));
    drop((executor, cache));
    machine.assert_clean();
}

/// Small devices keep most of their multiprocessors too.
#[test]
fn the_kernel_takes_few_of_the_multiprocessors() {
    for (multiprocessors, most) in [(132, 16), (72, 9), (40, 5), (4, 1)] {
        let machine = Machine::new();
        machine.state.lock().multiprocessors = Some(multiprocessors);
        let sizes = Sizes {
            layers: 16,
            blocks: 2,
            heads: 2,
            tokens: 4,
            content: 64,
        };
        let cache = Cache::new(&machine, KvLayout::LBNHC, sizes, 1);
        let executor = CudaExecutor::of(machine.ordinal).unwrap();
        let len = cache.places(&[1], &cache.whole()).len();
        let mut payload = Payload::new(&machine, len, 0, true);
        cache
            .gather(&executor, &[1], &cache.whole(), payload.bytes())
            .unwrap();
        let blocks: Vec<u32> = machine.state.lock().launches.iter().map(|l| l.0).collect();
        assert_eq!(blocks, [most], "of {multiprocessors} multiprocessors");
    }
}

#[test]
fn one_executor_for_each_device_while_it_is_in_use() {
    let (one, other) = (Machine::new(), Machine::new());
    let first = CudaExecutor::of(one.ordinal).unwrap();
    let second = CudaExecutor::of(one.ordinal).unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &second));
    let third = CudaExecutor::of(other.ordinal).unwrap();
    assert!(!std::sync::Arc::ptr_eq(&first, &third));
    drop((first, second));
    one.assert_clean();
    let again = CudaExecutor::of(one.ordinal).unwrap();
    assert_eq!(one.calls("cuModuleLoadData"), 2);
    drop((again, third));
    one.assert_clean();
    other.assert_clean();
}

#[test]
fn the_kernels_text_is_what_is_launched() {
    let text = CStr::from_bytes_with_nul(PIECES_PTX.as_bytes()).unwrap();
    let program = Program::read(text.to_str().unwrap(), PIECES_NAME.to_str().unwrap()).unwrap();
    assert_eq!(program.parameters, [8, 4, 4, 4]);
}
