"""The results of `penstock simulate`: tables and sentences for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock._native import Trace
from penstock.cli import words
from penstock.sim import (
    Fleet,
    Load,
    ObjectStore,
    Outcome,
    Prices,
    Requests,
    Saving,
    Sizes,
    Tiers,
    break_even_bytes,
    object_store_requests,
    saving,
)
from penstock.sim.money import HOURS_PER_MONTH


@dataclass(frozen=True)
class Money:
    """What pools save against the fleet without a pool."""

    prices: Prices
    against: str
    """What the fleet is without a pool."""
    tried: Sequence[Saving]
    """Pools of several sizes, the smallest first."""
    given: Saving | None
    """The fleet's own pool, if it has one."""

    @property
    def best(self) -> Saving:
        """The pool that leaves most, of all that are known."""
        known = [*self.tried, *([self.given] if self.given else [])]
        return max(known, key=lambda each: each.net)

    @property
    def subject(self) -> Saving:
        """The pool to speak of: the fleet's own, or else the one that leaves most."""
        return self.given or self.best


@dataclass(frozen=True)
class Results:
    """All that a simulation found."""

    trace: Trace
    fleet: Fleet
    outcomes: Mapping[str, Outcome]
    bounds: Mapping[str, float]
    sizes: Sizes | None
    money: Money | None
    packs: ObjectStore | None = None
    """If the pool is an object store: how."""

    def requests(self) -> dict[str, dict[str, Requests]]:
        """For each arrangement with a pool in an object store, the requests that it gets."""
        if self.packs is None:
            return {}
        block_bytes = self.trace.block_tokens * self.fleet.bytes_per_token
        return {
            name: object_store_requests(
                outcome.total, self.fleet, block_bytes, self.trace.duration, self.packs
            )
            for name, outcome in self.outcomes.items()
            if outcome.total.written_bytes
        }


def arrangements(fleet: Fleet) -> dict[str, Tiers]:
    """The fleet's tiers as given, and each of them alone."""
    own = Tiers.of(fleet)
    found = {}
    if own.has_host:
        found["private caches"] = Tiers(True, 0)
    if own.pool_bytes:
        found["shared pool"] = Tiers(False, own.pool_bytes)
    if len(found) == 2:
        found["both"] = own
    return found


def weigh(
    trace: Trace,
    fleet: Fleet,
    outcomes: Mapping[str, Outcome],
    sizes: Sizes | None,
    prices: Prices,
) -> Money:
    """What pools save in money, against the nodes' own caches or, without any, against none."""
    private = outcomes.get("private caches")
    without = trace.input_tokens if private is None else private.total.computed_tokens
    load = Load(without, trace.duration, fleet.prefill_speed)

    def of(pool_bytes: int, computed: int, moved: int) -> Saving:
        return saving(
            load, prices, pool_bytes=pool_bytes, computed_tokens=computed, moved_bytes=moved
        )

    tried = [
        of(each.nbytes, each.computed_tokens, each.read_bytes + each.written_bytes)
        for each in (() if sizes is None else sizes.tried)
    ]
    given = None
    if fleet.pool.nbytes:
        total = outcomes["shared pool" if private is None else "both"].total
        given = of(fleet.pool.nbytes, total.computed_tokens, total.read_bytes + total.written_bytes)
    against = "no caches at all" if private is None else "private caches alone"
    return Money(prices, against, tried, given)


def amount(money: float) -> str:
    """Money in words, without its currency.

    >>> amount(1234567.8), amount(12.345), amount(-0.004)
    ('1,234,568', '12.35', '-0.00')
    """
    return f"{money:,.0f}" if abs(money) >= 1000 else f"{money:,.2f}"


def verdict(each: Saving) -> str:
    """In one sentence, what a pool saves."""
    pool = f"A pool of {words.size(each.pool_bytes)}"
    if each.gpu_seconds <= 0:
        return f"{pool} saves no prefill, and costs {amount(-each.net)} a month."
    saves = f"{pool} saves {each.prefill_share:.1%} of prefill"
    if each.net < 0:
        return f"{saves}, but costs {amount(-each.net)} a month more than that is worth."
    return f"{saves}, and {amount(each.net)} a month after its own cost."


def finding(money: Money) -> str:
    """In one sentence, the best that any of the pools does."""
    if money.best.net < 0:
        return "No pool of the sizes tried pays for itself."
    return verdict(money.best)


def print_results(console: Console, results: Results, server_bytes: int) -> None:
    """Prints everything for people."""
    _print_head(console, results.trace, results.fleet)
    if results.outcomes:
        _print_outcomes(console, results.outcomes)
    if counts := results.requests():
        _print_requests(console, counts, results.trace.input_tokens)
    for name, ratio in results.bounds.items():
        console.print(f"bound, {name}: {ratio:.1%}")
    if results.sizes is not None:
        _print_sizes(console, results.sizes, server_bytes)
    if results.money is not None:
        _print_money(console, results.money)


def _print_head(console: Console, trace: Trace, fleet: Fleet) -> None:
    footprint = trace.unique_blocks * trace.block_tokens * fleet.bytes_per_token
    console.print(
        f"{trace.requests:,} requests of {trace.sessions:,} sessions in "
        f"{trace.duration / 60:,.1f} min, {trace.input_tokens:,} prompt tokens, format: "
        f"{trace.format}"
    )
    console.print(
        f"{trace.blocks:,} blocks of {trace.block_tokens} tokens, {trace.unique_blocks:,} "
        f"different: {words.size(footprint)} of KV, {words.size(fleet.bytes_per_token)} a token"
    )
    if trace.populations > 1:
        console.print(
            f"scaled: {trace.populations:,} populations of users, which have "
            f"{trace.common_blocks:,} blocks in common"
        )
    asked = trace.input_tokens / max(trace.duration, 1e-6) / fleet.nodes
    console.print(
        f"{fleet.nodes:,} nodes, routing {fleet.routing}; a node computes "
        f"{fleet.prefill_speed:,.0f} tokens/s, and is asked for {asked:,.0f} on average\n"
    )


def _print_outcomes(console: Console, outcomes: Mapping[str, Outcome]) -> None:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(
        ("", "hits", "private", "pool", "computed", "read", "written", "TTFT p50", "p99")
    ):
        table.add_column(name, justify="right" if number else "left")
    for name, outcome in outcomes.items():
        total = outcome.total
        blocks = max(1, total.blocks)
        table.add_row(
            name,
            f"{total.hit_ratio:.1%}",
            f"{total.host_blocks / blocks:.1%}",
            f"{total.pool_blocks / blocks:.1%}",
            f"{total.computed_tokens:,} tokens",
            words.size(total.read_bytes),
            words.size(total.written_bytes),
            words.milliseconds(outcome.ttft[0.5]),
            words.milliseconds(outcome.ttft[0.99]),
        )
    console.print(table)
    console.print("TTFT: look-up, load, then what is left to compute, without any queue\n")


def _print_requests(
    console: Console, counts: Mapping[str, Mapping[str, Requests]], tokens: int
) -> None:
    table = Table(box=None, pad_edge=False)
    kinds = list(next(iter(counts.values())))
    for number, name in enumerate(("requests per million tokens", *kinds)):
        table.add_column(name, justify="right" if number else "left")
    for name, of_kinds in counts.items():
        ranges = (of_kinds[kind].per_million(tokens) for kind in kinds)
        table.add_row(name, *(f"{least:,.1f} to {most:,.1f}" for least, most in ranges))
    console.print(table)
    console.print("head: reads of which blocks a pack has, by each node that did not write it\n")


def _print_sizes(console: Console, sizes: Sizes, server_bytes: int) -> None:
    table = Table(title="\npools", title_justify="left", box=None, pad_edge=False)
    for name in ("size", "hits", "servers", "peak read", "peak written"):
        table.add_column(name, justify="right")
    for each in sizes.tried:
        table.add_row(
            words.size(each.nbytes),
            f"{each.hit_ratio:.1%}",
            f"{each.servers:,}",
            f"{words.size(each.read_rate)}/s",
            f"{words.size(each.write_rate)}/s",
            style="bold" if each is sizes.enough else None,
        )
    console.print(table)
    enough = sizes.enough
    gigabits = (enough.read_rate + enough.write_rate) * 8 / 1e9
    console.print(
        f"\nA pool of {words.size(enough.nbytes)} finds {sizes.share:.0%} of what the largest "
        f"does: servers of {words.size(server_bytes)}: {enough.servers:,}, {gigabits:,.1f} Gbit/s "
        "at the peak, over all of them."
    )


def _print_money(console: Console, money: Money) -> None:
    title = f"\nmoney for a month, against {money.against}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("pool", "prefill saved", "GPUs", "worth", "pool costs", "network", "net"):
        table.add_column(name, justify="right")
    shown = {each.pool_bytes: each for each in money.tried}
    if money.given is not None:
        shown[money.given.pool_bytes] = money.given
    for each in sorted(shown.values(), key=lambda each: each.pool_bytes):
        table.add_row(
            words.size(each.pool_bytes),
            f"{each.prefill_share:.1%}",
            f"{each.gpus:,.1f}",
            amount(each.gpu_money),
            amount(each.pool_money),
            amount(each.network_money),
            amount(each.net),
            style="bold" if each == money.subject else None,
        )
    console.print(table)
    console.print(f"\n{verdict(money.subject)}")
    if money.best != money.subject or money.best.net < 0:
        console.print(finding(money))
    for line in _break_even(money):
        console.print(line)
    prices = money.prices
    console.print(f"\nprice: {amount(prices.gpu_hour)} for a GPU-hour")
    console.print(f"price: {amount(prices.pool_gib_month)} for a GiB of the pool a month")
    console.print(f"price: {prices.network_gib:g} for a GiB moved to or from the pool")
    console.print(f"given: GPUs of a node: {prices.gpus_per_node}")
    for line in ASSUMED:
        console.print(f"assumed: {line}")


ASSUMED = (
    f"a month has {HOURS_PER_MONTH} hours, all with the trace's load",
    "GPU time that prefill no longer needs is worth its price: other work takes it",
    "nodes' own caches cost nothing",
    "all caches are empty when the trace begins, which costs hits",
)


def _break_even(money: Money) -> Iterator[str]:
    even = break_even_bytes(money.tried)
    if even is not None:
        yield f"Break-even: a pool of {words.size(even)} costs as much as it saves."
    elif money.tried and money.tried[-1].net >= 0:
        yield "Break-even: beyond the largest pool tried."
    elif money.tried:
        yield "Break-even: none of the sizes tried."
    subject = money.subject
    yield (
        f"A pool of {words.size(subject.pool_bytes)} pays while a GiB costs less than "
        f"{amount(subject.break_even_price)} a month."
    )


def document(results: Results) -> dict[str, Any]:
    """Everything, for programs."""
    trace = results.trace
    return {
        "trace": {
            "format": trace.format,
            "populations": trace.populations,
            "requests": trace.requests,
            "sessions": trace.sessions,
            "seconds": trace.duration,
            "input_tokens": trace.input_tokens,
            "block_tokens": trace.block_tokens,
            "blocks": trace.blocks,
            "unique_blocks": trace.unique_blocks,
            "common_blocks": trace.common_blocks,
        },
        "fleet": asdict(results.fleet),
        "outcomes": {
            name: asdict(outcome)
            | {"hit_ratio": outcome.total.hit_ratio, "ttft": _shares(outcome.ttft)}
            for name, outcome in results.outcomes.items()
        },
        "bounds": dict(results.bounds),
        "object_store_requests": {
            name: {kind: asdict(count) for kind, count in of_kinds.items()}
            for name, of_kinds in results.requests().items()
        }
        or None,
        "sizes": None if results.sizes is None else _sizes_document(results.sizes),
        "money": None if results.money is None else _money_document(results.money),
    }


def _shares(ttft: Mapping[float, float]) -> dict[str, float]:
    return {f"p{share * 100:g}": value for share, value in ttft.items()}


def _sizes_document(sizes: Sizes) -> dict[str, Any]:
    found = asdict(sizes)
    for size in (found["enough"], *found["tried"]):
        size["ttft"] = _shares(size["ttft"])
    return found


def _money_document(money: Money) -> dict[str, Any]:
    def of(each: Saving) -> dict[str, Any]:
        return asdict(each) | {"net": each.net, "break_even_price": each.break_even_price}

    return {
        "prices": asdict(money.prices),
        "against": money.against,
        "assumed": list(ASSUMED),
        "tried": [of(each) for each in money.tried],
        "given": None if money.given is None else of(money.given),
        "best": of(money.best),
        "break_even_bytes": break_even_bytes(money.tried),
        "verdict": verdict(money.subject),
    }
