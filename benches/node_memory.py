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
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.engines import BLOCK, save_model
from benches.shared.report import MIB, progress
from benches.shared.rows import Times, turns
from lab.engines.forks import Fork
from lab.engines.node import Node
from lab.models.prompts import tokens
from lab.segments import Segment
from lab.servers import PoolServer

PROMPT_BLOCKS = 8
ON_THE_WAY = 32 * MIB
"""Host memory of an engine beside node memory: what two prompts store."""
EACH, NODE, QUARTER = "a host tier each", "node memory", "a quarter each"
KEPT, LOADED = "kept_bytes", "loaded_bytes"
FIRST_TOKEN = "first token"
COLUMNS = [
    ("engines", "{engines}"),
    ("host memory, MiB", "{host_bytes!M:,.0f}"),
    ("hits", "{hit_share:.1%}"),
    ("of them from host memory", "{from_host_share:.1%}"),
    ("MiB of the pool", "{loaded_bytes!M:,.0f}"),
    ("first token, ms", "{first_token_p50!m:,.1f}"),
    ("to the baseline", "{to_baseline:.2f}"),
]


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
    progress(f"{name}: {len(nodes)} engines")
    return nodes


def requests(prompts: int, count: int) -> list[list[int]]:
    """Prompts in the order in which they are asked for, by Zipf's law."""
    each = [tokens(PROMPT_BLOCKS * BLOCK + 9, number) for number in range(prompts)]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    return random.Random(1).choices(each, weights, k=count)


def ask(node: Node, prompt: list[int]) -> tuple[float, Counter[str]]:
    """Seconds to the first token after a prompt, and what was cached, and from where."""
    node.forget()
    before = node.counters()
    begin = time.perf_counter()
    answer = node.ask(prompt, max_tokens=1)
    seconds = time.perf_counter() - begin
    after = node.counters()
    more = {name: int(after.get(name, 0) - before.get(name, 0)) for name in (KEPT, LOADED)}
    return seconds, Counter(more | {"cached": answer.cached})


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.node_memory", description=__doc__)
    parser.add_argument("--engines", type=int, default=4, help="of each row")
    parser.add_argument("--prompts", type=int, default=48, help="different ones")
    parser.add_argument("--requests", type=int, default=240, help="to each row")
    parser.add_argument("--size", type=int, default=512, help="MiB of a host tier")
    args = report.begin(parser)
    size, times = args.size * MIB, Times()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        Segment("bench-node") as segment,
        ExitStack() as stack,
    ):
        host = "penstock.host_bytes"
        node_memory = segment.url(size - args.engines * ON_THE_WAY)
        setups: dict[str, tuple[int, dict[str, Any]]] = {
            EACH: (args.engines * size, {host: size}),
            NODE: (size, {"penstock.host_memory": node_memory, host: ON_THE_WAY}),
            QUARTER: (size, {host: size // args.engines}),
        }
        folder = Path(name)
        model = save_model(folder)
        rows = {
            row: start(stack, folder, model, row, args.engines, settings)
            for row, (_, settings) in setups.items()
        }
        counted: dict[str, Counter[str]] = {row: Counter() for row in rows}
        prompts = requests(args.prompts, args.requests)
        for number, row in turns(list(rows), len(prompts), warm_up=0):
            seconds, more = ask(rows[row][number % args.engines], prompts[number])
            times.add(number, row, FIRST_TOKEN, seconds)
            counted[row].update(more)
    asked = args.requests * PROMPT_BLOCKS * BLOCK
    result = {
        row: {
            "host_bytes": setups[row][0],
            "hit_share": of["cached"] / asked,
            KEPT: of[KEPT],
            LOADED: of[LOADED],
            "from_host_share": of[KEPT] / max(1, of[KEPT] + of[LOADED]),
            "first_token_p50": times.median(row, FIRST_TOKEN),
            "to_baseline": times.ratio(row, EACH, FIRST_TOKEN),
            "seconds": times.each(row, FIRST_TOKEN),
        }
        for row, of in counted.items()
    }
    lines = [{"engines": f"{args.engines}, {row}"} | found for row, found in result.items()]
    report.finish(args, report.listing(lines, COLUMNS), result)


if __name__ == "__main__":
    main()
