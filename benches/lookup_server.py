"""The look-up service over a million blocks, while engines store.

A Valkey server on a unix socket holds the blocks of many prompts. `penstock lookup-server` answers
over HTTP, as routers ask: whole prompts as token ids, at a fixed rate, however long answers take.
The time of an answer counts from when it was due. Meanwhile a program stores new blocks. In turn
with it, a bare server of the same HTTP library reads the same bodies and answers at once: what HTTP
alone takes. Run it as ``python -m benches.lookup_server``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benches.shared import report
from benches.shared.lookup_load import BLOCK, Storing, ask, fill, prompt, request, requests
from benches.shared.report import progress
from benches.shared.rows import turns
from lab.processes import Server, free_port
from lab.servers import PoolServer

LOOK_UPS, STORES, BARE, OTHER = "look-ups", "look-ups, stores", "bare", "other"
LEARNT = 500.0
"""Prompts a second that the index learns before."""
CALL = "import sys; from penstock.cli import main; sys.exit(main())"

BARE_SERVER = """
import sys, uvicorn
ANSWER = b'{"model":"llama","prompt_tokens":4000,"pools":[]}' + b" " * 120
async def application(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})
uvicorn.run(application, port=int(sys.argv[1]), log_config=None, access_log=False, lifespan="off")
"""


@contextmanager
def running(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> Iterator[tuple[Server, int]]:
    """A Python program that gets a port as its last argument, and the port."""
    port = free_port()
    words = [sys.executable, "-c", *command, str(port)]
    process = Server("server", words, folder / f"{port}.log", environment)
    try:
        process.wait_for_port(port)
        yield process, port
    finally:
        process.stop()


def figures(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over passes, of percentiles in milliseconds and of rates."""
    cut = [statistics.quantiles(one["seconds"], n=1000) for one in passes]
    return {
        "p50_ms": statistics.median(one[499] for one in cut) * 1e3,
        "p99_ms": statistics.median(one[989] for one in cut) * 1e3,
        "p99.9_ms": statistics.median(one[998] for one in cut) * 1e3,
        "rate": statistics.median(one["rate"] for one in passes),
        "answers": sum(len(one["seconds"]) for one in passes),
        **{name: sum(one[name] for one in passes) for name in ("right", "wrong", "failed")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.lookup_server", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the pool")
    parser.add_argument("--prompt-blocks", type=int, default=250, help="of 16 tokens, a prompt")
    parser.add_argument("--rate", type=float, default=1000.0, help="queries a second")
    parser.add_argument("--stored", type=float, default=2000.0, help="blocks stored a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="a pass")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument(
        "--other", metavar="FOLDER", help="`python` of another checkout: its service takes turns"
    )
    args = report.begin(parser)
    prompts = range(args.blocks // args.prompt_blocks)
    asked = requests(prompts, args.prompt_blocks, 3000, seed=1)
    # The index learns all prompts.
    learn = [
        (request([*prompt(number, args.prompt_blocks), 1]), args.prompt_blocks * BLOCK)
        for number in prompts
    ]
    found: dict[str, list[dict[str, Any]]] = {LOOK_UPS: [], STORES: [], BARE: []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(PoolServer("valkey", folder)).unix_url
        progress(f"storing {len(prompts) * args.prompt_blocks} blocks")
        fill(url, prompts, args.prompt_blocks)
        service = [CALL, "lookup-server", url, "--blocks", str(args.blocks * 3 // 2), "--port"]
        process, port = stack.enter_context(running(service, folder))
        ports = {LOOK_UPS: port, STORES: port}
        ports[BARE] = stack.enter_context(running([BARE_SERVER], folder))[1]
        first = uvloop.run(ask(port, learn, LEARNT, len(learn) / LEARNT))
        progress(f"learnt at {first['rate']:.0f} queries a second, {first['right']} right")
        if args.other is not None:
            found[OTHER] = []
            environment = {"PYTHONPATH": args.other}
            ports[OTHER] = stack.enter_context(running(service, folder, environment))[1]
            uvloop.run(ask(ports[OTHER], learn, LEARNT, len(learn) / LEARNT))
        storing = Storing(url, args.prompt_blocks, args.stored)
        for number, row in turns(list(found), args.passes, warm_up=0):
            progress(f"{row}: pass {number + 1} of {args.passes}")
            with storing.running() if row == STORES else nullcontext():
                answers = uvloop.run(ask(ports[row], asked, args.rate, args.seconds))
            found[row].append(answers)
        memory = psutil.Process(process.pid).memory_info().rss
    result = {name: figures(passes) for name, passes in found.items()}
    rows = [
        [
            name,
            f"{of['rate']:.0f}",
            *(f"{of[figure]:.2f}" for figure in ("p50_ms", "p99_ms", "p99.9_ms")),
            "" if name == BARE else f"{of['right'] / of['answers']:.2%}",
            str(of["failed"]),
        ]
        for name, of in result.items()
    ]
    heads = ["", "queries/s", "p50 ms", "p99 ms", "p99.9 ms", "right", "failed"]
    tables = report.table(heads, rows)
    tables += f"\n\nmemory of the service: {memory / report.MIB:.0f} MiB"
    tables += f"; blocks stored meanwhile: {storing.stored}"
    more = {
        "blocks": args.blocks,
        "prompt_tokens": args.prompt_blocks * BLOCK,
        "memory_bytes": memory,
        "stored_blocks": storing.stored,
        "first_seen": figures([first]),
    }
    report.finish(args, tables, more | {"figures": result})


if __name__ == "__main__":
    main()
