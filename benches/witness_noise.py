"""How far KV that is computed again lies from what it was, and how far wrong KV does.

Engines compute the same prompts in several ways: in long and short steps, alone and together, by
decoding, and with kernels that sum in other orders. Each stores into a pool of its own, and
payloads of equal keys are compared. Then engines with wrong models do the same, and payloads are
damaged. Run it as ``python -m benches.witness_noise``.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benches.shared import report
from benches.shared.report import progress
from benches.witness import ways
from benches.witness.families import FAMILIES
from benches.witness.faults import MODEL_FAULTS, OTHER_SEED, NotSuitable, flipped, payload_faults
from benches.witness.payloads import Payload, Payloads
from benches.witness.raw import Raw
from benches.witness.statistic import WIDTHS, WINDOW, Array, Distance, distance
from benches.witness.verdict import JUMP_FLOOR, wrong
from benches.witness.ways import Bench
from lab.engines.node import StartError

COLUMNS = [
    ("family", "{family}"),
    ("layers", "{kind}"),
    ("element", "{element}"),
    ("what", "{what}"),
    ("pairs", "{pairs}"),
    ("equal", "{equal}"),
    ("called wrong", "{wrong}"),
    ("whole", "{whole[0]:.2g} / {whole[2]:.2g} / {whole[4]:.2g}"),
    (f"window of {WINDOW}", "{window[0]:.2g} / {window[2]:.2g} / {window[4]:.2g}"),
    ("layer", "{layer[0]:.2g} / {layer[2]:.2g} / {layer[4]:.2g}"),
    ("first layer", "{first[0]:.2g} / {first[2]:.2g} / {first[4]:.2g}"),
    ("jump", "{jump[0]:.2g} / {jump[2]:.2g} / {jump[4]:.2g}"),
]
QUANTILES = (0, 0.01, 0.5, 0.99, 1)
FAILURES = (StartError, RuntimeError, AssertionError, TimeoutError, queue.Empty)
Found = list[Distance | None]


class Rows:
    """Distances by kind of layer, element type, and what was compared."""

    def __init__(self, family: str, raw: Raw | None) -> None:
        self._family, self._raw = family, raw
        self._found: dict[tuple[str, str, str], Found] = defaultdict(list)
        self._wrong: dict[tuple[str, str, str], Counter[str | None]] = defaultdict(Counter)

    def add(
        self, where: Payload, what: str, one: Array, other: Array, *, is_honest: bool = False
    ) -> None:
        """Compares a pair. States of several types can only be equal or not."""
        if self._raw is not None:
            self._raw.add(self._family, where, what, one, other, is_honest=is_honest)
        if where.element in WIDTHS:
            found = distance(one, other, where.element, where.layers)
            key = where.kind, where.element, what
            self._found[key].append(found)
            if found is not None:
                self._wrong[key][wrong(found, where.element, is_first=where.is_first)] += 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each."""
        for (kind, element, what), found in self._found.items():
            differing = [each for each in found if each is not None]
            said = self._wrong[kind, element, what]
            row = {
                "family": self._family,
                "kind": kind,
                "element": element,
                "what": what,
                "pairs": len(found),
                "equal": len(found) - len(differing),
                "wrong": said.total() - said[None],
                "by": {test: count for test, count in said.items() if test is not None},
            }
            if differing:
                row |= summary(differing, element)
            yield row


def summary(found: list[Distance], element: str) -> dict[str, Any]:
    """Quantiles of what is known of pairs that differ."""
    floor = JUMP_FLOOR[element]
    columns: dict[str, Callable[[Distance], float]] = {
        "whole": lambda each: each.whole,
        "window": lambda each: each.largest[WINDOW],
        "far": lambda each: each.far,
        "layer": lambda each: each.layer,
        "first": lambda each: each.layers[0],
        "jump": lambda each: each.jump(floor),
        "peaks": lambda each: each.peaks,
        "ulps": lambda each: each.ulps,
        "differing": lambda each: each.differing,
    }
    quantiles = {
        name: [float(each) for each in np.quantile([of(each) for each in found], QUANTILES)]
        for name, of in columns.items()
    }
    unequal = sum(not each.is_finite for each in found)
    return quantiles | {"not finite": unequal, "zeros": sum(each.is_zero for each in found)}


def measure(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of a family."""
    family = FAMILIES[name]
    model = folder / "model"
    if not model.exists():
        family.make(model)
    bench = Bench(family, model, folder, [])
    honest = {ways.DECODED: ways.decoded(bench)}
    for way, run in ways.all_ways(bench, args.threads).items():
        progress(f"{name}: {way}")
        honest[way] = run()
    rows = Rows(name, None if args.raw is None else Raw(args.raw, name))
    for (one, first), (other, second) in itertools.combinations(honest.items(), 2):
        for _, where, a, b in first.common(second):
            rows.add(where, f"{one}, {other}", a, b, is_honest=True)
    for fault in [OTHER_SEED, *MODEL_FAULTS] if args.faults is None else args.faults:
        progress(f"{name}: {fault}")
        try:
            wrong_ones = faulty(bench, fault)
        except NotSuitable:
            continue
        except FAILURES as error:
            progress(f"{name}: {fault} fails: {report.cause(str(error))}")
            continue
        for way in (ways.LONG, ways.FLOAT32):
            for _, where, a, b in honest[way].common(wrong_ones):
                rows.add(where, fault, a, b)
    damage(rows, honest)
    return list(rows.rows())


def faulty(bench: Bench, fault: str) -> Payloads:
    """What an engine with a wrong model stores."""
    folder = bench.folder / "wrong"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if fault == OTHER_SEED:
            bench.family.make(folder, seed=1)
        else:
            shutil.copytree(bench.model, folder)
            MODEL_FAULTS[fault](folder)
        few = bench.sequences[:FEW]
        limit = bench.family.steps[-1]
        return bench.run(
            fault, lambda node: ways.alone(node, few), model=folder, max_num_batched_tokens=limit
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


FEW = 2
"""Prompts that engines with wrong models compute."""
DAMAGED = 16
"""Payloads that are damaged, for each pair of ways."""


def damage(rows: Rows, honest: dict[str, Payloads]) -> None:
    """Damages payloads. They are compared with those of the same kernels, and of others."""
    draw = np.random.default_rng(1)
    for other, kernels in ((ways.SHORT, "same"), (ways.FLOAT32, "other")):
        found = [each for each in honest[ways.LONG].common(honest[other]) if each[1].is_numeric]
        for _, where, payload, right in found[:: max(1, len(found) // DAMAGED)]:
            for name, bad in payload_faults(payload, where.layers, where.rows).items():
                rows.add(where, f"{name}, {kernels} kernels", bad, right)
            width = WIDTHS[where.element]
            for bit in range(8 * width):
                place = int(draw.integers(len(payload) // width))
                bad = flipped(payload, width, bit, place)
                rows.add(where, f"bit {bit}, {kernels} kernels", bad, right)


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.witness_noise", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--faults", nargs="*", choices=[OTHER_SEED, *MODEL_FAULTS])
    parser.add_argument("--threads", action="store_true", help="an engine with two threads too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="payloads stay here")
    parser.add_argument("--raw", type=Path, metavar="FOLDER", help="write some pairs here")
    args = report.begin(parser)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        for name in args.families:
            folder = (args.keep or Path(temporary)) / name.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            rows += measure(name, folder, args)
            if args.keep is None:
                shutil.rmtree(folder)
    text = "Relative distances: least / median / most.\n\n"
    report.finish(args, text + report.listing(rows, COLUMNS), {"rows": rows})


if __name__ == "__main__":
    main()
