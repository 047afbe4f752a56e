"""`penstock simulate`: the hits that caches and a pool would have had under a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from penstock._native import Trace
from penstock.cli import options, words
from penstock.cli.simulate_panels import panels
from penstock.cli.simulate_words import (
    Results,
    arrangements,
    document,
    print_results,
    weigh,
)
from penstock.errors import ConfigError
from penstock.option import option
from penstock.plan import config
from penstock.plan.kv import KvSizes, Serving
from penstock.sim import (
    POLICIES,
    ROUTINGS,
    Engine,
    Fleet,
    ObjectStore,
    Prices,
    Tier,
    Tiers,
    compare,
)
from penstock.sim.plot import draw
from penstock.sim.sizes import tried_sizes, weigh_sizes
from penstock.vllm import advisor

if TYPE_CHECKING:
    from argparse import _SubParsersAction


@dataclass(frozen=True)
class _Fleet:
    """The nodes, their caches and the pool: sizes, speeds, policies."""

    nodes: int = option(4, "N", "nodes of the fleet")
    host_bytes: int = option(0, "SIZE", "what each node's own cache holds (default: none)")
    pool_bytes: int = option(0, "SIZE", "what the shared pool holds (default: none)")
    policy: str = option("chooser", "", "of the nodes' own", choices=POLICIES)
    pool_policy: str = option(
        "lru",
        "",
        "of the pool (default: lru, as in a directory; shared memory does as clock, Valkey with "
        "allkeys-lru between lru and lru-by-block)",
        choices=POLICIES,
    )
    routing: str = option("random", "", "how requests come to nodes", choices=ROUTINGS)
    load_policy: str = option(
        Engine.load_policy,
        "",
        "whether a node loads what its cache or the pool has: auto, where its simulated steps and "
        "loads so far say that this is faster than recomputing; always; or never",
        choices=advisor.POLICIES,
    )
    pack_bytes: int | None = option(
        None,
        "SIZE",
        "the pool is an object store with packs of this size, as 16MiB: say how many requests it "
        "gets",
    )
    server_bytes: int = option(64 << 30, "SIZE", "what one server of the pool holds")
    prefill_speed: int = option(10_000, "N", "tokens that a node computes a second")
    host_bandwidth: int = option(
        20 << 30, "SIZE", "bytes a second that a node reads from the host tier"
    )
    host_latency: float = option(0.0001, "SECONDS", "before the first of them")
    pool_bandwidth: int = option(
        2 << 30, "SIZE", "bytes a second that a node reads from the pool tier"
    )
    pool_latency: float = option(0.001, "SECONDS", "before the first of them")
    windows: int = option(60, "N", "parts of the trace's time that are counted one by one")

    def with_tokens_of(self, bytes_per_token: int) -> Fleet:
        """The fleet, for KV of this size."""
        return Fleet(
            nodes=self.nodes,
            host=Tier(self.host_bytes, self.policy, self.host_bandwidth, self.host_latency),
            pool=Tier(self.pool_bytes, self.pool_policy, self.pool_bandwidth, self.pool_latency),
            bytes_per_token=bytes_per_token,
            prefill_speed=self.prefill_speed,
            routing=self.routing,
            windows=self.windows,
            engine=Engine(load_policy=self.load_policy),
        )


@dataclass(frozen=True)
class _Reading:
    """How the trace is read, in the words of `Trace.read`."""

    block_tokens: int | None = option(
        None,
        "N",
        "tokens of a block where the trace does not say (default: 512 for Mooncake's, 16 for text)",
    )
    text_bytes_per_token: float = option(
        4.0, "X", "bytes of text that make a token, in traces of text"
    )
    session_interval: float = option(
        60.0, "SECONDS", "between the starts of sessions in traces whose sessions all start at 0"
    )


@dataclass(frozen=True)
class _Scale:
    """How a trace of few users becomes one of many, in the words of `Trace.scaled`."""

    populations: int = option(
        1,
        "K",
        "replay the trace for K populations of users, each with texts of its own (default: 1, the "
        "trace as it is). Give as many nodes as take that load",
        name="scale",
    )
    common_share: float = option(
        0.05,
        "SHARE",
        "a block is common to all populations if this share of the trace's sessions uses it",
    )
    stagger: float = option(
        60.0, "SECONDS", "time over which the beginnings of the populations are spread"
    )
    seed: int = option(1, "N", "gives other beginnings if it is another")


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace: what caches and a pool would have found, and how large to make them",
        description="Replays a trace of requests over nodes with caches of their own, over a pool "
        "that they share, and over both, through the policies that Penstock evicts with, and the "
        "rule by which its engines load or recompute. Shows hits, traffic and estimated times to "
        "first token, beside what no policy can beat, how large a pool the trace asks for, and, "
        "with prices, what it saves. "
        "Reads Mooncake's traces, coding sessions of kv-cache-tester, agent traces of LMCache, and "
        "vLLM's KV events, as JSON lines, gzipped or not. Needs neither a GPU nor vLLM.",
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
    for settings in (_Fleet, _Reading, _Scale, Prices):
        options.add(parser, settings)
    parser.add_argument(
        "--no-sizes", action="store_true", help="do not try pools of other sizes: faster"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write the plots as one SVG")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints the results."""
    prices = _prices(args)
    given = options.read(_Fleet, args)
    fleet = given.with_tokens_of(_bytes_per_token(args))
    with _progress(args.json) as bar:
        bar.begin("reading", None)
        trace = Trace.read(args.trace, **asdict(options.read(_Reading, args)))
        trace = trace.scaled(**asdict(options.read(_Scale, args)))
        named = arrangements(fleet)
        tried = [] if args.no_sizes else tried_sizes(trace, fleet)
        tiers = [*named.values(), *(Tiers(fleet.host.nbytes > 0, nbytes) for nbytes in tried)]
        bar.begin("replay", trace.requests)
        found = compare(trace, fleet, tiers, bar.tell)
        outcomes = dict(zip(named, found, strict=False))
        sizes = None
        if tried:
            by_size = dict(zip(tried, found[len(named) :], strict=True))
            sizes = weigh_sizes(trace, fleet, by_size, given.server_bytes)
        money = None if prices is None else weigh(trace, fleet, outcomes, sizes, prices)
        bar.begin("bounds", None)
        packs = None if given.pack_bytes is None else ObjectStore(pack_bytes=given.pack_bytes)
        results = Results(trace, fleet, outcomes, _bounds(trace, fleet), sizes, money, packs)
        if args.plot is not None:
            words.write_file(args.plot, draw(panels(results, bar)))
    if args.json:
        words.print_json(document(results))
        return 0
    console = words.console()
    print_results(console, results, given.server_bytes)
    if args.plot is not None:
        console.print(f"\npicture: {args.plot}")
    return 0


def _prices(args: argparse.Namespace) -> Prices | None:
    """The prices that the command line gives; None if it gives none."""
    given = (args.price_gpu_hour, args.price_pool_gib_month)
    if given == (None, None):
        return None
    if None in given:
        raise ConfigError("money needs both --price-gpu-hour and --price-pool-gib-month")
    if args.no_sizes and not args.pool_bytes:
        raise ConfigError("no pool to weigh: give --pool-bytes, or leave out --no-sizes")
    return options.read(Prices, args)


def _bytes_per_token(args: argparse.Namespace) -> int:
    if args.model is None:
        found: int = args.bytes_per_token
        return found
    model = config.estimate(config.load(args.model)[0])
    return KvSizes(model, Serving()).token_bytes(0, len(model.layers))


def _bounds(trace: Trace, fleet: Fleet) -> dict[str, float]:
    """Hit ratios that no policy can beat, with one cache for all nodes."""
    blocks = max(1, trace.blocks)
    total = fleet.host.nbytes * fleet.nodes + fleet.pool.nbytes
    capacity = total // (trace.block_tokens * fleet.bytes_per_token)
    found = {"no bound": trace.infinite_hits() / blocks}
    # What the bound knows of the future of a scaled trace does not fit into memory.
    if capacity and trace.populations == 1:
        found["Belady, all the fleet's memory"] = trace.belady_hits(capacity) / blocks
    return found


class _Bar:
    """A progress bar for one part of the work after the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("")

    def begin(self, name: str, total: int | None) -> None:
        """Starts the next part."""
        self._progress.reset(self._task, total=total, description=name)

    def tell(self, done: int) -> None:
        """Notes how much of the part is done."""
        self._progress.update(self._task, completed=done)


@contextmanager
def _progress(is_quiet: bool) -> Iterator[_Bar]:
    """A progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    is_shown = sys.stderr.isatty() and not is_quiet
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        yield _Bar(progress)
