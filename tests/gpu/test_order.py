"""Order between copies and what a CUDA device computes: no byte too early, none too late.

They need a CUDA device, its driver and PyTorch, but not vLLM. `benches.gpu_copy` compares the bytes
of plain copies in every layout.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock._native import Completion, Engine, Event, Fence, Outcome, Store, slot_stride
from tests.engine.jobs import blocks, finish

torch = pytest.importorskip("torch")

from benches.gpu_copy import DEVICE, Cache, Shape  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

NAMESPACE = bytes(range(16))
SHAPE = Shape(layers=4, heads=2, tokens=16, content_bytes=512, blocks=64)
LONG = 1_500_000_000
"""Cycles of the device's clock: most of a second. Much longer than it takes to submit a job."""
LIMIT = 60.0
"""Seconds for a job's end."""


@pytest.fixture(params=["BLNHC", "LBNHC"])
def cache(request: pytest.FixtureRequest) -> Cache:
    """A KV cache of random bytes: a block is one piece, which a copy engine copies, or a piece for
    each layer, which the kernel copies."""
    return Cache(request.param, SHAPE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines over one directory. All must end in time.

    An engine pins memory and measures copies first. Modules of kernels are loaded at their first
    use. Both may wait for the device, so both are over before a test makes the device late.
    """
    store = Store.open(f"file://{tmp_path}/pool?size=4GiB")
    engines: list[Engine] = []

    def new(
        cache: Cache, *, slots: int = 64, is_ready: bool = True, **options: bool | int
    ) -> Engine:
        engine = Engine(store, slot_bytes=SHAPE.block_bytes, slots=slots, **options)
        engines.append(engine)
        engine.register(cache.descriptor, cuda_device=DEVICE)
        engine.name_group(0, NAMESPACE)
        end = time.monotonic() + LIMIT
        while is_ready and not engine.stats()["pinned_bytes"]:
            assert time.monotonic() < end, engine.stats()
            time.sleep(0.01)
        # By copy engines and by strided kernels, each way that the tests copy.
        cache.logical[:, 0] = random_block()
        cache.logical[:, 0] = cache.logical[:, 1].clone()
        torch.cuda._sleep(1000)
        here(engine)
        torch.cuda.synchronize()
        return engine

    yield new
    for engine in engines:
        assert engine.shutdown(30)


def random_block() -> torch.Tensor:
    """What a block may hold in all layers, on the device."""
    shape = (SHAPE.layers, SHAPE.heads, SHAPE.tokens, SHAPE.content_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=f"cuda:{DEVICE}")


def here(engine: Engine) -> Fence:
    """A fence after all work of the current stream, as the connector raises it."""
    return engine.raise_fence(torch.cuda.current_stream(DEVICE).cuda_stream, cuda_device=DEVICE)


def now() -> torch.cuda.Event:
    """An event after all work of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def loaded(engine: Engine, job: int, what: int, block: int) -> Outcome:
    """Loads what a block holds into a block, and waits for it."""
    engine.submit_load(job, blocks((what, block)), LIMIT, after=here(engine))
    return finish(engine, job)[-1].outcomes[0]


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_store_reads_what_was_written_before_its_fence(
    cache: Cache, start: Callable[..., Engine], own_stream: bool
) -> None:
    """The write is late, and the store is submitted at once. What it stored is what was written,
    in the same engine's host memory and in the pool."""
    engine, other = start(cache), start(cache, keep=False)
    new = random_block()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        cache.logical[:, 3] = new
        written = now()
        engine.submit_store(1, blocks((1, 3)), after=here(engine))
        assert not written.query(), "the device was too fast, or submitting waited for it"
        released, stored = finish(engine, 1)
        assert written.query()
        assert (released.event, stored.outcomes) == (Event.RELEASED, [Outcome.STORED])
        assert loaded(engine, 2, 1, 9) == Outcome.KEPT
        assert loaded(other, 3, 1, 10) == Outcome.LOADED
    torch.cuda.synchronize()
    assert torch.equal(cache.logical[:, 9], new)
    assert torch.equal(cache.logical[:, 10], new)


@pytest.mark.parametrize("keep", [False, True])
def test_a_load_writes_when_all_before_its_fence_has_read(
    cache: Cache, start: Callable[..., Engine], keep: bool
) -> None:
    """Work that was launched before still finds the old bytes. What is launched after the load
    was reported finds the new ones, on whatever stream."""
    engine = start(cache, keep=keep)
    new = cache.logical[:, 3].clone()
    old = cache.logical[:, 5].clone()
    engine.submit_store(1, blocks((1, 3)), after=here(engine))
    finish(engine, 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    seen = cache.logical[:, 5].clone()
    read = now()
    engine.submit_load(2, blocks((1, 5)), LIMIT, after=here(engine))
    assert not read.query(), "the device was too fast, or submitting waited for it"
    assert finish(engine, 2)[-1].outcomes == [Outcome.KEPT if keep else Outcome.LOADED]
    assert read.query()
    with torch.cuda.stream(torch.cuda.Stream()):
        after = cache.logical[:, 5].clone()
    torch.cuda.synchronize()
    assert torch.equal(seen, old)
    assert torch.equal(after, new)


def test_what_waits_for_the_device_ends_at_once_when_the_engine_does(
    cache: Cache, start: Callable[..., Engine]
) -> None:
    """Nothing is copied. Only the thread that waits for the device is still there."""
    engine = start(cache)
    old = cache.logical[:, 5].clone()
    engine.submit_store(1, blocks((1, 3)), after=here(engine))
    finish(engine, 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(3 * LONG)
    asleep = now()
    engine.submit_load(2, blocks((1, 5)), LIMIT, after=here(engine))
    engine.submit_store(3, blocks((2, 4)), after=here(engine))
    assert not engine.shutdown(0.05)
    done = {each.job: each.outcomes for each in engine.poll()}
    assert not asleep.query(), "the device was too fast, or the end waited for it"
    assert (done[2], done[3]) == ([Outcome.CANCELLED], [Outcome.DROPPED])
    torch.cuda.synchronize()
    assert engine.shutdown(30)
    assert torch.equal(cache.logical[:, 5], old)


def test_stores_and_loads_beside_a_busy_device(
    cache: Cache, start: Callable[..., Engine], rng: random.Random
) -> None:
    """Every block that is loaded has the bytes that it was stored with, whatever the device does
    meanwhile; and so have all blocks that nobody loaded into."""
    engine = start(cache, keep=False, copy_lanes=3, put_lanes=2)
    factor = torch.randn(2048, 2048, device=f"cuda:{DEVICE}", dtype=torch.bfloat16)
    stored: dict[int, torch.Tensor] = {}
    numbers = itertools.count(1)
    for _ in range(60):
        free = rng.sample(range(SHAPE.blocks), 8)
        sources, targets = free[:4], free[4:]
        for _ in range(rng.randrange(6)):
            factor = torch.nn.functional.normalize(factor @ factor)
        torch.cuda._sleep(rng.randrange(5_000_000))
        written = {next(numbers): block for block in sources}
        for what, block in written.items():
            stored[what] = random_block()
            cache.logical[:, block] = stored[what]
        known = list(stored)[:-4]
        wanted = dict(zip(targets, rng.sample(known, 4), strict=True)) if known else {}
        rest = [block for block in range(SHAPE.blocks) if block not in (*sources, *targets)]
        before = cache.logical[:, rest].clone()
        store, load = next(numbers), next(numbers)
        engine.submit_store(store, blocks(*written.items()), after=here(engine))
        if wanted:
            named = blocks(*((what, block) for block, what in wanted.items()))
            engine.submit_load(load, named, LIMIT, after=here(engine))
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
    cache: Cache, start: Callable[..., Engine]
) -> None:
    """What other threads do would spoil a capture in the default mode. All captures are good, and
    so are their replays."""
    slots = (2 << 30) // SHAPE.block_bytes
    arena = slots * slot_stride(SHAPE.block_bytes)
    engine = start(cache, slots=slots, is_ready=False, keep=False)
    counter = torch.zeros(1 << 20, dtype=torch.int32, device=f"cuda:{DEVICE}")
    began, captures, unpinned = time.monotonic(), 0, 0
    while captures < 20 or (
        engine.stats()["pinned_bytes"] < arena and time.monotonic() - began < LIMIT
    ):
        unpinned += engine.stats()["pinned_bytes"] < arena
        engine.submit_store(captures, blocks((captures, captures % 60)), after=here(engine))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counter += 1
        graph.replay()
        assert finish(engine, captures)[-1].outcomes == [Outcome.STORED]
        captures += 1
    torch.cuda.synchronize()
    assert unpinned > 0, "all was pinned before the first capture: take a larger arena"
    assert engine.stats()["pinned_bytes"] >= arena
    assert counter.min() == counter.max() == captures


def test_no_stream_has_a_lower_priority_than_the_models() -> None:
    """So copies cannot yield to it by priority: see docs/design/gpu-copies.md."""
    lowest, _highest = torch.cuda.Stream.priority_range()
    assert lowest == 0
