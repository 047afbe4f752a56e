"""How often a Python loop waits, alone and beside a thread that takes the interpreter's lock.

``benches.gil`` tells by these waits whether an engine holds the lock. Its tests take a few
of them for none. This shows how far that is from what a thread causes that takes the lock again
and again. Passes of both kinds take turns. Run it as ``python -m benches.lock_waits``.
"""

from __future__ import annotations

import argparse
import statistics
import threading

from benches import gil, report
from benches.report import progress

KINDS = ("alone", "beside a thread that takes the lock")


def take_the_lock(done: threading.Event) -> None:
    """Holds the lock for a few hundred microseconds at a time."""
    while not done.wait(0.0005):
        sum(range(20_000))


def waits(kind: str, seconds: float) -> float:
    """The loop's waits per second in one pass."""
    done = threading.Event()
    thread = threading.Thread(target=take_the_lock, args=(done,))
    if kind != "alone":
        thread.start()
    try:
        return gil._count(seconds, None).waits
    finally:
        done.set()
        if kind != "alone":
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.lock_waits", description=__doc__)
    parser.add_argument("--passes", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.5, help="a pass")
    args = report.begin(parser)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.passes):
        for kind, seen in found.items():
            seen.append(waits(kind, args.seconds))
        progress(f"pass {number + 1} of {args.passes}")
    lines = [
        [kind, *(f"{figure:.1f}" for figure in (statistics.median(seen), min(seen), max(seen)))]
        for kind, seen in found.items()
    ]
    heads = ["waits per second", "median", "least", "most"]
    report.finish(args, report.table(heads, lines), {"waits_per_second": found})


if __name__ == "__main__":
    main()
