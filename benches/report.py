"""How the benches say what they found: tables for people, JSON for machines, progress aside."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every bench has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")


def progress(text: str) -> None:
    """Tells whoever waits what is going on."""
    print(text, file=sys.stderr, flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join(
        [line(headers), "|" + "|".join("-" * (w + 2) for w in widths) + "|"]
        + [line(row) for row in rows]
    )


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median of the ratios pass by pass: what both passes of a pair suffered cancels out."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def size_name(size: int) -> str:
    """64 KiB, 1 MiB."""
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB"


def parse_sizes(text: str) -> list[int]:
    """Comma-separated sizes with KiB or MiB: ``64KiB,1MiB``."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20}
    return [int(part[:-3]) * units[part[-3:]] for part in text.split(",")]


def finish(args: argparse.Namespace, tables: str, result: dict[str, Any]) -> None:
    """Prints the tables; writes the result, with what it ran on, if asked to."""
    print(tables)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
