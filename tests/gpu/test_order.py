"""Order between copies and what a CUDA device computes: no byte too early, none too late.

They need PyTorch, and a CUDA device with its driver or the stand-in for it, but not vLLM.
`benches.gpu_copy` compares the bytes of plain copies in every layout.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from lab.waiting import eventually
from penstock._native import (
    Completion,
    Descriptor,
    Engine,
    Event,
    Fence,
    Outcome,
    Store,
    TensorView,
    slot_stride,
)
from tests.engine.jobs import blocks, finish

torch = pytest.importorskip("torch")

from tests.gpu.device import LIMIT, ORDINAL, Cuda, Device, find  # noqa: E402

NAMESPACE = bytes(range(16))
LAYERS, HEADS, TOKENS, CONTENT, BLOCKS = 4, 2, 16, 512, 64
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT


@pytest.fixture(scope="module")
def device() -> Device:
    """The device of this machine, or its stand-in."""
    found = find()
    if found is None:
        pytest.skip("no CUDA device here, and no stand-in: scripts/cuda-standin.sh has one")
    return found


class Cache:
    """A KV cache of random bytes on the device, in one layout."""

    def __init__(self, device: Device, layout: str) -> None:
        sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
        memory, distance = device.memory([sizes[axis] for axis in layout])
        memory.random_(0, 256)
        self.logical = memory.permute([layout.index(axis) for axis in "LBHNC"])
        storage = memory.untyped_storage()
        self.descriptor = Descriptor.detect(
            [
                TensorView(
                    layer,
                    address=view.data_ptr() + distance,
                    shape=tuple(view.shape),
                    strides=tuple(view.stride()),
                    itemsize=1,
                    storage_address=storage.data_ptr() + distance,
                    storage_bytes=storage.nbytes(),
                )
                for layer, view in enumerate(self.logical)
            ]
        )
        # What copies run on streams of their own.
        device.synchronize()

    def random_block(self) -> torch.Tensor:
        """What a block may hold in all layers, on the device."""
        return torch.randint_like(self.logical[:, 0], 0, 256)


@pytest.fixture(params=["BLNHC", "LBNHC"])
def cache(request: pytest.FixtureRequest, device: Device) -> Cache:
    """A KV cache: a block is one piece, which a copy engine copies, or a piece for each layer,
    which the kernel copies."""
    return Cache(device, request.param)


@pytest.fixture
def start(tmp_path: Path, device: Device) -> Iterator[Callable[..., Engine]]:
    """Starts engines over one directory. All must end in time.

    An engine pins memory and measures copies first. That may wait for the device, so it is over
    before a test makes the device late.
    """
    store = Store.open(f"file://{tmp_path}/pool?size=4GiB")
    engines: list[Engine] = []

    def new(
        cache: Cache, *, slots: int = 64, is_ready: bool = True, **options: bool | int
    ) -> Engine:
        engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=slots, **options)
        engines.append(engine)
        engine.register(cache.descriptor, cuda_device=ORDINAL)
        engine.name_group(0, NAMESPACE)
        if is_ready:
            eventually(lambda: engine.stats()["pinned_bytes"], engine.stats)
        # Modules of strided kernels are loaded at their first use.
        cache.logical[:, 0] = cache.random_block()
        cache.logical[:, 0] = cache.logical[:, 1].clone()
        here(device, engine)
        device.synchronize()
        return engine

    yield new
    device.synchronize()
    for engine in engines:
        assert engine.shutdown(LIMIT)


def here(device: Device, engine: Engine) -> Fence:
    """A fence after all work of the current stream, as the connector raises it."""
    return engine.raise_fence(device.stream, cuda_device=ORDINAL)


def loaded(device: Device, engine: Engine, job: int, what: int, block: int) -> Outcome:
    """Loads what a block holds into a block, and waits for it."""
    engine.submit_load(job, blocks((what, block)), LIMIT, after=here(device, engine))
    return finish(engine, job)[-1].outcomes[0]


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_store_reads_what_was_written_before_its_fence(
    device: Device, cache: Cache, start: Callable[..., Engine], own_stream: bool
) -> None:
    """The write is late, and the store is submitted at once. What it stored is what was written,
    in the same engine's host memory and in the pool."""
    engine, other = start(cache), start(cache, keep=False)
    new = cache.random_block()
    device.synchronize()
    with device.own_stream() if own_stream else nullcontext():
        release = device.hold()
        device.run(lambda: cache.logical[:, 3].copy_(new))
        written = device.mark()
        engine.submit_store(1, blocks((1, 3)), after=here(device, engine))
        assert not written.query(), "the device was too fast, or submitting waited for it"
        release()
        released, stored = finish(engine, 1)
        assert written.query()
        assert (released.event, stored.outcomes) == (Event.RELEASED, [Outcome.STORED])
        assert loaded(device, engine, 2, 1, 9) == Outcome.KEPT
        assert loaded(device, other, 3, 1, 10) == Outcome.LOADED
    device.synchronize()
    assert torch.equal(cache.logical[:, 9], new)
    assert torch.equal(cache.logical[:, 10], new)


@pytest.mark.parametrize("keep", [False, True])
def test_a_load_writes_when_all_before_its_fence_has_read(
    device: Device, cache: Cache, start: Callable[..., Engine], keep: bool
) -> None:
    """Work that was launched before still finds the old bytes. What is launched after the load
    was reported finds the new ones, on whatever stream."""
    engine = start(cache, keep=keep)
    new = cache.logical[:, 3].clone()
    old = cache.logical[:, 5].clone()
    seen, after = torch.empty_like(old), torch.empty_like(old)
    engine.submit_store(1, blocks((1, 3)), after=here(device, engine))
    finish(engine, 1)
    device.synchronize()
    release = device.hold()
    device.run(lambda: seen.copy_(cache.logical[:, 5]))
    read = device.mark()
    engine.submit_load(2, blocks((1, 5)), LIMIT, after=here(device, engine))
    assert not read.query(), "the device was too fast, or submitting waited for it"
    release()
    assert finish(engine, 2)[-1].outcomes == [Outcome.KEPT if keep else Outcome.LOADED]
    assert read.query()
    with device.own_stream():
        device.run(lambda: after.copy_(cache.logical[:, 5]))
    device.synchronize()
    assert torch.equal(seen, old)
    assert torch.equal(after, new)


def test_what_waits_for_the_device_ends_at_once_when_the_engine_does(
    device: Device, cache: Cache, start: Callable[..., Engine]
) -> None:
    """Nothing is copied. Only the threads that wait for the device are still there."""
    engine = start(cache)
    old = cache.logical[:, 5].clone()
    engine.submit_store(1, blocks((1, 3)), after=here(device, engine))
    finish(engine, 1)
    device.synchronize()
    releases = [device.hold() for _ in range(3)]
    asleep = device.mark()
    engine.submit_load(2, blocks((1, 5)), LIMIT, after=here(device, engine))
    engine.submit_store(3, blocks((2, 4)), after=here(device, engine))
    assert not engine.shutdown(0.05)
    assert not engine.is_copying()
    done = {each.job: each.outcomes for each in engine.poll()}
    assert not asleep.query(), "the device was too fast, or the end waited for it"
    assert (done[2], done[3]) == ([Outcome.CANCELLED], [Outcome.DROPPED])
    for release in releases:
        release()
    device.synchronize()
    assert engine.shutdown(LIMIT)
    assert torch.equal(cache.logical[:, 5], old)


def test_stores_and_loads_beside_a_busy_device(
    device: Device, cache: Cache, start: Callable[..., Engine], rng: random.Random
) -> None:
    """Every block that is loaded has the bytes that it was stored with, whatever the device does
    meanwhile; and so have all blocks that nobody loaded into."""
    engine = start(cache, keep=False, copy_lanes=3, put_lanes=2)
    stored: dict[int, torch.Tensor] = {}
    numbers = itertools.count(1)
    for _ in range(60):
        free = rng.sample(range(BLOCKS), 8)
        sources, targets = free[:4], free[4:]
        device.compute(rng.randrange(6))
        written = {next(numbers): block for block in sources}
        for what, block in written.items():
            stored[what] = new = cache.random_block()
            device.run(partial(cache.logical[:, block].copy_, new))
        known = list(stored)[:-4]
        wanted = dict(zip(targets, rng.sample(known, 4), strict=True)) if known else {}
        rest = [block for block in range(BLOCKS) if block not in (*sources, *targets)]
        before = cache.logical[:, rest].clone()
        store, load = next(numbers), next(numbers)
        engine.submit_store(store, blocks(*written.items()), after=here(device, engine))
        if wanted:
            named = blocks(*((what, block) for block, what in wanted.items()))
            engine.submit_load(load, named, LIMIT, after=here(device, engine))
        done = both(engine, {store, load} if wanted else {store})
        assert done[store].outcomes == [Outcome.STORED] * 4
        if wanted:
            assert done[load].outcomes == [Outcome.LOADED] * 4
        for block, what in wanted.items():
            assert torch.equal(cache.logical[:, block], stored[what])
        assert torch.equal(cache.logical[:, rest], before)


def both(engine: Engine, jobs: set[int]) -> dict[int, Completion]:
    """The last completion of each job."""
    done: dict[int, Completion] = {}
    while done.keys() != jobs:
        assert engine.wait(LIMIT)
        done |= {each.job: each for each in engine.poll() if each.event != Event.RELEASED}
    return done


@pytest.fixture
def rng() -> random.Random:
    """The same choices in every run."""
    return random.Random(1)


def test_graphs_are_captured_while_memory_is_pinned_and_blocks_are_stored(
    device: Device, cache: Cache, start: Callable[..., Engine]
) -> None:
    """What other threads do would spoil a capture in the default mode. All captures are good, and
    so are their replays."""
    if not isinstance(device, Cuda):
        pytest.skip("no CUDA device here: PyTorch captures no graphs on the stand-in")
    slots = (2 << 30) // BLOCK_BYTES
    arena = slots * slot_stride(BLOCK_BYTES)
    engine = start(cache, slots=slots, is_ready=False, keep=False)
    counter = torch.zeros(1 << 20, dtype=torch.int32, device=f"cuda:{ORDINAL}")
    captures, unpinned = 0, 0

    def all_is_pinned() -> bool:
        nonlocal captures, unpinned
        unpinned += engine.stats()["pinned_bytes"] < arena
        engine.submit_store(captures, blocks((captures, captures % 60)), after=here(device, engine))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counter.add_(1)
        graph.replay()
        assert finish(engine, captures)[-1].outcomes == [Outcome.STORED]
        captures += 1
        return captures >= 20 and engine.stats()["pinned_bytes"] >= arena

    eventually(all_is_pinned, engine.stats, pause=0.0)
    torch.cuda.synchronize()
    assert unpinned > 0, "all was pinned before the first capture: take a larger arena"
    assert counter.min() == counter.max() == captures


def test_no_stream_has_a_lower_priority_than_the_models(device: Device) -> None:
    """So copies cannot yield to it by priority: see decision 7."""
    if not isinstance(device, Cuda):
        pytest.skip("no CUDA device here, and the stand-in's priorities are its own")
    lowest, _highest = torch.cuda.Stream.priority_range()
    assert lowest == 0
