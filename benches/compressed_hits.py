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

from benches import loopback, report
from benches.connectors import ENGINE_ENVIRONMENT, Connector, Penstock
from benches.end_to_end import BASELINE, MODELS, Group, Prompts, Row, Seen, summary
from lab.models import attention

OFF, LOSSLESS = "off", "lossless"
POOLS = {
    "shm": ("shm", ""),
    "file": ("file", ""),
    "valkey": ("valkey", "unix socket"),
    "valkey-tcp": ("valkey", "TCP"),
}
MODEL = MODELS["mid"]
DTYPE = "bfloat16"
TOKEN_BYTES = 2 * 2 * MODEL["layers"] * MODEL["kv_heads"] * MODEL["hidden"] // MODEL["heads"]


def measure(pool: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both rows of a pool beside the baseline, with the same prompts."""
    connectors = {
        BASELINE: Connector(),
        OFF: Penstock(*POOLS[pool]),
        LOSSLESS: Penstock(*POOLS[pool], compression=LOSSLESS),
    }
    rows = {
        name: Row(connector, {length: Seen() for length in args.lengths})
        for name, connector in connectors.items()
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        weights = attention.llama(Path(name) / "model", dtype=DTYPE, **MODEL)
        prompts = Prompts(args.lengths, args.repetitions, args.seed, TOKEN_BYTES)
        Group(weights, DTYPE, rows, Path(name)).run(prompts)
    found = {
        name: summary(name, row, rows[BASELINE], args.lengths)
        for name, row in rows.items()
        if name != BASELINE
    }
    for length in args.lengths:
        times = {name: rows[name].seen[length] for name in (OFF, LOSSLESS)}
        found[LOSSLESS][str(length)] |= {
            f"{what}_to_off": report.median_ratio(
                getattr(times[LOSSLESS], what), getattr(times[OFF], what)
            )
            for what in ("load", "cold", "after")
        }
    return found


def table(result: dict[str, Any], lengths: list[int]) -> str:
    """A line for each pool and length."""
    heads = ["pool", "tokens", "floor, ms", "off, ms", "lossless, ms", "lossless to off"]
    heads += ["cold, to off", "request right after, to off", "same logprobs as own hit"]
    lines = []
    for pool, found in result.items():
        for length in map(str, lengths):
            off, coded = found[OFF][length], found[LOSSLESS][length]
            lines.append(
                [
                    pool,
                    length,
                    *(f"{of * 1e3:.0f}" for of in (off["hit"], off["load"], coded["load"])),
                    *(f"{coded[f'{what}_to_off']:.2f}" for what in ("load", "cold", "after")),
                    f"{off['same_bits']} and {coded['same_bits']} of {coded['outputs']}",
                ]
            )
    return report.table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.compressed_hits", description=__doc__)
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=list(POOLS))
    parser.add_argument("--mbit", type=float, default=10_000.0, help="of loopback")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1800, 3900])
    parser.add_argument("--repetitions", type=int, default=10, help="prompts of each length")
    parser.add_argument("--seed", type=int, default=1)
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    loopback.limit(args.mbit)
    result = {}
    for pool in args.pools:
        report.progress(f"pool: {pool}")
        result[pool] = measure(pool, args)
    report.finish(args, table(result, args.lengths), {"mbit": args.mbit, "pools": result})


if __name__ == "__main__":
    main()
