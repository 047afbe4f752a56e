"""Invented workloads for eviction policies: each is hard for one of them.

Prompts are lists of blocks. A block's name stands for itself and for the blocks before it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Prompt = list[tuple[int, int]]
"""Blocks, each by the number of its text and its place there."""

BLOCK_TOKENS = 512
MILLISECONDS = 250
"""Between two prompts."""


def text(number: int, length: int) -> Prompt:
    """The first blocks of a text."""
    return [(number, place) for place in range(length)]


def scan(rng: random.Random) -> Iterator[Prompt]:
    """A few prompts are in use, among many that come once."""
    for number in range(12_000):
        if rng.random() < 0.4:
            hot = int(200 * rng.random() ** 2)
            yield text(hot, 8 + hot % 20)
        else:
            yield text(10**6 + number, rng.randint(4, 30))


def loop(rng: random.Random) -> Iterator[Prompt]:
    """The same prompts come round and round."""
    lengths = [rng.randint(5, 40) for _ in range(900)]
    for number in range(13_500):
        name = number % len(lengths)
        yield text(name, lengths[name])


def drift(rng: random.Random) -> Iterator[Prompt]:
    """Prompts by Zipf's law, of which the frequent ones slowly change."""
    names = 4000
    for number in range(20_000):
        rank = int(names ** rng.random())
        name = rank + number // 20
        yield text(name, 4 + name * 7919 % 23)


def sessions(rng: random.Random) -> Iterator[Prompt]:
    """Conversations over shared system prompts, which are continued minutes later or never."""
    due: list[tuple[int, int, int, int]] = []
    for number in range(15_000):
        due.sort()
        if due and due[0][0] <= number:
            _, system, name, length = due.pop(0)
        else:
            system, name, length = int(6 * rng.random() ** 2), 10**6 + number, 2
        length += rng.randint(1, 6)
        shared = text(system, 3 + 2 * system)
        yield shared + text(name, length)
        if rng.random() < 0.6 and length < 80:
            due.append((number + int(rng.lognormvariate(5.5, 1.0)), system, name, length))


def agents(rng: random.Random) -> Iterator[Prompt]:
    """A few agents at a time, each with long prompts that grow by every call."""
    running: list[list[int]] = []
    for number in range(9000):
        if len(running) < 12 or (len(running) < 30 and rng.random() < 0.01):
            running.append([10**6 + number, rng.randint(2, 10)])
        at = min(rng.randrange(len(running)), rng.randrange(len(running)))
        agent = running[at]
        agent[1] += rng.randint(1, 3)
        yield text(0, 12) + text(agent[0], agent[1])
        if rng.random() < 0.02:
            running.pop(at)


def phases(rng: random.Random) -> Iterator[Prompt]:
    """Parts of the others, one after the other, twice."""
    parts = [list(make(rng)) for make in (drift, loop, scan, sessions, agents)]
    for start in (0.0, 0.5):
        for offset, part in enumerate(parts):
            first = int(start * len(part))
            for prompt in part[first : first + len(part) // 3]:
                yield [(name + (offset + 1) * 10**8, place) for name, place in prompt]


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Prompt]]] = {
    make.__name__: make for make in (scan, loop, drift, sessions, agents, phases)
}


def write(name: str, seed: int, path: Path) -> None:
    """Writes a workload as a trace in Mooncake's format."""
    names: dict[tuple[int, ...], int] = {}
    with path.open("w") as file:
        for number, prompt in enumerate(WORKLOADS[name](random.Random(seed))):
            above, ids = -1, []
            for block in prompt:
                above = names.setdefault((above, *block), len(names))
                ids.append(above)
            line = {
                "timestamp": number * MILLISECONDS,
                "input_length": len(ids) * BLOCK_TOKENS,
                "output_length": 1,
                "hash_ids": ids,
            }
            file.write(json.dumps(line) + "\n")
