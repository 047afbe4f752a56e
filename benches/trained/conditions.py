"""The three ways in which an engine comes by the KV of a prompt."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.engines.node import Answer, Node

COLD, OWN, LOADED = "cold", "own hit", "loaded"
FORCED = {"logits_processors": ["benches.trained.forced:Forced"]}
"""Option of an engine whose requests may be forced."""


@dataclass(frozen=True)
class Request:
    """A prompt, and what is to follow it."""

    prompt: tuple[int, ...]
    count: int
    """Tokens of the answer."""
    forced: tuple[int, ...] | None = None
    """What the engine has to say. Then its logprobs are what is asked for."""

    def start(self, node: Node) -> int:
        """Sends it; returns its number for `node.answer`."""
        options: dict[str, Any] = {}
        if self.forced is not None:
            options["extra_args"] = {"forced": list(self.forced)}
        return node.start(list(self.prompt), self.count, **options)


class Condition(ABC):
    """Asks an engine, and sees to it that it has, or has not, what the condition says."""

    name: str

    def __init__(self, node: Node) -> None:
        self._node = node
        self._before = self._loaded_tokens()

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        """Sends requests together. No two of them may begin with the same block."""
        self._prepare(requests)
        answers = self._together(requests)
        for request, answer in zip(requests, answers, strict=True):
            assert request.forced in (None, answer.tokens), (request, answer)
            self._check(answer)
        return answers

    def loaded(self) -> int:
        """Tokens that Penstock counts as loaded since this object was made."""
        return self._loaded_tokens() - self._before

    def _loaded_tokens(self) -> int:
        return int(self._node.counters().get("loaded_tokens", 0))

    def _together(self, requests: Sequence[Request]) -> list[Answer]:
        numbers = [request.start(self._node) for request in requests]
        return [self._node.answer(number) for number in numbers]

    @abstractmethod
    def _prepare(self, requests: Sequence[Request]) -> None:
        """Brings the engine into the condition."""

    @abstractmethod
    def _check(self, answer: Answer) -> None:
        """Looks at an answer, and raises if the engine was not in the condition."""


class Cold(Condition):
    """Every prompt is computed. The engine has no prefix cache and no pool."""

    name = COLD

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Such an engine never has anything."""

    def _check(self, answer: Answer) -> None:
        assert not answer.cached, answer


class Own(Condition):
    """Every prompt is in vLLM's own prefix cache: it was computed just before."""

    name = OWN

    def _prepare(self, requests: Sequence[Request]) -> None:
        self._together([Request(request.prompt, 1) for request in requests])

    def _check(self, answer: Answer) -> None:
        """Whether tokens were loaded is known of all answers together: see `loaded`."""


class Loaded(Condition):
    """Every prompt comes from the pool: vLLM's own prefix cache is emptied before."""

    name = LOADED

    def _prepare(self, requests: Sequence[Request]) -> None:
        self._node.forget()

    def _check(self, answer: Answer) -> None:
        """How much was loaded is known of all answers together: see `loaded`."""


def settle(node: Node, timeout: float = 60.0) -> None:
    """Returns when nothing more is being stored."""
    end = time.monotonic() + timeout
    seen, same = -1.0, 0
    while same < 4:
        assert time.monotonic() < end, "stores do not end"
        node.ask([7, 8, 9], max_tokens=2)
        time.sleep(0.1)
        stored = node.counters().get("stored_blocks", 0)
        seen, same = stored, same + 1 if stored == seen else 0
