"""The load: prompts at random moments, whether or not earlier ones are answered."""

from __future__ import annotations

import random
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lab.models.chat import ASSISTANT, BEGIN, USER, encode
from penstock.completions import Answer

Ask = Callable[["Prompt"], Answer]
"""Sends a prompt to a system, and waits for the answer. Its times count from the call."""

SHORTEST, LONGEST = 500, 2_500
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that has nothing in common with any other."""

    number: int
    tokens: tuple[int, ...]
    answer_tokens: int
    at: float
    """When to send it, in seconds from the round's beginning."""


@dataclass(frozen=True)
class Timed:
    """A prompt's answer."""

    prompt: Prompt
    sent: float
    """When the prompt was sent, in seconds from the round's beginning."""
    answer: Answer

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """For each token but the first: when it came, and how long after the token before, in
        seconds."""
        return [
            (self.sent + later, later - earlier)
            for earlier, later in pairwise(self.answer.arrivals)
        ]


def prompts(count: int, answer_tokens: int, rate: float, seed: int) -> list[Prompt]:
    """`count` prompts about sources of Python's standard library, `rate` a second on average: times
    between them are exponential."""
    rng = random.Random(seed)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    long = [path for path in sources if path.stat().st_size > 4 * LONGEST]
    found, at = [], 0.0
    for number in range(count):
        text = rng.choice(long).read_bytes()
        length = rng.randrange(SHORTEST, LONGEST)
        begin = rng.randrange(len(text) - length)
        # The number comes first, so that no two prompts share a block.
        question = encode(f"{seed}/{number}: what does this do?\n")
        head, foot = [BEGIN, USER, *question], [ASSISTANT]
        body = text[begin : begin + length - len(head) - len(foot)]
        found.append(Prompt(number, (*head, *body, *foot), answer_tokens, at))
        at += rng.expovariate(rate)
    return found


def mean_tokens() -> float:
    """The average prompt's tokens."""
    return (SHORTEST + LONGEST) / 2


def run(ask: Ask, prompts: Sequence[Prompt], progress: Callable[[], None]) -> list[Timed]:
    """Sends each prompt at its time, and waits for all answers. Calls `progress` after each."""
    is_over = threading.Event()
    begin = time.perf_counter()

    def send(prompt: Prompt) -> Timed:
        if is_over.wait(max(0.0, begin + prompt.at - time.perf_counter())):
            raise CancelledError
        sent = time.perf_counter() - begin
        answer = ask(prompt)
        progress()
        return Timed(prompt, sent, answer)

    # A thread for each prompt: none waits for another's answer before it is sent.
    pool = ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(send, prompts))
    finally:
        # After a failure or a signal, nobody waits for answers: their servers end now.
        is_over.set()
        pool.shutdown(wait=False, cancel_futures=True)
