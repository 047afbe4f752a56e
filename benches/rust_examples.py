"""Runs a measuring example of the Rust crates. Its result gets the head that all results have.

It builds an example of `penstock-store` in release mode and runs it. `encryption_throughput`
measures sealing and opening of values. `shm_throughput` measures a pool of its own in shared memory
against memcpy. `quota_cost` measures puts with and without quotas. Words after `--` go to the
example, such as ``--passes 15``. Run it as
``python -m benches.rust_examples encryption_throughput``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benches.shared import report
from lab.segments import Segment

EXAMPLES = ("encryption_throughput", "quota_cost", "shm_throughput")
POOL_SIZE = "200MiB"
ROOT = Path(__file__).parents[1]


def run(example: str, words: list[str]) -> list[dict[str, Any]]:
    """The lines of an example: one for each size of values, and one more for look-ups."""
    cargo = ["cargo", "run", "--quiet", "--release", "--locked", "-p", "penstock-store"]
    said = subprocess.run(
        [*cargo, "--example", example, "--", *words, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in said.stdout.splitlines()]


def table(lines: list[dict[str, Any]]) -> str:
    """One row for each size. Lines below have everything else that was measured."""
    of_sizes = [line for line in lines if "bytes" in line]
    rest = [
        f"{name}: {value}" for line in lines if "bytes" not in line for name, value in line.items()
    ]
    heads = ["values", *(name for name in of_sizes[0] if name != "bytes")]
    cells = [
        [report.size_name(line["bytes"]), *(f"{line[name]:.2f}" for name in heads[1:])]
        for line in of_sizes
    ]
    return "\n\n".join([report.table(heads, cells), *rest])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.rust_examples", description=__doc__)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("words", nargs="*", help="for the example, behind --")
    args = report.begin(parser)
    rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True)
    args.environment["versions"]["rustc"] = rustc.stdout.split()[1]
    with ExitStack() as stack:
        pool = []
        if args.example == "shm_throughput":
            pool = [stack.enter_context(Segment("bench-examples")).url(POOL_SIZE)]
        rows = run(args.example, [*pool, *args.words])
    report.finish(args, table(rows), {"rows": rows})


if __name__ == "__main__":
    main()
