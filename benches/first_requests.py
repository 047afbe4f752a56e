"""The cost of a server's first requests, with Penstock and without.

Each start brings up two servers on the same cores: one with Penstock over an empty directory, and
one of vLLM alone. Neither is warmed up. Both get the same prompts, which nobody has seen. They take
turns, each after a rest, and the first one changes from prompt to prompt. At last they get prompts
without a rest. Then the other server's process runs beside each request: it spins for a second
after its last message. Run it as ``python -m benches.first_requests``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benches import report
from benches.connectors import ENGINE_ENVIRONMENT
from benches.report import progress
from lab.demo.engine import Engine
from lab.demo.replay import BLOCK_TOKENS, REST_SECONDS
from lab.models.chat import BEGIN, CONTEXT_TOKENS, VOCABULARY, model_folder
from lab.processes import Interruption, Processes, free_port
from penstock.pool import POOL_VARIABLE
from penstock.programs import cache_folder, installed_program, vllm_program

ROWS = ("penstock", "vllm")


def start(processes: Processes, folder: Path) -> dict[str, Engine]:
    """Starts both servers. They are ready, and nobody has asked them anything."""
    model = model_folder(cache_folder() / "demo")
    engines = {}
    for row in ROWS:
        port = free_port()
        program = (
            [installed_program("penstock"), "serve"] if row == "penstock" else [vllm_program()]
        )
        command = [*program, *([] if row == "penstock" else ["serve"]), str(model)]
        command += [
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--dtype", "float32"),
            *("--block-size", str(BLOCK_TOKENS)),
            *("--max-model-len", str(CONTEXT_TOKENS)),
            *("--kv-cache-memory-bytes", str(1 << 30)),
            "--enforce-eager",
            "--disable-uvicorn-access-log",
        ]
        if row == "penstock":
            command += ["--host-bytes", str(256 << 20)]
        server = processes.start(
            row,
            command,
            folder / f"{row}.log",
            {
                **ENGINE_ENVIRONMENT,
                "TMPDIR": str(folder),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                POOL_VARIABLE: (folder / "pool").as_uri(),
            },
        )
        engines[row] = Engine(row, server, port)
    while not all(engine.is_ready() for engine in engines.values()):
        time.sleep(0.25)
    return engines


def measure(number: int, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Seconds to the first token, by kind of request and by row."""
    found: dict[str, list[list[float]]] = {"rest": [[], []], "in a row": [[], []]}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        Interruption() as interruption,
        Processes(interruption) as processes,
    ):
        engines = start(processes, Path(name))
        time.sleep(5)
        rng = random.Random(number)
        for kind, requests in (("rest", args.requests), ("in a row", args.requests)):
            for request in range(requests):
                prompt = [BEGIN, *(rng.randrange(VOCABULARY) for _ in range(args.tokens - 1))]
                for row in ROWS if (number + request) % 2 == 0 else ROWS[::-1]:
                    time.sleep(REST_SECONDS if kind == "rest" else 0.0)
                    seconds = engines[row].complete(prompt, 4).first_token
                    found[kind][ROWS.index(row)].append(seconds)
        progress(f"start {number + 1} of {args.starts}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.first_requests", description=__doc__)
    parser.add_argument("--starts", type=int, default=4, help="of both servers")
    parser.add_argument("--requests", type=int, default=6, help="to each server, of either kind")
    parser.add_argument("--tokens", type=int, default=2_000, help="of a prompt")
    args = report.begin(parser)
    result: dict[str, Any] = {}
    starts = [measure(number, args) for number in range(args.starts)]
    kinds = {
        "first request of a process": [
            [found["rest"][row][:1] for found in starts] for row in (0, 1)
        ],
        "second": [[found["rest"][row][1:2] for found in starts] for row in (0, 1)],
        "later ones": [[found["rest"][row][2:] for found in starts] for row in (0, 1)],
        "in turn without a rest": [[found["in a row"][row] for found in starts] for row in (0, 1)],
    }
    lines = []
    for kind, rows in kinds.items():
        own, plain = ([seconds for each in row for seconds in each] for row in rows)
        result[kind] = {
            "penstock": statistics.median(own),
            "vllm": statistics.median(plain),
            "ratio": report.median_ratio(own, plain),
            "each": {"penstock": own, "vllm": plain},
        }
        found = result[kind]
        lines.append(
            [kind, str(len(own))]
            + [f"{found[row] * 1e3:,.0f}" for row in ROWS]
            + [f"{found['ratio']:.2f}"]
        )
    heads = ["first token, ms", "requests", "with Penstock", "vLLM alone", "ratio"]
    report.finish(args, report.table(heads, lines), result)


if __name__ == "__main__":
    main()
