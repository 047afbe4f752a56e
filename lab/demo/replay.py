"""Sends a workload through two engines that share a pool, and each prompt to one without it."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from lab.demo.engine import Counters, Engine
from lab.demo.workload import NODES, Workload
from lab.models.chat import BEGIN, VOCABULARY
from penstock.completions import Answer

BLOCK_TOKENS = 128
"""Tokens of a block of KV cache. A block is stored, found and loaded as a whole."""

REST_SECONDS = 1.1
"""Seconds between an answer and the next request. vLLM's processes ask their queues over and over
for a second after a message. On few cores, this would take time from the next server's request."""


class Situation(Enum):
    """The expected source of the largest part of a prompt, from the earlier requests to the nodes.

    It is computed before the request is sent. So a load that fails does not turn a warm request
    into a cold one."""

    COLD = "cold"
    OTHER_NODE = "warm on the other node"
    SAME_NODE = "warm on the same node"


@dataclass(frozen=True)
class Exchange:
    """One step of the workload, with its results."""

    conversation: int
    turn: int
    node: int
    situation: Situation
    prompt: tuple[int, ...]
    answer: Answer
    moved: Counters

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens whose KV came from the pool."""
        return self.moved.loaded_tokens

    @property
    def local_tokens(self) -> int:
        """Prompt tokens that the node had in its own prefix cache."""
        return max(0, self.answer.cached_tokens - self.loaded_tokens)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the node computed."""
        return len(self.prompt) - self.local_tokens - self.loaded_tokens


@dataclass(frozen=True)
class Comparison:
    """A step, and the answer to the same prompt on the engine without Penstock and without any
    cache."""

    exchange: Exchange
    reference: Answer

    @property
    def equal(self) -> bool:
        """Whether every token of both answers is the same."""
        return self.exchange.answer.tokens == self.reference.tokens


class Sightings:
    """The prefixes that each node has got, in whole blocks."""

    def __init__(self) -> None:
        self._seen: list[set[bytes]] = [set() for _ in range(NODES)]

    def situation(self, prompt: Sequence[int], node: int) -> Situation:
        """The situation of `prompt` on `node`. Afterwards `node` counts as having seen it."""
        names = chain(prompt)
        # vLLM always computes the last token itself.
        reusable = names[: (len(prompt) - 1) // BLOCK_TOKENS]
        here = _shared(reusable, self._seen[node])
        anywhere = max(here, *(_shared(reusable, seen) for seen in self._seen))
        self.saw(prompt, node)
        parts = {
            Situation.SAME_NODE: here * BLOCK_TOKENS,
            Situation.OTHER_NODE: (anywhere - here) * BLOCK_TOKENS,
            Situation.COLD: len(prompt) - anywhere * BLOCK_TOKENS,
        }
        return max(parts, key=lambda part: parts[part])

    def saw(self, tokens: Sequence[int], node: int) -> None:
        """Notes that `node` has computed or loaded all of `tokens`."""
        self._seen[node].update(chain(tokens))


def chain(tokens: Sequence[int]) -> list[bytes]:
    """A digest for each prefix of whole blocks."""
    digest = hashlib.sha256()
    names = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest.update(array("I", tokens[end - BLOCK_TOKENS : end]).tobytes())
        names.append(digest.digest())
    return names


def _shared(names: Sequence[bytes], seen: set[bytes]) -> int:
    return next((n for n, digest in enumerate(names) if digest not in seen), len(names))


def warm_up(nodes: Sequence[Engine], reference: Engine, tokens: int) -> None:
    """Warms up all engines, so that no measured request pays for the first use of memory or code.

    Every engine computes a prompt of `tokens` tokens that only it has seen. Then every node answers
    the prompts of the other nodes."""
    prompts = [
        [BEGIN, *((number + token) % VOCABULARY for token in range(1, tokens))]
        for number in range(len(nodes) + 1)
    ]
    for engine, prompt in zip([*nodes, reference], prompts, strict=True):
        engine.complete(prompt, max_tokens=2)
    for number, node in enumerate(nodes):
        for other, prompt in enumerate(prompts[: len(nodes)]):
            if other != number:
                node.complete(prompt, max_tokens=2)


def replay(
    workload: Workload, nodes: Sequence[Engine], reference: Engine, progress: Callable[[], None]
) -> list[Comparison]:
    """Sends the steps one after the other, each to its node and to `reference`. So the state of the
    machine affects both alike. Calls `progress` after each step."""
    sightings = Sightings()
    histories: dict[int, tuple[int, ...]] = {}
    before = [node.counters() for node in nodes]
    comparisons = []
    for number, step in enumerate(workload.steps):
        node = nodes[step.node]
        history = histories[step.conversation] if step.follows else ()
        prompt = (*history, *step.tokens)
        situation = sightings.situation(prompt, step.node)
        time.sleep(max(0.0, step.pause - REST_SECONDS))
        # Each node goes first as often as the reference.
        order = [node, reference] if number // NODES % 2 == 0 else [reference, node]
        answers = {}
        for engine in order:
            time.sleep(REST_SECONDS)
            answers[engine] = engine.complete(prompt, step.answer_tokens)
        answer = answers[node]
        # The KV of the answer's last token does not exist yet.
        sightings.saw((*prompt, *answer.tokens[:-1]), step.node)
        histories[step.conversation] = (*prompt, *answer.tokens)
        after = node.counters()
        exchange = Exchange(
            step.conversation,
            step.turn,
            step.node,
            situation,
            prompt,
            answer,
            after - before[step.node],
        )
        comparisons.append(Comparison(exchange, answers[reference]))
        before[step.node] = after
        progress()
    return comparisons
