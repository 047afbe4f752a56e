"""Buffers of every kind: read from, written to, refused."""

from __future__ import annotations

import array
import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Pool, errors
from penstock._native import Buffer

PAYLOAD = bytes(range(64))


@pytest.fixture
def pool() -> Pool:
    return penstock.open("memory://?size=64MiB")


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, len(PAYLOAD))
    memory.write(PAYLOAD)
    return memory


READABLE = {
    "bytes": lambda: PAYLOAD,
    "bytearray": lambda: bytearray(PAYLOAD),
    "memoryview": lambda: memoryview(PAYLOAD),
    "memoryview of a slice": lambda: memoryview(b"xx" + PAYLOAD + b"y")[2:-1],
    "array": lambda: array.array("I", PAYLOAD),
    "mmap": mapped,
    "ctypes": lambda: (ctypes.c_uint16 * 32).from_buffer_copy(PAYLOAD),
    "numpy uint8": lambda: np.frombuffer(PAYLOAD, np.uint8),
    "numpy float32 matrix": lambda: np.frombuffer(PAYLOAD, np.float32).reshape(4, 4),
    "numpy float16 slice of rows": lambda: np.frombuffer(b"\0" * 32 + PAYLOAD, np.float16).reshape(
        -1, 16
    )[1:],
    "numpy record": lambda: np.frombuffer(PAYLOAD, [("a", "<i4"), ("b", "<f4")]),
    "Buffer": lambda: Buffer(PAYLOAD),
}
WRITABLE = {
    "bytearray": lambda: bytearray(64),
    "memoryview": lambda: memoryview(bytearray(64)),
    "array": lambda: array.array("d", bytes(64)),
    "mmap": lambda: mmap.mmap(-1, 64),
    "ctypes": lambda: (ctypes.c_uint64 * 8)(),
    "numpy matrix": lambda: np.zeros((4, 4), np.int32),
    "Buffer": lambda: Buffer(bytearray(64), writable=True),
}


@pytest.mark.parametrize("kind", READABLE)
def test_values_from(pool: Pool, kind: str) -> None:
    pool.put("key", READABLE[kind]())
    assert pool.get("key") == PAYLOAD


@pytest.mark.parametrize("kind", WRITABLE)
def test_values_into(pool: Pool, kind: str) -> None:
    pool.put("key", PAYLOAD)
    into: Any = WRITABLE[kind]()
    assert pool.get("key", into=into) == 64
    if isinstance(into, Buffer):
        assert ctypes.string_at(into.address, into.nbytes) == PAYLOAD
    else:
        assert bytes(memoryview(into).cast("B")) == PAYLOAD


REFUSED_READING = {
    "text": ("text", "neither the buffer protocol nor __dlpack__"),
    "a number": (7, "neither"),
    "None": (None, "neither"),
    "every second byte": (memoryview(PAYLOAD)[::2], "contiguous"),
    "numpy columns": (np.zeros((8, 8))[:, :4], "contiguous"),
    "numpy transposed": (np.zeros((4, 8), np.int16).T, "contiguous"),
    "numpy objects": (np.array([object(), None]), "Python objects"),
    "a list with one of them": ([b"fine", memoryview(PAYLOAD)[::2]], "contiguous"),
}
REFUSED_WRITING = {
    "bytes": (b"12345678", "writable"),
    "read-only numpy": (np.frombuffer(PAYLOAD, np.uint8), "writable"),
    "read-only memoryview": (memoryview(bytearray(8)).toreadonly(), "writable"),
    "read-only Buffer": (Buffer(b"12345678"), "read-only"),
    "every second byte": (memoryview(bytearray(64))[::2], "contiguous"),
    "numpy objects": (np.array([None] * 8), "Python objects"),
}


@pytest.mark.parametrize("kind", REFUSED_READING)
def test_refused_as_a_value(pool: Pool, kind: str) -> None:
    value, why = REFUSED_READING[kind]
    with pytest.raises(errors.ConfigError, match=why):
        pool.put("key", value)
    with pytest.raises(errors.ConfigError, match=why):
        pool.put_many([("good", b"good"), ("key", value)])
    assert pool.contains(["good", "key"]) == [False, False]


@pytest.mark.parametrize("kind", REFUSED_WRITING)
def test_refused_as_a_destination(pool: Pool, kind: str) -> None:
    into, why = REFUSED_WRITING[kind]
    pool.put("key", b"12345678")
    good = bytearray(b"untouched")
    with pytest.raises(errors.ConfigError, match=why):
        pool.get("key", into=into)
    with pytest.raises(errors.ConfigError, match=why):
        pool.get_many(["key", "key"], into=[good, into])
    assert good == b"untouched"


def test_a_pinned_buffer_cannot_be_resized_until_it_is_let_go() -> None:
    memory = bytearray(8)
    buffer = Buffer(memory, writable=True)
    assert (buffer.nbytes, len(buffer), buffer.readonly) == (8, 8, False)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del buffer
    memory.extend(b"more")


def test_buffers_are_let_go_after_each_operation(pool: Pool) -> None:
    value = bytearray(b"value")
    into = bytearray(8)
    pool.put("key", value)
    pool.get("key", into=into)
    short = memoryview(into)[:2]
    with pytest.raises(errors.TooSmall):
        pool.get("key", into=short)
    short.release()
    before = sys.getrefcount(into)
    for _ in range(100):
        pool.get("key", into=into)
    assert sys.getrefcount(into) == before
    value.clear()
    into.clear()


class TestTorch:
    """Tensors come through DLPack: they have no buffer protocol."""

    @pytest.fixture(autouse=True)
    def _import(self) -> None:
        self.torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int64", "uint8", "bool"])
    def test_there_and_back(self, pool: Pool, dtype: str) -> None:
        torch = self.torch
        value = torch.randint(0, 2, (3, 5, 7)).to(getattr(torch, dtype))
        pool.put(dtype, value)
        into = torch.zeros_like(value)
        assert pool.get(dtype, into=into) == value.nbytes
        assert torch.equal(into, value)

    def test_a_view_with_an_offset(self, pool: Pool) -> None:
        blocks = self.torch.arange(80, dtype=self.torch.int16).reshape(10, 8)
        pool.put("key", blocks[3])
        assert pool.get("key") == blocks[3].numpy().tobytes()
        assert pool.get("key", into=blocks[9]) == 16
        assert self.torch.equal(blocks[9], blocks[3])
        assert blocks[8].tolist() == list(range(64, 72))

    def test_pieces_of_a_tensor_are_one_value(self, pool: Pool) -> None:
        layers = [self.torch.full((4,), i, dtype=self.torch.bfloat16) for i in range(3)]
        pool.put("key", layers)
        into = self.torch.zeros(12, dtype=self.torch.bfloat16)
        assert pool.get("key", into=into) == 24
        assert into.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4

    def test_no_elements(self, pool: Pool) -> None:
        assert pool.put("key", self.torch.empty(0))
        assert pool.get("key", into=self.torch.empty(0, 4)) == 0

    def test_refused(self, pool: Pool) -> None:
        torch = self.torch
        cases = {
            "contiguous": torch.zeros(8, 8)[:, ::2],
            "row-major": torch.zeros(4, 8).T,
            "gradient": torch.zeros(8, requires_grad=True),
            "meta": torch.zeros(8, device="meta"),
        }
        for why, tensor in cases.items():
            with pytest.raises(errors.ConfigError, match=why):
                pool.put("key", tensor)
        assert "key" not in pool

    def test_the_tensor_is_let_go(self, pool: Pool) -> None:
        tensor = self.torch.ones(16)
        before = sys.getrefcount(tensor)
        for i in range(50):
            pool.put(f"key {i}", tensor)
        assert sys.getrefcount(tensor) == before


class Exporter:
    """A tensor whose DLPack export is under the test's control."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1, versioned: bool = True):
        self.array, self.device, self.versioned = array, device, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> object:
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


def test_dlpack_of_another_device_is_refused_with_a_way_out(pool: Pool) -> None:
    with pytest.raises(errors.ConfigError, match=r"CUDA.*\.cpu\(\)"):
        pool.put("key", Exporter(np.zeros(4), device=2))


def test_dlpack_of_old_producers(pool: Pool) -> None:
    value = np.arange(8.0)
    pool.put("key", Exporter(value, versioned=False))
    into = np.zeros(8)
    assert pool.get("key", into=Exporter(into, versioned=False)) == 64
    assert into.tolist() == value.tolist()


def test_dlpack_says_when_it_is_read_only(pool: Pool) -> None:
    value = np.arange(8.0)
    value.flags.writeable = False
    pool.put("key", Exporter(value))
    with pytest.raises(errors.ConfigError, match="read-only"):
        pool.get("key", into=Exporter(value))


def test_dlpack_that_is_no_dlpack(pool: Pool) -> None:
    class Liar:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> object:
            return object()

    with pytest.raises(errors.ConfigError):
        pool.put("key", Liar())
