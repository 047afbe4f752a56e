"""Time to first token of loads, with compression and without, over each kind of pool.

The first process computes a prompt and stores it, the second loads it, as in `benches.end_to_end`.
Loopback is limited to what a network carries, which only the pool over TCP notices. Random weights
give KV that shrinks nearly as much as that of trained models. It needs root. Run it as
``python -m benches.compressed_hits``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benches.shared import loopback, report
from benches.shared.connectors import ENGINE_ENVIRONMENT, Connector, Penstock
from benches.shared.engines import save_model, token_bytes
from benches.shared.systems import BASELINE
from benches.shared.two_processes import Group, Row, prompts, summary

OFF, LOSSLESS = "off", "lossless"
POOLS = {
    "shm": ("shm", ""),
    "file": ("file", ""),
    "valkey": ("valkey", "unix socket"),
    "valkey-tcp": ("valkey", "TCP"),
}
MODEL, DTYPE = "mid", "bfloat16"
COMPARED = ("load", "cold", "after")
COLUMNS = [
    ("pool", "{pool}"),
    ("tokens", "{tokens}"),
    ("floor, ms", "{off[hit]!m:.0f}"),
    ("off, ms", "{off[load]!m:.0f}"),
    ("lossless, ms", "{lossless[load]!m:.0f}"),
    ("lossless to off", "{lossless[load_to_off]:.2f}"),
    ("cold, to off", "{lossless[cold_to_off]:.2f}"),
    ("request right after, to off", "{lossless[after_to_off]:.2f}"),
    (
        "same logprobs as own hit",
        "{off[same_bits]} and {lossless[same_bits]} of {lossless[outputs]}",
    ),
]


def measure(pool: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both rows of a pool beside the baseline, with the same prompts."""
    report.progress(f"pool: {pool}")
    connectors = {
        BASELINE: Connector(),
        OFF: Penstock(*POOLS[pool]),
        LOSSLESS: Penstock(*POOLS[pool], compression=LOSSLESS),
    }
    rows = {name: Row(connector, args.lengths) for name, connector in connectors.items()}
    asked = prompts(args.lengths, args.repetitions, args.seed, token_bytes(MODEL, DTYPE))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        Group(save_model(Path(name), MODEL, DTYPE), DTYPE, rows, Path(name)).run(asked)
    found = {name: summary(name, rows) for name in (OFF, LOSSLESS)}
    for length in args.lengths:
        coded, plain = (found[name][str(length)]["each"] for name in (LOSSLESS, OFF))
        found[LOSSLESS][str(length)] |= {
            f"{what}_to_off": report.median_ratio(coded[what], plain[what]) for what in COMPARED
        }
    return found


def table(pools: dict[str, Any], lengths: list[int]) -> str:
    """A line for each pool and length."""
    lines = [
        {"pool": pool, "tokens": length} | {name: of[str(length)] for name, of in found.items()}
        for pool, found in pools.items()
        for length in lengths
    ]
    return report.listing(lines, COLUMNS)


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.compressed_hits", description=__doc__)
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=list(POOLS))
    parser.add_argument("--mbit", type=float, default=10_000.0, help="of loopback")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1800, 3900])
    parser.add_argument("--repetitions", type=int, default=10, help="prompts of each length")
    parser.add_argument("--seed", type=int, default=1)
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    loopback.limit(args.mbit)
    pools = {pool: measure(pool, args) for pool in args.pools}
    report.finish(args, table(pools, args.lengths), {"mbit": args.mbit, "pools": pools})


if __name__ == "__main__":
    main()
