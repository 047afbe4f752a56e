"""Loading against recomputing, over fast and absurdly slow networks; and hits that had to wait.

The pool is a Valkey server behind a network that delays and throttles. An engine with
`--load-policy auto` is asked for each of some stored prompts three times, in an order drawn anew
for each. One request is as it is. Two say `never` for themselves. Two engines may differ by some
per cent in their speed, so both sides are taken from the same engine. The two `never` requests show
how large a difference can be by chance.

Another engine always loads, since the first one has to find out about the network by itself. Each
network is new to both engines. The first hits after a change are listed by themselves, since the
engine notices the change by them.

`--queue N` measures something else. An engine that computes one request at a time is at work on
one. It gets N requests at once, all of them in the pool, with and without prefetching into host
memory. Run it as ``python -m benches.load_policy``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benches import load_policy_plot, quiet, report
from benches.connectors import ENGINE_ENVIRONMENT
from benches.report import progress
from lab.engines.node import Node
from lab.models import attention
from lab.models.saved import VOCABULARY
from lab.network import Way
from lab.servers import PoolServer

BLOCK = 128
ASKED = {
    "never": ("auto", "never"),
    "never, again": ("auto", "never"),
    "always": ("always", "always"),
    "auto": ("auto", "auto"),
}
"""For each kind of request: the engine, and the policy of the request itself."""

NETWORKS: list[tuple[str, dict[str, float]]] = [
    ("as it is", {}),
    ("1 ms", {"delay": 0.0005}),
    ("10 ms, 1 Gbit/s", {"delay": 0.005, "mbit": 1000}),
    ("10 ms, 500 Mbit/s", {"delay": 0.005, "mbit": 500}),
    ("10 ms, 200 Mbit/s", {"delay": 0.005, "mbit": 200}),
    ("10 ms, 100 Mbit/s", {"delay": 0.005, "mbit": 100}),
    ("100 ms, 100 Mbit/s", {"delay": 0.05, "mbit": 100}),
    ("100 ms, 20 Mbit/s", {"delay": 0.05, "mbit": 20}),
    ("1 s, 2 Mbit/s", {"delay": 0.5, "mbit": 2}),
    ("as it is, again", {}),
]
"""Name, delay of one way (seconds), and rate of each way. Names have the round trip."""

REST_SECONDS = 1.0
"""Longest time for the machine to come to rest between two requests of the sweep."""

PROMPTS = 16
"""Number of different prompts, at most. Engines forget them before each request."""

SETTLING = 2
"""Hits after a change of network that are listed by themselves."""


def prompts(count: int, blocks: int, seed: int) -> list[list[int]]:
    """Prompts of `blocks` whole blocks and some tokens more."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK + 30)] for _ in range(count)
    ]


def start(model: Path, folder: Path, name: str, pool: str, **settings: Any) -> Node:
    """Starts an engine over the pool. `settings` are Penstock's; other options are vLLM's."""
    ours = {f"penstock.{key}": value for key, value in settings.pop("settings").items()}
    return Node(
        model,
        folder / f"{name}.log",
        pool=pool,
        settings=ours | {"penstock.load_timeout": 60.0},
        env=ENGINE_ENVIRONMENT,
        **settings,
    )


def percentile(times: list[float], share: float) -> float:
    """The smallest time that is not exceeded by this share of all times."""
    ordered = sorted(times)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def sweep(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Times to the first token of hits under each policy, network by network."""
    stored = prompts(min(args.hits, PROMPTS), args.blocks, seed=1)
    fresh = iter(prompts(10_000, args.blocks, seed=2))
    with contextlib.ExitStack() as ending:
        server = ending.enter_context(PoolServer("valkey", folder))
        way = ending.enter_context(Way(server.port))
        with start(model, folder, "first", server.tcp_url, settings={}) as first:
            for prompt in stored:
                first.ask(prompt, max_tokens=1)
            first.wait_for("stored_blocks", len(stored) * args.blocks, timeout=300)
        nodes = {
            name: start(
                model,
                folder,
                name,
                f"redis://127.0.0.1:{way.port}",
                settings={"load_policy": name, "put_lanes": 1},
            )
            for name in ("always", "auto")
        }
        for node in nodes.values():
            ending.callback(node.kill)
            node.wait_ready()
            # The engine learns from these prompts how fast it computes.
            for prompt in itertools.islice(fresh, 3):
                node.ask(prompt, max_tokens=1)
        time.sleep(3)
        order = random.Random(4)
        rows = []
        for network, kind in [NETWORKS[number] for number in args.networks]:
            way.be(**kind)
            times: dict[str, list[float]] = {asked: [] for asked in ASKED}
            for number in range(args.hits):
                for asked in order.sample(list(ASKED), len(ASKED)):
                    engine, policy = ASKED[asked]
                    drags = number >= args.always and times[asked][-1] > 3
                    if policy == "always" and drags:
                        continue
                    nodes[engine].forget()
                    # The threads of an engine that was just at work spin for a while.
                    quiet.wait(timeout=REST_SECONDS)
                    answer = nodes[engine].ask(
                        stored[number % len(stored)],
                        max_tokens=1,
                        extra_args={"kv_transfer_params": {"penstock.load_policy": policy}},
                    )
                    times[asked].append(answer.seconds)
            rows.append({"network": network, **kind} | summary(times))
            progress(f"{network}: " + ", ".join(f"{p} {rows[-1][p]['p50']:.3f} s" for p in ASKED))
        names = ("loads", "declined_tokens", "probes", "loaded_tokens", "load_failed_blocks")
        counters = nodes["auto"].counters()
        return {
            "rows": rows,
            "all": over_all(rows),
            "counters": {name: counters.get(name, 0) for name in names},
        }


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Times of each kind of request, without the first hits after the change of network."""
    return {
        asked: {
            "p50": statistics.median(each[SETTLING:]),
            "p99": percentile(each[SETTLING:], 0.99),
            "each": each,
        }
        for asked, each in times.items()
    }


def over_all(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The 99th percentile over all networks together.

    Each figure is the time of a hit, divided by the median of recomputing on the same network. The
    first hits after a change of network are left out.
    """
    return {
        asked: percentile(
            [
                seconds / row["never"]["p50"]
                for row in rows
                for seconds in row[asked]["each"][SETTLING:]
            ],
            0.99,
        )
        for asked in ("auto", "never", "never, again")
    }


def sweep_table(result: dict[str, Any]) -> str:
    """A line a network."""
    lines = []
    for row in result["rows"]:
        never, again, always, auto = (row[asked] for asked in ASKED)
        lines.append(
            [
                row["network"],
                f"{never['p50'] * 1000:.0f} / {never['p99'] * 1000:.0f}",
                f"{always['p50'] * 1000:.0f}",
                f"{auto['p50'] * 1000:.0f} / {auto['p99'] * 1000:.0f}",
                " / ".join(f"{auto[p] / never[p]:.2f}" for p in ("p50", "p99")),
                " / ".join(f"{again[p] / never[p]:.2f}" for p in ("p50", "p99")),
                f"{auto['p50'] / min(never['p50'], always['p50']):.2f}",
                ", ".join(f"{seconds * 1000:.0f}" for seconds in auto["each"][:SETTLING]),
            ]
        )
    head = [
        "round trip, rate",
        "never: p50 / p99, ms",
        "always: p50",
        "auto: p50 / p99",
        "auto to never: p50 / p99",
        "never, again, to never",
        "auto to the better of the two",
        "auto, first hits after the change",
    ]
    shares = ", ".join(f"{asked} {share:.2f}" for asked, share in result["all"].items())
    return (
        f"{report.table(head, lines)}\n\n"
        f"p99 over all networks, to the median of recomputing: {shares}"
    )


def queue(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Times of requests that arrive together while the engine computes another one."""
    with contextlib.ExitStack() as ending:
        server = ending.enter_context(PoolServer("valkey", folder))
        way = ending.enter_context(Way(server.port))
        stored = prompts(args.passes * args.queue, args.blocks, seed=3)
        with start(model, folder, "first", server.tcp_url, settings={}) as first:
            for prompt in stored:
                first.ask(prompt, max_tokens=1)
            first.wait_for("stored_blocks", len(stored) * args.blocks, timeout=600)
        way.be(delay=args.delay, mbit=args.mbit)
        nodes = {}
        for name, is_on in (("without", False), ("with", True)):
            nodes[name] = start(
                model,
                folder,
                name,
                f"redis://127.0.0.1:{way.port}",
                settings={"host_tier": is_on, "host_bytes": "512MiB", "load_policy": "always"},
                max_num_seqs=1,
            )
            ending.callback(nodes[name].kill)
            nodes[name].wait_ready()
            nodes[name].ask(prompts(1, 2, seed=9)[0], max_tokens=1)
        others = iter(prompts(2 * args.passes, 1, seed=4))
        rows = []
        for number in range(args.passes):
            batch = stored[number * args.queue : (number + 1) * args.queue]
            pair = {}
            order = list(nodes)
            for name in order if number % 2 else order[::-1]:
                # While nothing is computed, vLLM itself begins to load for all waiting requests.
                busy = nodes[name].start(next(others), max_tokens=args.busy)
                time.sleep(0.3)
                running = [nodes[name].start(prompt, max_tokens=args.output) for prompt in batch]
                nodes[name].answer(busy)
                pair[name] = [nodes[name].answer(each).seconds for each in running]
            rows.append(pair)
            progress(f"pass {number + 1} of {args.passes}")
        return {
            "rows": [
                {
                    "engine": name,
                    "mean": statistics.mean(t for pair in rows for t in pair[name]),
                    "last": statistics.median(max(pair[name]) for pair in rows),
                    "to_without": statistics.median(
                        statistics.mean(pair[name]) / statistics.mean(pair["without"])
                        for pair in rows
                    ),
                    "each": [pair[name] for pair in rows],
                }
                for name in nodes
            ]
        }


def queue_table(result: dict[str, Any]) -> str:
    """One row for each engine."""
    lines = [
        [
            row["engine"],
            f"{row['mean'] * 1000:.0f}",
            f"{row['last'] * 1000:.0f}",
            f"{row['to_without']:.2f}",
        ]
        for row in result["rows"]
    ]
    head = ["prefetching", "until answered, mean, ms", "the last of the queue", "to without"]
    return report.table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.load_policy", description=__doc__)
    parser.add_argument("--hits", type=int, default=16, help="a network, each way")
    parser.add_argument(
        "--always", type=int, default=4, help="of these, where always loading drags"
    )
    parser.add_argument(
        "--networks",
        type=lambda text: [int(number) for number in text.split(",")],
        default=list(range(len(NETWORKS))),
        help="which of them, by their numbers from 0, as 0,4,7",
    )
    parser.add_argument("--blocks", type=int, default=12, help="of 128 tokens, a prompt")
    parser.add_argument("--queue", type=int, default=0, help="requests at once; 0 for the sweep")
    parser.add_argument("--passes", type=int, default=8, help="of the queue")
    parser.add_argument(
        "--busy", type=int, default=128, help="tokens of the answer that the queue waits for"
    )
    parser.add_argument("--output", type=int, default=16, help="tokens an answer, of the queue")
    parser.add_argument("--delay", type=float, default=0.005, help="each way, of the queue")
    parser.add_argument("--mbit", type=float, default=500, help="of the queue")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of the sweep, as SVG")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = attention.llama(folder / "model", hidden=512, layers=8, heads=8, kv_heads=4)
        if args.queue:
            found = queue(args, model, folder)
            shown = queue_table(found)
        else:
            found = sweep(args, model, folder)
            shown = sweep_table(found)
            if args.plot is not None:
                args.plot.write_text(load_policy_plot.draw(found["rows"]), encoding="utf-8")
    report.finish(args, shown, found)


if __name__ == "__main__":
    main()
