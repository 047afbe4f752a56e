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
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benches import report
from penstock._native import Descriptor, TensorView
from penstock.cli import cuda_copies
from penstock.layout.negotiate import LAYOUTS

DEVICE = 0
LEAST_CALL = 32 << 20
"""Bytes of one timed call, at least."""
CHECKED_BLOCKS = 9


@dataclass(frozen=True)
class Shape:
    """Sizes of a KV cache. `content_bytes` is the size of one token's key and value in one head."""

    layers: int
    heads: int
    tokens: int
    content_bytes: int
    blocks: int = CHECKED_BLOCKS

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.layers * self.heads * self.tokens * self.content_bytes


SHAPES = {
    # 8 KV heads of 128, bf16, K and V; blocks of 16 tokens.
    "llama-8b": Shape(layers=32, heads=8, tokens=16, content_bytes=2 * 128 * 2),
    # The same on one of eight tensor-parallel ranks.
    "llama-8b-tp8": Shape(layers=32, heads=1, tokens=16, content_bytes=2 * 128 * 2),
    # One latent of 512 + 64, bf16; blocks of 64 tokens.
    "deepseek-v3": Shape(layers=61, heads=1, tokens=64, content_bytes=576 * 2),
    # Not multiples of 16 bytes, so the kernel copies byte by byte. Checked, but not timed.
    "odd": Shape(layers=3, heads=3, tokens=5, content_bytes=37),
}


class Cache:
    """A KV cache on the device, in one layout."""

    def __init__(self, layout: str, shape: Shape) -> None:
        sizes = {
            "L": shape.layers,
            "B": shape.blocks,
            "H": shape.heads,
            "N": shape.tokens,
            "C": shape.content_bytes,
        }
        self.memory = torch.empty(
            [sizes[axis] for axis in layout], dtype=torch.uint8, device=f"cuda:{DEVICE}"
        )
        self.memory.random_(0, 256)
        self.logical = self.memory.permute([layout.index(axis) for axis in "LBHNC"])
        storage = self.memory.untyped_storage()
        self.descriptor = Descriptor.detect(
            [
                TensorView(
                    layer,
                    address=view.data_ptr(),
                    shape=tuple(view.shape),
                    strides=tuple(view.stride()),
                    itemsize=1,
                    storage_address=storage.data_ptr(),
                    storage_bytes=storage.nbytes(),
                )
                for layer, view in enumerate(self.logical)
            ]
        )
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
    whole = (0, shape.layers, 0, shape.heads)
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


def seconds(work: Callable[[], None]) -> float:
    """Seconds that the work takes, with all of the device's work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Contestants:
    """Ways to copy the same bytes of one cache, `per_call` blocks at a time, in both directions."""

    def __init__(self, cache: Cache, shape: Shape, per_call: int) -> None:
        self._descriptor = cache.descriptor
        self._whole = (0, shape.layers, 0, shape.heads)
        self._size = per_call * shape.block_bytes
        self._flat = cache.memory.view(-1)
        self._payload = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        order = random.Random(1).sample(range(shape.blocks), shape.blocks)
        self.calls = [order[i : i + per_call] for i in range(0, shape.blocks, per_call)]
        self.pieces = len(self._descriptor.segments(0, self._whole))
        # The pieces of the first call, one copy each. Cut beforehand, so only copies are timed.
        runs = [
            (offset, length)
            for block in self.calls[0]
            for _, offset, length in self._descriptor.segments(block, self._whole)
        ]
        self._device = [self._flat[offset : offset + length] for offset, length in runs]
        self._host = list(self._payload.split([length for _, length in runs]))

    def gather(self) -> None:
        """All blocks to the host, by Penstock."""
        for blocks in self.calls:
            self._descriptor.gather(blocks, self._whole, self._payload, cuda_device=DEVICE)

    def scatter(self) -> None:
        """All blocks back to the device, by Penstock."""
        for blocks in self.calls:
            self._descriptor.scatter(blocks, self._whole, self._payload, cuda_device=DEVICE)

    def contiguous_out(self) -> None:
        """As many bytes to the host: one contiguous copy for each call, each waited for."""
        for i in range(len(self.calls)):
            piece = self._flat[i * self._size : (i + 1) * self._size]
            self._payload.copy_(piece, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def contiguous_back(self) -> None:
        """As many bytes back to the device, likewise."""
        for i in range(len(self.calls)):
            piece = self._flat[i * self._size : (i + 1) * self._size]
            piece.copy_(self._payload, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    def pieces_out(self) -> None:
        """The blocks of the first call to the host, one cudaMemcpyAsync for each piece."""
        for host, device in zip(self._host, self._device, strict=True):
            host.copy_(device, non_blocking=True)

    def pieces_back(self) -> None:
        """The blocks of the first call back to the device, likewise."""
        for host, device in zip(self._host, self._device, strict=True):
            device.copy_(host, non_blocking=True)


def measure(layout: str, shape: Shape, total: int, passes: int, per_call: int) -> dict[str, Any]:
    """Figures of one layout. Ratios are medians of the ratios pass by pass."""
    blocks = max(1, total // shape.block_bytes // per_call) * per_call
    contestants = Contestants(
        Cache(layout, replace(shape, blocks=blocks)), replace(shape, blocks=blocks), per_call
    )
    names = (
        "gather",
        "scatter",
        "contiguous_out",
        "contiguous_back",
        "pieces_out",
        "pieces_back",
    )
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(passes + 1):
        for name in names:
            taken = seconds(getattr(contestants, name))
            # The first pass only warms up.
            if number:
                found[name].append(taken)
    nbytes = blocks * shape.block_bytes

    def faster(name: str, than: str, share: float = 1.0) -> float:
        """How many times as fast as the other, which copies only `share` of the bytes of a pass."""
        pairs = zip(found[than], found[name], strict=True)
        return statistics.median(theirs / (ours * share) for theirs, ours in pairs)

    share = 1 / len(contestants.calls)
    return {
        "layout": layout,
        "pieces": contestants.pieces,
        "piece_bytes": shape.block_bytes // contestants.pieces,
        "gather_gb_s": nbytes / statistics.median(found["gather"]) / 1e9,
        "gather_to_contiguous": faster("gather", "contiguous_out"),
        "gather_to_pieces": faster("gather", "pieces_out", share),
        "scatter_gb_s": nbytes / statistics.median(found["scatter"]) / 1e9,
        "scatter_to_contiguous": faster("scatter", "contiguous_back"),
        "scatter_to_pieces": faster("scatter", "pieces_back", share),
    }


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
