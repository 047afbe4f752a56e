"""Is a hit from the pool, bit for bit, vLLM's own hit of the same length, whatever happens?

For each family of models, each pool and each fault: answers that were loaded, with their logprobs,
against those of a vLLM that has the same prompt in its own prefix cache. The stores of other
connectors can be put beside. Run it as ``python -m benches.exactness``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benches.exact import pools
from benches.exact.cell import Cell, Engines, compare
from benches.exact.families import BY_DEVICE, FAMILIES, ROOT_BLOCKS, Family
from benches.exact.faults import (
    AT_REST,
    EVIDENCE,
    FAULTS,
    IN_SMALL_POOL,
    SMALL_POOL_ROOTS,
)
from benches.exact.reference import ANSWER_TOKENS, Reference
from benches.shared import report
from benches.shared.report import progress
from lab.engines.node import StartError

COLUMNS = [
    ("family", "{family}"),
    ("pool", "{pool}"),
    ("fault", "{fault}"),
    ("hits that differ", "{hits_differ} of {hits}"),
    ("rejected loads", "{rejected_differ} of {rejected}"),
    ("computed", "{computed_differ} of {computed}"),
    ("no answer", "{unanswered}"),
    ("seen", "{evidence}"),
    ("failure", "{failure}"),
]
FAILURES = (StartError, RuntimeError, TimeoutError, AssertionError, queue.Empty)
"""How an engine fails."""


@contextlib.contextmanager
def engines(
    family: Family, model: Path, pool_name: str, folder: Path, room: int
) -> Iterator[Engines]:
    """A pool, and an engine with it when one is asked for."""
    folder.mkdir()
    pool = pools.named(pool_name)
    try:
        pool.start(folder, room)
        with contextlib.closing(Engines(family, model, pool, folder)) as started:
            yield started
    finally:
        pool.stop()


def fill(cell: Cell, fault: str, reference: Reference) -> dict[str, Any]:
    """Fills one cell of the matrix."""
    began = time.monotonic()
    failure = None
    try:
        FAULTS[fault](cell)
    except StartError as error:
        failure = f"does not start: {report.cause(str(error))}"
    except FAILURES as error:
        failure = f"fails on the way: {report.cause(repr(error))}"
    if failure is not None:
        cell.engines.kill()
    seconds = round(time.monotonic() - began, 1)
    try:
        found = compare(cell, reference)
    except FAILURES as error:
        found = nothing(f"vLLM alone fails: {report.cause(repr(error))}")
    found |= {"seconds": seconds}
    return found if failure is None else found | {"failure": failure}


def nothing(failure: str) -> dict[str, Any]:
    """A cell that shows nothing."""
    counts = ("hits", "hits_differ", "rejected", "rejected_differ", "computed", "computed_differ")
    return dict.fromkeys(counts, 0) | {"seen": {}, "failure": failure}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fills all cells, a family at a time. A family that vLLM alone does not serve costs no other
    one."""
    rows: list[dict[str, Any]] = []
    for name in args.families:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = Path(temporary)
            try:
                rows += rows_of(name, folder, args)
            except FAILURES as error:
                failure = nothing(f"vLLM alone fails: {report.cause(repr(error))}")
                cells = itertools.product(args.pools, args.faults)
                rows += [
                    {"family": name, "pool": pool, "fault": fault, "goal": args.hits} | failure
                    for pool, fault in cells
                ]
            finally:
                if args.logs is not None:
                    report.keep_logs(folder, args.logs / name)
    return rows


def rows_of(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of a family."""
    served = BY_DEVICE[args.device][name]
    model, family = replace(served, options=served.options | dict(args.engine)).made(folder)
    rows = []
    with Reference(family, model, folder / "reference.log") as reference:
        for pool in args.pools:
            rows += column(name, family, model, pool, folder / pool, reference, args)
    return rows


def column(
    name: str,
    family: Family,
    model: Path,
    pool: str,
    folder: Path,
    reference: Reference,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The cells of a family with a pool. Evictions have a small pool of their own."""
    possible = [each for each in args.faults if pool not in pools.PEERS or each not in AT_REST]
    rows = []
    for small in (False, True):
        chosen = [each for each in FAULTS if each in possible and (each in IN_SMALL_POOL) == small]
        if not chosen:
            continue
        room = SMALL_POOL_ROOTS * family.root_bytes if small else pools.ROOMY
        own = folder.with_name(f"{folder.name}-small") if small else folder
        with engines(family, model, pool, own, room) as started:
            for fault in chosen:
                cell = Cell(started, args.hits, args.seconds)
                row = {"family": name, "pool": pool, "fault": fault, "goal": args.hits}
                rows.append(row | fill(cell, fault, reference))
                progress(line(rows[-1]))
    return rows


def line(row: dict[str, Any]) -> str:
    """A row in words, while the bench runs."""
    said = f"{row['family']} {row['pool']} {row['fault']}: {row['hits_differ']} of {row['hits']}"
    said += f", {row['seconds']} s, {row['seen']}"
    return said + (f", {row['failure']}" if "failure" in row else "")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each cell."""
    lines = []
    for row in rows:
        evidence = EVIDENCE[row["fault"]]
        name = evidence.replace("_", " ").removeprefix("num ")
        count = row["seen"].get(evidence, 0)
        said = f"{count} {name}" if count else "**did not happen**"
        lines.append({"unanswered": 0, "failure": ""} | row | {"evidence": said})
    return report.listing(lines, COLUMNS)


def added(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and those of the file's other cells, with the environment of each run."""
    before: dict[str, Any] = {"runs": [], "rows": []}
    if args.add and args.json.exists():
        before = json.loads(args.json.read_text())
    run = len(before["runs"])
    cells = [(row["family"], row["pool"], row["fault"]) for row in rows]
    kept = [
        row for row in before["rows"] if (row["family"], row["pool"], row["fault"]) not in cells
    ]
    order = [list(FAMILIES), [*pools.POOLS, *pools.PEERS], list(FAULTS)]

    def place(row: dict[str, Any]) -> list[int]:
        names = (row["family"], row["pool"], row["fault"])
        return [known.index(name) for known, name in zip(order, names, strict=True)]

    return {
        "runs": [*before["runs"], args.environment],
        "rows": sorted([*kept, *({"run": run} | row for row in rows)], key=place),
    }


def main() -> None:
    """Fills the cells, prints the table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.exactness", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="default: all")
    every = pools.POOLS + pools.PEERS
    parser.add_argument("--pools", nargs="+", choices=every, default=pools.POOLS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--hits", type=int, default=200, help="loaded hits of a cell")
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, for a cell")
    parser.add_argument("--add", action="store_true", help="keep the other cells of the JSON file")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit status 1 if an answer differs, or a cell has a failure or no hit",
    )
    report.add_engine_options(parser, BY_DEVICE)
    args = report.begin(parser)
    args.environment |= {"device": args.device, "engine": dict(args.engine)}
    args.families = args.families or list(BY_DEVICE[args.device])
    if absent := [each for each in args.families if each not in BY_DEVICE[args.device]]:
        parser.error(f"not tried on {args.device}: {', '.join(absent)}")
    if args.add and args.json is None:
        parser.error("--add needs --json: to which file?")
    rows = measure(args)
    settings = {"answer_tokens": ANSWER_TOKENS, "root_blocks": ROOT_BLOCKS}
    result = settings | added(args, rows)
    report.finish(args, table(result["rows"]), result)
    if args.strict and (bad := [row for row in rows if not is_good(row)]):
        sys.exit(f"exactness: {len(bad)} of {len(rows)} cells are not as they must be")


def is_good(row: dict[str, Any]) -> bool:
    """Whether a cell shows what it is for: hits, all of them vLLM's own, and the fault seen."""
    differing = ("hits_differ", "rejected_differ", "computed_differ", "unanswered")
    happened = row["seen"].get(EVIDENCE[row["fault"]], 0)
    return bool(
        "failure" not in row
        and row["hits"]
        and happened
        and not any(row.get(name, 0) for name in differing)
    )


if __name__ == "__main__":
    main()
