"""The look-up service, asked all the time, while two real vLLM engines store and load.

Both engines compute prompts without a pause: shared beginnings and new ends, so they find some in
their own caches, load some from a Valkey pool, and store what is new. In some passes the service
gets queries at a fixed rate meanwhile, in others none: what the engines' throughput says. In all
passes each engine's client asks the service first; the answer is compared with what the engine then
finds. The engines give way to all else (`--nice`), because here they share a machine's cores with
the service and with who asks it: a router's service has cores of its own.

Run it as ``python -m benches.lookup_engines``.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop
from lab.models import attention
from lab.processes import free_port
from lab.servers import PoolServer
from msgspec import json
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.forks import Fork
from tests.e2e.node import Node

from benches import report
from benches.lookup_server import CALL, ask, running
from benches.report import progress

ROOTS = 12
ROOT_BLOCKS = 6
OWN_BLOCKS = 40
"""Of an engine's own cache: it evicts all the time."""
NAMES = ("a", "b")


def prompt(rng: random.Random) -> list[int]:
    """The beginning of one of some texts, and an end that is new."""
    root = tokens(ROOT_BLOCKS * BLOCK, seed=rng.randrange(ROOTS))
    tail = tokens(rng.randrange(BLOCK, 3 * BLOCK), seed=rng.randrange(1 << 40))
    return root[: rng.randrange(1, len(root) + 1)] + tail


def request(model: str, asked: list[int]) -> bytes:
    """A look-up as it goes over a connection."""
    body = json.encode({"model": model, "prompt": asked})
    head = f"POST /lookup HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def query(
    port: int, model: str, rate: float, seconds: float, seed: int, answers: Connection
) -> None:
    """Asks the service at a rate; a process of its own."""
    rng = random.Random(seed)
    asked = [(request(model, prompt(rng)), -1) for _ in range(2000)]
    answers.send("ready")
    answers.recv()
    answers.send(uvloop.run(ask(port, asked, rate, seconds)))


class Client:
    """Has one engine compute one prompt after the other, and asks the service before each."""

    def __init__(self, name: str, node: Node, port: int, model: str, seed: int) -> None:
        self.name, self._node, self._port, self._model = name, node, port, model
        self._rng = random.Random(seed)
        self.said: list[tuple[int | None, int | None]] = []
        self.found: list[tuple[int, int]] = []
        self.tokens = 0

    def run(self, end: threading.Event) -> None:
        """Until the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        before = self._hits()
        while not end.is_set():
            asked = prompt(self._rng)
            body = json.encode({"model": self._model, "prompt": asked})
            connection.request("POST", "/lookup", body)
            answer = json.decode(connection.getresponse().read())
            [engine] = [one for one in answer["engines"] if one["name"] == self.name]
            self._node.ask(asked, max_tokens=2)
            after = self._hits()
            own, pool = (late - early for late, early in zip(after, before, strict=True))
            before = after
            self.said.append((engine["own"], engine["tokens"]))
            self.found.append((own, own + pool))
            self.tokens += len(asked)
        connection.close()

    def _hits(self) -> tuple[int, int]:
        counters = self._node.counters()
        own, pool = (counters.get(f"{kind}prefix_cache_hits", 0) for kind in ("", "external_"))
        return int(own), int(pool)


def one_pass(
    nodes: dict[str, Node], port: int, model: str, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """Both engines for some seconds, with queries at a rate or without."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    asking = context.Process(target=query, args=(port, model, rate, seconds, seed, there))
    if rate:
        asking.start()
        here.recv()
    end = threading.Event()
    clients = [
        Client(name, node, port, model, seed + place)
        for place, (name, node) in enumerate(nodes.items())
    ]
    threads = [threading.Thread(target=client.run, args=(end,)) for client in clients]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    if rate:
        here.send("go")
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    end.set()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    asked = here.recv() if rate else None
    if rate:
        asking.join()
    said = [one for client in clients for one in client.said]
    found = [one for client in clients for one in client.found]
    return {
        "queries": asked,
        "requests": len(said),
        "tokens_per_second": sum(client.tokens for client in clients) / took,
        "right": sum(one == other for one, other in zip(said, found, strict=True)),
        "own_right": sum(one[0] == other[0] for one, other in zip(said, found, strict=True)),
        "own_tokens": sum(own for own, _ in found),
        "loaded_tokens": sum(total - own for own, total in found),
    }


def give_way(node: Node, by: int) -> None:
    """Has an engine, with all its threads, leave the processor to others by this niceness."""
    engine = psutil.Process(node.process.pid)
    for process in (engine, *engine.children(recursive=True)):
        for thread in process.threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, by)


def figures(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of some passes: sums, and medians over passes."""
    sums = ("requests", "right", "own_right", "own_tokens", "loaded_tokens")
    made: dict[str, Any] = {name: sum(one[name] for one in passes) for name in sums}
    made["tokens_per_second"] = statistics.median(one["tokens_per_second"] for one in passes)
    made["tokens_per_second_passes"] = [one["tokens_per_second"] for one in passes]
    asked = [one["queries"] for one in passes if one["queries"] is not None]
    if asked:
        cut = [statistics.quantiles(one["seconds"], n=1000) for one in asked]
        for name, place in (("p50_ms", 499), ("p99_ms", 989), ("p99.9_ms", 998)):
            made[name] = statistics.median(one[place] for one in cut) * 1e3
        made["rate"] = statistics.median(one["rate"] for one in asked)
        made["answers"] = sum(len(one["seconds"]) for one in asked)
        made["failed"] = sum(one["failed"] for one in asked)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.lookup_engines", description=__doc__)
    parser.add_argument("--rate", type=float, default=1000.0, help="queries a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="a pass")
    parser.add_argument("--passes", type=int, default=3, help="with queries, and as many without")
    parser.add_argument("--nice", type=int, default=19, help="by how much engines give way")
    args = report.begin(parser)
    ports = {name: (free_port(), free_port()) for name in NAMES}
    port = free_port()
    passes: dict[str, list[dict[str, Any]]] = {"queries": [], "none": []}
    with tempfile.TemporaryDirectory() as folder, PoolServer("valkey", Path(folder)) as valkey:
        room = Path(folder)
        llama = attention.llama(room / "llama")
        nodes = {
            name: Node(
                llama,
                room / f"{name}.log",
                launch=Fork,
                pool=valkey.unix_url,
                max_model_len=2048,
                kv_cache_memory_bytes=OWN_BLOCKS * KV_BYTES_PER_BLOCK,
                kv_events_config={
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": f"tcp://*:{events}",
                    "replay_endpoint": f"tcp://*:{replay}",
                },
            )
            for name, (events, replay) in ports.items()
        }
        with nodes["a"], nodes["b"]:
            for place, node in enumerate(nodes.values()):
                node.ask(prompt(random.Random(place)), max_tokens=2)
                node.wait_for("stored_blocks", 1)
                give_way(node, args.nice)
            service = [CALL, "lookup-server", valkey.unix_url, "--port", str(port)]
            # What is missing may be stored at any moment.
            service += ["--believe-missing", "0.05"]
            for name, (events, replay) in ports.items():
                where = f"tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
                service += ["--engine", f"{name}={where}"]
            with running(service, port, room / "log"):
                time.sleep(2.0)
                one_pass(nodes, port, str(llama), 0, 3.0, seed=1)
                before = sum(node.counters()["stored_blocks"] for node in nodes.values())
                for number in range(args.passes):
                    for kind, rate in (("queries", args.rate), ("none", 0.0)):
                        seed = 100 * number + 10
                        passes[kind].append(
                            one_pass(nodes, port, str(llama), rate, args.seconds, seed)
                        )
                    progress(f"pass {number + 1} of {args.passes}")
                after = sum(node.counters()["stored_blocks"] for node in nodes.values())
    result = {name: figures(of) for name, of in passes.items()}
    rows = [
        [
            name,
            *(f"{of[key]:.2f}" if key in of else "" for key in ("p50_ms", "p99_ms", "p99.9_ms")),
            str(of.get("failed", "")),
            f"{of['tokens_per_second']:.0f}",
            str(of["requests"]),
            f"{of['own_right'] / of['requests']:.1%}",
            f"{of['right'] / of['requests']:.1%}",
        ]
        for name, of in result.items()
    ]
    heads = ["", "p50 ms", "p99 ms", "p99.9 ms", "failed", "tokens/s", "requests", "own", "all"]
    tables = report.table(heads, rows)
    tables += f"\n\nblocks stored meanwhile: {after - before:.0f}"
    report.finish(
        args, tables, {"nice": args.nice, "stored_blocks": after - before, "figures": result}
    )


if __name__ == "__main__":
    main()
