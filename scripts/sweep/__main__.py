"""Serves every architecture of vLLM's registry that can be made tiny by rule.

Each one runs alone, and then over a pool: one engine stores a prompt, another loads it. What is
loaded has to give vLLM's own tokens and probabilities, bit for bit. `--write` puts the table into
docs/guides/models.md. What models for images and sound need comes with a script::

    scripts/multimodal.sh .venv 0.28.0 python -m scripts.sweep --write
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from scripts.sweep.check import (
    FAILS,
    NO_HITS,
    NOT_ALONE,
    NOT_MADE,
    REFUSED,
    RIGHT,
    UNTOLD,
    WRONG,
    Found,
    check,
)
from scripts.sweep.configs import architectures
from scripts.sweep.engine import ENVIRONMENT

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/models.md"
BEGIN, END = "<!-- sweep -->\n", "<!-- end of sweep -->\n"

MEANINGS = {
    RIGHT: "served: a load gives vLLM's own tokens and probabilities",
    WRONG: "**a load gives others**",
    FAILS: "**starts alone, and not with Penstock**",
    REFUSED: "Penstock refuses it, in words",
    NO_HITS: "vLLM's own cache has no hits for it, so there is nothing to compare",
    UNTOLD: "with random weights all prompts have the same answer, which shows nothing",
    NOT_ALONE: "vLLM's CPU build does not start it alone as made by rule, with random weights",
    NOT_MADE: "no configuration could be made by rule",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.sweep", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="how many run beside each other")
    parser.add_argument(
        "--json",
        type=Path,
        help="keep what is found in this file too. What it has is run again only if it is named",
    )
    parser.add_argument("--write", action="store_true", help="write the table into the guide")
    args = parser.parse_args()
    known = architectures()
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"vLLM {version('vllm')} has no architecture {', '.join(unknown)}")
    found = kept(args.json)
    names = args.names or [name for name in known if name not in found]
    os.environ |= ENVIRONMENT
    multiprocessing.set_forkserver_preload(["lab.engines.preloaded"])
    with ThreadPoolExecutor(args.jobs) as pool:
        for number, one in enumerate(pool.map(check, names), 1):
            print(f"{number}/{len(names)} {one.architecture}: {one.outcome} {one.why}", flush=True)
            found[one.architecture] = one
            if args.json:
                lines = {"vllm": version("vllm"), "found": [asdict(one) for one in found.values()]}
                args.json.write_text(json.dumps(lines, indent=1) + "\n")
    if args.write and (missing := sorted(set(known) - found.keys())):
        parser.error(f"the guide's table is of all architectures; missing: {', '.join(missing)}")
    listed = [found[name] for name in known if name in found]
    if args.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + table(listed) + END + rest.split(END)[1])
    print(table(listed))
    return 1 if any(one.outcome in (WRONG, FAILS) for one in listed) else 0


def kept(file: Path | None) -> dict[str, Found]:
    """What an earlier run with the same vLLM found, by architecture."""
    if file is None or not file.exists():
        return {}
    read = json.loads(file.read_text())
    if read["vllm"] != version("vllm"):
        raise SystemExit(f"{file} is of vLLM {read['vllm']}: remove it first")
    return {one["architecture"]: Found(**one) for one in read["found"]}


def table(found: Iterable[Found]) -> str:
    """The guide's tables."""
    by_outcome: dict[str, list[Found]] = {outcome: [] for outcome in MEANINGS}
    for one in found:
        by_outcome[one.outcome].append(one)
    count = sum(map(len, by_outcome.values()))
    lines = [
        f"vLLM {version('vllm')}, {count} architectures:",
        "",
        "| what | how many |",
        "|---|---:|",
        *(f"| {text} | {len(by_outcome[name])} |" for name, text in MEANINGS.items()),
        "",
        f"Served: {', '.join(one.architecture for one in by_outcome[RIGHT])}.",
        "",
        "| architecture | what | why |",
        "|---|---|---|",
        *(
            f"| {one.architecture} | {name} | {_plain(one.why)} |"
            for name, of_one in by_outcome.items()
            for one in of_one
            if name != RIGHT
        ),
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    sys.exit(main())
