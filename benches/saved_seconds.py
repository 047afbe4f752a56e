"""Checks the figure that pays for the pool: seconds of prefill saved less seconds waited.

An engine with Penstock and an engine of vLLM alone get the same prompts, in turn and at rest. A
pool holds half of them. The others are new to both engines. The bench compares two figures: what
Penstock's metrics say was saved, and what the first tokens show. The latter is the sum of the plain
engine's times less the other engine's, over the prompts that were loaded. Run it as ``python -m
benches.saved_seconds``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benches import connectors, quiet, report
from benches.connectors import ENGINE_ENVIRONMENT
from benches.end_to_end import BLOCK, KV_BYTES, MODELS
from lab.engines.node import Node
from lab.models import attention
from lab.models.saved import VOCABULARY

WARM_UPS = 3
"""New prompts that both engines compute first, at rest too: they set up what later ones use, and
the estimate rests on them at first."""


def prompt(seed: str, tokens: int) -> list[int]:
    """Tokens that no other seed gives."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def engine(model: Path, log: Path, dtype: str, transfer: dict[str, Any] | None) -> Node:
    """An engine, with Penstock if it is told what to transfer."""
    options: dict[str, Any] = {} if transfer is None else {"kv_transfer_config": transfer}
    return Node(
        model,
        log,
        env=ENGINE_ENVIRONMENT,
        dtype=dtype,
        block_size=BLOCK,
        kv_cache_memory_bytes=KV_BYTES,
        **options,
    )


def ask(node: Node, tokens: list[int]) -> tuple[float, int]:
    """Seconds to the first token, at rest, and the tokens that were not computed."""
    quiet.wait(timeout=3)
    answer = node.ask(tokens, max_tokens=1)
    return answer.seconds, answer.cached


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.saved_seconds", description=__doc__)
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=1800, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=20, help="half of them are in the pool")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    half = args.prompts // 2
    stored = [prompt(f"stored {n}", args.tokens) for n in range(half)]
    fresh = [prompt(f"fresh {n}", args.tokens) for n in range(half + WARM_UPS)]
    pool = connectors.Penstock("shm")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = attention.llama(folder / args.model, dtype=args.dtype, **MODELS[args.model])
        pool.start(folder)
        try:
            with engine(model, folder / "first.log", args.dtype, pool.transfer()) as first:
                for tokens in stored:
                    first.ask(tokens, max_tokens=1)
                first.wait_for("stored_blocks", half * (args.tokens // BLOCK))
            with (
                engine(model, folder / "second.log", args.dtype, pool.transfer()) as second,
                engine(model, folder / "plain.log", args.dtype, None) as plain,
            ):
                rows = compare(second, plain, stored, fresh)
                # The last load is reported with a later step.
                second.wait_for("loaded_tokens", sum(row["loaded_tokens"] for row in rows))
                counters = second.counters()
        finally:
            pool.stop()
    saved, waited = counters["prefill_saved_seconds"], counters["load_wait_seconds"]
    loaded = [row for row in rows if row["loaded_tokens"]]
    shown = sum(row["plain"] - row["penstock"] for row in loaded)
    result = {
        "prompts": rows,
        "saved_seconds": saved,
        "waited_seconds": waited,
        "net_seconds": saved - waited,
        "shown_seconds": shown,
        "net_to_shown": (saved - waited) / shown,
    }
    table = report.table(
        ["prompts loaded", "saved, s", "waited, s", "net, s", "first tokens show, s", "ratio"],
        [
            [
                f"{len(loaded)}",
                f"{saved:.2f}",
                f"{waited:.2f}",
                f"{saved - waited:.2f}",
                f"{shown:.2f}",
                f"{result['net_to_shown']:.3f}",
            ]
        ],
    )
    report.finish(args, table, result)


def compare(
    second: Node, plain: Node, stored: list[list[int]], fresh: list[list[int]]
) -> list[dict[str, Any]]:
    """Both engines' times, prompt by prompt: one that is stored, then one that is not."""
    for tokens in fresh[:WARM_UPS]:
        ask(second, tokens)
        ask(plain, tokens)
    rows = []
    pairs = zip(stored, fresh[WARM_UPS:], strict=True)
    for number, tokens in enumerate(tokens for pair in pairs for tokens in pair):
        nodes = {"penstock": second, "plain": plain}
        times = {}
        loaded = 0
        for name in sorted(nodes, reverse=number % 4 < 2):
            times[name], cached = ask(nodes[name], tokens)
            loaded += cached
        rows.append({**times, "loaded_tokens": loaded})
        report.progress(f"prompt {number}: {times}")
    return rows


if __name__ == "__main__":
    main()
