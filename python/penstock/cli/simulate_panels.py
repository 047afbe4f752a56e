"""The panels of the picture of `penstock simulate`, with titles that say what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from penstock.cli import words
from penstock.cli.simulate_words import Money, Results, arrangements, finding
from penstock.sim import POLICIES, Sizes, compare
from penstock.sim.plot import Line, Panel
from penstock.sim.sizes import tried_sizes

_NODES_TRIED = (1, 2, 4, 8, 16, 32)
_PARTS_OF_A_LARGE_FLEET = (16, 4, 1)
"""Divisors of a scaled trace's nodes: fleets of the quotients are tried."""
_TTFT_SHARES = (0.5, 0.9, 0.99)

_Points = dict[str, list[tuple[float, float]]]


class Bar(Protocol):
    """Where the progress is told."""

    def begin(self, name: str, total: int | None) -> None:
        """Starts the next part."""

    def tell(self, done: int) -> None:
        """Notes how much of the part is done."""


def panels(results: Results, bar: Bar) -> list[Panel]:
    """All panels, the most telling first. Some need replays of their own."""
    found: list[Panel] = []
    if results.money is not None and results.money.tried:
        found.append(_money(results.money))
    if results.sizes is not None:
        found += _sizes(results.sizes)
    if results.trace.populations == 1:
        found.append(_policies(results, bar))
    if results.outcomes:
        found += _nodes(results, bar)
        found.append(_time(results))
    return found


def _money(money: Money) -> Panel:
    worth = [abs(value) for each in money.tried for value in (each.gpu_money, each.net)]
    factor, unit = next(
        (factor, unit)
        for least, factor, unit in ((5e6, 1e-6, "M"), (5e3, 1e-3, "k"), (0.0, 1.0, ""))
        if max(worth) >= least
    )
    lines = {
        "net": [(float(each.pool_bytes), each.net) for each in money.tried],
        "GPU time saved": [(float(each.pool_bytes), each.gpu_money) for each in money.tried],
        "costs": [
            (float(each.pool_bytes), -each.pool_money - each.network_money) for each in money.tried
        ],
    }
    title = finding(money).rstrip(".")
    return Panel(title, "pool, money for a month", lines, words.size, factor, unit)


def _sizes(sizes: Sizes) -> Iterator[Panel]:
    enough = sizes.enough
    hits = [(float(each.nbytes), each.hit_ratio) for each in sizes.tried]
    title = f"A pool of {words.size(enough.nbytes)} finds {enough.hit_ratio:.0%} of all blocks"
    yield Panel(title, "pool", {"hits": hits}, words.size)
    smallest, median = sizes.tried[0], enough.ttft[0.5]
    title = (
        f"{words.size(enough.nbytes)}: half of the first tokens come within "
        f"{words.milliseconds(median)}"
    )
    if median < smallest.ttft[0.5]:
        sooner = 1 - median / smallest.ttft[0.5]
        title += f", {sooner:.0%} sooner than with {words.size(smallest.nbytes)}"
    lines: _Points = {}
    for share in _TTFT_SHARES:
        points = [(float(each.nbytes), each.ttft[share]) for each in sizes.tried]
        lines[f"TTFT p{share * 100:g}"] = points
    yield _times(title, "pool", lines, words.size)


def _policies(results: Results, bar: Bar) -> Panel:
    trace, fleet = results.trace, results.fleet
    capacities = tried_sizes(trace, fleet)
    block_bytes = trace.block_tokens * fleet.bytes_per_token
    bar.begin("plots: capacities", len(capacities))
    curves: _Points = {}
    for done, nbytes in enumerate(capacities):
        bar.tell(done)
        capacity, x = nbytes // block_bytes, float(nbytes)
        for policy in POLICIES:
            ratio = trace.hits(policy, capacity) / max(1, trace.blocks)
            curves.setdefault(policy, []).append((x, ratio))
        best = trace.belady_hits(capacity) / max(1, trace.blocks)
        curves.setdefault("Belady", []).append((x, best))
    return Panel("Hits of one cache, over its capacity", "capacity", curves, words.size)


def _nodes(results: Results, bar: Bar) -> Iterator[Panel]:
    trace, fleet = results.trace, results.fleet
    if trace.populations == 1:
        tried = sorted({*_NODES_TRIED, fleet.nodes})
    else:
        tried = sorted({max(1, fleet.nodes // part) for part in _PARTS_OF_A_LARGE_FLEET})
    hits: _Points = {}
    times: _Points = {}
    named = arrangements(fleet)
    for nodes in tried:
        bar.begin(f"plots: {nodes:,} nodes", trace.requests)
        found = compare(trace, replace(fleet, nodes=nodes), list(named.values()), bar.tell)
        for name, outcome in zip(named, found, strict=True):
            hits.setdefault(name, []).append((float(nodes), outcome.total.hit_ratio))
        for share in _TTFT_SHARES:
            line = times.setdefault(f"TTFT p{share * 100:g}", [])
            line.append((float(nodes), found[-1].ttft[share]))
    own = tried.index(fleet.nodes)
    each = ", ".join(f"{name} {hits[name][own][1]:.0%}" for name in named)
    title = f"Hits on {fleet.nodes:,} nodes, each with the same cache: {each}"
    yield Panel(title, "nodes", hits, "{:,.0f}".format)
    median = words.milliseconds(times["TTFT p50"][own][1])
    last = [*named][-1]
    title = f"On {fleet.nodes:,} nodes, half of the first tokens come within {median} ({last})"
    yield _times(title, "nodes", times, "{:,.0f}".format)


def _time(results: Results) -> Panel:
    minutes = results.trace.duration / results.fleet.windows / 60
    lines: dict[str, Line] = {
        name: [
            ((number + 0.5) * minutes, window.hit_ratio)
            for number, window in enumerate(outcome.windows)
        ]
        for name, outcome in results.outcomes.items()
    }
    name, outcome = list(results.outcomes.items())[-1]
    title = f"Hits over time: {outcome.total.hit_ratio:.0%} on average ({name})"
    return Panel(title, "minutes", lines)


def _times(title: str, axis: str, lines: _Points, label: Callable[[float], str]) -> Panel:
    most = max(y for line in lines.values() for _, y in line)
    factor, unit = (1.0, " s") if most >= 5 else (1000.0, " ms")
    return Panel(title, axis, lines, label, factor, unit)
