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
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benches import quiet, report
from benches.connectors import ENGINE_ENVIRONMENT
from benches.report import progress
from lab.engines.node import Node
from lab.models import attention
from lab.models.saved import VOCABULARY

LAYOUTS = ("LBHNC", "BLHNC")
OUTPUT_TOKENS = 64


class Engine:
    """An engine with one layout, and its times."""

    def __init__(self, layout: str, model: Path, folder: Path) -> None:
        self.layout = layout
        self.prefill: list[float] = []
        """Seconds to the first token."""
        self.decode: list[float] = []
        """Seconds for each token after the first."""
        self.node = Node(
            model,
            folder / f"{layout}.log",
            pool=f"file://{folder}/{layout}?size=2GiB",
            settings={"penstock.kv_layout": layout},
            env=ENGINE_ENVIRONMENT,
        )

    def measure(self, prompt: list[int], again: list[int]) -> None:
        """Times the first token of `prompt`, and the tokens that follow `again`."""
        quiet.wait(timeout=3)
        self.prefill.append(self.node.ask(prompt, max_tokens=1).seconds)
        # The second request hits the engine's own prefix cache, so the rest is decoding.
        self.node.ask(again, max_tokens=1)
        whole = self.node.ask(again, max_tokens=OUTPUT_TOKENS).seconds
        short = self.node.ask(again, max_tokens=1).seconds
        self.decode.append((whole - short) / (OUTPUT_TOKENS - 1))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Times of both engines, and the number of answers that differ."""
    rng = random.Random(args.seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        model = attention.llama(folder / "model", hidden=512, layers=8, heads=8, kv_heads=4)
        engines = [Engine(layout, model, folder) for layout in LAYOUTS]
        for engine in engines:
            ending.callback(engine.node.kill)
            engine.node.wait_ready()
        for number in range(args.passes + 1):
            pair = prompt(args.input_tokens), prompt(args.input_tokens // 4)
            for step in range(len(engines)):
                engines[(number + step) % len(engines)].measure(*pair)
            progress(f"pass {number} of {args.passes}")
        differing = 0
        for number in range(args.prompts):
            question = prompt(rng.randrange(20, 400))
            answers = [engine.node.ask(question, max_tokens=16).text for engine in engines]
            differing += answers[0] != answers[1]
            if number % 50 == 49:
                progress(f"{number + 1} of {args.prompts} answers compared")
    base = engines[0]
    return {
        "prompts_compared": args.prompts,
        "differing": differing,
        "rows": [
            {
                "layout": engine.layout,
                "first_token": statistics.median(engine.prefill[1:]),
                "first_token_to_LBHNC": report.median_ratio(engine.prefill[1:], base.prefill[1:]),
                "per_token": statistics.median(engine.decode[1:]),
                "per_token_to_LBHNC": report.median_ratio(engine.decode[1:], base.decode[1:]),
                "each": {"first_token": engine.prefill[1:], "per_token": engine.decode[1:]},
            }
            for engine in engines
        ],
    }


def table(result: dict[str, Any]) -> str:
    """One row for each layout."""
    lines = [
        [
            row["layout"],
            f"{row['first_token'] * 1000:.0f}",
            f"{row['first_token_to_LBHNC']:.3f}",
            f"{row['per_token'] * 1000:.2f}",
            f"{row['per_token_to_LBHNC']:.3f}",
        ]
        for row in result["rows"]
    ]
    head = ["layout", "first token, ms", "to LBHNC", "a token after it, ms", "to LBHNC"]
    compared = f"{result['prompts_compared']} answers compared, {result['differing']} differ"
    return report.table(head, lines) + "\n" + compared


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.layout_cost", description=__doc__)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--input-tokens", type=int, default=1600)
    parser.add_argument("--prompts", type=int, default=300, help="answers to compare")
    parser.add_argument("--seed", type=int, default=1)
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    found = run(args)
    report.finish(args, table(found), found)


if __name__ == "__main__":
    main()
