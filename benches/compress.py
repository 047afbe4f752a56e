"""Lossless compression of KV: how much it shrinks, and how fast one core encodes and decodes it.

KV is encoded and decoded on one thread, against memcpy of the same bytes, pass by pass in turn.
Every bit is checked to come back. Without ``--kv`` the KV is synthetic: normal numbers, with a
scale for each of 128 channels. That shows speed, but not how much the KV of a model shrinks. For
that, ``benches.trained_kv`` writes files. Run it as ``python -m benches.compress``.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import statistics
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benches.shared import report
from benches.shared.report import size_name
from benches.shared.rows import Times, processor_time, turns
from penstock._native import Buffer, Coder, parse_size

_PASS_BYTES = 32 << 20
"""Bytes that each pass works through, at least: a pass takes some milliseconds."""
_CHANNELS = 128
_DRAWN = _CHANNELS * 2048
"""Synthetic elements that are drawn. They are repeated: no chunk looks at another one."""


@dataclass(frozen=True)
class Row:
    """Figures for one element type: medians over passes, in GB of payload a second of one core.

    Values that do not shrink, and a shorter one at the end, are not timed."""

    element: str
    instructions: str
    payload_bytes: int
    """Bytes of all values that were coded."""
    ratio: float
    """Payload's bytes to coded bytes. A value that does not shrink counts as it is."""
    coded_values: int
    values: int
    encode_gb_s: float
    decode_gb_s: float
    memcpy_gb_s: float


class WrongBytes(Exception):
    """What was decoded is not what was encoded."""


def synthetic(element: str, size: int) -> bytes:
    """`size` bytes of normal numbers, each channel at a scale of its own."""
    draw = random.Random(1)
    scales = [math.exp(draw.gauss(0, 0.5)) for _ in range(_CHANNELS)]
    numbers = [draw.gauss(0, scales[at % _CHANNELS]) for at in range(_DRAWN)]
    drawn = b"".join(map(_WRITERS[element], numbers))
    return (drawn * -(-size // len(drawn)))[:size]


def _bf16(number: float) -> bytes:
    return struct.pack("<f", number)[2:]


def _fp16(number: float) -> bytes:
    return struct.pack("<e", number)


def _fp8_e5m2(number: float) -> bytes:
    return _fp16(number)[1:]


def _fp8_e4m3(number: float) -> bytes:
    mantissa, exponent = math.frexp(abs(number))
    sign = 0x80 if number < 0 else 0
    place = exponent + 6
    if place < 1:
        return bytes([sign | min(7, int(abs(number) * 2**9))])
    return bytes([sign | min(0x7E, place << 3 | int(mantissa * 16) & 7)])


_WRITERS: dict[str, Callable[[float], bytes]] = {
    "bf16": _bf16,
    "fp16": _fp16,
    "fp8_e4m3": _fp8_e4m3,
    "fp8_e5m2": _fp8_e5m2,
}


def measure(element: str, payload: bytes, size: int, passes: int, *, baseline: bool = False) -> Row:
    """The figures of one element type over values of `size` bytes.

    Raises:
        WrongBytes: a value did not come back as it was.
    """
    coder = Coder(element, baseline=baseline)
    values = [payload[at : at + size] for at in range(0, len(payload), size)]
    code, back = bytearray(size), bytearray(size)
    coded: list[tuple[bytes, bytes]] = []
    coded_bytes = 0
    for value in values:
        used = coder.encode(value, code)
        coded_bytes += len(value) if used is None else used
        if used is None:
            continue
        into = bytearray(len(value))
        coder.decode(bytes(code[:used]), into)
        if into != value:
            raise WrongBytes(f"a value of {element} did not come back as it was")
        coded.append((value, bytes(code[:used])))
    target = Buffer(back, writable=True)
    whole = [(value, kept) for value, kept in coded if len(value) == size]
    nbytes = len(whole) * size
    rounds = -(-_PASS_BYTES // nbytes) if nbytes else 0
    works: dict[str, Callable[[bytes, bytes], object]] = {
        "encode": lambda value, _: coder.encode(value, code),
        "decode": lambda _, kept: coder.decode(kept, back),
        "memcpy": lambda value, _: ctypes.memmove(target.address, value, size),
    }

    def do(work: Callable[[bytes, bytes], object]) -> None:
        for value, kept in whole * rounds:
            work(value, kept)

    times = Times()
    for number, what in turns(list(works), passes if nbytes else 0, warm_up=0):
        times.run(number, what, what, partial(do, works[what]))

    def rate(what: str) -> float:
        # What other programs take of the core does not count.
        taken = times.each(what, processor_time(what))
        return nbytes * rounds / statistics.median(taken) / 1e9 if taken else 0.0

    return Row(
        element=element,
        instructions=coder.speed,
        payload_bytes=len(payload),
        ratio=len(payload) / coded_bytes,
        coded_values=len(coded),
        values=len(values),
        encode_gb_s=rate("encode"),
        decode_gb_s=rate("decode"),
        memcpy_gb_s=rate("memcpy"),
    )


def table(source: str, size: int, rows: list[Row]) -> str:
    """A row for each element type."""
    head = ["element", "instructions", "ratio", "encode GB/s", "decode GB/s", "memcpy GB/s"]
    lines = [
        [row.element, row.instructions, f"{row.ratio:.3f}"]
        + [f"{rate:.1f}" for rate in (row.encode_gb_s, row.decode_gb_s, row.memcpy_gb_s)]
        for row in rows
    ]
    shown = f"KV: {source}; values of {size_name(size)}; one thread\n\n{report.table(head, lines)}"
    if any(row.coded_values < row.values for row in rows):
        shown += "\n\nValues that did not shrink count as they are. They are not timed."
    return shown


def main() -> None:
    """Measures every element type, and prints a table."""
    parser = argparse.ArgumentParser(prog="benches.compress", description=__doc__)
    parser.add_argument("--kv", type=Path, help="file of elements, as values hold them")
    parser.add_argument(
        "--element", choices=Coder.elements, help="their type (default: bf16 with --kv, else all)"
    )
    parser.add_argument("--size", type=parse_size, default="2MiB", help="bytes of a value")
    parser.add_argument(
        "--baseline", action="store_true", help="only instructions that every such CPU has"
    )
    parser.add_argument("--passes", type=int, default=21)
    args = report.begin(parser)
    if args.kv:
        payloads = {args.element or "bf16": args.kv.read_bytes()}
        if not all(payloads.values()):
            parser.error(f"{args.kv} is empty")
    else:
        elements = [args.element] if args.element else Coder.elements
        payloads = {element: synthetic(element, args.size) for element in elements}
    rows = [
        measure(element, payload, args.size, args.passes, baseline=args.baseline)
        for element, payload in payloads.items()
    ]
    source = args.kv.name if args.kv else "synthetic"
    found = {"kv": source, "value_bytes": args.size, "passes": args.passes}
    found["rows"] = [asdict(row) for row in rows]
    report.finish(args, table(source, args.size, rows), found)


if __name__ == "__main__":
    main()
