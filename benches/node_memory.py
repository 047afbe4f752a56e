"""Four engines of one machine: with a host tier each, and with node memory.

All engines of all rows are alive at once. Prompts, some asked for more often than others, come to a
row's engines in turn; all rows get the same ones, one at a time. An engine forgets its own prefix
cache before each request, so what it does not compute comes from host memory or from the pool. Each
row has a pool of its own with room for everything. The baseline is a host tier of `--size` for each
engine. The other rows have a quarter of that memory in all. Run it as
``python -m benches.node_memory``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import report
from benches.report import MIB, median_ratio, progress
from lab.engines.forks import Fork
from lab.engines.node import Node
from lab.models import attention
from lab.models.saved import VOCABULARY
from lab.servers import PoolServer

BLOCK = 128
PROMPT_BLOCKS = 8
ON_THE_WAY = 32 * MIB
"""Host memory of an engine beside node memory: what two prompts store."""
COUNTERS = ("kept_bytes", "loaded_bytes")


@dataclass
class Row:
    """Engines that are set up alike, and what they did."""

    name: str
    host_bytes: int
    """Host memory of all engines together, node memory included."""
    engines: list[Node]
    seconds: list[float] = field(default_factory=list)
    """To the first token, one for each request."""
    cached: int = 0
    kept_bytes: int = 0
    loaded_bytes: int = 0

    def ask(self, number: int, prompt: list[int]) -> None:
        """Sends the request of this number to the engine whose turn it is."""
        node = self.engines[number % len(self.engines)]
        node.forget()
        before = node.counters()
        begin = time.perf_counter()
        answer = node.ask(prompt, max_tokens=1)
        self.seconds.append(time.perf_counter() - begin)
        after = node.counters()
        self.cached += answer.cached
        for name in COUNTERS:
            more = int(after.get(name, 0) - before.get(name, 0))
            setattr(self, name, getattr(self, name) + more)


def start(
    stack: ExitStack, folder: Path, model: Path, name: str, count: int, settings: dict[str, Any]
) -> list[Node]:
    """A row's engines, and their pool."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    server = stack.enter_context(PoolServer("valkey", own))
    nodes = [
        Node(
            model,
            own / f"{number}.log",
            launch=Fork,
            pool=server.unix_url,
            settings={"penstock.host_tier": True} | settings,
            max_model_len=(PROMPT_BLOCKS + 1) * BLOCK,
            block_size=BLOCK,
            kv_cache_memory_bytes=64 * MIB,
        )
        for number in range(count)
    ]
    for node in nodes:
        stack.enter_context(node)
    return nodes


def requests(prompts: int, count: int, seed: int) -> list[list[int]]:
    """Prompts in the order in which they are asked for, by Zipf's law."""
    rng = random.Random(seed)
    each = [
        [rng.randrange(3, VOCABULARY) for _ in range(PROMPT_BLOCKS * BLOCK + 9)]
        for _ in range(prompts)
    ]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    return rng.choices(each, weights, k=count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.node_memory", description=__doc__)
    parser.add_argument("--engines", type=int, default=4, help="of each row")
    parser.add_argument("--prompts", type=int, default=48, help="different ones")
    parser.add_argument("--requests", type=int, default=240, help="to each row")
    parser.add_argument("--size", type=int, default=512, help="MiB of a host tier")
    args = report.begin(parser)
    size = args.size * MIB
    segment = f"bench-node-{os.getpid()}"
    setups: dict[str, tuple[int, dict[str, Any]]] = {
        "a host tier each": (args.engines * size, {"penstock.host_bytes": size}),
        "node memory": (
            size,
            {
                "penstock.host_memory": f"shm://{segment}?size={size - args.engines * ON_THE_WAY}",
                "penstock.host_bytes": ON_THE_WAY,
            },
        ),
        "a quarter each": (size, {"penstock.host_bytes": size // args.engines}),
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        model = attention.llama(folder / "model", hidden=512, layers=8, heads=8, kv_heads=4)
        stack.callback(Path(f"/dev/shm/penstock-{segment}").unlink, missing_ok=True)
        rows = []
        for label, (host_bytes, settings) in setups.items():
            nodes = start(stack, folder, model, label, args.engines, settings)
            rows.append(Row(label, host_bytes, nodes))
            progress(f"{label}: {len(nodes)} engines")
        turns = itertools.cycle(range(len(rows)))
        for number, prompt in enumerate(requests(args.prompts, args.requests, seed=1)):
            first = next(turns)
            for row in [*rows[first:], *rows[:first]]:
                row.ask(number, prompt)
            if number % 40 == 39:
                progress(f"{number + 1} of {args.requests} requests")
    asked = args.requests * PROMPT_BLOCKS * BLOCK
    result = {
        row.name: {
            "host_bytes": row.host_bytes,
            "hit_share": row.cached / asked,
            "kept_bytes": row.kept_bytes,
            "loaded_bytes": row.loaded_bytes,
            "from_host_share": row.kept_bytes / max(1, row.kept_bytes + row.loaded_bytes),
            "first_token_p50": statistics.median(row.seconds),
            "to_baseline": median_ratio(row.seconds, rows[0].seconds),
            "seconds": row.seconds,
        }
        for row in rows
    }
    heads = [f"{args.engines} engines", "host memory, MiB", "hits", "of them from host memory"]
    heads += ["MiB of the pool", "first token, ms", "to the baseline"]
    lines = [
        [
            name,
            f"{found['host_bytes'] / MIB:,.0f}",
            f"{found['hit_share']:.1%}",
            f"{found['from_host_share']:.1%}",
            f"{found['loaded_bytes'] / MIB:,.0f}",
            f"{found['first_token_p50'] * 1e3:,.1f}",
            f"{found['to_baseline']:.2f}",
        ]
        for name, found in result.items()
    ]
    report.finish(args, report.table(heads, lines), result)


if __name__ == "__main__":
    main()
