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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches.shared import load_policy_plot, quiet, report
from benches.shared.behind import Behind
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.engines import BLOCK
from benches.shared.report import progress
from benches.shared.rows import turns
from lab.latency import percentile
from lab.models.prompts import tokens

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
COUNTERS = ("loads", "declined_tokens", "probes", "loaded_tokens", "load_failed_blocks")
SWEEP = [
    ("round trip, rate", "{network}"),
    ("never: p50 / p99, ms", "{never[p50]!m:.0f} / {never[p99]!m:.0f}"),
    ("always: p50", "{always[p50]!m:.0f}"),
    ("auto: p50 / p99", "{auto[p50]!m:.0f} / {auto[p99]!m:.0f}"),
    ("auto to never: p50 / p99", "{auto_p50:.2f} / {auto_p99:.2f}"),
    ("never, again, to never", "{again_p50:.2f} / {again_p99:.2f}"),
    ("auto to the better of the two", "{to_better:.2f}"),
    ("auto, first hits after the change", "{settling}"),
]
QUEUE = [
    ("prefetching", "{engine}"),
    ("until answered, mean, ms", "{mean!m:.0f}"),
    ("the last of the queue", "{last!m:.0f}"),
    ("to without", "{to_without:.2f}"),
]


def prompts(count: int, blocks: int, seed: str) -> list[list[int]]:
    """Prompts of `blocks` whole blocks and some tokens more."""
    return [tokens(blocks * BLOCK + 30, f"{seed} {number}") for number in range(count)]


def sweep(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times to the first token of hits under each policy, network by network."""
    stored = prompts(min(args.hits, PROMPTS), args.blocks, "stored")
    with contextlib.closing(Behind(folder, stored)) as behind:
        nodes = {}
        for name in ("always", "auto"):
            nodes[name] = behind.engine(name, {"load_policy": name, "put_lanes": 1})
            # The engine learns from these prompts how fast it computes.
            for prompt in prompts(3, args.blocks, f"new to {name}"):
                nodes[name].ask(prompt, max_tokens=1)
        time.sleep(3)
        order = random.Random(4)
        rows: list[dict[str, Any]] = []
        for network, kind in [NETWORKS[number] for number in args.networks]:
            behind.way.be(**kind)
            times: dict[str, list[float]] = {asked: [] for asked in ASKED}
            for number, asked in drawn(args.hits, order):
                engine, policy = ASKED[asked]
                if policy == "always" and number >= args.always and times[asked][-1] > 3:
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
        counters = nodes["auto"].counters()
    counted = {name: counters.get(name, 0) for name in COUNTERS}
    return {"rows": rows, "all": over_all(rows), "counters": counted}


def drawn(hits: int, order: random.Random) -> Iterator[tuple[int, str]]:
    """Every kind of request for each hit, in an order drawn anew."""
    for number in range(hits):
        for asked in order.sample(list(ASKED), len(ASKED)):
            yield number, asked


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

    def ratios(asked: str) -> list[float]:
        settled = ((row, row[asked]["each"][SETTLING:]) for row in rows)
        return [seconds / row["never"]["p50"] for row, each in settled for seconds in each]

    return {asked: percentile(ratios(asked), 0.99) for asked in ("auto", "never", "never, again")}


def sweep_table(result: dict[str, Any]) -> str:
    """A line a network."""
    lines = []
    for row in result["rows"]:
        never, again, always, auto = (row[asked] for asked in ASKED)
        ratios = {f"auto_{p}": auto[p] / never[p] for p in ("p50", "p99")}
        ratios |= {f"again_{p}": again[p] / never[p] for p in ("p50", "p99")}
        ratios["to_better"] = auto["p50"] / min(never["p50"], always["p50"])
        first = ", ".join(f"{seconds * 1000:.0f}" for seconds in auto["each"][:SETTLING])
        lines.append(row | ratios | {"settling": first})
    shares = ", ".join(f"{asked} {share:.2f}" for asked, share in result["all"].items())
    over = f"p99 over all networks, to the median of recomputing: {shares}"
    return f"{report.listing(lines, SWEEP)}\n\n{over}"


def queue(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times of requests that arrive together while the engine computes another one."""
    stored = prompts(args.passes * args.queue, args.blocks, "stored")
    with contextlib.closing(Behind(folder, stored)) as behind:
        behind.way.be(delay=args.delay, mbit=args.mbit)
        nodes = {}
        for name, is_on in (("without", False), ("with", True)):
            settings = {"host_tier": is_on, "host_bytes": "512MiB", "load_policy": "always"}
            nodes[name] = behind.engine(name, settings, max_num_seqs=1)
            nodes[name].ask(prompts(1, 2, "warm-up")[0], max_tokens=1)
        others = iter(prompts(2 * args.passes, 1, "other"))
        each: dict[str, list[list[float]]] = {name: [] for name in nodes}
        for number, name in turns(list(nodes), args.passes, warm_up=0):
            progress(f"pass {number + 1} of {args.passes}: {name}")
            batch = stored[number * args.queue : (number + 1) * args.queue]
            # While nothing is computed, vLLM itself begins to load for all waiting requests.
            busy = nodes[name].start(next(others), max_tokens=args.busy)
            time.sleep(0.3)
            running = [nodes[name].start(prompt, max_tokens=args.output) for prompt in batch]
            nodes[name].answer(busy)
            each[name].append([nodes[name].answer(request).seconds for request in running])
    means = {name: [statistics.mean(seconds) for seconds in found] for name, found in each.items()}
    return {
        "rows": [
            {
                "engine": name,
                "mean": statistics.mean(itertools.chain(*found)),
                "last": statistics.median(max(seconds) for seconds in found),
                "to_without": report.median_ratio(means[name], means["without"]),
                "each": found,
            }
            for name, found in each.items()
        ]
    }


def main() -> None:
    """Measures, prints a table and writes the result."""
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
    busy = "tokens of the answer that the queue waits for"
    parser.add_argument("--busy", type=int, default=128, help=busy)
    parser.add_argument("--output", type=int, default=16, help="tokens an answer, of the queue")
    parser.add_argument("--delay", type=float, default=0.005, help="each way, of the queue")
    parser.add_argument("--mbit", type=float, default=500, help="of the queue")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of the sweep, as SVG")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name:
        if args.queue:
            found = queue(args, Path(name))
            shown = report.listing(found["rows"], QUEUE)
        else:
            found = sweep(args, Path(name))
            shown = sweep_table(found)
    report.finish(args, shown, found)
    if args.plot is not None and not args.queue:
        args.plot.write_text(load_policy_plot.draw(found["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
