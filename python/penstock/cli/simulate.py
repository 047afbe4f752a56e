"""`penstock simulate`: the hits that caches and a pool would have had under a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock._native import Trace
from penstock.cli import words
from penstock.plan import config
from penstock.plan.kv import KvSizes, Serving
from penstock.sim import (
    POLICIES,
    ROUTINGS,
    Engine,
    Fleet,
    Outcome,
    Sizes,
    Tier,
    replay,
    size_pool,
)
from penstock.sim.plot import Panel, draw
from penstock.sim.sizes import SHARES
from penstock.vllm.advisor import POLICIES as LOAD_POLICIES

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_NODES_TRIED = (1, 2, 4, 8, 16, 32)
Tell = Callable[[int], None]


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace: what caches and a pool would have found, and how large to make them",
        description="Replays a trace of requests over nodes with caches of their own, over a pool "
        "that they share, and over both, through the policies that Penstock evicts with, and the "
        "rule by which its engines load or recompute. Shows hits, traffic and estimated times to "
        "first token, beside what no policy can beat, and how large a pool the trace asks for. "
        "Reads Mooncake's traces, coding sessions of kv-cache-tester, agent traces of LMCache, and "
        "vLLM's KV events, as JSON lines, gzipped or not. Needs neither a GPU nor vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path)
    kv = parser.add_mutually_exclusive_group(required=True)
    kv.add_argument(
        "--bytes-per-token",
        metavar="SIZE",
        type=words.size_argument,
        help="KV of one token, all layers and ranks together",
    )
    kv.add_argument(
        "--model", metavar="CONFIG", type=Path, help="or the model: its folder, or a config.json"
    )
    _add_fleet(parser)
    _add_speeds(parser)
    _add_reading(parser)
    parser.add_argument(
        "--no-sizes", action="store_true", help="do not try pools of other sizes: much faster"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write the plots as one SVG")
    parser.add_argument("--json", action="store_true", help="write JSON")


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    """Adds options for nodes, for the sizes of their caches and the pool, and for policies."""
    parser.add_argument("--nodes", metavar="N", type=words.count_argument, default=4)
    parser.add_argument(
        "--host-bytes",
        metavar="SIZE",
        type=words.size_argument,
        default=0,
        help="what each node's own cache holds (default: none)",
    )
    parser.add_argument(
        "--pool-bytes",
        metavar="SIZE",
        type=words.size_argument,
        default=0,
        help="what the shared pool holds (default: none)",
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default="prefix", help="of the nodes' own (default: prefix)"
    )
    parser.add_argument(
        "--pool-policy",
        choices=POLICIES,
        default="lru",
        help="of the pool (default: lru, as in a directory; shared memory does as clock, Valkey "
        "with allkeys-lru between lru and lru-by-block)",
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="random")
    parser.add_argument(
        "--server-bytes",
        metavar="SIZE",
        type=words.size_argument,
        default="64GiB",
        help="what one server of the pool holds (default: %(default)s)",
    )


def _add_speeds(parser: argparse.ArgumentParser) -> None:
    """Adds options for how fast nodes compute and read, and for when they load."""
    parser.add_argument(
        "--prefill-speed",
        metavar="N",
        type=words.count_argument,
        default=10_000,
        help="tokens that a node computes a second (default: %(default)s)",
    )
    parser.add_argument(
        "--load-policy",
        choices=LOAD_POLICIES,
        default=Engine.load_policy,
        help="whether engines load what can be loaded (default: %(default)s, where that is "
        "expected to be faster than recomputing)",
    )
    for tier, bandwidth, latency in (("host", "20GiB", 0.0001), ("pool", "2GiB", 0.001)):
        parser.add_argument(
            f"--{tier}-bandwidth",
            metavar="SIZE",
            type=words.size_argument,
            default=bandwidth,
            help=f"bytes a second that a node reads from the {tier} tier (default: %(default)s)",
        )
        parser.add_argument(
            f"--{tier}-latency",
            metavar="SECONDS",
            type=words.seconds_argument,
            default=latency,
            help="before the first of them (default: %(default)s)",
        )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Adds options for how the trace is read and counted."""
    parser.add_argument(
        "--windows",
        metavar="N",
        type=words.count_argument,
        default=60,
        help="parts of the trace's time that are counted one by one (default: %(default)s)",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=words.count_argument,
        help="tokens of a block where the trace does not say (default: 512 for Mooncake's, 16 for "
        "text)",
    )
    parser.add_argument(
        "--text-bytes-per-token",
        metavar="X",
        type=float,
        default=4.0,
        help="bytes of text that make a token, in traces of text (default: %(default)s)",
    )
    parser.add_argument(
        "--session-interval",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=60.0,
        help="between the starts of sessions in traces whose sessions all start at 0 "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints the results."""
    bytes_per_token = _bytes_per_token(args)
    with _progress(args.json) as bar:
        bar.begin("reading", None)
        trace = Trace.read(
            args.trace,
            block_tokens=args.block_tokens,
            text_bytes_per_token=args.text_bytes_per_token,
            session_interval=args.session_interval,
        )
        fleet = Fleet(
            nodes=args.nodes,
            host=Tier(args.host_bytes, args.policy, args.host_bandwidth, args.host_latency),
            pool=Tier(args.pool_bytes, args.pool_policy, args.pool_bandwidth, args.pool_latency),
            bytes_per_token=bytes_per_token,
            prefill_speed=args.prefill_speed,
            routing=args.routing,
            windows=args.windows,
            engine=Engine(load_policy=args.load_policy),
        )
        outcomes = {
            name: replay(trace, each, bar.begin(name, trace.requests))
            for name, each in _arrangements(fleet).items()
        }
        bar.begin("bounds", None)
        bounds = _bounds(trace, fleet)
        sizes = None
        if not args.no_sizes:
            tell = bar.begin("pools of other sizes", trace.requests * len(SHARES))
            sizes = size_pool(trace, fleet, server_bytes=args.server_bytes, progress=tell)
        if args.plot is not None:
            words.write_file(args.plot, _plots(trace, fleet, outcomes, bar))
    if args.json:
        words.print_json(_document(trace, fleet, outcomes, bounds, sizes))
        return 0
    console = words.console()
    _print(console, trace, fleet, outcomes, bounds)
    if sizes is not None:
        _print_sizes(console, sizes, args.server_bytes)
    if args.plot is not None:
        console.print(f"\npicture: {args.plot}")
    return 0


def _bytes_per_token(args: argparse.Namespace) -> int:
    if args.model is None:
        found: int = args.bytes_per_token
        return found
    model = config.estimate(config.load(args.model)[0])
    return KvSizes(model, Serving()).token_bytes(0, len(model.layers))


def _arrangements(fleet: Fleet) -> dict[str, Fleet]:
    """The fleet as given, and the fleet with each of its tiers alone."""
    no_host, no_pool = replace(fleet.host, nbytes=0), replace(fleet.pool, nbytes=0)
    found = {}
    if fleet.host.nbytes:
        found["private caches"] = replace(fleet, pool=no_pool)
    if fleet.pool.nbytes:
        found["shared pool"] = replace(fleet, host=no_host)
    if len(found) == 2:
        found["both"] = fleet
    return found


def _bounds(trace: Trace, fleet: Fleet) -> dict[str, float]:
    """Hit ratios that no policy can beat, with one cache for all nodes."""
    blocks = max(1, trace.blocks)
    total = fleet.host.nbytes * fleet.nodes + fleet.pool.nbytes
    capacity = total // (trace.block_tokens * fleet.bytes_per_token)
    found = {"no bound": trace.infinite_hits() / blocks}
    if capacity:
        found["Belady, all the fleet's memory"] = trace.belady_hits(capacity) / blocks
    return found


def _print(
    console: Console,
    trace: Trace,
    fleet: Fleet,
    outcomes: Mapping[str, Outcome],
    bounds: Mapping[str, float],
) -> None:
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
    console.print(
        f"{fleet.nodes} nodes, routing {fleet.routing}; a node computes "
        f"{fleet.prefill_speed:,.0f} tokens/s\n"
    )
    if outcomes:
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
    for name, ratio in bounds.items():
        console.print(f"bound, {name}: {ratio:.1%}")


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
        f"does: servers of {words.size(server_bytes)}: {enough.servers}, {gigabits:,.1f} Gbit/s "
        "at the peak, over all of them."
    )


def _plots(trace: Trace, fleet: Fleet, outcomes: Mapping[str, Outcome], bar: _Bar) -> str:
    blocks = max(1, trace.blocks)
    block_bytes = trace.block_tokens * fleet.bytes_per_token
    capacities = sorted({max(1, round(trace.unique_blocks * share)) for share in SHARES})
    tell = bar.begin("plots: capacities", len(capacities) * (len(POLICIES) + 1))
    curves: dict[str, list[tuple[float, float]]] = {}
    done = 0
    for capacity in capacities:
        x = float(capacity * block_bytes)
        for policy in POLICIES:
            found = trace.hits(policy, capacity) / blocks
            curves.setdefault(policy, []).append((x, found))
            done += 1
            tell(done)
        curves.setdefault("Belady", []).append((x, trace.belady_hits(capacity) / blocks))
        done += 1
        tell(done)
    panels = [Panel("hits of one cache, over its capacity", "capacity", curves, words.size)]
    if outcomes:
        by_nodes: dict[str, list[tuple[float, float]]] = {}
        for nodes in sorted({*_NODES_TRIED, fleet.nodes}):
            for name, each in _arrangements(replace(fleet, nodes=nodes)).items():
                tell = bar.begin(f"plots: {nodes} nodes", trace.requests)
                ratio = replay(trace, each, tell).total.hit_ratio
                by_nodes.setdefault(name, []).append((float(nodes), ratio))
        title = "hits over nodes, each with the same cache"
        panels.append(Panel(title, "nodes", by_nodes, "{:g}".format))
        minutes = trace.duration / fleet.windows / 60
        over_time = {
            name: [
                ((number + 0.5) * minutes, window.hit_ratio)
                for number, window in enumerate(outcome.windows)
            ]
            for name, outcome in outcomes.items()
        }
        panels.append(Panel("hits over time", "minutes", over_time))
    return draw(panels)


def _document(
    trace: Trace,
    fleet: Fleet,
    outcomes: Mapping[str, Outcome],
    bounds: Mapping[str, float],
    sizes: Sizes | None,
) -> dict[str, Any]:
    return {
        "trace": {
            "format": trace.format,
            "requests": trace.requests,
            "sessions": trace.sessions,
            "seconds": trace.duration,
            "input_tokens": trace.input_tokens,
            "block_tokens": trace.block_tokens,
            "blocks": trace.blocks,
            "unique_blocks": trace.unique_blocks,
        },
        "fleet": asdict(fleet),
        "outcomes": {
            name: asdict(outcome)
            | {
                "hit_ratio": outcome.total.hit_ratio,
                "ttft": {f"p{share * 100:g}": value for share, value in outcome.ttft.items()},
            }
            for name, outcome in outcomes.items()
        },
        "bounds": dict(bounds),
        "sizes": None if sizes is None else asdict(sizes),
    }


class _Bar:
    """A progress bar for one part of the work after the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("")

    def begin(self, name: str, total: int | None) -> Tell:
        """Starts the next part. Returns a function to call with the amount that is done."""
        self._progress.reset(self._task, total=total, description=name)
        return lambda done: self._progress.update(self._task, completed=done)


@contextmanager
def _progress(is_quiet: bool) -> Iterator[_Bar]:
    """A progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    is_shown = sys.stderr.isatty() and not is_quiet
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        yield _Bar(progress)
