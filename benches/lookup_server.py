"""The look-up service over a million blocks, while engines store.

A Valkey server on a unix socket holds the blocks of many prompts. `penstock lookup-server` answers
over HTTP, as routers ask: whole prompts as token ids, at a fixed rate, however long answers take.
The time of an answer counts from when it was due. Meanwhile a program stores new blocks. In turn
with it, a bare server of the same HTTP library reads the same bodies and answers at once: what HTTP
alone takes. Run it as ``python -m benches.lookup_server``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import uvloop
from msgspec import json

from benches import report
from benches.report import progress
from lab.pretended import NONE_HASH, Engine
from lab.processes import Server, free_port
from lab.servers import PoolServer
from penstock._native import PrefixHasher, Store

BLOCK = 16
SPAN = (0, 2, 0, 1)
CONNECTIONS = 32
CALL = "import sys; from penstock.cli import main; sys.exit(main())"

BARE = """
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


def prompt(number: int, blocks: int) -> list[int]:
    """A prompt of so many whole blocks, the same for the same number."""
    rng = random.Random(number)
    return [rng.randrange(128_000) for _ in range(blocks * BLOCK)]


def put(engine: Engine, number: int, blocks: int) -> None:
    """Stores all blocks of a prompt."""
    hasher = PrefixHasher("sha256", NONE_HASH, BLOCK)
    span = b"".join(edge.to_bytes(2, "little") for edge in SPAN)
    keys = [
        engine.namespace + chunk + span for chunk in hasher.prefix(prompt(number, blocks)).hashes
    ]
    engine.store.put_many([(key, b"KV") for key in keys], timeout=60.0)


def fill(url: str, prompts: Sequence[int], blocks: int) -> None:
    """Stores the blocks of many prompts."""
    engine = Engine(Store.open(url), facts={"spans": [SPAN]})
    for number in prompts:
        put(engine, number, blocks)


def store_on(url: str, first: int, blocks: int, rate: float, end: Event, stored: Any) -> None:
    """Stores one prompt after the other, so many blocks a second, until the end."""
    engine = Engine(Store.open(url), facts={"spans": [SPAN]})
    due = time.monotonic()
    while not end.is_set():
        put(engine, first + stored.value, blocks)
        stored.value += 1
        due += blocks / rate
        time.sleep(max(0.0, due - time.monotonic()))


def request(asked: list[int]) -> bytes:
    """A look-up as it goes over a connection."""
    body = json.encode({"model": "llama", "prompt": asked})
    head = f"POST /lookup HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def requests(prompts: Sequence[int], blocks: int, count: int, seed: int) -> list[tuple[bytes, int]]:
    """Requests, and the tokens that the pool has of each: some prompt's beginning, and a tail."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        known = rng.randrange(blocks + 1)
        asked = prompt(rng.choice(prompts), blocks)[: known * BLOCK]
        tail = (blocks - known) * BLOCK + rng.randrange(1, BLOCK)
        asked += [rng.randrange(128_000) for _ in range(tail)]
        made.append((request(asked), known * BLOCK))
    return made


async def ask(
    port: int, asked: Sequence[tuple[bytes, int]], rate: float, seconds: float
) -> dict[str, Any]:
    """Asks at a rate, and returns the times of the answers and how many of them were right."""
    free: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    times: list[float] = []
    outcomes = {"right": 0, "wrong": 0, "failed": 0}
    running: set[asyncio.Task[None]] = set()

    async def one(due: float, question: bytes, expected: int) -> None:
        reader, writer = await free.get()
        writer.write(question)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(length)
        times.append(time.perf_counter() - due)
        free.put_nowait((reader, writer))
        if not head.startswith(b"HTTP/1.1 200"):
            outcomes["failed"] += 1
            return
        pools = json.decode(answer)["pools"]
        is_right = bool(pools) and pools[0]["tokens"] == expected
        outcomes["right" if is_right else "wrong"] += 1

    began = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        task = asyncio.create_task(one(due, *asked[number % len(asked)]))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    took = time.perf_counter() - began
    while not free.empty():
        free.get_nowait()[1].close()
    return {"seconds": times, "rate": len(times) / took} | outcomes


@contextlib.contextmanager
def running(
    command: list[str], port: int, log: Path, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    process = Server(log.stem, [sys.executable, "-c", *command], log, environment)
    try:
        process.wait_for_port(port)
        yield process
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
    found: dict[str, list[dict[str, Any]]] = {"look-ups": [], "look-ups, stores": [], "bare": []}
    if args.other is not None:
        found["other"] = []
    with tempfile.TemporaryDirectory() as folder, PoolServer("valkey", Path(folder)) as valkey:
        progress(f"storing {len(prompts) * args.prompt_blocks} blocks")
        fill(valkey.unix_url, prompts, args.prompt_blocks)
        ports, log = [free_port() for _ in range(3)], Path(folder) / "log"
        service = [CALL, "lookup-server", valkey.unix_url]
        service += ["--blocks", str(args.blocks * 3 // 2), "--port"]
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(running([*service, str(ports[0])], ports[0], log))
            stack.enter_context(running([BARE, str(ports[1])], ports[1], log))
            if args.other is not None:
                environment = {"PYTHONPATH": args.other}
                other = running([*service, str(ports[2])], ports[2], log, environment)
                stack.enter_context(other)
            # The index learns all prompts.
            learn = [
                (request([*prompt(number, args.prompt_blocks), 1]), args.prompt_blocks * BLOCK)
                for number in prompts
            ]
            first = uvloop.run(ask(ports[0], learn, 500.0, len(learn) / 500.0))
            if args.other is not None:
                uvloop.run(ask(ports[2], learn, 500.0, len(learn) / 500.0))
            progress(f"learnt at {first['rate']:.0f} queries a second, {first['right']} right")
            context = multiprocessing.get_context("fork")
            stored = context.Value("i", 0)
            for number in range(args.passes):
                found["look-ups"].append(uvloop.run(ask(ports[0], asked, args.rate, args.seconds)))
                found["bare"].append(uvloop.run(ask(ports[1], asked, args.rate, args.seconds)))
                if args.other is not None:
                    found["other"].append(uvloop.run(ask(ports[2], asked, args.rate, args.seconds)))
                end = context.Event()
                writer = context.Process(
                    target=store_on,
                    args=(valkey.unix_url, 10**7, args.prompt_blocks, args.stored, end, stored),
                )
                writer.start()
                found["look-ups, stores"].append(
                    uvloop.run(ask(ports[0], asked, args.rate, args.seconds))
                )
                end.set()
                writer.join()
                progress(f"pass {number + 1} of {args.passes}")
            memory = psutil.Process(process.pid).memory_info().rss
    result = {name: figures(passes) for name, passes in found.items()}
    rows = [
        [
            name,
            f"{of['rate']:.0f}",
            *(f"{of[figure]:.2f}" for figure in ("p50_ms", "p99_ms", "p99.9_ms")),
            "" if name == "bare" else f"{of['right'] / of['answers']:.2%}",
            str(of["failed"]),
        ]
        for name, of in result.items()
    ]
    heads = ["", "queries/s", "p50 ms", "p99 ms", "p99.9 ms", "right", "failed"]
    tables = report.table(heads, rows)
    tables += f"\n\nmemory of the service: {memory / report.MIB:.0f} MiB"
    tables += f"; blocks stored meanwhile: {stored.value * args.prompt_blocks}"
    more = {
        "blocks": args.blocks,
        "prompt_tokens": args.prompt_blocks * BLOCK,
        "memory_bytes": memory,
        "stored_blocks": stored.value * args.prompt_blocks,
        "first_seen": figures([first]),
    }
    report.finish(args, tables, more | {"figures": result})


if __name__ == "__main__":
    main()
