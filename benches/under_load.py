"""Hits under load: two servers behind round-robin, one of them busy, by `vllm bench serve`.

The requests are turns of conversations. Conversations of one kind begin with the same text, and
each turn repeats all turns before it. A router sends them to the two servers in turn, so a server
has computed only half of what a conversation repeats. Somebody else keeps the second server busy.

`vllm bench serve` sends requests at random moments (Poisson), whether or not earlier ones are
answered. Rates are shares of what the baseline can answer. The baseline is vLLM alone: two private
caches. Systems are measured in groups, all servers of a group alive at once. For each rate and
round they take turns, with the same requests. Run it as ``scripts/vllm-router.sh .venv 0.1.17
.venv-bench/bin/python -m benches.under_load``, after `benches/setup_peers.sh`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benches.shared import pairs, report, rows, serving
from benches.shared.pairs import Pair
from benches.shared.report import MIB, median_ratio, progress
from benches.shared.serving import Place
from benches.shared.systems import BASELINE, NAMES, every
from lab.demo.engine import Engine
from lab.demo.page import picture
from lab.demo.servers import wait_until_ready
from lab.models.chat import BEGIN
from lab.models.prompts import tokens
from lab.processes import free_port
from penstock.chart import Bar, grouped_bars

KV_BYTES = 288 * MIB
"""Of a server: nine conversations at their end."""
SEQUENCES = 8
KINDS, KIND_TOKENS = 3, 768
"""Texts that conversations begin with."""
TURNS, TURN_TOKENS, ANSWER_TOKENS = 4, 256, 16
WARM_UP = 6
"""Conversations from which each server uses its memory and code once."""
BUSY_TOKENS, BUSY_ANSWER = 512, 32
"""Of the requests that keep the second server busy, one after the other."""
ROUTER = "PENSTOCK_TEST_VLLM_ROUTER"
FIGURES = ("request_throughput", "median_ttft_ms", "p99_ttft_ms")
COLUMNS = [
    ("load", "{load}"),
    ("system", "{system}"),
    ("requests/s", "{requests_per_second:.2f}"),
    ("to the baseline", "{to_baseline[request_throughput]:.2f}"),
    ("first token p50, ms", "{first_token_p50!m:,.0f}"),
    ("to the baseline", "{to_baseline[median_ttft_ms]:.2f}"),
    ("p99, ms", "{first_token_p99!m:,.0f}"),
    ("to the baseline", "{to_baseline[p99_ttft_ms]:.2f}"),
]


def write_requests(path: Path, seed: int, sessions: int) -> None:
    """Writes the turns of some conversations for `vllm bench serve`, in the order in which they are
    sent: each turn of all conversations before their next one.

    A token is a byte, so texts are random letters.
    """
    rng = random.Random(seed)

    def text(tokens: int) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens))

    kinds = [text(KIND_TOKENS) for _ in range(KINDS)]
    talks = [kinds[number % KINDS] for number in range(sessions)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(TURNS):
            for number in range(sessions):
                talks[number] += text(TURN_TOKENS)
                line = {"prompt": talks[number], "output_tokens": ANSWER_TOKENS}
                file.write(json.dumps(line) + "\n")
                talks[number] += text(ANSWER_TOKENS)


def route(place: Place, pair: Pair) -> str:
    """Starts a router before two servers. Returns its URL."""
    port = free_port()
    command = [os.environ[ROUTER], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(engine.url for engine in pair.engines)]
    log = place.folder / f"{pair.name}-router.log"
    # Nothing of this environment is the router's.
    server = place.processes.start(f"{pair.name} router", command, log, {"PYTHONPATH": ""})
    router = Engine("router", server, port)
    wait_until_ready([router], lambda ready: None)
    return router.url


@contextlib.contextmanager
def busy(engine: Engine, seed: str) -> Iterator[None]:
    """Keeps a server busy with prompts that nobody else sends."""
    over = threading.Event()

    def ask() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            engine.complete([BEGIN, *tokens(BUSY_TOKENS, f"busy {seed} {number}")], BUSY_ANSWER)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def drive(place: Place, pair: Pair, url: str, seed: int, sessions: int, rate: float) -> Any:
    """Sends conversations to a system at a rate. Returns what `vllm bench serve` says of them."""
    sent = place.folder / "requests.jsonl"
    write_requests(sent, seed, sessions)
    found = place.drive(
        url,
        sessions * TURNS,
        beside=busy(pair.engines[1], f"{pair.name} {seed}"),
        dataset_name="custom",
        dataset_path=sent,
        custom_output_len=ANSWER_TOKENS,
        skip_chat_template=True,
        disable_shuffle=True,
        request_rate=rate,
        seed=1,
        percentile_metrics="ttft",
        save_detailed=True,
    )
    return {key: found[key] for key in (*FIGURES, "ttfts", "duration")}


def measure(group: Sequence[Pair], args: argparse.Namespace, rate: float | None) -> dict[str, Any]:
    """Measures some systems together. `rate` is what the baseline can answer, in requests a second:
    it is measured if it is not given."""
    runs: dict[str, dict[float, list[dict[str, Any]]]] = {}
    urls: dict[str, str] = {}
    began = time.time()
    with serving.place() as place:

        def begin(pair: Pair) -> None:
            urls[pair.name] = route(place, pair)
            runs[pair.name] = {share: [] for share in args.loads}

        def run(pair: Pair, seed: int, sessions: int, rate: float) -> Any:
            return drive(place, pair, urls[pair.name], seed, sessions, rate)

        running = pairs.started(place, group, begin, kv_bytes=KV_BYTES, sequences=SEQUENCES)
        for pair in running:
            run(pair, args.seed, WARM_UP, float("inf"))
        if rate is None:
            # With texts that no cache has.
            saturated = run(running[0], args.seed + 1, args.sessions, float("inf"))
            rate = float(saturated["request_throughput"])
            progress(f"saturated: {rate:.2f} requests/s")
        for number in range(args.rounds):
            for share in args.loads:
                # Nobody has seen these texts before.
                seed = args.seed + 100 * (number + 1) + round(10 * share)
                for pair in pairs.shuffled(running, seed):
                    progress(f"round {number + 1} of {args.rounds}, {share} of it: {pair.name}")
                    runs[pair.name][share].append(run(pair, seed, args.sessions, share * rate))
    return {
        "rate": rate,
        "seconds": time.time() - began,
        "systems": {
            name: {str(share): figures(found[share], runs[BASELINE][share]) for share in args.loads}
            for name, found in runs.items()
        },
        "failures": pairs.failures(group),
    }


def figures(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A system's figures at one load over all rounds, and what they are to the baseline's."""
    firsts = sorted(seconds for run in runs for seconds in run["ttfts"])
    return {
        "requests_per_second": statistics.median(run["request_throughput"] for run in runs),
        "first_token_p50": statistics.median(firsts),
        "first_token_p99": firsts[int(0.99 * (len(firsts) - 1))],
        "to_baseline": {
            figure: median_ratio([run[figure] for run in runs], [run[figure] for run in others])
            for figure in FIGURES
        },
        "runs": runs,
    }


def table(groups: Sequence[dict[str, Any]]) -> str:
    """A line for each load and system."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for share in group["systems"][BASELINE]:
            for name, found in group["systems"].items():
                lines.append({"load": share, "system": name} | found[share])
        for name, why in group["failures"].items():
            lines.append({"load": "all", "system": name, "failure": why})
    return report.listing(lines, COLUMNS)


def draw(group: dict[str, Any]) -> str:
    """Bars of each system's median first token, with lines to their 99th percentiles."""
    groups = []
    for share in group["systems"][BASELINE]:
        bars = []
        for name, found in group["systems"].items():
            kind, of = "plain" if name == BASELINE else "pool", found[share]
            bars.append(Bar(kind, of["first_token_p50"], of["first_token_p99"], name))
        groups.append((f"{share} of saturation", bars))
    keys = (("plain", "vLLM alone, two private caches"), ("pool", "with a connector"))
    return picture(grouped_bars(groups, "s"), keys)


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.under_load", description=__doc__)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=[name for name in NAMES if name != BASELINE],
        default=["penstock-file", "penstock-shm", "penstock-valkey"],
    )
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.8, 1.0])
    parser.add_argument("--sessions", type=int, default=15, help="conversations of a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the first group as SVG")
    args = report.begin(parser)
    if ROUTER not in os.environ:
        parser.error("no router: run this by scripts/vllm-router.sh")
    groups: list[dict[str, Any]] = []
    rate: float | None = None
    for names in rows.groups(args.systems, pairs.GROUP):
        group = [Pair(name, every()[name]) for name in (BASELINE, *names)]
        groups.append(measure(group, args, rate))
        rate = groups[0]["rate"]
    settings = {"saturation": rate, "loads": args.loads, "sessions": args.sessions}
    report.finish(args, table(groups), {**settings, "rounds": args.rounds, "groups": groups})
    if args.plot:
        args.plot.write_text(draw(groups[0]), encoding="utf-8")


if __name__ == "__main__":
    main()
