"""The native engine and look-up through their bindings: bytes move, arguments are checked."""

from __future__ import annotations

import base64
import ctypes.util
import gc
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lab.waiting import LIMIT, eventually
from penstock._native import (
    Blocks,
    Descriptor,
    EncryptionKeys,
    Engine,
    Event,
    Lookup,
    Outcome,
    Store,
    TensorView,
    host_changes,
    slot_stride,
)
from penstock.errors import Closed, ConfigError, LayoutError, Unavailable
from tests.engine.jobs import blocks, chunk, finish

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 8, 2, 16, 32
SPAN = (0, LAYERS, 0, HEADS)
NAMESPACE = bytes(range(16))
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT


class Kv:
    """KV memory of one rank, a tensor per layer."""

    def __init__(self) -> None:
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)
        self.layers = [np.zeros(shape, dtype=np.uint8) for _ in range(LAYERS)]
        self.descriptor = Descriptor.detect(
            [
                TensorView(
                    i,
                    address=a.ctypes.data,
                    shape=a.shape,
                    strides=a.strides,
                    itemsize=1,
                    storage_address=a.ctypes.data,
                    storage_bytes=a.nbytes,
                )
                for i, a in enumerate(self.layers)
            ]
        )

    def fill(self, block: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for layer in self.layers:
            layer[block] = rng.integers(0, 256, layer[block].shape, dtype=np.uint8)

    def block(self, block: int) -> bytes:
        return b"".join(layer[block].tobytes() for layer in self.layers)


def register(engine: Engine, kv: Kv) -> None:
    engine.register(kv.descriptor)
    engine.name_group(0, NAMESPACE)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"file://{tmp_path}/pool?size=1GiB")


@pytest.fixture
def kv() -> Kv:
    return Kv()


@pytest.fixture
def engine(store: Store, kv: Kv) -> Iterator[Engine]:
    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=8, keep=False)
    register(engine, kv)
    yield engine
    assert engine.shutdown(30)


def outcomes(engine: Engine, job: int) -> list[Outcome]:
    return finish(engine, job)[-1].outcomes


def test_blocks_pass_between_processes() -> None:
    made = Blocks([(0, 7, chunk(1), None), (3, 2**40, b"short", (chunk(1), 16))])
    assert (len(made), made.block_ids) == (2, [7, 2**40])
    assert pickle.loads(pickle.dumps(made)) == made == Blocks.decode(made.encode())
    assert made != Blocks([(0, 7, chunk(1), None), (3, 2**40, b"short", (chunk(1), 17))])
    assert len(Blocks([])) == 0
    for bad in (made.encode()[:-1], b"\xff", b"x" * 50):
        with pytest.raises(ConfigError, match="not an encoding of blocks"):
            Blocks.decode(bad)
    with pytest.raises(ConfigError, match="32 bytes at most"):
        Blocks([(0, 0, bytes(33), None)])
    with pytest.raises(ConfigError, match="not an encoding of changes"):
        host_changes(b"x" * 34)


def test_what_one_engine_stores_another_loads(store: Store, engine: Engine, kv: Kv) -> None:
    for block in range(4):
        kv.fill(block, block)
    engine.submit_store(2**63, blocks(*((n, n) for n in range(4))))
    released, stored = finish(engine, 2**63)
    assert (released.event, released.outcomes) == (Event.RELEASED, [])
    assert (stored.event, stored.outcomes) == (Event.STORED, [Outcome.STORED] * 4)
    assert (stored.stored_bytes, stored.missing) == (4 * BLOCK_BYTES, [])

    lookup = Lookup(store)
    lookup.submit(7, NAMESPACE, [chunk(n) for n in (0, 3, 9)], [SPAN], 30)
    assert lookup.wait(LIMIT)
    ((number, answer, seconds),) = lookup.poll()
    assert (number, answer) == (7, [True, True, False])
    assert 0 < seconds < 30
    assert lookup.shutdown()

    other = Kv()
    reader = Engine(store, slot_bytes=BLOCK_BYTES, slots=4, copy_lanes=2, get_lanes=2)
    register(reader, other)
    reader.submit_load(1, blocks((0, 7), (1, 6), (9, 5), (2, 4)), 30, prefix=True)
    (loaded,) = finish(reader, 1)
    assert loaded.event == Event.LOADED
    assert loaded.outcomes[:3] == [Outcome.LOADED, Outcome.LOADED, Outcome.MISS]
    last = loaded.outcomes[3]
    assert last in (Outcome.SKIPPED, Outcome.LOADED)
    assert loaded.missing == ([2] if last == Outcome.LOADED else [2, 3])
    assert loaded.missing_bytes == len(loaded.missing) * BLOCK_BYTES
    assert (loaded.lost, loaded.foreign) == ([2], [])
    assert [other.block(7), other.block(6)] == [kv.block(0), kv.block(1)]
    stats = reader.stats()
    assert stats["missed_objects"] == 1
    assert stats["loaded_bytes"] == loaded.loaded_bytes >= 2 * BLOCK_BYTES
    assert reader.shutdown(30)


def test_a_block_may_be_several_pages_and_several_objects(store: Store, kv: Kv) -> None:
    halves = [(0, 1, 0, HEADS), (1, LAYERS, 0, HEADS)]
    engine = Engine(store, slot_bytes=2 * BLOCK_BYTES, slots=8)
    engine.register(kv.descriptor, 0, spans=halves, pages_per_block=2)
    engine.name_group(0, NAMESPACE)
    for page in range(BLOCKS):
        kv.fill(page, page)
    engine.submit_store(1, blocks((0, 1)))
    stored = finish(engine, 1)[-1]
    assert (stored.outcomes, stored.stored_bytes) == ([Outcome.STORED], 2 * BLOCK_BYTES)
    assert engine.stats()["stored_objects"] == 2
    engine.submit_load(2, blocks((0, 3)), 30)
    assert outcomes(engine, 2) == [Outcome.KEPT]
    assert [kv.block(6), kv.block(7)] == [kv.block(2), kv.block(3)]
    assert engine.shutdown(30)


def test_a_damaged_value_is_named_and_not_loaded(engine: Engine, kv: Kv, tmp_path: Path) -> None:
    kv.fill(0, 1)
    engine.submit_store(1, blocks((0, 0)))
    finish(engine, 1)
    files = (p for p in (tmp_path / "pool").rglob("*") if p.is_file())
    (path,) = (p for p in files if p.stat().st_size == 64 + BLOCK_BYTES)
    value = bytearray(path.read_bytes())
    value[100] ^= 1
    path.write_bytes(value)
    kv.fill(3, 3)
    before = kv.block(3)
    engine.submit_load(1, blocks((0, 3)), 30)
    (loaded,) = finish(engine, 1)
    assert loaded.outcomes == [Outcome.REJECTED]
    assert (loaded.missing, loaded.lost, loaded.rejected_objects) == ([0], [0], 1)
    assert kv.block(3) == before
    assert engine.stats()["rejected:payload_checksum"] == 1


def test_what_is_prefetched_is_loaded_from_host_memory(store: Store, kv: Kv) -> None:
    writer = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    register(writer, kv)
    assert writer.take_host_changes() == b""
    kv.fill(0, 5)
    writer.submit_store(1, blocks((0, 0)))
    finish(writer, 1)
    assert host_changes(writer.take_host_changes()) == [(0, chunk(0), True)]
    assert writer.shutdown(30)

    other = Kv()
    reader = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    register(reader, other)
    reader.submit_prefetch(1, blocks((0, 2**50), (9, 0)), 30)
    (fetched,) = finish(reader, 1)
    assert fetched.event == Event.PREFETCHED
    assert fetched.outcomes == [Outcome.LOADED, Outcome.MISS]
    assert host_changes(reader.take_host_changes()) == [(0, chunk(0), True)]
    reader.submit_load(2, blocks((0, 3)), 30)
    (loaded,) = finish(reader, 2)
    assert (loaded.outcomes, loaded.kept_bytes) == ([Outcome.KEPT], BLOCK_BYTES)
    assert other.block(3) == kv.block(0)
    reader.release(1)
    reader.release(1)
    assert reader.stats()["kept_objects"] == 1
    assert reader.shutdown(30)


def test_an_engine_of_an_encrypted_store_encrypts_for_the_tenant(
    store: Store, kv: Kv, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("k:" + base64.b64encode(bytes(32)).decode())
    file.chmod(0o600)
    keys = EncryptionKeys.load(file)
    assert keys is not None
    engine = Engine(store.encrypted(keys).guarded(), slot_bytes=BLOCK_BYTES, slots=4)
    register(engine, kv)
    kv.fill(0, 1)
    engine.submit_store(1, blocks((0, 0), (1, 0)), salt=b"salt")
    assert outcomes(engine, 1) == [Outcome.STORED] * 2
    sizes = [p.stat().st_size for p in (tmp_path / "pool").rglob("*") if p.is_file()]
    assert sizes.count(128 + BLOCK_BYTES) == 2
    engine.submit_load(2, blocks((0, 5)), 30, salt=b"salt")
    assert outcomes(engine, 2) == [Outcome.LOADED]
    assert kv.block(5) == kv.block(0)
    engine.submit_load(3, blocks((1, 6)), 30)
    assert outcomes(engine, 3) == [Outcome.REJECTED]
    assert engine.stats()["rejected:authentication"] == 1
    assert engine.shutdown(30)
    plain = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    register(plain, kv)
    plain.submit_load(4, blocks((0, 7)), 30)
    (loaded,) = finish(plain, 4)
    assert loaded.outcomes == [Outcome.FOREIGN]
    assert (loaded.missing, loaded.lost, loaded.foreign) == ([0], [], [0])
    assert (loaded.rejected_objects, loaded.foreign_objects) == (0, 1)
    assert plain.shutdown(30)


def test_a_job_can_be_declined(engine: Engine, kv: Kv) -> None:
    engine.decline_store(1, blocks((0, 0), (1, 1)))
    released, stored = finish(engine, 1)
    assert (released.event, stored.outcomes) == (Event.RELEASED, [Outcome.DROPPED] * 2)
    assert (stored.missing, stored.dropped_objects) == ([0, 1], 2)
    engine.decline_load(2, blocks((0, 0)))
    (loaded,) = finish(engine, 2)
    assert (loaded.outcomes, loaded.missing, loaded.lost) == ([Outcome.DROPPED], [0], [])


def test_a_group_that_lies_elsewhere_is_done_at_once(engine: Engine, kv: Kv) -> None:
    engine.register_elsewhere(1)
    engine.name_group(1, bytes(16))
    engine.submit_load(1, Blocks([(1, 2**40, chunk(1), None)]), 30, prefix=True)
    (loaded,) = finish(engine, 1)
    assert (loaded.missing, loaded.kept_bytes, loaded.loaded_bytes) == ([], 0, 0)


def test_a_slot_takes_whole_pages_with_room_for_a_header() -> None:
    assert [slot_stride(n) for n in (1, 4096 - 128, 4096 - 127)] == [4096, 4096, 8192]


def test_wrong_arguments_say_what_is_wrong(store: Store, engine: Engine, kv: Kv) -> None:
    with pytest.raises(LayoutError, match="block 8 of 8"):
        engine.submit_store(1, blocks((0, BLOCKS)))
    with pytest.raises(ConfigError, match="timeout"):
        engine.submit_load(1, blocks((0, 0)), 0)
    with pytest.raises(ConfigError, match=r"registered with this engine for group 3"):
        engine.submit_store(1, Blocks([(3, 0, chunk(0), None)]))
    with pytest.raises(ConfigError, match="16 bytes"):
        engine.name_group(0, b"short")
    with pytest.raises(ConfigError, match="replica"):
        engine.register(kv.descriptor, 1, replica=(2, 2))
    engine.register(kv.descriptor, 1)
    with pytest.raises(ConfigError, match="name it before its first job"):
        engine.submit_store(1, Blocks([(1, 0, chunk(0), None)]))
    with pytest.raises(ConfigError, match="registered with this engine already"):
        engine.register(kv.descriptor)
    with pytest.raises(ConfigError, match="slots must be"):
        Engine(store, slot_bytes=1, slots=1)
    lookup = Lookup(store, threads=1)
    with pytest.raises(ConfigError, match="at least one span"):
        lookup.submit(1, NAMESPACE, [chunk(0)], [], 1)
    with pytest.raises(ConfigError, match="32 bytes at most"):
        lookup.submit(1, NAMESPACE, [bytes(33)], [SPAN], 1)
    lookup.shutdown()
    with pytest.raises(Closed):
        lookup.submit(1, NAMESPACE, [chunk(0)], [SPAN], 1)


def test_waiting_and_ending_release_the_gil(engine: Engine) -> None:
    go = threading.Event()

    def end_wait() -> None:
        go.wait()
        engine.submit_store(1, blocks((0, 0)))

    thread = threading.Thread(target=end_wait, daemon=True)
    thread.start()
    before = sys.getswitchinterval()
    # From here on the other thread runs only if this one lets it. Nothing else ends the wait.
    sys.setswitchinterval(10 * LIMIT)
    try:
        go.set()
        assert engine.wait(LIMIT)
    finally:
        sys.setswitchinterval(before)
    thread.join()


def test_an_engine_that_is_only_forgotten_leaves_no_thread(store: Store, kv: Kv) -> None:
    def native_threads() -> list[str]:
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            # It may end meanwhile.
            with suppress(OSError):
                names.append(path.read_text().strip())
        own = ("penstock-get", "penstock-put", "penstock-look")
        return [name for name in names if name.startswith(own)]

    def until(count: int) -> None:
        # A thread takes its name, and leaves the list, a moment after it begins and ends.
        eventually(lambda: len(native_threads()) == count, native_threads)

    gc.collect()
    until(0)
    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=4, get_lanes=3)
    register(engine, kv)
    engine.submit_store(1, blocks((0, 0)))
    lookup = Lookup(store)
    until(6)
    del engine, lookup
    until(0)


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a CUDA driver")
def test_without_a_cuda_driver_a_device_is_refused_in_words(store: Store, kv: Kv) -> None:
    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    with pytest.raises(Unavailable, match="no usable CUDA driver: libcuda"):
        engine.register(kv.descriptor, cuda_device=0)
    engine.register(kv.descriptor)
    with pytest.raises(Unavailable, match="no usable CUDA driver: libcuda"):
        kv.descriptor.gather([0], SPAN, bytearray(BLOCK_BYTES), cuda_device=0)
    assert engine.shutdown(30)
