"""The cost of a cross-layer layout for the model, and whether it changes an answer.

There are two engines with Penstock, each over a pool of its own. One has a tensor per layer
(LBHNC). The other has all layers of a block side by side (BLHNC). They are asked in turn, and each
prompt begins with another one. Nothing is loaded from a pool, so only the layout is different. Then
both answer a few hundred short prompts. The answers have to be equal to the last bit. Run it as
``python -m benches.layout_cost``.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.engines import first_token, save_model
from benches.shared.report import progress
from benches.shared.rows import Times, turns
from lab.engines.node import Node
from lab.models.prompts import tokens

LAYOUTS = ("LBHNC", "BLHNC")
BASELINE = LAYOUTS[0]
OUTPUT_TOKENS = 64
FIRST_TOKEN, PER_TOKEN = FIGURES = ("first_token", "per_token")
COLUMNS = [
    ("layout", "{layout}"),
    ("first token, ms", "{first_token!m:.0f}"),
    ("to LBHNC", "{first_token_to_LBHNC:.3f}"),
    ("a token after it, ms", "{per_token!m:.2f}"),
    ("to LBHNC", "{per_token_to_LBHNC:.3f}"),
]


def per_token(node: Node, prompt: list[int]) -> float:
    """Seconds for each token that follows a prompt, after the first."""
    # The next requests hit the engine's own prefix cache, so the rest is decoding.
    node.ask(prompt, max_tokens=1)
    whole = node.ask(prompt, max_tokens=OUTPUT_TOKENS).seconds
    short = node.ask(prompt, max_tokens=1).seconds
    return (whole - short) / (OUTPUT_TOKENS - 1)


def differing(nodes: dict[str, Node], args: argparse.Namespace) -> int:
    """The number of answers that are not the same with both layouts."""
    rng, found = random.Random(args.seed), 0
    for number in range(args.prompts):
        question = tokens(rng.randrange(20, 400), f"{args.seed}/question {number}")
        answers = [node.ask(question, max_tokens=16).text for node in nodes.values()]
        found += answers[0] != answers[1]
        if number % 50 == 49:
            progress(f"{number + 1} of {args.prompts} answers compared")
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Times of both engines, and the number of answers that differ."""
    times = Times()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        model = save_model(folder)
        nodes = {
            layout: Node(
                model,
                folder / f"{layout}.log",
                pool=f"file://{folder}/{layout}?size=2GiB",
                settings={"penstock.kv_layout": layout},
                env=ENGINE_ENVIRONMENT,
            )
            for layout in LAYOUTS
        }
        for node in nodes.values():
            ending.callback(node.kill)
        for node in nodes.values():
            node.wait_ready()
        for number, layout in turns(LAYOUTS, args.passes):
            progress(f"pass {number + 1} of {args.passes}: {layout}")
            node, seed = nodes[layout], f"{args.seed}/{number}"
            seconds = first_token(node, tokens(args.input_tokens, seed)).seconds
            times.add(number, layout, FIRST_TOKEN, seconds)
            again = tokens(args.input_tokens // 4, f"{seed} again")
            times.add(number, layout, PER_TOKEN, per_token(node, again))
        found = differing(nodes, args)
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        row: dict[str, Any] = {"layout": layout}
        for figure in FIGURES:
            row[figure] = times.median(layout, figure)
            row[f"{figure}_to_{BASELINE}"] = times.ratio(layout, BASELINE, figure)
        rows.append(row | {"each": {figure: times.each(layout, figure) for figure in FIGURES}})
    return {"prompts_compared": args.prompts, "differing": found, "rows": rows}


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.layout_cost", description=__doc__)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--input-tokens", type=int, default=1600)
    parser.add_argument("--prompts", type=int, default=300, help="answers to compare")
    parser.add_argument("--seed", type=int, default=1)
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    found = run(args)
    compared = f"{args.prompts} answers compared, {found['differing']} differ"
    report.finish(args, f"{report.listing(found['rows'], COLUMNS)}\n{compared}", found)


if __name__ == "__main__":
    main()
