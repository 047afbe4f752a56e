"""The beginning and the end of a bench: its environment, tables, JSON, and progress."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import environment

MIB = 1 << 20
GIB = 1 << 30


def begin(parser: argparse.ArgumentParser, **more: Any) -> argparse.Namespace:
    """Reads the command line before anything is measured. Every bench has these options.

    `environment` in the return value is the head of the result: the machine and the versions as
    they are now, and `more`. A result that is written has to be of a commit, or to say that it is
    not.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")
    parser.add_argument(
        "--uncommitted",
        action="store_true",
        help="write it although the tree has changes that are not committed; the result names them",
    )
    args = parser.parse_args()
    args.environment = environment.describe() | more
    changed = args.environment["versions"]["uncommitted"]
    if args.json is not None and changed != [] and not args.uncommitted:
        what = "Penstock is not of a checkout" if changed is None else ", ".join(changed)
        parser.error(
            f"not committed: {what}. Nobody could measure this again: commit, or say --uncommitted"
        )
    return args


def progress(text: str) -> None:
    """Prints a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def cause(log: str) -> str:
    """The first error of a log's end: those behind it follow from it."""
    found = re.findall(r"(?:[A-Z]\w*)?(?:Error|Exception|Refused): .*", log)
    return str(found[0]) if found else ["no word of why", *log.strip().splitlines()][-1]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join(
        [line(headers), "|" + "|".join("-" * (w + 2) for w in widths) + "|"]
        + [line(row) for row in rows]
    )


class _Units(string.Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        match conversion:
            case "m":
                return value * 1e3
            case "M":
                return value / MIB
            case "G":
                return value / GIB
        return super().convert_field(value, conversion)


def cell(row: Mapping[str, Any], pattern: str) -> str:
    """A cell of a table, as `str.format` writes a row's values. `!m` makes milliseconds of seconds,
    `!M` and `!G` make MiB and GiB of bytes. If the row lacks a value, the cell is empty."""
    try:
        return _Units().vformat(pattern, (), row)
    except KeyError:
        return ""


def across(row: Mapping[str, Any], keys: Iterable[object], pattern: str) -> str:
    """A cell with a figure for each of a row's parts, as each prompt length: ``1.2 / 3.4``."""
    return " / ".join(cell(row[str(key)], pattern) for key in keys)


def listing(rows: Iterable[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    """A table with a line for each row. Columns are heads and patterns of `cell`. A row that has a
    `failure` says "failed" where its figures would begin."""
    lines = []
    for row in rows:
        line = [cell(row, pattern) for _, pattern in columns]
        if row.get("failure") and "" in line:
            line[line.index("")] = "failed"
        lines.append(line)
    return table([head for head, _ in columns], lines)


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median of the ratios pass by pass. What slows both sides of a pass cancels out."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def size_name(size: int) -> str:
    """A size as text: ``64 KiB``, ``1 MiB``."""
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB"


def parse_sizes(text: str) -> list[int]:
    """Reads sizes in KiB or MiB, separated by commas: ``64KiB,1MiB``."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20}
    return [int(part[:-3]) * units[part[-3:]] for part in text.split(",")]


def add_engine_options(parser: argparse.ArgumentParser, devices: Iterable[str]) -> None:
    """Options of benches that start engines: `device`, `logs`, and `engine`, pairs of names and
    values."""
    parser.add_argument("--device", choices=list(devices), default="cpu", help="that vLLM uses")
    parser.add_argument(
        "--engine",
        nargs="+",
        type=_engine_option,
        default=[],
        metavar="NAME=JSON",
        help="options of all engines: enforce_eager=false async_scheduling=false",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs here")


def _engine_option(text: str) -> tuple[str, Any]:
    """An option of vLLM's engine, as ``name=value`` with a value in JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def keep_logs(source: Path, target: Path) -> None:
    """Copies all logs below a folder to the same places below another."""
    for log in source.rglob("*.log"):
        kept = target / log.relative_to(source)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept)


def finish(args: argparse.Namespace, tables: str, result: dict[str, Any]) -> None:
    """Prints the tables. With `--json`, writes the result behind its head."""
    print(tables)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"environment": args.environment} | result, indent=1) + "\n"
        )
