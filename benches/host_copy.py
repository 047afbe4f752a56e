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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from benches.shared import report
from benches.shared.layouts import Shape, describe
from benches.shared.report import size_name
from benches.shared.rows import Times, processor_time, turns
from penstock._native import Buffer, Descriptor, parse_size
from penstock.layout.negotiate import LAYOUTS

PER_CALL = 4
"""Blocks that one call copies one after the other into one piece, as into slots of the engine's
arena."""


@dataclass(frozen=True)
class Row:
    """Figures for one layout: medians over passes. A ratio compares with a memcpy of the same bytes
    as whole blocks, in the same pass."""

    layout: str
    interior: str
    """Order of heads and tokens in the contiguous copy."""
    pieces: int
    """Number of separate runs of memory that a block lies in."""
    gather_gb_s: float
    gather_to_memcpy: float
    summed_to_memcpy: float
    """Ratio of a gather that also computes the checksum, as a store does."""
    scatter_gb_s: float
    scatter_to_memcpy: float
    cpu_us_per_block: float
    """CPU time of the gather without checksum, in microseconds per block."""


class WrongBytes(Exception):
    """A block changed when it was copied out and back."""


def measure(shape: Shape, passes: int) -> tuple[float, list[Row]]:
    """Memcpy's GB/s, and a row for each layout and for each conversion of the interior.

    Raises:
        WrongBytes: a block changed on its way out and back.
    """
    memory = mmap.mmap(-1, shape.blocks * shape.block_bytes)
    payload = mmap.mmap(-1, PER_CALL * shape.block_bytes)
    base, target = (Buffer(of, writable=True).address for of in (memory, payload))
    for start in range(0, len(memory), 1 << 20):
        memory[start : start + (1 << 20)] = os.urandom(min(1 << 20, len(memory) - start))
    cases = {}
    for layout in LAYOUTS:
        own = describe(shape, layout, base)
        for interior in ("HNC", "NHC"):
            if interior == own.interior or layout in ("LBHNC", "BLHNC"):
                cases[layout, interior] = own.with_interior(interior)
    for descriptor in cases.values():
        _check(descriptor, shape, payload)
    order = random.Random(1).sample(range(shape.blocks), shape.blocks)
    calls = [order[i : i + PER_CALL] for i in range(0, shape.blocks, PER_CALL)]
    times = Times()
    for number, (case, descriptor) in turns(list(cases.items()), passes, warm_up=0):
        for what, copy in _copies(descriptor, shape, payload, base, target).items():
            times.run(number, " ".join(case), what, partial(_all, copy, calls))

    nbytes = shape.blocks * shape.block_bytes
    memcpy = [each for case in cases for each in times.each(" ".join(case), "memcpy out")]
    return nbytes / statistics.median(memcpy) / 1e9, [
        _row(times, layout, interior, len(descriptor.segments(0, shape.whole)), shape)
        for (layout, interior), descriptor in cases.items()
    ]


def _check(descriptor: Descriptor, shape: Shape, payload: mmap.mmap) -> None:
    blocks = [0, shape.blocks - 1]
    size = descriptor.gather(blocks, shape.whole, payload)
    before = payload[:size]
    descriptor.scatter(blocks, shape.whole, bytes(size))
    descriptor.gather(blocks, shape.whole, payload)
    cleared = payload[:size]
    descriptor.scatter(blocks, shape.whole, before)
    descriptor.gather(blocks, shape.whole, payload)
    if payload[:size] != before or cleared != bytes(size) or not any(before):
        raise WrongBytes(f"blocks of {descriptor!r} did not come back as they were")


Copy = Callable[[Sequence[int]], object]


def _copies(
    descriptor: Descriptor, shape: Shape, payload: mmap.mmap, base: int, target: int
) -> dict[str, Copy]:
    """What is timed: each copies some blocks."""
    size = shape.block_bytes

    def out(blocks: Sequence[int]) -> None:
        for slot, block in enumerate(blocks):
            ctypes.memmove(target + slot * size, base + block * size, size)

    def back(blocks: Sequence[int]) -> None:
        for slot, block in enumerate(blocks):
            ctypes.memmove(base + block * size, target + slot * size, size)

    return {
        "gather": lambda blocks: descriptor.gather(blocks, shape.whole, payload),
        "memcpy out": out,
        "summed": lambda blocks: descriptor.gather(blocks, shape.whole, payload, checksum=True),
        "scatter": lambda blocks: descriptor.scatter(blocks, shape.whole, payload),
        "memcpy in": back,
    }


def _all(copy: Copy, calls: Sequence[Sequence[int]]) -> None:
    for blocks in calls:
        copy(blocks)


def _row(times: Times, layout: str, interior: str, pieces: int, shape: Shape) -> Row:
    case, nbytes = f"{layout} {interior}", shape.blocks * shape.block_bytes

    def to_memcpy(what: str, memcpy: str) -> float:
        return report.median_ratio(times.each(case, memcpy), times.each(case, what))

    return Row(
        layout,
        interior,
        pieces,
        gather_gb_s=nbytes / times.median(case, "gather") / 1e9,
        gather_to_memcpy=to_memcpy("gather", "memcpy out"),
        summed_to_memcpy=to_memcpy("summed", "memcpy out"),
        scatter_gb_s=nbytes / times.median(case, "scatter") / 1e9,
        scatter_to_memcpy=to_memcpy("scatter", "memcpy in"),
        cpu_us_per_block=times.median(case, processor_time("gather")) / shape.blocks * 1e6,
    )


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
