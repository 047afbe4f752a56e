"""The native engine and look-up through their bindings: bytes move, arguments are checked."""

from __future__ import annotations

import base64
import ctypes.util
import hashlib
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock._native import Descriptor, EncryptionKeys, Engine, Lookup, Store
from penstock.errors import Closed, ConfigError, LayoutError, Unavailable

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
                (i, a.ctypes.data, a.shape, a.strides, 1, a.ctypes.data, a.nbytes)
                for i, a in enumerate(self.layers)
            ]
        )

    def fill(self, block: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for layer in self.layers:
            layer[block] = rng.integers(0, 256, layer[block].shape, dtype=np.uint8)

    def block(self, block: int) -> bytes:
        return b"".join(layer[block].tobytes() for layer in self.layers)


def chunk(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest()


def key(n: int) -> bytes:
    return NAMESPACE + chunk(n) + struct.pack("<4H", *SPAN)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"file://{tmp_path}/pool?size=1GiB")


@pytest.fixture
def kv() -> Kv:
    return Kv()


@pytest.fixture
def engine(store: Store, kv: Kv) -> Iterator[Engine]:
    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=8, keep=False)
    engine.register(kv.descriptor)
    yield engine
    assert engine.shutdown(30)


def finish(engine: Engine, job: int) -> list[tuple[str, list[tuple[str, int]]]]:
    events: list[tuple[str, list[tuple[str, int]]]] = []
    while not events or events[-1][0] == "released":
        assert engine.wait(30)
        events += [event[1:3] for event in engine.poll() if event[0] == job and event[3] >= 0]
    return events


def test_each_object_has_a_parent_or_none_has(engine: Engine, kv: Kv) -> None:
    kv.fill(0, 0)
    objects = [(0, key(n), [n]) for n in range(2)]
    with pytest.raises(ConfigError, match="1 parents of 2 objects"):
        engine.submit_store(1, objects, parents=[(b"", 0)])
    with pytest.raises(ConfigError):
        engine.submit_store(1, objects, parents=[(b"", 0), (bytes(33), 16)])
    engine.submit_store(1, objects, parents=[(b"", 0), (chunk(0), 16)])
    assert finish(engine, 1)[-1] == ("stored", [("stored", BLOCK_BYTES)] * 2)


def test_what_one_engine_stores_another_loads(store: Store, engine: Engine, kv: Kv) -> None:
    for block in range(4):
        kv.fill(block, block)
    engine.submit_store(2**63, [(0, key(block), [block]) for block in range(4)])
    stored = [("stored", BLOCK_BYTES)] * 4
    assert finish(engine, 2**63) == [("released", []), ("stored", stored)]

    lookup = Lookup(store)
    lookup.submit(7, NAMESPACE, [chunk(n) for n in (0, 3, 9)], [SPAN], 30)
    assert lookup.wait(30)
    ((number, answer, seconds),) = lookup.poll()
    assert (number, answer) == (7, [True, True, False])
    assert 0 < seconds < 30
    assert lookup.shutdown()

    other = Kv()
    reader = Engine(store, slot_bytes=BLOCK_BYTES, slots=4, copy_lanes=2, get_lanes=2)
    reader.register(other.descriptor)
    wanted = [(0, key(n), [7 - i]) for i, n in enumerate((0, 1, 9, 2))]
    reader.submit_load(1, wanted, 30, True)
    ((event, outcomes),) = finish(reader, 1)
    assert (event, outcomes[:3]) == (
        "loaded",
        [("loaded", BLOCK_BYTES), ("loaded", BLOCK_BYTES), ("miss", 0)],
    )
    assert outcomes[3][0] in ("skipped", "loaded")
    assert [other.block(7), other.block(6)] == [kv.block(0), kv.block(1)]
    stats = reader.stats()
    assert stats["missed_objects"] == 1
    assert stats["loaded_bytes"] >= 2 * BLOCK_BYTES
    assert reader.shutdown(30)


def test_a_damaged_value_is_named_and_not_loaded(engine: Engine, kv: Kv, tmp_path: Path) -> None:
    kv.fill(0, 1)
    engine.submit_store(1, [(0, key(0), [0])])
    finish(engine, 1)
    files = (p for p in (tmp_path / "pool").rglob("*") if p.is_file())
    (path,) = (p for p in files if p.stat().st_size == 64 + BLOCK_BYTES)
    value = bytearray(path.read_bytes())
    value[100] ^= 1
    path.write_bytes(value)
    kv.fill(3, 3)
    before = kv.block(3)
    engine.submit_load(1, [(0, key(0), [3])], 30)
    assert finish(engine, 1) == [("loaded", [("rejected:payload_checksum", 0)])]
    assert kv.block(3) == before
    assert engine.stats()["rejected:payload_checksum"] == 1


def test_what_is_prefetched_is_loaded_from_host_memory(store: Store, kv: Kv) -> None:
    writer = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    writer.register(kv.descriptor)
    assert writer.take_host_changes() == []
    kv.fill(0, 5)
    writer.submit_store(1, [(0, key(0), [0])])
    finish(writer, 1)
    assert writer.take_host_changes() == [(key(0), True)]
    assert writer.shutdown(30)

    other = Kv()
    reader = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    reader.register(other.descriptor)
    reader.submit_prefetch(1, [(0, key(0), [0]), (0, key(9), [0])], 30)
    ((event, outcomes),) = finish(reader, 1)
    assert (event, outcomes) == ("prefetched", [("loaded", BLOCK_BYTES), ("miss", 0)])
    assert reader.take_host_changes() == [(key(0), True)]
    reader.submit_load(2, [(0, key(0), [3])], 30)
    assert finish(reader, 2) == [("loaded", [("kept", BLOCK_BYTES)])]
    assert other.block(3) == kv.block(0)
    reader.release(1)
    reader.release(1)
    assert reader.stats()["kept_objects"] == 1
    assert reader.shutdown(30)


def test_an_engine_of_an_encrypted_store_encrypts_for_the_context(
    store: Store, kv: Kv, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("k:" + base64.b64encode(bytes(32)).decode())
    file.chmod(0o600)
    keys = EncryptionKeys.load(file)
    assert keys is not None
    engine = Engine(store.encrypted(keys).guarded(), slot_bytes=BLOCK_BYTES, slots=4)
    engine.register(kv.descriptor)
    kv.fill(0, 1)
    engine.submit_store(1, [(0, key(0), [0]), (0, key(1), [0])], context=b"tenant")
    stored = [("stored", BLOCK_BYTES)] * 2
    assert finish(engine, 1) == [("released", []), ("stored", stored)]
    sizes = [p.stat().st_size for p in (tmp_path / "pool").rglob("*") if p.is_file()]
    assert sizes.count(128 + BLOCK_BYTES) == 2
    engine.submit_load(2, [(0, key(0), [5])], 30, context=b"tenant")
    assert finish(engine, 2) == [("loaded", [("loaded", BLOCK_BYTES)])]
    assert kv.block(5) == kv.block(0)
    engine.submit_load(3, [(0, key(1), [6])], 30)
    assert finish(engine, 3) == [("loaded", [("rejected:authentication", 0)])]
    assert engine.shutdown(30)
    plain = Engine(store, slot_bytes=BLOCK_BYTES, slots=4)
    plain.register(kv.descriptor)
    plain.submit_load(4, [(0, key(0), [7])], 30)
    assert finish(plain, 4) == [("loaded", [("rejected:encrypted", 0)])]
    assert plain.shutdown(30)


def test_wrong_arguments_say_what_is_wrong(store: Store, engine: Engine, kv: Kv) -> None:
    with pytest.raises(ConfigError, match="56 bytes"):
        engine.submit_store(1, [(0, b"short", [0])])
    with pytest.raises(LayoutError, match="block 8 of 8"):
        engine.submit_store(1, [(0, key(0), [BLOCKS])])
    with pytest.raises(ConfigError, match="timeout"):
        engine.submit_load(1, [(0, key(0), [0])], 0)
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
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    assert not engine.wait(0.3)
    during = ticks
    stop.set()
    thread.join()
    assert during > 1


def test_an_engine_that_is_only_forgotten_leaves_no_thread(store: Store, kv: Kv) -> None:
    def native_threads() -> list[str]:
        names = (p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm"))
        own = ("penstock-get", "penstock-put", "penstock-look")
        return [name for name in names if name.startswith(own)]

    def until(count: int) -> None:
        # A thread takes its name, and leaves the list, a moment after it begins and ends.
        end = time.monotonic() + 30
        while len(native_threads()) != count:
            assert time.monotonic() < end, native_threads()
            time.sleep(0.001)

    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=4, get_lanes=3)
    engine.register(kv.descriptor)
    engine.submit_store(1, [(0, key(0), [0])])
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
