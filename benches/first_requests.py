"""The cost of a server's first requests, with Penstock and without.

Each start brings up two servers on the same cores: one with Penstock over an empty directory, and
one of vLLM alone. Neither is warmed up. Both get the same prompts, which nobody has seen. They take
turns, each after a rest, and the first one changes from prompt to prompt. At last they get prompts
without a rest. Then the other server's process runs beside each request: it spins for a second
after its last message. Run it as ``python -m benches.first_requests``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benches.shared import report, serving
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.report import GIB, MIB, progress
from benches.shared.rows import Times, rotated
from benches.shared.serving import Place
from lab.demo.engine import Engine
from lab.demo.replay import REST_SECONDS
from lab.demo.servers import wait_until_ready
from lab.models.chat import BEGIN
from lab.models.prompts import tokens
from penstock.pool import POOL_VARIABLE
from penstock.programs import installed_program

PENSTOCK, PLAIN = ROWS = ("penstock", "vllm")
KINDS = ("first request of a process", "second", "later ones")
IN_TURN = "in turn without a rest"
COLUMNS = [
    ("first token, ms", "{kind}"),
    ("requests", "{requests}"),
    ("with Penstock", "{penstock!m:,.0f}"),
    ("vLLM alone", "{vllm!m:,.0f}"),
    ("ratio", "{ratio:.2f}"),
]


def start(place: Place) -> dict[str, Engine]:
    """Starts both servers. They are ready, and nobody has asked them anything."""
    engines = {}
    commands = {
        # With its own limits: how long a first look-up may take is part of what is measured.
        PENSTOCK: [
            *(installed_program("penstock"), "serve", str(place.model)),
            *("--host-bytes", str(256 * MIB)),
        ],
        PLAIN: place.servers.plain(),
    }
    for row, command in commands.items():
        engines[row] = place.servers.start(
            row,
            serving.CORES,
            command,
            sequences=serving.SEQUENCES,
            kv_bytes=GIB,
            environment={POOL_VARIABLE: (place.folder / "pool").as_uri()},
        )
    wait_until_ready(list(engines.values()), lambda ready: None)
    time.sleep(5)
    return engines


def measure(number: int, args: argparse.Namespace, times: Times) -> None:
    """Seconds to the first token, by kind of request and by row, of one start."""
    with serving.place() as place:
        engines = start(place)
        for request in range(2 * args.requests):
            rests = request < args.requests
            kind = KINDS[min(request, len(KINDS) - 1)] if rests else IN_TURN
            prompt = [BEGIN, *tokens(args.tokens - 1, f"{number}/{request}")]
            for row in rotated(ROWS, number + request):
                time.sleep(REST_SECONDS if rests else 0.0)
                times.add(number, row, kind, engines[row].complete(prompt, 4).first_token)
        progress(f"start {number + 1} of {args.starts}")


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.first_requests", description=__doc__)
    parser.add_argument("--starts", type=int, default=4, help="of both servers")
    parser.add_argument("--requests", type=int, default=6, help="to each server, of either kind")
    parser.add_argument("--tokens", type=int, default=2_000, help="of a prompt")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    times = Times()
    for number in range(args.starts):
        measure(number, args, times)
    result: dict[str, dict[str, Any]] = {
        kind: {row: times.median(row, kind) for row in ROWS}
        | {
            "ratio": times.ratio(PENSTOCK, PLAIN, kind),
            "each": {row: times.each(row, kind) for row in ROWS},
        }
        for kind in [*KINDS, IN_TURN]
        if times.each(PLAIN, kind)
    }
    lines = [
        {"kind": kind, "requests": len(found["each"][PLAIN])} | found
        for kind, found in result.items()
    ]
    report.finish(args, report.listing(lines, COLUMNS), result)


if __name__ == "__main__":
    main()
