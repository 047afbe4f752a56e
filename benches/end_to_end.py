"""Time to first token on the real vLLM, with every connector.

The first process computes a prompt and stores it. The second process loads it. Before a load, its
files are brought into the page cache. `benches.shared.two_processes` says how the engines take
turns.

The floor is vLLM's own prefix-cache hit. The result says for how many outputs tokens and logprobs
are those of that hit. Run it as ``python -m benches.end_to_end``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.engines import MODELS, save_model, token_bytes
from benches.shared.rows import groups
from benches.shared.systems import BASELINE, NAMES, every
from benches.shared.two_processes import Group, Row, prompts, summary

HEADS = [
    "second process, ms",
    "to the floor",
    "first process, cold, to plain",
    "request right after, to plain",
    "same tokens as own hit",
    "same logprobs, bit for bit",
]


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all rows with one model, in groups of `--together` engines."""
    others = [name for name in args.rows.split(",") if name != BASELINE]
    found: dict[str, Any] = {"rows": [], "restless": 0}
    for number, chosen in enumerate(groups(others, args.together - 1)):
        rows = {name: Row(every()[name], args.lengths) for name in (BASELINE, *chosen)}
        size = token_bytes(model, args.dtype)
        asked = prompts(args.lengths, args.repetitions, args.seed + number, size)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            group = Group(save_model(folder, model, args.dtype), args.dtype, rows, folder)
            try:
                group.run(asked)
            finally:
                if args.logs is not None:
                    report.keep_logs(folder, args.logs / f"{model}-{number}")
        found["restless"] += group.restless
        found["rows"] += [summary(name, rows) | {"group": number} for name in rows]
    return found


def table(model: str, rows: list[dict[str, Any]], lengths: list[int]) -> str:
    """A line for each row, and one for the floor."""
    lines = []
    for row in rows:

        def across(pattern: str, row: dict[str, Any] = row) -> str:
            return report.across(row, lengths, pattern)

        if row["failure"] is not None:
            lines.append([row["label"], "failed", *[""] * 5])
            continue
        times = [across("{load!m:.0f}"), across("{load_to_floor:.2f}")]
        if row["row"] == BASELINE:
            lines.append([f"{row['label']}: recompute", *times, "1", "1", "", ""])
            floor = f"{row['label']}: own prefix-cache hit (the floor)"
            lines.append([floor, across("{hit!m:.0f}"), "1", *[""] * 4])
        else:
            ratios = [across("{cold_to_plain:.3f}"), across("{after_to_plain:.2f}")]
            same = [across("{same_tokens}"), across("{same_bits}")]
            lines.append([row["label"], *times, *ratios, *same])
    title = f"{model}, prompts of {' / '.join(map(str, lengths))} tokens"
    return report.table([title, *HEADS], lines)


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Measures, prints a table for each model and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.end_to_end", description=__doc__)
    parser.add_argument("--models", default="mid,tiny", help=f"of {','.join(MODELS)}")
    parser.add_argument("--rows", default=",".join(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--lengths", type=numbers, default="1800,3900", help="prompt tokens")
    parser.add_argument("--repetitions", type=int, default=5, help="prompts of each length")
    parser.add_argument(
        "--together",
        type=int,
        default=5,
        metavar="N",
        help="engines alive at once; more rows go in groups with a baseline each",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of weights and KV; without AVX-512 vLLM computes bfloat16 some ten times slower",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs here")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    result: dict[str, Any] = {"dtype": args.dtype, "models": {}, "restless": {}}
    for model in args.models.split(","):
        found = measure(model, args)
        result["models"][model] = found["rows"]
        result["restless"][model] = found["restless"]
        report.finish(args, table(model, found["rows"], args.lengths), result)


if __name__ == "__main__":
    main()
