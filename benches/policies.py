"""Hit ratios of the eviction policies on real traces, and the limit that no policy can exceed.

One cache serves the whole trace. A block is a hit if it is found, and so are all blocks before it
in its prompt. Run it as ``python -m benches.policies FOLDER``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benches.shared import report
from penstock.sim import POLICIES, Trace

TRACES = (
    "mooncake/conversation_trace.jsonl",
    "coding-sessions/sessions.jsonl.gz",
    "agent/miniswe.jsonl.gz",
    "agent/taubench.jsonl.gz",
)
PERCENT = (1, 5, 10, 20)


def measure(path: Path) -> dict[str, Any]:
    """Hit ratios by capacity, and look-ups a second of processor time.

    Capacities are in per cent of the trace's different blocks.
    """
    trace = Trace.read(path)
    found: dict[str, Any] = {
        "requests": trace.requests,
        "blocks": trace.blocks,
        "unique_blocks": trace.unique_blocks,
        "infinite": trace.infinite_hits() / trace.blocks,
        "capacities": {},
        "lookups_per_second": {},
    }
    for percent in PERCENT:
        capacity = trace.unique_blocks * percent // 100
        ratios = {}
        speeds = {}
        for policy in POLICIES:
            started = time.process_time()
            ratios[policy] = trace.hits(policy, capacity) / trace.blocks
            speeds[policy] = round(trace.blocks / (time.process_time() - started))
        ratios["belady"] = trace.belady_hits(capacity) / trace.blocks
        found["capacities"][percent] = ratios
        found["lookups_per_second"][percent] = speeds
        report.progress(f"{path.name}: {percent} %")
    return found


def table(traces: dict[str, Any]) -> str:
    """Hit ratios, one row for each trace and capacity."""
    lines = [
        [name, f"{percent} %", *(f"{ratio:.4f}" for ratio in [*ratios.values(), found["infinite"]])]
        for name, found in traces.items()
        for percent, ratios in found["capacities"].items()
    ]
    return report.table(["trace", "capacity", *POLICIES, "belady", "no bound"], lines)


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.policies", description=__doc__)
    parser.add_argument("traces", type=Path, help="folder with the traces, as docs/benchmarks.md")
    args = report.begin(parser)
    traces = {name: measure(args.traces / name) for name in TRACES}
    report.finish(args, table(traces), {"traces": traces})


if __name__ == "__main__":
    main()
