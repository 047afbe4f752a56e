"""The simulation: replays a trace over pools of two sizes, and prints what they would find.

python examples/simulate.py [TRACE]

TRACE is a file of any format that docs/guides/sizing.md names. Without it the example writes one.
"""

import json
import sys
import tempfile
from pathlib import Path

from penstock.sim import Fleet, Tier, Tiers, Trace, compare

GIB = 1 << 30
SYSTEM = [0, 1]


def write_trace(path: Path) -> Path:
    """Writes 40 conversations of five turns, in Mooncake's format: ids of blocks of 512 tokens."""
    turns = [(talk, turn) for turn in range(5) for talk in range(40)]
    with path.open("w") as file:
        for second, (talk, turn) in enumerate(turns):
            # All begin with one system prompt. Each turn has two blocks more than the one before.
            ids = SYSTEM + [100 * talk + block for block in range(2, 5 + 2 * turn)]
            request = {"timestamp": 1000 * second, "input_length": 512 * len(ids)}
            print(json.dumps(request | {"output_length": 1, "hash_ids": ids}), file=file)
    return path


with tempfile.TemporaryDirectory() as folder:
    trace = Trace.read(sys.argv[1] if sys.argv[1:] else write_trace(Path(folder, "trace.jsonl")))
print(f"{trace.requests} requests, {trace.input_tokens:,} tokens, {trace.unique_blocks} blocks")

host = Tier(nbytes=0, policy="lru", bandwidth=20 * GIB, latency=0.0001)  # no caches of the nodes
pool = Tier(nbytes=0, policy="lru", bandwidth=2 * GIB, latency=0.001)
fleet = Fleet(4, host, pool, bytes_per_token=128 << 10, prefill_speed=10_000.0)
sizes = [Tiers(has_host=False, pool_bytes=gib * GIB) for gib in (8, 32)]
for size, outcome in zip(sizes, compare(trace, fleet, sizes), strict=True):
    ratio, ttft = outcome.total.hit_ratio, outcome.ttft[0.5]
    print(f"{size.pool_bytes // GIB} GiB: {ratio:.1%} of blocks hit, median TTFT {ttft:.3f} s")
