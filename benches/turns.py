"""Conversations of several turns: a pool on Valkey, against local offload to host memory.

Each row is a vLLM server. The same load comes to all of them in turn, on the same cores. The
conversations' KV does not fit into a server's own prefix cache, so each turn finds it in host
memory, in node memory or on Valkey, or computes it. The baseline, local offload, is the host tier.
All rows with Penstock also store everything on Valkey. Run it as ``python -m benches.turns``.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import report
from benches.report import MIB, median_ratio, progress
from lab.demo.engine import Engine
from lab.demo.figures import percentile
from lab.demo.replay import REST_SECONDS
from lab.demo.servers import Servers, wait_until_ready
from lab.models.chat import BEGIN, VOCABULARY, model_folder
from lab.processes import Interruption, Processes
from lab.servers import PoolServer
from penstock.pool import POOL_VARIABLE
from penstock.programs import cache_folder

FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1_200, 400, 24
KV_BYTES = 288 * MIB
"""Of a server: one conversation of the longest length fits."""
HOST_BYTES = 1 << 30
BASELINE = "host memory"


@dataclass
class Row:
    """A server, and what its clients saw."""

    name: str
    engine: Engine
    first_token: list[float] = field(default_factory=list)
    """Seconds, of all turns but conversations' first."""
    rounds: list[float] = field(default_factory=list)
    """Seconds of each round."""
    cached: int = 0
    asked: int = 0
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, seed: int, sessions: int, turns: int, clients: int) -> None:
        """One round: new conversations, each turn of all of them before the next."""
        rng = random.Random(seed)

        def drawn(count: int) -> list[int]:
            return [rng.randrange(VOCABULARY) for _ in range(count)]

        prompts = [[BEGIN, *drawn(FIRST_TOKENS)] for _ in range(sessions)]
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            for turn in range(turns):
                answers = list(pool.map(lambda p: self.engine.complete(p, ANSWER_TOKENS), prompts))
                for prompt, answer in zip(prompts, answers, strict=True):
                    if turn:
                        self.first_token.append(answer.first_token)
                        self.cached += answer.cached_tokens
                        self.asked += len(prompt)
                    self.outputs.append(answer.tokens)
                    prompt += [*answer.tokens, *drawn(TURN_TOKENS)]
        self.rounds.append(time.perf_counter() - began)


def start(
    processes: Processes, folder: Path, rows: Sequence[str], unix: str, tcp: str, segment: str
) -> list[Row]:
    """Starts the rows' servers."""
    servers = Servers(model_folder(cache_folder() / "demo"), folder, processes)
    host = ("--host-bytes", str(HOST_BYTES))
    no_tier = (*host, "--set", "host_tier=false")
    options = {
        "vLLM alone": None,
        BASELINE: (unix, *host),
        "node memory": (unix, "--host-memory", f"shm://{segment}?size={HOST_BYTES}"),
        "Valkey, unix socket": (unix, *no_tier),
        "Valkey, TCP": (tcp, *no_tier),
    }
    found = []
    for name in rows:
        if (chosen := options[name]) is None:
            command, environment = servers.plain(), {}
        else:
            url, *more = chosen
            # No row finds what another one has stored.
            command = servers.sharing(*more, "--set", f"salt={name}")
            environment = {POOL_VARIABLE: url}
        engine = servers.start(
            name, "0-1", command, sequences=16, kv_bytes=KV_BYTES, environment=environment
        )
        found.append(Row(name, engine))
    wait_until_ready([row.engine for row in found], lambda _: None)
    progress(f"{len(found)} servers are ready")
    return found


def main() -> None:
    names = ["vLLM alone", BASELINE, "node memory", "Valkey, unix socket", "Valkey, TCP"]
    parser = argparse.ArgumentParser(prog="benches.turns", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=12, help="conversations of a round")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2, help="requests at a time")
    args = report.begin(parser)
    segment = f"bench-turns-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        PoolServer("valkey", Path(name)) as valkey,
        Interruption() as interruption,
        Processes(interruption) as processes,
    ):
        try:
            rows = start(processes, Path(name), args.rows, valkey.unix_url, valkey.tcp_url, segment)
            # Round 0 has each server use its memory and code once.
            for number in range(args.rounds + 1):
                turn = number % len(rows)
                for row in [*rows[turn:], *rows[:turn]]:
                    time.sleep(REST_SECONDS)
                    row.run(number, args.sessions, args.turns, args.clients)
                if number == 0:
                    rows = [Row(row.name, row.engine) for row in rows]
                progress(f"round {number} of {args.rounds}")
        finally:
            Path(f"/dev/shm/penstock-{segment}").unlink(missing_ok=True)
    base = next((row for row in rows if row.name == BASELINE), rows[0])
    result: dict[str, Any] = {
        row.name: {
            "first_token_p50": statistics.median(row.first_token),
            "first_token_p99": percentile(row.first_token, 0.99),
            "to_baseline": median_ratio(row.first_token, base.first_token),
            "seconds_of_a_round": statistics.median(row.rounds),
            "rounds_to_baseline": median_ratio(row.rounds, base.rounds),
            "cached_share": row.cached / row.asked,
            "outputs_equal": sum(a == b for a, b in zip(row.outputs, base.outputs, strict=True)),
            "outputs": len(row.outputs),
            "first_token": row.first_token,
            "rounds": row.rounds,
        }
        for row in rows
    }
    heads = ["later turns", "cached", "first token p50, ms", "p99", "to host memory"]
    heads += ["a round, s", "to host memory", "equal outputs"]
    lines = [
        [
            name,
            f"{found['cached_share']:.0%}",
            f"{found['first_token_p50'] * 1e3:,.0f}",
            f"{found['first_token_p99'] * 1e3:,.0f}",
            f"{found['to_baseline']:.2f}",
            f"{found['seconds_of_a_round']:,.1f}",
            f"{found['rounds_to_baseline']:.2f}",
            f"{found['outputs_equal']} of {found['outputs']}",
        ]
        for name, found in result.items()
    ]
    report.finish(args, report.table(heads, lines), result)


if __name__ == "__main__":
    main()
