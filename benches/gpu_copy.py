"""Copies between the KV cache of a CUDA device and host memory: are they right, and how fast?

It needs a device, PyTorch and the installed package, but neither vLLM nor numpy. It does three
things, in every layout where that matters. First it copies random data out and back, whole and by
spans, with pinned and with pageable memory, and compares every byte. Then it times both ways to
copy pieces, by the size of a piece. At last it times gather and scatter, in turn, pass by pass,
against a contiguous pinned copy of the same bytes, and against an asynchronous copy for each piece.
Run it as ``python -m benches.gpu_copy --json FILE``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benches.shared import report
from benches.shared.layouts import Shape, describe
from benches.shared.rows import Times, turns
from penstock.cli import cuda_copies
from penstock.layout.negotiate import LAYOUTS

DEVICE = 0
LEAST_CALL = 32 << 20
"""Bytes of one timed call, at least."""
CHECKED_BLOCKS = 9

SHAPES = {
    # 8 KV heads of 128, bf16, K and V; blocks of 16 tokens.
    "llama-8b": Shape(32, 8, 16, 2 * 128 * 2, CHECKED_BLOCKS),
    # The same on one of eight tensor-parallel ranks.
    "llama-8b-tp8": Shape(32, 1, 16, 2 * 128 * 2, CHECKED_BLOCKS),
    # One latent of 512 + 64, bf16; blocks of 64 tokens.
    "deepseek-v3": Shape(61, 1, 64, 576 * 2, CHECKED_BLOCKS),
    # Not multiples of 16 bytes, so the kernel copies byte by byte. Checked, but not timed.
    "odd": Shape(layers=3, heads=3, tokens=5, content_bytes=37, blocks=CHECKED_BLOCKS),
}


class Cache:
    """A KV cache on the device, in one layout."""

    def __init__(self, layout: str, shape: Shape) -> None:
        self.shape = shape
        self.memory = torch.empty(
            [shape.axes[axis] for axis in layout], dtype=torch.uint8, device=f"cuda:{DEVICE}"
        )
        self.memory.random_(0, 256)
        self.logical = self.memory.permute([layout.index(axis) for axis in "LBHNC"])
        self.descriptor = describe(shape, layout, self.memory.data_ptr())
        # The copies below run on streams of their own.
        torch.cuda.synchronize()

    def expected(self, blocks: list[int], span: tuple[int, int, int, int]) -> torch.Tensor:
        """The canonical bytes of blocks, by PyTorch's own indexing."""
        order = (0, 1, 2, 3) if self.descriptor.interior == "HNC" else (0, 2, 1, 3)
        parts = [
            self.logical[span[0] : span[1], block, span[2] : span[3]].permute(order).reshape(-1)
            for block in blocks
        ]
        return torch.cat(parts).cpu()


def check(layout: str, shape: Shape) -> int:
    """Copies out and back, and compares every byte. Returns the number of bytes."""
    cache = Cache(layout, shape)
    rng = random.Random(layout)
    compared = 0
    whole = shape.whole
    half = (shape.layers // 2, shape.layers, shape.heads // 2, shape.heads)
    for pinned in (True, False):
        for span in (whole, half, (0, 1, 0, 1)):
            blocks = rng.sample(range(shape.blocks), 4)
            expected = cache.expected(blocks, span)
            payload = torch.zeros(expected.numel(), dtype=torch.uint8, pin_memory=pinned)
            copied = cache.descriptor.gather(blocks, span, payload, cuda_device=DEVICE)
            same = copied == expected.numel() and torch.equal(payload, expected)
            other = torch.randint(0, 256, payload.shape, dtype=torch.uint8)
            payload.copy_(other)
            untouched = [block for block in range(shape.blocks) if block not in blocks]
            rest = cache.expected(untouched, whole)
            cache.descriptor.scatter(blocks, span, payload, cuda_device=DEVICE)
            same = same and torch.equal(cache.expected(blocks, span), other)
            same = same and torch.equal(cache.expected(untouched, whole), rest)
            if not same:
                raise SystemExit(f"WRONG BYTES: {layout}, {shape}, span {span}, pinned {pinned}")
            compared += 2 * expected.numel()
    return compared


def sweep() -> dict[str, Any]:
    """Times of both ways to copy pieces, by size, as the executor measures them for itself."""
    return {name: asdict(found) for name, found in cuda_copies.measure(DEVICE).items()}


class Contestants:
    """Ways to copy the same bytes of one cache, `per_call` blocks at a time, in both directions."""

    def __init__(self, cache: Cache, per_call: int) -> None:
        shape, descriptor = cache.shape, cache.descriptor
        self._whole = shape.whole
        self._size = per_call * shape.block_bytes
        self._flat = cache.memory.view(-1)
        self._payload = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        order = random.Random(1).sample(range(shape.blocks), shape.blocks)
        self.calls = [order[i : i + per_call] for i in range(0, shape.blocks, per_call)]
        self.pieces = len(descriptor.segments(0, shape.whole))
        # The pieces of the first call, one copy each. Cut beforehand, so only copies are timed.
        runs = [
            (offset, length)
            for block in self.calls[0]
            for _, offset, length in descriptor.segments(block, shape.whole)
        ]
        self._device = [self._flat[offset : offset + length] for offset, length in runs]
        self._host = list(self._payload.split([length for _, length in runs]))
        self.works: dict[str, Callable[[], None]] = {
            "gather": partial(self._penstock, descriptor.gather),
            "scatter": partial(self._penstock, descriptor.scatter),
            "contiguous_out": partial(self._contiguous, out=True),
            "contiguous_back": partial(self._contiguous, out=False),
            "pieces_out": partial(self._pieces, self._device, self._host),
            "pieces_back": partial(self._pieces, self._host, self._device),
        }

    def time(self, passes: int) -> Times:
        """Seconds that all take, with all of the device's work."""

        def synchronized(work: Callable[[], None]) -> None:
            work()
            torch.cuda.synchronize()

        times = Times()
        for number, name in turns(list(self.works), passes):
            torch.cuda.synchronize()
            times.run(number, name, "copy", partial(synchronized, self.works[name]))
        return times

    def _penstock(self, copy: Callable[..., object]) -> None:
        """All blocks, by Penstock."""
        for blocks in self.calls:
            copy(blocks, self._whole, self._payload, cuda_device=DEVICE)

    def _contiguous(self, out: bool) -> None:
        """As many bytes: one contiguous copy for each call, each waited for."""
        for i in range(len(self.calls)):
            piece = self._flat[i * self._size : (i + 1) * self._size]
            source, target = (piece, self._payload) if out else (self._payload, piece)
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def _pieces(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """The blocks of the first call, one cudaMemcpyAsync for each piece."""
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)


def measure(layout: str, shape: Shape, total: int, passes: int, per_call: int) -> dict[str, Any]:
    """Figures of one layout. Ratios are medians of the ratios pass by pass."""
    shape = replace(shape, blocks=max(1, total // shape.block_bytes // per_call) * per_call)
    contestants = Contestants(Cache(layout, shape), per_call)
    times = contestants.time(passes)
    row: dict[str, Any] = {
        "layout": layout,
        "pieces": contestants.pieces,
        "piece_bytes": shape.block_bytes // contestants.pieces,
    }
    for way, direction in (("gather", "out"), ("scatter", "back")):
        nbytes = shape.blocks * shape.block_bytes
        row[f"{way}_gb_s"] = nbytes / times.median(way, "copy") / 1e9
        row[f"{way}_to_contiguous"] = times.ratio(f"contiguous_{direction}", way, "copy")
        # Piece by piece, only one call's bytes are copied in a pass.
        to_pieces = times.ratio(f"pieces_{direction}", way, "copy") * len(contestants.calls)
        row[f"{way}_to_pieces"] = to_pieces
    return row


@dataclass(frozen=True)
class Aim:
    """What a copy of one shape is meant to reach at least."""

    what: str
    least: float
    seen: float

    @property
    def is_met(self) -> bool:
        """Whether it is reached."""
        return self.seen >= self.least


def aims(rows: Sequence[Mapping[str, Any]], layers: int) -> list[Aim]:
    """The aims of all layouts of a shape, in both directions.

    A block in one piece is to be copied nearly as fast as contiguous memory, and one with a piece
    for each layer a little slower. What a cross-layer layout gains is its speed over that of a copy
    for each piece of a layout by layers.
    """
    found = []
    by_layers = next(row for row in rows if row["layout"] == "LBHNC")
    for row in rows:
        for way in ("gather", "scatter"):
            name = f"{way}, {row['layout']}"
            if row["pieces"] <= layers:
                least = 0.95 if row["pieces"] == 1 else 0.9
                found.append(Aim(f"{name}, to contiguous", least, row[f"{way}_to_contiguous"]))
            if row["pieces"] == 1:
                one_by_one = by_layers[f"{way}_gb_s"] / by_layers[f"{way}_to_pieces"]
                gain = row[f"{way}_gb_s"] / one_by_one
                found.append(Aim(f"{name}, to a copy for each piece of LBHNC", 4.0, gain))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A table of the rows, with their keys as its head."""
    lines = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in rows
    ]
    return report.table(list(rows[0]), lines)


def met(wanted: Sequence[Aim]) -> list[list[str]]:
    """A line for each aim."""
    return [
        [aim.what, f"{aim.least:.2f}", f"{aim.seen:.2f}", "yes" if aim.is_met else "**no**"]
        for aim in wanted
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.gpu_copy", description=__doc__)
    parser.add_argument("--total", type=int, default=4 << 30, help="bytes of the KV cache")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--per-call", type=int, default=16, help="blocks of one copy, at least")
    args = report.begin(parser)
    if not torch.cuda.is_available():
        sys.exit("gpu_copy: no CUDA device here")
    args.environment |= {
        "device": torch.cuda.get_device_name(DEVICE),
        "cuda": torch.version.cuda,
    }
    result: dict[str, Any] = {"checked_bytes": 0, "shapes": {}}
    for name, shape in SHAPES.items():
        for layout in LAYOUTS:
            result["checked_bytes"] += check(layout, shape)
        report.progress(f"{name}: every byte right in {len(LAYOUTS)} layouts")
    result["sweep"] = sweep()
    tables = []
    for name in ("gather", "scatter"):
        direction = result["sweep"][name]
        tables.append(f"{name}: copy engines from {direction['copy_engine_from']} B a piece")
        tables.append(table(direction["rows"]))
    for name, shape in SHAPES.items():
        if name == "odd":
            continue
        # Each call is waited for. With few bytes the wait would be measured, not the copy.
        per_call = max(args.per_call, -(-LEAST_CALL // shape.block_bytes))
        report.progress(f"{name}: {args.passes} passes")
        rows = [measure(layout, shape, args.total, args.passes, per_call) for layout in LAYOUTS]
        wanted = aims(rows, shape.layers)
        result["shapes"][name] = {"rows": rows, "aims": [asdict(aim) for aim in wanted]}
        tables += [name, table(rows), report.table(["aim", "at least", "seen", "met"], met(wanted))]
    report.finish(args, "\n\n".join(tables), result)


if __name__ == "__main__":
    main()
