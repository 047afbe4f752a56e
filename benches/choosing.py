"""How far the policy that chooses is from the best of those that it chooses from.

On real traces, and on invented workloads (`benches.workloads`) from three seeds. Hit ratios are
counted as in `benches.policies`. Run it as ``python -m benches.choosing FOLDER``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benches import report, workloads
from benches.policies import PERCENT, TRACES
from penstock.sim import Trace

CHOSEN_FROM = ("lru", "s3fifo", "prefix")
POLICIES = (*CHOSEN_FROM, "chooser")
SEEDS = (1, 2, 3)
AIM = 0.005


def measure(path: Path) -> dict[str, Any]:
    """Hit ratios by capacity, and look-ups a second of processor time."""
    trace = Trace.read(path)
    found: dict[str, Any] = {"capacities": {}, "lookups_per_second": {}}
    for percent in PERCENT:
        capacity = trace.unique_blocks * percent // 100
        ratios, speeds = {}, {}
        for policy in POLICIES:
            started = time.process_time()
            ratios[policy] = trace.hits(policy, capacity) / trace.blocks
            speeds[policy] = round(trace.blocks / (time.process_time() - started))
        found["capacities"][percent] = ratios
        found["lookups_per_second"][percent] = speeds
    report.progress(path.name)
    return found


def invented() -> dict[str, Any]:
    """The same for the invented workloads."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in workloads.WORKLOADS:
            for seed in SEEDS:
                path = Path(folder) / f"{name}-{seed}.jsonl"
                workloads.write(name, seed, path)
                found[f"{name}, seed {seed}"] = measure(path)
    return found


def table(traces: dict[str, Any]) -> str:
    """Hit ratios, and how far the chooser is from the best of the others."""
    lines = []
    for name, found in traces.items():
        for percent, ratios in found["capacities"].items():
            off = ratios["chooser"] - max(ratios[policy] for policy in CHOSEN_FROM)
            shown = [f"{ratios[policy]:.4f}" for policy in POLICIES]
            verdict = "missed" if off < -AIM else "met"
            speed = f"{found['lookups_per_second'][percent]['chooser'] / 1e6:.1f}"
            lines.append([name, f"{percent} %", *shown, f"{off:+.4f}", verdict, speed])
    headers = ["trace", "capacity", *POLICIES, "to the best", "aim", "chooser, M/s"]
    return report.table(headers, lines)


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.choosing", description=__doc__)
    parser.add_argument("traces", type=Path, help="folder with the traces, as docs/benchmarks.md")
    args = report.begin(parser)
    made = invented()
    traces = {name: measure(args.traces / name) for name in TRACES}
    report.finish(args, table(traces | made), {"traces": traces, "invented": made})


if __name__ == "__main__":
    main()
