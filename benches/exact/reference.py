"""vLLM's own hits, which loaded hits are compared with."""

from __future__ import annotations

import types
from pathlib import Path

from benches.exact.families import Family
from lab.engines.forks import Fork
from lab.engines.node import Answer, Node

ANSWER_TOKENS = 4


class Reference:
    """vLLM alone. It keeps the states at the ends of all blocks, so it has hits of all lengths."""

    def __init__(self, family: Family, model: Path, log: Path) -> None:
        options = {"launch": Fork, "prefix_cache_retention_interval": None, **family.engine}
        self._node = Node(model, log, **options)
        self._dropped = family.dropped
        self._known: dict[tuple[tuple[int, ...], int], Answer] = {}

    def __enter__(self) -> Reference:
        self._node.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._node.stop()

    def own_hit(self, prompt: list[int], count: int) -> Answer:
        """The answer after a hit of `count` tokens in vLLM's own prefix cache."""
        key = tuple(prompt), count
        if key not in self._known:
            self._node.forget()
            if count:
                self._node.ask(prompt[: count + self._dropped + 1], max_tokens=1)
            answer = self._node.ask(prompt, max_tokens=ANSWER_TOKENS)
            assert answer.cached == count, f"vLLM's own hit is {answer.cached}, not {count}"
            self._known[key] = answer
        return self._known[key]
