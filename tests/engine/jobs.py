"""Jobs of a native engine, as tests name them and wait for them."""

from __future__ import annotations

import hashlib

from lab.waiting import LIMIT
from penstock._native import Blocks, Completion, Engine, Event


def chunk(n: int) -> bytes:
    """The hash of the tokens that a block holds."""
    return hashlib.sha256(str(n).encode()).digest()


def blocks(*named: tuple[int, int]) -> Blocks:
    """Of pairs: what a block holds, and which it is."""
    return Blocks([(0, block, chunk(n), None) for n, block in named])


def finish(engine: Engine, job: int) -> list[Completion]:
    """All of a job's completions, which nothing else has."""
    done: list[Completion] = []
    while not done or done[-1].event == Event.RELEASED:
        assert engine.wait(LIMIT)
        done += engine.poll()
    assert all(each.job == job and each.seconds >= 0 for each in done)
    return done
