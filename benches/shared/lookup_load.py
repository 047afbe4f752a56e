"""Blocks of prompts that are stored in a pool, and the look-ups that a router asks meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from typing import Any

from msgspec import json

from lab.pretended import NONE_HASH, Engine
from penstock._native import PrefixHasher, Store

BLOCK = 16
SPAN = (0, 2, 0, 1)
CONNECTIONS = 32


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


class Storing:
    """A program that stores one prompt after the other, at a rate of blocks a second."""

    def __init__(self, url: str, blocks: int, rate: float) -> None:
        self._context = multiprocessing.get_context("fork")
        self._prompts = self._context.Value("i", 0)
        self._url, self._blocks, self._rate = url, blocks, rate

    @property
    def stored(self) -> int:
        """How many blocks it has stored so far."""
        return self._prompts.value * self._blocks

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Stores until the end, on from where it ended before."""
        end = self._context.Event()
        writer = self._context.Process(target=self._store, args=(end,))
        writer.start()
        try:
            yield
        finally:
            end.set()
            writer.join()

    def _store(self, end: Event) -> None:
        engine = Engine(Store.open(self._url), facts={"spans": [SPAN]})
        due = time.monotonic()
        while not end.is_set():
            put(engine, 10**7 + self._prompts.value, self._blocks)
            self._prompts.value += 1
            due += self._blocks / self._rate
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
