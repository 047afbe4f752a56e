"""Copies of KV blocks in host memory, layout by layout, against memcpy.

Blocks of a KV cache are copied out of and into every layout, in random order, on one thread, and by
memcpy, pass by pass in turn. Every byte is checked to come back. ``benches.gpu_copy`` does this on
a CUDA device. Run it as ``python -m benches.host_copy``.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from benches import report
from benches.report import median_ratio, size_name
from penstock._native import Buffer, Descriptor, TensorView, parse_size
from penstock.layout.negotiate import LAYOUTS

PER_CALL = 4
"""Blocks that one call copies one after the other into one piece, as into slots of the engine's
arena."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a KV cache. `content_bytes` is the bytes of key and value of one token and head."""

    layers: int
    heads: int
    tokens: int
    content_bytes: int
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers."""
        return self.layers * self.heads * self.tokens * self.content_bytes


@dataclass
class Row:
    """Figures for one layout: medians over passes. A ratio compares with a memcpy of the same bytes
    as whole blocks, in the same pass."""

    layout: str
    interior: str
    """Order of heads and tokens in the contiguous copy."""
    pieces: int
    """Number of separate runs of memory that a block lies in."""
    gather_gb_s: float = 0.0
    gather_to_memcpy: float = 0.0
    summed_to_memcpy: float = 0.0
    """Ratio of a gather that also computes the checksum, as a store does."""
    scatter_gb_s: float = 0.0
    scatter_to_memcpy: float = 0.0
    cpu_us_per_block: float = 0.0
    """CPU time of the gather without checksum, in microseconds per block."""


class WrongBytes(Exception):
    """A block changed when it was copied out and back."""


@dataclass
class _Case:
    row: Row
    descriptor: Descriptor
    gather: list[float] = field(default_factory=list)
    summed: list[float] = field(default_factory=list)
    scatter: list[float] = field(default_factory=list)
    memcpy_out: list[float] = field(default_factory=list)
    memcpy_in: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure(shape: Shape, passes: int) -> tuple[float, list[Row]]:
    """Memcpy's GB/s, and a row for each layout and for each conversion of the interior.

    Raises:
        WrongBytes: a block changed on its way out and back.
    """
    memory = mmap.mmap(-1, shape.blocks * shape.block_bytes)
    payload = mmap.mmap(-1, PER_CALL * shape.block_bytes)
    whole = (0, shape.layers, 0, shape.heads)
    base = Buffer(memory, writable=True).address
    cases = []
    for layout in LAYOUTS:
        own = describe(shape, layout, base)
        for interior in ("HNC", "NHC"):
            descriptor = own.with_interior(interior)
            pieces = len(descriptor.segments(0, whole))
            if interior == own.interior or layout in ("LBHNC", "BLHNC"):
                cases.append(_Case(Row(layout, interior, pieces), descriptor))
    for start in range(0, len(memory), 1 << 20):
        memory[start : start + (1 << 20)] = os.urandom(min(1 << 20, len(memory) - start))
    for case in cases:
        _check(case.descriptor, whole, shape, payload)
    order = random.Random(1).sample(range(shape.blocks), shape.blocks)
    calls = [order[i : i + PER_CALL] for i in range(0, shape.blocks, PER_CALL)]
    target = Buffer(payload, writable=True).address
    for _ in range(passes):
        for case in cases:
            _measure_pass(case, calls, whole, payload, base, target, shape.block_bytes)
    nbytes = shape.blocks * shape.block_bytes
    for case in cases:
        _summarize(case, nbytes, shape.blocks)
    every = [seconds for case in cases for seconds in case.memcpy_out]
    return nbytes / statistics.median(every) / 1e9, [case.row for case in cases]


def describe(shape: Shape, layout: str, address: int) -> Descriptor:
    """The descriptor of a KV cache without gaps at `address`, as an engine would register it."""
    sizes = {
        "L": shape.layers,
        "B": shape.blocks,
        "H": shape.heads,
        "N": shape.tokens,
        "C": shape.content_bytes,
    }
    strides, stride = {}, 1
    for axis in reversed(layout):
        strides[axis] = stride
        stride *= sizes[axis]
    return Descriptor.detect(
        [
            TensorView(
                layer,
                address=address + layer * strides["L"],
                shape=[sizes[axis] for axis in "BHNC"],
                strides=[strides[axis] for axis in "BHNC"],
                itemsize=1,
                storage_address=address,
                storage_bytes=stride,
            )
            for layer in range(shape.layers)
        ]
    )


def _check(
    descriptor: Descriptor, whole: tuple[int, int, int, int], shape: Shape, payload: mmap.mmap
) -> None:
    blocks = [0, shape.blocks - 1]
    size = descriptor.gather(blocks, whole, payload)
    before = payload[:size]
    descriptor.scatter(blocks, whole, bytes(size))
    descriptor.gather(blocks, whole, payload)
    cleared = payload[:size]
    descriptor.scatter(blocks, whole, before)
    descriptor.gather(blocks, whole, payload)
    if payload[:size] != before or cleared != bytes(size) or not any(before):
        raise WrongBytes(f"blocks of {descriptor!r} did not come back as they were")


def _measure_pass(
    case: _Case,
    calls: Sequence[list[int]],
    whole: tuple[int, int, int, int],
    payload: mmap.mmap,
    base: int,
    target: int,
    block_bytes: int,
) -> None:
    def memcpy_out() -> None:
        for blocks in calls:
            for slot, block in enumerate(blocks):
                ctypes.memmove(target + slot * block_bytes, base + block * block_bytes, block_bytes)

    def memcpy_in() -> None:
        for blocks in calls:
            for slot, block in enumerate(blocks):
                ctypes.memmove(base + block * block_bytes, target + slot * block_bytes, block_bytes)

    def gather() -> None:
        for blocks in calls:
            case.descriptor.gather(blocks, whole, payload)

    def summed() -> None:
        for blocks in calls:
            case.descriptor.gather(blocks, whole, payload, checksum=True)

    def scatter() -> None:
        for blocks in calls:
            case.descriptor.scatter(blocks, whole, payload)

    cpu = time.thread_time()
    case.gather.append(_seconds(gather))
    case.cpu.append(time.thread_time() - cpu)
    case.memcpy_out.append(_seconds(memcpy_out))
    case.summed.append(_seconds(summed))
    case.scatter.append(_seconds(scatter))
    case.memcpy_in.append(_seconds(memcpy_in))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _summarize(case: _Case, nbytes: int, blocks: int) -> None:
    row = case.row
    row.gather_gb_s = nbytes / statistics.median(case.gather) / 1e9
    row.gather_to_memcpy = median_ratio(case.memcpy_out, case.gather)
    row.summed_to_memcpy = median_ratio(case.memcpy_out, case.summed)
    row.scatter_gb_s = nbytes / statistics.median(case.scatter) / 1e9
    row.scatter_to_memcpy = median_ratio(case.memcpy_in, case.scatter)
    row.cpu_us_per_block = statistics.median(case.cpu) / blocks * 1e6


def table(shape: Shape, memcpy: float, rows: Sequence[Row]) -> str:
    """A line for the blocks, and a row for each layout."""
    head = ["layout", "copied as", "pieces", "gather GB/s", "to memcpy", "with checksum"]
    head += ["scatter GB/s", "to memcpy", "CPU µs a block"]
    lines = [
        [
            row.layout,
            row.interior,
            str(row.pieces),
            f"{row.gather_gb_s:.1f}",
            f"{row.gather_to_memcpy:.2f}",
            f"{row.summed_to_memcpy:.2f}",
            f"{row.scatter_gb_s:.1f}",
            f"{row.scatter_to_memcpy:.2f}",
            f"{row.cpu_us_per_block:.0f}",
        ]
        for row in rows
    ]
    return (
        f"blocks of {size_name(shape.block_bytes)}: {shape.layers} layers, {shape.heads} KV heads, "
        f"{shape.tokens} tokens; memcpy of a whole block {memcpy:.1f} GB/s\n\n"
        + report.table(head, lines)
    )


def main() -> None:
    """Measures every layout, and prints a table."""
    parser = argparse.ArgumentParser(prog="benches.host_copy", description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="attention layers")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of the rank")
    parser.add_argument("--head-dim", type=int, default=128, help="elements of a key")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block")
    parser.add_argument("--element-bytes", type=int, default=2, help="bytes of an element")
    parser.add_argument(
        "--total",
        type=parse_size,
        default="256MiB",
        help="of KV, all copied in a pass",
    )
    parser.add_argument("--passes", type=int, default=11)
    args = report.begin(parser)
    content = 2 * args.head_dim * args.element_bytes
    block = args.layers * args.heads * args.block_size * content
    blocks = max(PER_CALL, args.total // block // PER_CALL * PER_CALL)
    shape = Shape(args.layers, args.heads, args.block_size, content, blocks)
    memcpy, rows = measure(shape, args.passes)
    found = {
        "shape": asdict(shape) | {"block_bytes": shape.block_bytes},
        "passes": args.passes,
        "memcpy_gb_s": memcpy,
        "rows": [asdict(row) for row in rows],
    }
    report.finish(args, table(shape, memcpy, rows), found)


if __name__ == "__main__":
    main()
