"""Checks the figure that pays for the pool: seconds of prefill saved less seconds waited.

An engine with Penstock and an engine of vLLM alone get the same prompts, in turn and at rest. A
pool holds half of them. The others are new to both engines. The bench compares two figures: what
Penstock's metrics say was saved, and what the first tokens show. The latter is the sum of the plain
engine's times less the other engine's, over the prompts that were loaded. Run it as ``python -m
benches.saved_seconds``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.connectors import ENGINE_ENVIRONMENT, Connector, Penstock
from benches.shared.engines import BLOCK, MODELS, connected, first_token, save_model
from benches.shared.rows import rotated
from lab.engines.node import Node
from lab.models.prompts import tokens

PENSTOCK, PLAIN = ROWS = ("penstock", "plain")
WARM_UPS = 3
"""New prompts that both engines compute first, at rest too: they set up what later ones use, and
the estimate rests on them at first."""
COLUMNS = [
    ("prompts loaded", "{loaded}"),
    ("saved, s", "{saved_seconds:.2f}"),
    ("waited, s", "{waited_seconds:.2f}"),
    ("net, s", "{net_seconds:.2f}"),
    ("first tokens show, s", "{shown_seconds:.2f}"),
    ("ratio", "{net_to_shown:.3f}"),
]


def compare(
    nodes: dict[str, Node], stored: list[list[int]], fresh: list[list[int]]
) -> list[dict[str, Any]]:
    """Both engines' times, prompt by prompt: one that is stored, then one that is not."""
    for prompt in fresh[:WARM_UPS]:
        for row in ROWS:
            first_token(nodes[row], prompt)
    rows = []
    pairs = zip(stored, fresh[WARM_UPS:], strict=True)
    for number, prompt in enumerate(prompt for pair in pairs for prompt in pair):
        answers = {row: first_token(nodes[row], prompt) for row in rotated(ROWS, number // 2)}
        times = {row: answer.seconds for row, answer in answers.items()}
        loaded = sum(answer.cached for answer in answers.values())
        rows.append({**times, "loaded_tokens": loaded})
        report.progress(f"prompt {number}: {times}")
    return rows


def run(args: argparse.Namespace, folder: Path, pool: Penstock) -> dict[str, Any]:
    """The times of all prompts, and both figures."""
    half = args.prompts // 2
    stored = [tokens(args.tokens, f"stored {number}") for number in range(half)]
    fresh = [tokens(args.tokens, f"fresh {number}") for number in range(half + WARM_UPS)]
    model = save_model(folder, args.model, args.dtype)
    with connected(model, folder / "first.log", pool, args.dtype) as first:
        for prompt in stored:
            first.ask(prompt, max_tokens=1)
        first.wait_for("stored_blocks", half * (args.tokens // BLOCK))
    with (
        connected(model, folder / "second.log", pool, args.dtype) as second,
        connected(model, folder / "plain.log", Connector(), args.dtype) as plain,
    ):
        rows = compare({PENSTOCK: second, PLAIN: plain}, stored, fresh)
        # The last load is reported with a later step.
        second.wait_for("loaded_tokens", sum(row["loaded_tokens"] for row in rows))
        counters = second.counters()
    saved, waited = counters["prefill_saved_seconds"], counters["load_wait_seconds"]
    shown = sum(row[PLAIN] - row[PENSTOCK] for row in rows if row["loaded_tokens"])
    return {
        "prompts": rows,
        "saved_seconds": saved,
        "waited_seconds": waited,
        "net_seconds": saved - waited,
        "shown_seconds": shown,
        "net_to_shown": (saved - waited) / shown,
    }


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.saved_seconds", description=__doc__)
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=1800, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=20, help="half of them are in the pool")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    pool = Penstock("shm")
    with tempfile.TemporaryDirectory() as name:
        pool.start(Path(name))
        try:
            result = run(args, Path(name), pool)
        finally:
            pool.stop()
    loaded = sum(row["loaded_tokens"] > 0 for row in result["prompts"])
    report.finish(args, report.listing([{"loaded": loaded} | result], COLUMNS), result)


if __name__ == "__main__":
    main()
