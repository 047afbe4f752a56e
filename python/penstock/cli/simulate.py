"""`penstock simulate`: the hits that caches and a pool would have had under a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from penstock._native import Trace
from penstock.cli import words
from penstock.cli.simulate_panels import panels
from penstock.cli.simulate_words import (
    Results,
    arrangements,
    document,
    print_results,
    weigh,
)
from penstock.errors import ConfigError
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
from penstock.vllm.advisor import POLICIES as LOAD_POLICIES

if TYPE_CHECKING:
    from argparse import _SubParsersAction


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
    _add_fleet(parser)
    _add_speeds(parser)
    _add_reading(parser)
    _add_scale(parser)
    _add_prices(parser)
    parser.add_argument(
        "--no-sizes", action="store_true", help="do not try pools of other sizes: faster"
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
        "--policy", choices=POLICIES, default="chooser", help="of the nodes' own (default: chooser)"
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
        "--pack-bytes",
        metavar="SIZE",
        type=words.size_argument,
        help="the pool is an object store with packs of this size, as 16MiB: say how many requests "
        "it gets",
    )
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


def _add_scale(parser: argparse.ArgumentParser) -> None:
    """Adds options for how a trace of few users becomes one of many."""
    parser.add_argument(
        "--scale",
        metavar="K",
        type=words.count_argument,
        default=1,
        help="replay the trace for K populations of users, each with texts of its own (default: "
        "%(default)s, the trace as it is). Give as many nodes as take that load",
    )
    parser.add_argument(
        "--common-share",
        metavar="SHARE",
        type=words.share_argument,
        default=0.05,
        help="a block is common to all populations if this share of the trace's sessions uses it "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stagger",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=60.0,
        help="time over which the beginnings of the populations are spread (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=words.count_argument,
        default=1,
        help="gives other beginnings if it is another (default: %(default)s)",
    )


def _add_prices(parser: argparse.ArgumentParser) -> None:
    """Adds options for what things cost. All prices are in one currency."""
    for name, meaning, default in (
        ("gpu-hour", "a GPU for an hour; with it, the output says what pools save in money", None),
        ("pool-gib-month", "a GiB of the pool's memory for a month, servers included", None),
        ("network-gib", "a GiB moved between a node and the pool", 0.0),
    ):
        shown = "" if default is None else " (default: 0)"
        parser.add_argument(
            f"--price-{name}",
            metavar="PRICE",
            type=words.price_argument,
            default=default,
            help=f"price of {meaning}{shown}",
        )
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=words.count_argument,
        default=1,
        help="GPUs of a node, which together have its prefill speed (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulates, and prints the results."""
    prices = _prices(args)
    bytes_per_token = _bytes_per_token(args)
    with _progress(args.json) as bar:
        bar.begin("reading", None)
        trace = Trace.read(
            args.trace,
            block_tokens=args.block_tokens,
            text_bytes_per_token=args.text_bytes_per_token,
            session_interval=args.session_interval,
        ).scaled(args.scale, common_share=args.common_share, stagger=args.stagger, seed=args.seed)
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
        named = arrangements(fleet)
        tried = [] if args.no_sizes else tried_sizes(trace, fleet)
        tiers = [*named.values(), *(Tiers(fleet.host.nbytes > 0, nbytes) for nbytes in tried)]
        bar.begin("replay", trace.requests)
        found = compare(trace, fleet, tiers, bar.tell)
        outcomes = dict(zip(named, found, strict=False))
        sizes = None
        if tried:
            by_size = dict(zip(tried, found[len(named) :], strict=True))
            sizes = weigh_sizes(trace, fleet, by_size, args.server_bytes)
        money = None if prices is None else weigh(trace, fleet, outcomes, sizes, prices)
        bar.begin("bounds", None)
        packs = None if args.pack_bytes is None else ObjectStore(pack_bytes=args.pack_bytes)
        results = Results(trace, fleet, outcomes, _bounds(trace, fleet), sizes, money, packs)
        if args.plot is not None:
            words.write_file(args.plot, draw(panels(results, bar)))
    if args.json:
        words.print_json(document(results))
        return 0
    console = words.console()
    print_results(console, results, args.server_bytes)
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
    return Prices(
        gpu_hour=args.price_gpu_hour,
        pool_gib_month=args.price_pool_gib_month,
        network_gib=args.price_network_gib,
        gpus_per_node=args.gpus_per_node,
    )


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
