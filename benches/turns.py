"""Conversations of several turns: a pool on Valkey, against local offload to host memory.

Each row is a vLLM server. The same load comes to all of them in turn, on the same cores. The
conversations' KV does not fit into a server's own prefix cache, so each turn finds it in host
memory, in node memory or on Valkey, or computes it. The baseline, local offload, is the host tier.
All rows with Penstock also store everything on Valkey. Run it as ``python -m benches.turns``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benches.shared import report, serving
from benches.shared.report import MIB, progress
from benches.shared.rows import Times, turns
from benches.shared.serving import Place
from lab.demo.engine import Engine
from lab.demo.replay import REST_SECONDS
from lab.demo.servers import wait_until_ready
from lab.latency import percentile
from lab.models.chat import BEGIN
from lab.models.prompts import tokens
from lab.segments import Segment
from lab.servers import PoolServer
from penstock.pool import POOL_VARIABLE

FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1_200, 400, 24
KV_BYTES = 288 * MIB
"""Of a server: one conversation of the longest length fits."""
SEQUENCES, CORES = 16, "0-1"
HOST_BYTES = 1 << 30
PLAIN, BASELINE, NODE = "vLLM alone", "host memory", "node memory"
UNIX, TCP = "Valkey, unix socket", "Valkey, TCP"
ROWS = (PLAIN, BASELINE, NODE, UNIX, TCP)
ROUND = "round"
COLUMNS = [
    ("later turns", "{row}"),
    ("cached", "{cached_share:.0%}"),
    ("first token p50, ms", "{first_token_p50!m:,.0f}"),
    ("p99", "{first_token_p99!m:,.0f}"),
    ("to host memory", "{to_baseline:.2f}"),
    ("a round, s", "{seconds_of_a_round:,.1f}"),
    ("to host memory", "{rounds_to_baseline:.2f}"),
    ("equal outputs", "{outputs_equal} of {outputs}"),
]


@dataclass
class Answered:
    """What a server answered: of all turns but conversations' first, where it says so."""

    cached: int = 0
    """Tokens, of later turns."""
    asked: int = 0
    """Tokens, of later turns."""
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    """Seconds, of later turns."""

    def lead(
        self, engine: Engine, number: int, prompts: list[list[int]], args: argparse.Namespace
    ) -> None:
        """Goes on with conversations that begin so, each turn of all of them before the next."""
        with ThreadPoolExecutor(args.clients) as pool:
            for turn in range(args.turns):
                answers = list(pool.map(lambda p: engine.complete(p, ANSWER_TOKENS), prompts))
                for session, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                    if turn:
                        self.first_token.append(answer.first_token)
                        self.cached += answer.cached_tokens
                        self.asked += len(prompt)
                    self.outputs.append(answer.tokens)
                    more = tokens(TURN_TOKENS, f"{number}/{session}/{turn}")
                    prompt += [*answer.tokens, *more]


def start(place: Place, rows: Sequence[str], valkey: PoolServer, node: str) -> dict[str, Engine]:
    """Starts the rows' servers."""
    host = ("--host-bytes", str(HOST_BYTES))
    no_tier = (*host, "--set", "host_tier=false")
    setups = {
        BASELINE: (valkey.unix_url, *host),
        NODE: (valkey.unix_url, "--host-memory", node),
        UNIX: (valkey.unix_url, *no_tier),
        TCP: (valkey.tcp_url, *no_tier),
    }
    engines = {}
    for row in rows:
        command, environment = place.servers.plain(), {}
        if row != PLAIN:
            url, *options = setups[row]
            # No row finds what another one has stored.
            command = place.servers.sharing(*options, "--set", f"salt={row}")
            environment = {POOL_VARIABLE: url}
        engines[row] = place.servers.start(
            row, CORES, command, sequences=SEQUENCES, kv_bytes=KV_BYTES, environment=environment
        )
    wait_until_ready(list(engines.values()), lambda ready: None)
    progress(f"{len(engines)} servers are ready")
    return engines


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.turns", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=12, help="conversations of a round")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2, help="requests at a time")
    args = report.begin(parser)
    times = Times()
    answered = {row: Answered() for row in args.rows}
    with (
        serving.place() as place,
        PoolServer("valkey", place.folder) as valkey,
        Segment("bench-turns") as segment,
    ):
        engines = start(place, args.rows, valkey, segment.url(HOST_BYTES))
        for number, row in turns(args.rows, args.rounds):
            progress(f"round {number + 1} of {args.rounds}: {row}")
            time.sleep(REST_SECONDS)
            of = answered[row] if number >= 0 else Answered()
            prompts = [
                [BEGIN, *tokens(FIRST_TOKENS, f"{number}/{session}")]
                for session in range(args.sessions)
            ]
            began = time.perf_counter()
            of.lead(engines[row], number, prompts, args)
            times.add(number, row, ROUND, time.perf_counter() - began)
    base = BASELINE if BASELINE in args.rows else args.rows[0]
    result: dict[str, Any] = {}
    for row, of in answered.items():
        equal = zip(of.outputs, answered[base].outputs, strict=True)
        result[row] = {
            "first_token_p50": statistics.median(of.first_token),
            "first_token_p99": percentile(of.first_token, 0.99),
            "to_baseline": report.median_ratio(of.first_token, answered[base].first_token),
            "seconds_of_a_round": times.median(row, ROUND),
            "rounds_to_baseline": times.ratio(row, base, ROUND),
            "cached_share": of.cached / of.asked,
            "outputs_equal": sum(own == other for own, other in equal),
            "outputs": len(of.outputs),
            "first_token": of.first_token,
            "rounds": times.each(row, ROUND),
        }
    lines = [{"row": row} | found for row, found in result.items()]
    report.finish(args, report.listing(lines, COLUMNS), result)


if __name__ == "__main__":
    main()
