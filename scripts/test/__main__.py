"""Runs the checks, in the repository's root and in the environment that `make` arranges.

Fast ones come first. Two stages run beside each other, and what a stage wrote is shown when it is
over. A stage that failed stops no other; the end says what became of all.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from scripts.test import passed
from scripts.test.lanes import Lanes
from scripts.test.stages import STAGES, Stage

ROOT = Path(__file__).resolve().parents[2]

KINDS = {
    "lint": "linters and type checkers",
    "check": "those, and unit tests but the long ones",
    "unit": "all unit tests",
    "all": "everything, but for stages whose inputs have not changed since they last passed",
    "full": "everything, and every architecture of vLLM's registry",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.test", description=__doc__)
    kinds = "; ".join(f"{name}: {text}" for name, text in KINDS.items())
    parser.add_argument("kind", choices=KINDS, help=kinds)
    parser.add_argument("words", nargs="*", help="only stages whose names have one of these")
    args = parser.parse_args()
    kind = args.kind
    wanted = {"all", "full"} if kind == "full" else {kind}
    stages = [stage for stage in STAGES if wanted & set(stage.kinds)]
    if args.words:
        stages = [stage for stage in stages if any(word in stage.name for word in args.words)]
        if not stages:
            parser.error(f"no stage of {kind} has one of these words: {' '.join(args.words)}")
    digests = {stage.name: passed.digest(stage, ROOT) for stage in stages if stage.inputs}
    known = passed.recorded()
    unchanged = [
        stage
        for stage in stages
        if kind != "full" and stage.inputs and known.get(stage.name) == digests[stage.name]
    ]
    summary, failures = run([stage for stage in stages if stage not in unchanged], digests)
    for stage in unchanged:
        summary.append(f"{stage.name:<56}  unchanged since it passed: left out (`make full`)")
    print("\n" + "\n".join(summary + failures))
    return 1 if failures else 0


def run(stages: list[Stage], digests: dict[str, str]) -> tuple[list[str], list[str]]:
    """Runs the stages, and returns a line of each and of tests that were skipped, and what those
    that failed said of it."""
    summary: list[str] = []
    failures: list[str] = []
    lanes = Lanes(ROOT)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lanes.interrupt)
    with contextlib.closing(lanes.run(stages)) as outcomes:
        for outcome in outcomes:
            stage = outcome.stage
            line = f"{stage.name:<56} {outcome.seconds:5.0f} s {outcome.cpu:5.0f} CPU s"
            if outcome.failure is not None:
                line += f"  FAILED: {outcome.failure}"
                failures += ["", f"== {stage.name}: {outcome.failure}", *outcome.faults]
            if stage.inputs:
                passed.record(stage, digests[stage.name] if outcome.failure is None else None)
            print(line, flush=True)
            summary += [line, *(f"    {said}" for said in outcome.skipped)]
    return summary, failures


if __name__ == "__main__":
    sys.exit(main())
