"""Copies between a CUDA device's KV cache and pinned memory, in every layout: right, how fast.

Needs a device, PyTorch and the installed package; nothing of vLLM. First fresh random data goes out
and back in every layout, whole and by spans, and every byte is compared. Then each layout's gather
and scatter are timed in turn, pass by pass, against a contiguous pinned copy of the same bytes and
against a cudaMemcpyAsync a piece. Run it as ``python benches/gpu_copy.py --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.cli.bench_copy import Shape
from penstock.layout import Descriptor
from penstock.layout.negotiate import LAYOUTS

CHECKED_BLOCKS = 9

SHAPES = {
    # 8 KV heads of 128, bf16, K and V; blocks of 16 tokens.
    "llama-8b": Shape(
        layers=32, heads=8, tokens=16, content_bytes=2 * 128 * 2, blocks=CHECKED_BLOCKS
    ),
    # The same on one of eight tensor-parallel ranks.
    "llama-8b-tp8": Shape(
        layers=32, heads=1, tokens=16, content_bytes=2 * 128 * 2, blocks=CHECKED_BLOCKS
    ),
    # One latent of 512 + 64, bf16; blocks of 64 tokens.
    "deepseek-v3": Shape(
        layers=61, heads=1, tokens=64, content_bytes=576 * 2, blocks=CHECKED_BLOCKS
    ),
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
            [sizes[axis] for axis in layout], dtype=torch.uint8, device="cuda:0"
        )
        self.memory.random_(0, 256)
        self.logical = self.memory.permute([layout.index(axis) for axis in "LBHNC"])
        storage = self.memory.untyped_storage()
        self.descriptor = Descriptor.detect(
            [
                (
                    layer,
                    view.data_ptr(),
                    tuple(view.shape),
                    tuple(view.stride()),
                    1,
                    storage.data_ptr(),
                    storage.nbytes(),
                )
                for layer, view in enumerate(self.logical)
            ]
        )

    def expected(self, blocks: list[int], span: tuple[int, int, int, int]) -> torch.Tensor:
        """The canonical bytes of blocks, by PyTorch's own indexing."""
        order = (0, 1, 2, 3) if self.descriptor.interior == "HNC" else (0, 2, 1, 3)
        parts = [
            self.logical[span[0] : span[1], block, span[2] : span[3]].permute(order).reshape(-1)
            for block in blocks
        ]
        return torch.cat(parts).cpu()


def check(layout: str, shape: Shape) -> int:
    """Copies out and back, every byte compared; returns the bytes."""
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
            copied = cache.descriptor.gather(blocks, span, payload.numpy(), cuda_device=0)
            same = copied == expected.numel() and torch.equal(payload, expected)
            other = torch.randint(0, 256, payload.shape, dtype=torch.uint8)
            payload.copy_(other)
            untouched = [block for block in range(shape.blocks) if block not in blocks]
            rest = cache.expected(untouched, whole)
            cache.descriptor.scatter(blocks, span, payload.numpy(), cuda_device=0)
            same = same and torch.equal(cache.expected(blocks, span), other)
            same = same and torch.equal(cache.expected(untouched, whole), rest)
            if not same:
                raise SystemExit(f"WRONG BYTES: {layout}, {shape}, span {span}, pinned {pinned}")
            compared += 2 * expected.numel()
    return compared


def seconds(work: Callable[[], None]) -> float:
    """How long it takes, with all of the device's work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(shape: Shape, total: int, passes: int, per_call: int) -> list[dict[str, Any]]:
    """A row for each layout; ratios are medians of the ratios pass by pass."""
    blocks = max(per_call, total // shape.block_bytes // per_call * per_call)
    whole = (0, shape.layers, 0, shape.heads)
    order = random.Random(1).sample(range(blocks), blocks)
    calls = [order[i : i + per_call] for i in range(0, blocks, per_call)]
    size = per_call * shape.block_bytes
    payload = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host = payload.numpy()
    rows = []
    for layout in LAYOUTS:
        cache = Cache(layout, replace(shape, blocks=blocks))
        flat = cache.memory.view(-1)
        pieces = cache.descriptor.segments(0, whole)
        views = [flat[offset : offset + length] for _, offset, length in pieces]
        targets = []
        done = 0
        for view in views:
            targets.append(payload[done : done + view.numel()])
            done += view.numel()

        def out(cache: Cache = cache) -> None:
            for numbers in calls:
                cache.descriptor.gather(numbers, whole, host, cuda_device=0)

        def back(cache: Cache = cache) -> None:
            for numbers in calls:
                cache.descriptor.scatter(numbers, whole, host, cuda_device=0)

        def contiguous_out(flat: torch.Tensor = flat) -> None:
            for i in range(len(calls)):
                payload.copy_(flat[i * size : (i + 1) * size], non_blocking=True)
                torch.cuda.current_stream().synchronize()

        def contiguous_back(flat: torch.Tensor = flat) -> None:
            for i in range(len(calls)):
                flat[i * size : (i + 1) * size].copy_(payload, non_blocking=True)
                torch.cuda.current_stream().synchronize()

        def piecewise(views: list[torch.Tensor] = views, targets: Any = targets) -> None:
            for target, view in zip(targets, views, strict=True):
                target.copy_(view, non_blocking=True)

        found: dict[str, list[float]] = {}
        for number in range(passes + 1):
            for name, work in (
                ("gather", out),
                ("scatter", back),
                ("contiguous_out", contiguous_out),
                ("contiguous_back", contiguous_back),
                ("piecewise", piecewise),
            ):
                taken = seconds(work)
                if number:
                    found.setdefault(name, []).append(taken)
        nbytes = blocks * shape.block_bytes

        def ratio(name: str, to: str, scale: float = 1.0, found: Any = found) -> float:
            pairs = zip(found[to], found[name], strict=True)
            return statistics.median(scale * theirs / ours for theirs, ours in pairs)

        rows.append(
            {
                "layout": layout,
                "pieces": len(pieces),
                "gather_gb_s": nbytes / statistics.median(found["gather"]) / 1e9,
                "gather_to_contiguous": ratio("gather", "contiguous_out"),
                "scatter_gb_s": nbytes / statistics.median(found["scatter"]) / 1e9,
                "scatter_to_contiguous": ratio("scatter", "contiguous_back"),
                # One block piece by piece, against a block's share of the gather.
                "gather_to_piecewise": ratio("gather", "piecewise", scale=blocks),
            }
        )
        del cache, flat, views
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total", type=int, default=4 << 30, help="bytes of the KV cache")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--per-call", type=int, default=16, help="blocks of one copy")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_copy: no CUDA device here")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "command": sys.argv,
        "checked_bytes": 0,
        "shapes": {},
    }
    for name, shape in SHAPES.items():
        for layout in LAYOUTS:
            result["checked_bytes"] += check(layout, shape)
        print(f"{name}: every byte right in {len(LAYOUTS)} layouts", flush=True)
        rows = measure(shape, args.total, args.passes, args.per_call)
        result["shapes"][name] = rows
        for row in rows:
            print(
                "  "
                + "  ".join(
                    f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
